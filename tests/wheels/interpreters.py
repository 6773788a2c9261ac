"""The interpreters that the package is installed into: those on the PATH, of pyenv, and in TENSORDICT_TEST_PYTHONS."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Prints the version of an interpreter, with a `t` behind that of a free-threaded one, and where its torch lies, if it
# has one.
_ASK = """
import importlib.util, pathlib, sys, sysconfig
spec = importlib.util.find_spec("torch")
print("%d.%d" % sys.version_info[:2] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""))
print(pathlib.Path(spec.origin).parents[1] if spec else "")
"""


@cache
def found() -> dict[str, tuple[str, str]]:
    """Return one interpreter of each version, and the folder of its torch; `None` without torch.

    This one counts for its version. Those in TENSORDICT_TEST_PYTHONS (paths, separated as in PATH) come before others
    of their versions.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, *filter(None, os.environ.get("TENSORDICT_TEST_PYTHONS", "").split(os.pathsep))]
    candidates += filter(None, (shutil.which(f"python{version}{t}") for version in VERSIONS for t in ("", "t")))
    candidates += sorted(map(str, pyenv.glob("3.*/bin/python3")))
    interpreters: dict[str, tuple[str, str]] = {}
    for path in candidates:
        try:
            answer = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        # A shim of pyenv for a version that is not chosen is on the PATH, and fails.
        lines = answer.stdout.splitlines()
        if answer.returncode == 0 and lines and re.fullmatch(r"3\.\d+t?", lines[0]):
            interpreters.setdefault(lines[0], (path, lines[1] if len(lines) > 1 else ""))
    return interpreters
