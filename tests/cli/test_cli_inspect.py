"""`tensordict inspect`: statistics, first rows, patterns of keys, and the pager; what is read for them."""

from __future__ import annotations

import json
import math
import os
import pathlib
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from cases import mark_slow
from tensordict import DatasetWriter, NonTensorStack, TensorDict, lazy_stack
from tensordict.io.formats import opening as formats
from tensordict_cli.runners import main

SUFFIX = {
    "directory": "",
    "archive": ".tdz",
    "consolidated": ".consolidated",
    "h5": ".h5",
    "zarr": ".zarr",
    "safetensors": ".safetensors",
    "dataset": ".rows",
}


def container() -> TensorDict:
    torch.manual_seed(0)
    td = TensorDict(
        obs=torch.randn(20, 3, 5),
        policy={
            "weight": torch.arange(40).view(20, 2),
            "bias": torch.linspace(-1, 1, 20),
            "flag": torch.ones(20).bool(),
        },
        value={"weight": torch.zeros(20, 4, dtype=torch.bfloat16)},
        batch_size=[20],
    )
    td["obs"][3:5] = math.nan
    td["words"] = NonTensorStack(*[f"w{i}" for i in range(20)])
    return td


@pytest.fixture(params=SUFFIX)
def save(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / f"save{SUFFIX[request.param]}"
    if request.param == "dataset":
        with DatasetWriter(path) as writer:
            for part in container().split(7):
                writer.extend(part)
    else:
        formats.write_save(container(), path, request.param)
    return path


def report_of(capsys: pytest.CaptureFixture[str], path: object, *options: str) -> dict[str, Any]:
    assert main(["inspect", "--json", str(path), *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def leaf(root: dict[str, Any], *key: str) -> dict[str, Any]:
    for name in key:
        root = root["entries"][name]
    return root


def test_statistics_are_those_of_describe(save: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = report_of(capsys, save, "--stats")["root"]
    expected = container().describe(percentiles=())
    for key in ("obs", ("policy", "weight"), ("policy", "bias"), ("policy", "flag"), ("value", "weight")):
        found = leaf(root, *((key,) if isinstance(key, str) else key))["stats"]
        assert list(found) == ["count", "mean", "std", "min", "max", "nan", "infinite", "zero"]
        numel = container()[key].numel()
        assert found["count"] == numel and found["count"] - found["nan"] == expected[key, "count"]
        assert found["infinite"] == 0 and found["zero"] == round(expected[key, "zero"].item() * numel)
        for name in ("mean", "std", "min", "max"):
            assert found[name] == pytest.approx(expected[key, name].item(), rel=1e-9), (key, name)
    assert "stats" not in leaf(root, "words")


def test_statistics_for_people(save: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(save), "--stats", "--key", "policy"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.partition("\n\n")[2].splitlines()]
    assert rows[0] == ["count", "mean", "std", "min", "max", "nan", "infinite", "zero"]
    by_key = {key: values for key, *values in rows[1:]}
    assert by_key["policy.flag"] == ["20", "1", "0", "True", "True", "0", "0", "0"]
    assert by_key["policy.weight"] == ["40", "19.5", "11.6905", "0", "39", "0", "0", "1"]
    assert by_key["policy.bias"][2:] == ["0.622745", "-1", "1", "0", "0", "0"]


def test_first_rows(save: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = report_of(capsys, save, "--head", "4")["root"]
    td = container()
    assert leaf(root, "policy", "weight")["head"] == td["policy", "weight"][:4].tolist()
    obs = torch.tensor(leaf(root, "obs")["head"][:3])
    assert torch.equal(obs, td["obs"][:3])
    assert leaf(root, "obs")["head"][3] == [[None] * 5] * 3  # NaN is no JSON
    assert leaf(root, "words")["head"] == ["w0", "w1", "w2", "w3"]

    assert main(["inspect", str(save), "--head", "2", "--key", "policy.*"]) == 0
    text = capsys.readouterr().out
    assert "\n\npolicy.weight\n  0  0 1\n  1  2 3\n" in text and "\n\npolicy.flag\n  0  True\n  1  True\n" in text
    assert main(["inspect", str(save), "--head", "1", "--key", "obs"]) == 0
    first = [f"{value:.6g}" for value in td["obs"][0].flatten()[:8].tolist()]
    assert capsys.readouterr().out.endswith(f"\n\nobs\n  0  {' '.join(first)} …\n")


def test_keys_by_pattern(save: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(pattern: str, *options: str) -> list[str]:
        assert main(["inspect", str(save), "--key", pattern, *options]) == 0
        lines = capsys.readouterr().out.splitlines()[1:]
        return sorted(re.sub("[├─└│ ]+", " ", line).split()[0] for line in lines)

    assert shown("*.weight") == [".", "policy", "value", "weight", "weight"]
    assert shown("pol*") == [".", "bias", "flag", "policy", "weight"]
    assert shown("pol*", "--depth", "1") == [".", "policy"]
    assert shown("*.[bf]*") == [".", "bias", "flag", "policy"]
    assert report_of(capsys, save, "--key", "*.weight")["tensors"] == 2
    assert main(["inspect", str(save), "--key", "*.wait"]) == 2
    assert "no key matches '*.wait'; there are " in capsys.readouterr().err
    # A file with this name is meant literally.
    starred = save.with_name("starred")
    TensorDict({"a*": torch.ones(1), "ab": torch.ones(1)}).save(starred)
    assert main(["inspect", str(starred), "--key", "a*"]) == 0
    assert "ab" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_ragged_rows_and_columns(layout: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = torch.nested.nested_tensor([torch.full((n, 2), float(n)) for n in (1, 3, 2)], layout=layout)
    TensorDict(x=rows, batch_size=[3]).save(tmp_path / "ragged")
    lazy_stack([TensorDict(x=torch.full((n, 2), float(n))) for n in (1, 3, 2, 4, 1)]).save(tmp_path / "columns.tdz")
    root = report_of(capsys, tmp_path / "ragged", "--stats", "--head", "2")["root"]
    assert leaf(root, "x")["head"] == [[[1.0, 1.0]], [[3.0, 3.0]] * 3]
    assert leaf(root, "x")["stats"]["count"] == 12
    assert main(["inspect", str(tmp_path / "ragged"), "--head", "2"]) == 0
    assert capsys.readouterr().out.endswith("x\n  0  [1, 2]  1 1\n  1  [3, 2]  3 3 3 3 3 3\n")
    assert main(["inspect", str(tmp_path / "columns.tdz"), "--stats", "--head", "1"]) == 0


def test_dtypes_without_numbers(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict(
        bits=torch.arange(4, dtype=torch.int16).view(torch.bits16),
        z=torch.tensor([1 + 2j, complex(math.nan, 0)]),
        wide=torch.tensor([2**64 - 1, 3], dtype=torch.uint64),
        scalar=torch.tensor(7),
        none=torch.zeros(0, 2),
    ).save(tmp_path / "x")
    root = report_of(capsys, tmp_path / "x", "--stats", "--head", "1")["root"]
    assert (leaf(root, "bits")["stats"], leaf(root, "bits")["head"]) == (None, [None])
    assert (leaf(root, "z")["stats"]["mean"], leaf(root, "z")["head"]) == ([1.0, 2.0], [[1.0, 2.0]])
    assert leaf(root, "wide")["stats"]["max"] == 2**64 - 1
    assert (leaf(root, "scalar")["head"], leaf(root, "none")["head"]) == ([7], [])
    assert leaf(root, "none")["stats"]["count"] == 0 and leaf(root, "none")["stats"]["mean"] is None
    assert main(["inspect", str(tmp_path / "x"), "--stats", "--head", "1"]) == 0
    assert "bits\n  0  no numbers of this dtype" in capsys.readouterr().out


def test_what_cannot_be_read_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A compressed tensor is unpacked only now."""
    td = TensorDict(good=torch.ones(4000), other=torch.zeros(4000))
    formats.write_save(td, tmp_path / "x.tdz", "archive", compression="deflate")
    content = bytearray((tmp_path / "x.tdz").read_bytes())
    at = content.index(b"other.memmap") + len("other.memmap")
    content[at : at + 12] = b"\xff" * 12
    (tmp_path / "x.tdz").write_bytes(content)
    assert main(["inspect", "--stats", str(tmp_path / "x.tdz")]) == 1
    output = capsys.readouterr()
    assert "entry 'other': " in output.err and "good   4000 " in output.out


@pytest.mark.parametrize("name", mark_slow(["directory", "h5", "zarr", "archive", "dataset"], keep=["h5", "archive"]))
def test_statistics_take_little_memory(name: str, tmp_path: pathlib.Path) -> None:
    """256 MiB are read with less than half of it in memory of its own; pages of files are the kernel's."""
    path = tmp_path / f"x{SUFFIX[name]}"
    part = TensorDict(x=torch.ones(1 << 20, 4), batch_size=[1 << 20])
    if name == "dataset":
        with DatasetWriter(path) as writer:
            for _ in range(16):
                writer.extend(part)
    else:
        formats.write_save(part.expand(16, 1 << 20).reshape(-1), path, name)
    program = f"""
import threading, time
from tensordict_cli.runners import main, inspect
def own():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
start, most, done = own(), [0], threading.Event()
def watch():
    while not done.wait(0.005):
        most[0] = max(most[0], own())
watcher = threading.Thread(target=watch)
watcher.start()
code = main(["inspect", {str(path)!r}, "--stats"])
done.set()
watcher.join()
assert code == 0
assert most[0] - start < 128 << 10, (most[0] - start) >> 10
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "x  67108864  1     0    1    1    0    0         0" in result.stdout


# --- the pager --------------------------------------------------------------------------------------------------------


def on_terminal(arguments: list[str], rows: int, **environment: str) -> str:
    """Return the output of the command on a terminal of this many lines."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 100, 0, 0))
    given = {key: value for key, value in os.environ.items() if key not in ("PAGER", "LINES", "COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "tensordict", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**given, "TERM": "xterm", **environment},
    ) as process:  # fmt: skip
        os.close(theirs)
        output = b""
        try:
            while part := os.read(ours, 65536):
                output += part
        except OSError:
            pass  # Linux reports with this error that the other end of a terminal is closed.
    os.close(ours)
    assert process.returncode == 0
    return output.decode().replace("\r\n", "\n")


def test_long_output_goes_through_the_pager(tmp_path: pathlib.Path) -> None:
    TensorDict({f"entry{i}": torch.ones(1) for i in range(50)}).save(tmp_path / "x")
    pager = f"cat > {tmp_path}/paged; echo through the pager"
    arguments = ["inspect", str(tmp_path / "x")]
    assert on_terminal(arguments, 20, PAGER=pager) == "through the pager\n"
    paged = (tmp_path / "paged").read_text()
    assert "\x1b[" in paged and "entry49" in paged and len(paged.splitlines()) == 52
    # It fits, is not wanted, or nobody watches.
    (tmp_path / "paged").unlink()
    assert "entry49" in on_terminal(arguments, 80, PAGER=pager)
    assert "entry49" in on_terminal([*arguments, "--no-pager"], 20, PAGER=pager)
    assert "entry49" in on_terminal(arguments, 20, PAGER="")
    piped = subprocess.run(
        [sys.executable, "-m", "tensordict", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PAGER": pager},
    )
    assert "entry49" in piped.stdout and not (tmp_path / "paged").exists()


def test_a_pager_that_is_left(tmp_path: pathlib.Path) -> None:
    TensorDict({f"entry{i}": torch.ones(1) for i in range(5000)}).save(tmp_path / "x.tdz")
    assert on_terminal(["inspect", str(tmp_path / "x.tdz")], 20, PAGER="head -1 > /dev/null") == ""
