"""The parser of the command `tensordict`, its exit codes and its error messages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tensordict.cli import convert, diff, ifeval, inspect, verify
from tensordict.cli.terminal import printable

TROUBLE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

DESCRIPTION = """\
Look into saves of tensordict, in all of its formats: folders, archives (.tdz), consolidated files, HDF5, safetensors.
"""

EXAMPLES = """\
examples:
  tensordict inspect runs/1
  tensordict verify runs/1 && echo sound
  tensordict convert runs/1 run.tdz
  tensordict diff runs/1 run.tdz

exit codes:
  0    done; sound (verify); the same (diff)
  1    there are problems (verify); there are differences (diff)
  2    wrong usage, or a file that cannot be read or written: one line on standard error says why
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(TROUBLE, f"tensordict: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `tensordict`.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit code: 0 for success, 1 for problems or differences that were found, 2 for trouble, 130 after Ctrl-C,
        141 when the reader of the output has gone away.

    Raises:
        SystemExit: after `--help`, and when the arguments are wrong.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.cli import main
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(a=torch.zeros(4)).save(folder + "/1")
        ...     _ = TensorDict(a=torch.ones(4)).save(folder + "/2")
        ...     main(["diff", folder + "/1", folder + "/2"])
        'a'  elements  4 of 4 differ, by at most 1
        1 difference
        1
    """
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RecursionError:
        return _fail("the save is nested too deeply")
    except (OSError, ImportError, ValueError, RuntimeError, MemoryError) as error:
        return _fail(_message(error))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tensordict",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (inspect, verify, convert, diff, ifeval):
        command.add_parser(commands)
    return parser


def _fail(message: str) -> int:
    print(f"tensordict: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return TROUBLE


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {os.fspath(error.filename)!r}"
    return str(error) or type(error).__name__
