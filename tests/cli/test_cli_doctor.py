"""`tensordict doctor`, and what the shell completes."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import select
import subprocess
import sys
import time
from importlib import metadata

import pytest
import torch

import tensordict
from tensordict import TensorDict, set_kernel_memory_info
from tensordict_cli.runners import doctor, main


def test_what_is_there(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    versions = report["versions"]
    assert (versions["tensordict"], versions["torch"]) == (tensordict.__version__, metadata.version("torch"))
    assert report["extras"]["h5"] == {"packages": {"h5py": metadata.version("h5py")}, "install": None}
    assert not {"dev", "demo", "clients", "docs"} & report["extras"].keys()
    assert len(report["gpus"]) == torch.cuda.device_count() + torch.backends.mps.is_available()
    path = report["path"]
    assert path["path"] == str(tmp_path) and 0 < path["free"] <= path["nbytes"]
    assert path["features"]["rename over"] is path["features"]["shared maps"] is None
    assert report["environment"]["torch_threads"] == torch.get_num_threads()
    assert set(report["environment"]["start_methods"]) >= {"spawn"}
    assert os.listdir(tmp_path) == []  # all that was tried is gone

    assert main(["doctor", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "rename over   yes" in text and text.endswith("\nno problems\n")


def test_what_is_missing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ["torch>=99.1", "numpy", "nothing-such>=1; extra == 'tables'", "h5py>=99; extra == 'h5'"]
    needed += ["sphinx; extra == 'dev'", "zarr>=3; python_version >= '99' and extra == 'zarr'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [f"torch 99.1 or newer is needed, and {metadata.version('torch')} is installed"]
    assert report["extras"] == {
        "tables": {"packages": {"nothing-such": None}, "install": "pip install 'tensordict[tables]'"},
        "h5": {"packages": {"h5py": metadata.version("h5py")}, "install": "pip install 'tensordict[h5]'"},
    }
    assert main(["doctor", str(tmp_path)]) == 1
    assert "pip install 'tensordict[tables]'" in capsys.readouterr().out


def test_a_file_system_that_can_less(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **options: object) -> None:
        raise OSError(95, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refused)
        assert main(["doctor", str(tmp_path), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["path"]["features"]["hard links"] == "Operation not supported"
        assert (
            len(report["problems"]) == 1 and "hard links, which is needed for existsok=False" in report["problems"][0]
        )
        # The package does so too.
        with pytest.raises(OSError, match="not supported"):
            TensorDict(a=torch.ones(1)).memmap(tmp_path / "x.tdz", existsok=False)
    with monkeypatch.context() as patch:
        patch.setattr("tensordict.memory.system.lock", refused)
        assert main(["doctor", str(tmp_path)]) == 0  # it gets by without
        assert "no   savers" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkdtemp", refused)
        assert main(["doctor", str(tmp_path), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["path"]["features"] is None and "nothing can be written" in report["problems"][0]
    with monkeypatch.context() as patch, set_kernel_memory_info(False):
        patch.setattr(doctor, "_try_start", lambda method: f"{method}: refused")
        assert main(["doctor", str(tmp_path), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["environment"]["kernel_memory_info"] == {"asked": False, "maps": False, "written_pages": False}
        assert "no process can be started" in report["problems"][0]


def test_what_is_no_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
    assert main(["doctor", "s3://bucket/x"]) == 2
    assert "is a URL" in capsys.readouterr().err


# --- completion -------------------------------------------------------------------------------------------------------


class Shell:
    """A bash at a terminal, which knows the command."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._ours, theirs = pty.openpty()
        scripts = str(pathlib.Path(sys.executable).parent)
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True,
            env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"},
        )  # fmt: skip
        os.close(theirs)
        self.type(
            'bind "set enable-bracketed-paste off"; eval "$(register-python-argcomplete tensordict)"; echo rea""dy\n'
        )
        self.until("ready")

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, expected: str) -> str:
        """Return the output up to and including a text; fail when the text does not come."""
        shown, stop = "", time.monotonic() + 60
        while expected not in shown:
            ready, _, _ = select.select([self._ours], [], [], max(0, stop - time.monotonic()))
            assert ready, f"{expected!r} is not in {shown!r}"
            shown += os.read(self._ours, 65536).decode()
        return shown

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


def test_bash_completes(tmp_path: pathlib.Path) -> None:
    """Commands, options, their choices, and paths."""
    pytest.importorskip("argcomplete")
    (tmp_path / "checkpoint_of_today").mkdir()
    shell = Shell(tmp_path)
    try:
        for typed, completed in (
            ("tensordict insp\t", "tensordict inspect "),
            ("check\t", "checkpoint_of_today/"),
            (" --st\t", "--stats "),
            ("\x15tensordict convert check\t", "checkpoint_of_today/"),
            (" x --to saf\t", "safetensors "),
            ("\x15tensordict doc\t", "doctor "),
        ):
            shell.type(typed)
            shell.until(completed)
    finally:
        shell.close()


def test_completion_imports_no_torch(tmp_path: pathlib.Path) -> None:
    """The shell runs this program at every key stroke; the variables are argcomplete's."""
    pytest.importorskip("argcomplete")
    line = "tensordict ver"
    program = (
        "import sys\nfrom tensordict_cli import main\ntry:\n    main([])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'tensordict'} & sys.modules.keys()"
    )
    environment = {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"), "_ARGCOMPLETE_IFS": "\n",
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-c", f"import os\nos._exit = sys_exit = __import__('sys').exit\n{program}"],
        env={**os.environ, **environment}, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert (tmp_path / "found").read_text().strip() == "verify"
