"""Runs the tests with the Pythons that are found (`interpreters.py`), each in an environment of its own.

python tests/wheels/pythons.py [3.10 3.13 ...] [-- ARGUMENTS OF PYTEST]

The environments, `.venv-pythons/VERSION`, are kept. Left out is what says the same on any Python (types, pages, the
house, wheels), client libraries, and what needs the reference. The exit code is 1 where a test has failed, or where a
version that was asked for is not found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from interpreters import VERSIONS, found

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("clients", "docs", "house", "typing", "wheels")
ARGUMENTS = [
    "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q", "-m", "not slow and not reference",
    *(f"--ignore=tests/{folder}" for folder in LEFT_OUT),
    # Torch warns about Python 3.13.0 alone, at each compilation.
    "-W", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
]  # fmt: skip


def environment(path: str, version: str) -> Path:
    """The Python of the environment for a version, with all that the tests need; this one's is the one it is in."""
    if path == sys.executable:
        return Path(path)
    home = ROOT / ".venv-pythons" / version
    python, stamp = home / "bin" / "python", home / "installed"
    sources = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    if not stamp.exists() or stamp.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        subprocess.run([path, "-m", "venv", "--without-pip", home], check=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--editable", f"{ROOT}[dev]",
             "--constraint", ROOT / "constraints.txt"],
            check=True,
        )  # fmt: skip
        stamp.touch()
    return python


def main(wanted: list[str], arguments: list[str]) -> int:
    # Free-threaded ones, too, which have a `t` behind their version.
    versions = [version for name in VERSIONS for version in (name, f"{name}t")]
    interpreters = {version: found()[version][0] for version in versions if version in found()}
    missing = [version for version in wanted if version not in interpreters]
    if missing:
        print(f"no Python {', '.join(missing)} on the PATH, of pyenv or in TENSORDICT_TEST_PYTHONS", file=sys.stderr)
        return 1
    failed = []
    for version in wanted or interpreters:
        print(f"Python {version}: {interpreters[version]}", flush=True)
        python = environment(interpreters[version], version)
        # Commands of the package, such as `tensordict`, come from this environment.
        variables = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
        # Compiled files are read and written: torch takes five times as long to import without.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        if subprocess.run([python, "-m", "pytest", *ARGUMENTS, *arguments], cwd=ROOT, env=variables).returncode:
            failed.append(version)
    print(f"failed: {', '.join(failed)}" if failed else "passed on every Python")
    return 1 if failed else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    sys.exit(main(given[:at], given[at + 1 :]))
