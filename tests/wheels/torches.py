"""Runs tests with several torches, each in an environment of its own.

python tests/wheels/torches.py [2.11 2.15 ...] [-- ARGUMENTS OF PYTEST]

The environments, `.venv-torches/VERSION`, are kept. Each holds torch and what torch asks for; the rest comes from the
environment of this Python. The tests are those that depend on torch most: contract, compile, functional, nn, memmap,
parallel and pickle. A deprecation warning of torch is an error, in processes that tests start, too. The exit code is 1
where a test has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# The oldest supported torch, the torch of `make test`, and the newest ones.
VERSIONS = ("2.11", "2.13", "2.14", "2.15")
TESTS = [
    "tests/contract", "tests/memory", "tests/nn", "tests/parallel",
    *(f"tests/compile/test_{name}.py" for name in ("compile", "compile_blocks")),
    *(f"tests/core/test_{name}.py" for name in ("foreach", "functional", "pytree", "torch_internals")),
]  # fmt: skip
ARGUMENTS = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q", "-m", "not slow and not reference"]


def environment(version: str) -> Path:
    """The Python of the environment for a version of torch; this one where it has that version."""
    if torch.__version__.startswith(f"{version}."):
        return Path(sys.executable)
    home = ROOT / ".venv-torches" / version
    python, stamp = home / "bin" / "python", home / "installed"
    if not stamp.exists():
        print(
            f"installing torch {version} in {home}. PyPI has torch for Linux with its CUDA libraries only, about "
            "5 GB. Pip prefers a CPU build that it finds elsewhere, but torch 2.15 has none.",
            flush=True,
        )
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
        if subprocess.run([*pip, f"torch=={version}.*"]).returncode:
            sys.exit(
                f"pip cannot install torch {version}. Where a constraint in its configuration forbids it: "
                f"PIP_CONFIG_FILE=/dev/null make test-torches TORCHES={version}"
            )
        purelib = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        behind = [str(ROOT / "src"), *(path for path in sys.path if Path(path).name == "site-packages")]
        (purelib / "base.pth").write_text("\n".join(behind))
        stamp.touch()
    return python


def main(wanted: list[str], arguments: list[str]) -> int:
    # Pytest makes errors of all warnings by itself; these are for processes that tests start.
    variables = {**os.environ, "PYTHONWARNINGS": "error::FutureWarning", "OMP_NUM_THREADS": "1"}
    chosen = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    failed = []
    for version in wanted or VERSIONS:
        python = environment(version)
        print(f"torch {version}: {python}", flush=True)
        command = [python, "-m", "pytest", *ARGUMENTS, *([] if chosen else TESTS), *arguments]
        if subprocess.run(command, cwd=ROOT, env=variables).returncode:
            failed.append(version)
    print(f"failed: {', '.join(failed)}" if failed else "passed with every torch")
    return 1 if failed else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    sys.exit(main(given[:at], given[at + 1 :]))
