"""Programs run by the reference, in environments of its own.

One process for each environment has imported it, and every program runs in a child of that one: the import takes longer
than most programs do.
"""

from __future__ import annotations

import json
import pathlib
import select
import subprocess
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Behaviour is compared with 0.14.3, and speed with 0.15.3.
ENVIRONMENTS = [".venv-behaviour", ".venv-reference"]

_SERVER = """
import json, os, sys
import tensordict

for line in sys.stdin:
    program, arguments, out = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(out, os.O_WRONLY), 1)
        os.dup2(os.open(out + "-errors", os.O_WRONLY | os.O_CREAT), 2)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
sys.argv = ["-c", *arguments]
exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
"""


class Reference:
    """The reference in one environment.

    Args:
        environment: the folder of the environment inside the project.
    """

    def __init__(self, environment: str) -> None:
        self.environment = environment
        self.python = ROOT / environment / "bin" / "python"
        self._server: subprocess.Popen[str] | None = None

    def run(self, program: str, *args: object) -> str:
        """Run a program with arguments and return its output; a failure is an `AssertionError`."""
        server = self._server or self._start()
        assert server.stdin is not None and server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out"
            out.touch()
            server.stdin.write(json.dumps([program, [str(arg) for arg in args], str(out)]) + "\n")
            server.stdin.flush()
            if not select.select([server.stdout], [], [], 120)[0]:
                self.close()
                raise AssertionError(f"a program of the reference takes more than 120 s:\n{program}")
            code = server.stdout.readline().strip()
            errors = pathlib.Path(f"{out}-errors")
            # Of a failure only the message: what the reference looks like inside is none of our business.
            said = errors.read_text().strip().rpartition("\n")[2] if errors.exists() else "it could not be started"
            assert code == "0", said
            return out.read_text()

    def _start(self) -> subprocess.Popen[str]:
        if not self.python.exists():
            pytest.skip(f"{self.environment} is not installed here (make .venv-reference/installed)")
        command = [str(self.python), "-I", "-W", "ignore", "-c", _SERVER]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self._server

    def close(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None
