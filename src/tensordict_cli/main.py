"""The parser of the command `tensordict`, its exit codes and its error messages."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from tensordict_cli.commands import COMMANDS
from tensordict_cli.text import printable, suggest

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
  tensordict inspect s3://bucket/run.tdz

URLs (s3://, gs://, http://; pip install 'tensordict[remote]') are reached as the configuration of fsspec says, such as
FSSPEC_S3_ENDPOINT_URL; the folder TENSORDICT_CACHE_DIR keeps what is fetched.

The shell completes commands, options and paths (pip install 'tensordict[cli]') after
  eval "$(register-python-argcomplete tensordict)"

exit codes:
  0    done; sound (verify); the same (diff)
  1    there are problems (inspect, verify); there are differences (diff)
  2    wrong usage, or a file that cannot be read or written: one line on standard error says why
"""


class _Parser(argparse.ArgumentParser):
    """A parser that prints each error as one line, with a suggestion where a name was misspelt."""

    def error(self, message: str) -> NoReturn:
        self.exit(TROUBLE, f"tensordict: error: {message} (see {self.prog} --help)\n")

    def options(self) -> list[str]:
        """Return the long options."""
        return [name for name in self._option_string_actions if name.startswith("--")]


class _Version(argparse.Action):
    """Print the version of the installed package."""

    def __call__(self, parser: argparse.ArgumentParser, *others: object) -> None:
        print(f"tensordict {metadata.version('tensordict')}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `tensordict`.

    Args:
        argv: the arguments; by default the arguments of this process.

    Returns:
        The exit code: 0 for success, 1 when problems or differences were found, 2 for an error, 130 after Ctrl-C, 141
        when the reader of the output has gone away.

    Raises:
        SystemExit: after `--help`, and when the arguments are wrong.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict_cli.runners import main
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(a=torch.zeros(4)).save(folder + "/1")
        ...     _ = TensorDict(a=torch.ones(4)).save(folder + "/2")
        ...     main(["diff", folder + "/1", folder + "/2"])
        'a'  elements  4 of 4 differ, by at most 1
        1 difference
        1
    """
    args = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        # Import torch as late as possible, so that `--help`, wrong arguments and shell completion stay fast.
        runner = importlib.import_module(f"tensordict_cli.runners.{args.command}")
        code: int = runner.run(_hide_secrets(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit. Without this line, that flush would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except RecursionError:
        return _print_error("the save is nested too deeply")
    except (OSError, ImportError, ValueError, RuntimeError, MemoryError) as error:
        return _print_error(_format_error(error))


def _hide_secrets(args: argparse.Namespace) -> argparse.Namespace:
    """Replace each URL among the arguments by a string that hides its secrets when it is printed."""
    as_url = importlib.import_module("tensordict.io.remote.credentials").as_url
    for name, value in vars(args).items():
        if isinstance(value, str):
            setattr(args, name, as_url(value))
        elif isinstance(value, list):
            setattr(args, name, [as_url(item) if isinstance(item, str) else item for item in value])
    return args


def _parse(argv: list[str]) -> argparse.Namespace:
    parser, commands = _build_parsers()
    if "_ARGCOMPLETE" in os.environ:
        # The shell asks for completions at the cursor. This call prints them and ends the process.
        importlib.import_module("argcomplete").autocomplete(parser)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(f"there is no command {argv[0]!r}; {suggest(argv[0], commands)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[args.command]
        name = unknown[0].partition("=")[0]
        told = f"; {suggest(name, command.options())}" if name.startswith("-") else ""
        command.error(f"{args.command} does not take {' '.join(unknown)!r}{told}")
    return args


def _build_parsers() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="tensordict",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    group = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands: dict[str, _Parser] = {}
    for name, add_arguments in COMMANDS.items():
        first, _, rest = (inspect.getdoc(add_arguments) or "").partition("\n\n")
        description, title, examples = rest.partition("examples:\n")
        commands[name] = group.add_parser(
            name,
            help=first[:1].lower() + first[1:].rstrip("."),
            description=description,
            epilog=title + examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(commands[name])
    return parser, commands


def _print_error(message: str) -> int:
    print(f"tensordict: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return TROUBLE


def _format_error(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {os.fspath(error.filename)!r}"
    return str(error) or type(error).__name__
