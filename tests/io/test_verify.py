"""`verify`: sound saves of every format pass, and every kind of damage to a folder is named."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensordict
from reference import Reference
from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack, verify
from tensordict.core.exceptions import SaveError
from tensordict.io.formats.detect import detect_format
from tensordict.io.saving import checksums

ROOT = pathlib.Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "data" / "format" / "samples"
# Torch says of its nested tensors, once, that they are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def make() -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(30, dtype=torch.int64),
            "n": {"x": torch.rand(30, 3), "f8": torch.ones(30, dtype=torch.float8_e4m3fn), "o dd": torch.ones(30)},
            "r": torch.nested.nested_tensor([torch.ones(i % 3 + 1) for i in range(30)], layout=torch.jagged),
            "x.shape": torch.ones(30),
            "shape": torch.ones(30),
            "empty": torch.zeros(30, 0),
            "t": torch.rand(5, 30).t(),
            "s": NonTensorData("text", batch_size=[30]),
        },
        [30],
    )


@pytest.mark.parametrize("algorithm", [True, "crc32", "sha256", "blake2b"])
@pytest.mark.parametrize("num_threads", [0, 3])
def test_checksums_are_those_of_the_files(
    algorithm: bool | str, num_threads: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensordict.io.saving.leaf_writer._SPLIT", 64)
    make().memmap(tmp_path, checksum=algorithm, num_threads=num_threads)
    report = verify(tmp_path, num_threads=num_threads)
    assert report.ok and report.problems == []
    assert (report.format, report.leaves, report.checksummed) == ("directory", 9, 9)
    assert report.nbytes == sum(
        path.stat().st_size for path in tmp_path.rglob("*.memmap") if path.name != "r.shape.memmap"
    )
    if algorithm == "crc32":
        spec = json.loads((tmp_path / "n" / "meta.json").read_text())["x"]
        assert spec["_checksum"] == f"crc32:{zlib.crc32((tmp_path / 'n' / 'x.memmap').read_bytes()):08x}"


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (1, 1), (70_000, 3), (5, 70_001)])
def test_crc_of_two_pieces(lengths: tuple[int, int]) -> None:
    first, second = (bytes((i * 31 + n) % 251 for i in range(length)) for n, length in enumerate(lengths))
    pieces: list[checksums.Checksum] = [checksums.new("crc32"), checksums.new("crc32")]
    pieces[0].update(first)
    pieces[1].update(second)
    assert checksums.combine(pieces).hexdigest() == f"{zlib.crc32(first + second):08x}"


def test_leaves_that_stay_get_checksums_too(tmp_path: pathlib.Path) -> None:
    td = make().memmap(tmp_path)
    assert verify(tmp_path).checksummed == 0
    td["a"][0] = 5
    td.memmap(tmp_path, checksum=True, copy_existing=True)
    assert verify(tmp_path).checksummed == 9
    td["a"][0] = 6
    assert [problem[:9] for problem in verify(tmp_path, raises=False).problems] == ["entry 'a'"]


def test_unknown_algorithm(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="checksum must be"):
        make().memmap(tmp_path, checksum="md4")
    assert not os.listdir(tmp_path)


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def append(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, append, cut, folder, pathlib.Path.unlink])
@pytest.mark.parametrize(
    ("file", "key"),
    [
        *(("a.memmap", "'a'"), ("n/f8.memmap", "('n', 'f8')"), ("n/o%20dd.memmap", "('n', 'o dd')")),
        *(("r.memmap", "'r'"), ("x.shape.memmap", "'x.shape'"), ("shape.memmap", "'shape'"), ("n/meta.json", "")),
    ],
)
def test_damage_is_named(damage: Callable[[Any], None], file: str, key: str, tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path, checksum=True)
    damage(tmp_path / file)
    if file == "n/meta.json" and damage in (append, flip):
        pytest.skip("JSON with a byte more may be the same JSON")
    report = verify(tmp_path, raises=False)
    assert not report.ok
    assert len(report.problems) == 1
    assert key in report.problems[0]
    with pytest.raises(SaveError, match="is broken: "):
        verify(tmp_path)


def test_all_problems_are_listed(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path, checksum=True)
    flip(tmp_path / "a.memmap")
    cut(tmp_path / "n" / "x.memmap")
    (tmp_path / "t.memmap").unlink()
    (tmp_path / "r.memmap").unlink()
    problems = verify(tmp_path, raises=False).problems
    assert len(problems) == 4
    for key in ("'a'", "'r'", "'t'", "('n', 'x')"):
        assert any(f"entry {key}" in problem for problem in problems), (key, problems)


def test_a_broken_container_does_not_hide_others(tmp_path: pathlib.Path) -> None:
    parts = {name: {"x": torch.ones(3)} for name in "abc"}
    TensorDict({"s": lazy_stack([TensorDict(parts, [3]), TensorDict(parts, [3])], 0), **parts}).memmap(
        tmp_path, checksum=True
    )
    (tmp_path / "a" / "meta.json").write_text("{")
    (tmp_path / "s" / "1" / "b" / "meta.json").unlink()
    flip(tmp_path / "s" / "1" / "c" / "x.memmap")
    flip(tmp_path / "c" / "x.memmap")
    problems = verify(tmp_path, raises=False).problems
    assert len(problems) == 4
    for key in ("'a'", "('s', '1', 'b')", "('s', '1', 'c', 'x')", "('c', 'x')"):
        assert any(f"entry {key}" in problem for problem in problems), (key, problems)


class Verified(TensorClass):
    x: torch.Tensor
    note: str


@pytest.mark.parametrize(
    ("other", "reason"),
    [("value", "a NonTensorData holds no fields"), ("nested", r"it has entries \['y'\]")],
)
def test_what_is_behind_a_tensorclass(other: str, reason: str, tmp_path: pathlib.Path) -> None:
    """It has to be a container of fields; loading and verifying agree on that."""
    item = Verified(x=torch.zeros(2), note="n", batch_size=[2])
    td = TensorDict(item=item, value=NonTensorData("v"), nested={"y": torch.ones(2)}, batch_size=[2])
    td.memmap(tmp_path / "save")
    shutil.rmtree(tmp_path / "save/item/_tensordict")
    shutil.copytree(tmp_path / "save" / other, tmp_path / "save/item/_tensordict")
    with pytest.raises(SaveError, match=f"'item'.*{reason}"):
        TensorDict.load_memmap(tmp_path / "save")
    (problem,) = verify(tmp_path / "save", raises=False).problems
    assert re.search(f"'item'.*{reason}", problem)


def test_nothing_there(tmp_path: pathlib.Path) -> None:
    for raises in (True, False):
        with pytest.raises(FileNotFoundError):
            verify(tmp_path / "missing", raises=raises)
    (tmp_path / "text").write_text("no save at all")
    report = verify(tmp_path / "text", raises=False)
    assert report.format == ""
    assert "no format that is known" in report.problems[0]
    assert "meta.json" in verify(tmp_path, raises=False).problems[0]


def test_progress_counts_every_byte(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    td = TensorDict(a=torch.zeros(3 << 20, dtype=torch.uint8), b=torch.zeros(1 << 20, dtype=torch.uint8))
    td.memmap(tmp_path, checksum=True, num_threads=2, progress=True)
    TensorDict.load_memmap(tmp_path, progress=True)
    verify(tmp_path, progress=True)
    shown = capsys.readouterr().err
    assert "saving: 100%" in shown and "4.00M/4.00M" in shown
    assert "loading: 100%" in shown
    assert "verifying: 4.00MB" in shown


# --- files ------------------------------------------------------------------------------------------------------------

FILES: dict[str, Callable[..., Any]] = {
    "consolidated": lambda td, path, **how: td.consolidate(path, **how),
    "safetensors": lambda td, path, **how: td.to_safetensors(path, **how),
}
IN_ONE_FILE = pytest.mark.parametrize("name", FILES)


@IN_ONE_FILE
@pytest.mark.parametrize("how", [{"checksum": True}, {"checksum": "sha256"}, {"checksum": "blake2b", "num_threads": 3}])
def test_files_keep_checksums(name: str, how: dict[str, Any], tmp_path: pathlib.Path) -> None:
    td = make()
    td["bytes"] = torch.rand(30, dtype=torch.complex128)
    path = tmp_path / "x"
    FILES[name](td, path, **how)
    report = verify(path, num_threads=2)
    assert (report.format, report.leaves, report.checksummed, report.ok) == (name, 10, 10, True)
    assert report.nbytes < path.stat().st_size
    loaded = TensorDict.from_consolidated(path) if name == "consolidated" else TensorDict.from_safetensors(path)
    assert torch.equal(loaded["n", "x"], td["n", "x"]) and loaded["s"] == "text"
    with pytest.raises(ValueError, match="checksum must be"):
        FILES[name](td, path, checksum="md4")
    FILES[name](td, path)
    assert verify(path).checksummed == 0


def test_a_buffer_has_checksums_too(tmp_path: pathlib.Path) -> None:
    make().consolidate(tmp_path / "x", use_buffer=True, checksum=True, progress=True)
    assert verify(tmp_path / "x").checksummed == 9
    with pytest.raises(ValueError, match="filename"):
        make().consolidate(checksum=True)


@IN_ONE_FILE
def test_every_byte_of_the_tensors_counts(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    td = TensorDict({"a": torch.arange(3, dtype=torch.int16), "b": {"c": torch.arange(5, dtype=torch.int16)}})
    FILES[name](td, path, checksum=True)
    content = path.read_bytes()
    wrong = 0
    for value, key in ((td["a"], "'a'"), (td["b", "c"], "'b.c'")):
        start = content.index(value.numpy().tobytes())
        for at in range(start, start + value.nbytes):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            report = verify(path, raises=False)
            assert len(report.problems) == 1 and f"entry {key}: its crc32 checksum" in report.problems[0]
            wrong += 1
    assert wrong == 16


@IN_ONE_FILE
@pytest.mark.parametrize("other", ["crc32:0", "md4:00000000", 7, None])
def test_odd_checksums(name: str, other: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensordict.io.saving.checksums.format_checksum", lambda *args: other)
    FILES[name](TensorDict(a=torch.ones(1)), tmp_path / "x", checksum=True)
    assert "entry 'a': its" in verify(tmp_path / "x", raises=False).problems[0]


@IN_ONE_FILE
def test_progress_of_files(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    td = TensorDict(a=torch.zeros(3 << 20, dtype=torch.uint8), b=torch.zeros(1 << 20, dtype=torch.uint8))
    FILES[name](td, tmp_path / "x", progress=True, num_threads=2)
    FILES[name](td, tmp_path / "y", progress=True, checksum=True)
    verify(tmp_path / "y", progress=True)
    shown = capsys.readouterr().err
    assert shown.count("saving: 100%") == 2 and shown.count("4.00M/4.00M") == 2
    assert "verifying: 4.00MB" in shown
    if name == "safetensors":
        TensorDict.from_safetensors(tmp_path / "x", device="cpu", progress=True)
        assert "loading: 100%" in capsys.readouterr().err


def test_progress_of_hdf5(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    td = TensorDict({"a": torch.zeros(3 << 20, dtype=torch.uint8), "b": {"c": torch.zeros(1 << 20, dtype=torch.uint8)}})
    with td.to_h5(tmp_path / "x", progress=True) as data:
        data.to_h5(tmp_path / "y", progress=True).close()
    shown = capsys.readouterr().err
    assert shown.count("saving: 100%") == 2 and shown.count("4.00M/4.00M") == 2


@pytest.mark.parametrize(
    ("sample", "format"),
    [
        *(
            (name, "directory")
            for name in ("dense", "lazy", "keys", "tensorclass", "nontensor", "pickled", "strided_nested")
        ),
        *(("dense.tdz", "archive"), ("dense_deflate.tdz", "archive")),
    ],
)
def test_samples_of_the_reference(sample: str, format: str) -> None:
    assert detect_format(SAMPLES / sample) == format
    report = verify(SAMPLES / sample)
    assert (report.format, report.problems) == (format, [])
    assert report.leaves >= (sample != "nontensor" and sample != "pickled")


def test_detects_what_we_write(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.ones(3), b={"c": torch.ones(2)})
    td.memmap(tmp_path / "1.safetensors")
    td.memmap(tmp_path / "2", archive=True)
    td.consolidate(tmp_path / "3.h5")
    td.to_h5(tmp_path / "4.tdz").close()
    td.to_safetensors(tmp_path / "5")
    found = [detect_format(tmp_path / name) for name in ("1.safetensors", "2", "3.h5", "4.tdz", "5")]
    assert found == ["directory", "archive", "consolidated", "h5", "safetensors"]
    for name in ("1.safetensors", "2", "3.h5", "4.tdz", "5"):
        report = verify(tmp_path / name)
        assert (report.leaves, report.nbytes) == (2, 20)
    (tmp_path / "short").write_bytes(b"PK")
    with pytest.raises(SaveError, match="no format that is known"):
        detect_format(tmp_path / "short")
    with pytest.raises(FileNotFoundError):
        detect_format(tmp_path)


def test_no_class_and_no_pickle_is_needed(tmp_path: pathlib.Path) -> None:
    assert verify(SAMPLES / "tensorclass").leaves > 0
    lazy_stack([TensorDict(a=torch.ones(2), o=object()), TensorDict(a=torch.ones(3), o=None)]).memmap(
        tmp_path, allow_pickle=True, checksum=True
    )
    assert verify(tmp_path).leaves == 2
    assert tensordict.verify is verify


READ = """
import sys, warnings
warnings.simplefilter("ignore")
from tensordict import TensorDict
td = TensorDict.load_memmap(sys.argv[1])
print(td["a"].sum().item(), td["n", "x"].sum().item())
"""


@pytest.mark.reference
def test_the_reference_reads_a_save_with_checksums(reference: Reference, tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.arange(30), "n": {"x": torch.ones(30, 3)}}, [30])
    td.memmap(tmp_path, checksum=True)
    assert reference.run(READ, tmp_path) == "435 90.0\n"


CONSOLIDATED = """
import sys, warnings
warnings.simplefilter("ignore")
import tensordict
td = tensordict.from_consolidated(sys.argv[1])
print(td["a"].sum().item(), td["n", "x"].sum().item())
"""


@pytest.mark.reference
def test_the_reference_reads_a_consolidated_file_with_checksums(reference: Reference, tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.arange(30), "n": {"x": torch.ones(30, 3)}}, [30])
    td.consolidate(tmp_path / "x", checksum=True)
    assert reference.run(CONSOLIDATED, tmp_path / "x") == "435 90.0\n"
