"""The wheel and the sdist: what is in them, and that the wheel works in clean environments of every Python found.

`make test-wheels` installs torch, too: several GB for a version of which there is no build for the CPU.
"""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from interpreters import VERSIONS, found

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
INSTALLS_TORCH = os.environ.get("TENSORDICT_TEST_TORCH") == "1"


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this tree."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


def test_the_wheel_has_the_packages_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.suffix in (".py", ".tsv", ".css", ".lua") or path.name == "py.typed"
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_has_every_extra_that_an_error_names(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {"s3", "gcs", "hf", "pandas", "images", "video", "rlds", "all"} <= extras
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"require\(\s*\"[\w.]+\",\s*\"([\w-]+)\"\)", text)) | set(
        re.findall(r"tensordict\[([\w-]+)\]'", text)
    )
    assert len(named) > 15 and named <= extras, named - extras
    needs: dict[str, set[str]] = {extra: set() for extra in extras}
    for line in metadata.get_all("Requires-Dist", []):
        if found := re.search(r"^([\w.-]+).*extra == '([\w-]+)'", line):
            needs[found[2]].add(found[1])
    assert needs["s3"] >= {"fsspec", "s3fs"} and needs["gcs"] >= {"gcsfs"} and needs["pandas"] == {"pandas", "pyarrow"}
    for extra in ("s3", "gcs", "hf", "pandas", "polars", "h5", "zarr", "redis", "images", "video", "rlds", "onnx"):
        assert needs[extra] and needs[extra] <= needs["all"], extra


def test_the_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CITATION.cff", "tests", "docs", "examples"):
        assert (source / name).exists(), name
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=source)
    [wheel], [again] = built.glob("*.whl"), (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {entry.filename: entry.CRC for entry in first.infolist()} == {
            entry.filename: entry.CRC for entry in second.infolist()
        }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_compiles(version: str) -> None:
    """This version supports all syntax of the file, without a warning."""
    if version not in found():
        pytest.skip(f"no Python {version} on the PATH, of pyenv or in TENSORDICT_TEST_PYTHONS")
    program = """
import pathlib, sys
for folder in ("src", "examples"):
    for path in pathlib.Path(sys.argv[1], folder).rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
"""
    run(found()[version][0], "-I", "-W", "error", "-c", program, ROOT)


@pytest.mark.parametrize(
    "version", [pytest.param(HERE, marks=pytest.mark.seconds), *(v for v in VERSIONS if v != HERE)]
)
def test_the_wheel_works(version: str, built: Path, tmp_path: Path) -> None:
    if version not in found():
        pytest.skip(f"no Python {version} on the PATH, of pyenv or in TENSORDICT_TEST_PYTHONS")
    path, torch_at = found()[version]
    if version == HERE:
        torch_at = str(Path(importlib.util.find_spec("torch").origin).parents[1])  # type: ignore[union-attr, arg-type]
    if not torch_at and not INSTALLS_TORCH:
        pytest.skip(f"{path} has no torch: `make test-wheels` installs it")
    home = tmp_path / "environment"
    run(path, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    [wheel] = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-cache-dir"]
    if INSTALLS_TORCH:
        run(*pip, "--constraint", ROOT / "constraints.txt", wheel)
    else:
        run(*pip, "--no-deps", "--no-index", wheel)
        borrow(home, Path(torch_at))
    assert "works on" in run(python, "-I", "-W", "error", ROOT / "tests" / "wheels" / "first_use.py", cwd=tmp_path)


def test_a_free_threaded_python_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a version of its own; one that does not answer is none."""
    for name, says in (("python3.14t", "echo 3.14t; echo /its/torch"), ("python3.12t", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    now = found.__wrapped__()
    assert now["3.14t"] == (str(tmp_path / "python3.14t"), "/its/torch")
    assert "3.12t" not in now and now[HERE][0] == sys.executable


# Packages that torch imports.
NEEDED = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "typing_extensions.py", "filelock", "sympy", "mpmath",
    "networkx", "jinja2", "markupsafe", "fsspec", "nvidia", "setuptools",
)  # fmt: skip


def borrow(home: Path, packages: Path) -> None:
    """Lend an environment the torch that lies in a folder, and none of the other packages there."""
    [site] = home.glob("lib/python*/site-packages")
    for name in NEEDED:
        if (packages / name).exists():
            (site / name).symlink_to(packages / name)
