"""Saves that are broken, foreign or hostile, and disks that do not play along."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tensordict import TensorDict, lazy_stack, verify
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.specification import VALUE_STACK, Specification, to_container
from tensordict.memory import system

LEAF = {"device": "cpu", "shape": [2], "dtype": "torch.float32", "is_nested": False}
NODE = {"shape": [2], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}


def make() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), "b": {"c": torch.ones(3, 2)}}, [3])


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def put(folder: pathlib.Path, meta: Any, **files: bytes) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_bytes(meta if isinstance(meta, bytes) else json.dumps(meta).encode())
    for name, content in files.items():
        (folder / f"{name}.memmap").write_bytes(content)
    return folder


# --- metadata that does not add up ------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Any, str]] = {
    "truncated": (b'{"a": {', "not JSON"),
    "binary": (b"\xff\xfe\x00", "not JSON"),
    "empty": (b"", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "list": ([], "holds a list"),
    "foreign": ({"name": "some-package"}, "names no class"),
    "odd class": ({**NODE, "_type": "TensorDict"}, "form"),
    "no shape": ({"device": "cpu", "_type": NODE["_type"]}, "batch size is None"),
    "negative batch": ({**NODE, "shape": [-1]}, "non-negative"),
    "float batch": ({**NODE, "shape": [2.0]}, "non-negative"),
    "batch is text": ({**NODE, "shape": "2"}, "batch size is '2'"),
    "bad device": ({**NODE, "device": "abacus"}, "'abacus'"),
    "device is a number": ({**NODE, "device": 3}, "device is 3"),
    "too many names": ({**NODE, "_names": ["x", "y"]}, "dim names"),
    "names of numbers": ({**NODE, "_names": [1]}, "dim names"),
    "bad entries": ({**NODE, "_entries": [["x"]]}, "_entries"),
    "entry is a number": ({**NODE, "a": 3}, "'a'.*3"),
    "entry is nothing": ({**NODE, "a": {}}, "'a'.*neither"),
    "unknown dtype": ({**NODE, "a": {**LEAF, "dtype": "torch.float33"}}, "'a'.*'torch.float33'"),
    "dtype is code": ({**NODE, "a": {**LEAF, "dtype": "os.system"}}, "'a'.*'os.system'"),
    "dtype is a function": ({**NODE, "a": {**LEAF, "dtype": "torch.save"}}, "'a'.*'torch.save'"),
    "dtype is a list": ({**NODE, "a": {**LEAF, "dtype": ["torch.int8"]}}, "'a'.*dtype"),
    "no leaf shape": ({**NODE, "a": {"dtype": "torch.int8"}}, "'a'.*shape is None"),
    "negative shape": ({**NODE, "a": {**LEAF, "shape": [2, -3]}}, "'a'.*non-negative"),
    "bool shape": ({**NODE, "a": {**LEAF, "shape": [True, True]}}, "'a'.*non-negative"),
    "huge shape": ({**NODE, "a": {**LEAF, "shape": [2, 2**70]}}, "'a'.*non-negative"),
    "product of shape": ({**NODE, "a": {**LEAF, "shape": [2, 2**62, 2**62]}}, "'a'.*larger than"),
    "another product": ({**NODE, "a": {**LEAF, "shape": [2, 2**20]}}, "'a'.*8 bytes"),
    "does not fit the batch": ({**NODE, "a": {**LEAF, "shape": [3]}}, r"'a'.*\[3\].*\[2\]"),
}


@pytest.mark.parametrize(("meta", "message"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_broken_metadata(meta: Any, message: str, nested: bool, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "inner" if nested else tmp_path
    put(folder, meta, a=bytes(8))
    if nested:
        put(tmp_path, {**NODE, "shape": [], "inner": {"type": "TensorDict"}})
    with pytest.raises(SaveError) as caught:
        TensorDict.load_memmap(tmp_path)
    pattern = message.replace("'a'", r"\('inner', 'a'\)") if nested else message
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert str(folder) in str(caught.value)
    if nested:
        assert "inner" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567"], ids=["empty", "short"])
def test_short_file(content: bytes, tmp_path: pathlib.Path) -> None:
    put(tmp_path, {**NODE, "a": LEAF}, a=content)
    with pytest.raises(SaveError, match=rf"'a'.*{tmp_path}/a\.memmap.*{len(content)} bytes.*needs 8"):
        TensorDict.load_memmap(tmp_path)
    assert (tmp_path / "a.memmap").read_bytes() == content


def test_longer_file_is_read(tmp_path: pathlib.Path) -> None:
    # The reference leaves the tail in place when it saves a shorter tensor over a longer one.
    put(tmp_path, {**NODE, "a": LEAF}, a=bytes(12))
    assert TensorDict.load_memmap(tmp_path)["a"].tolist() == [0, 0]


def test_missing_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "nowhere")):
        TensorDict.load_memmap(tmp_path / "nowhere")
    make().memmap(tmp_path)
    (tmp_path / "b" / "c.memmap").unlink()
    with pytest.raises(FileNotFoundError, match=rf"\('b', 'c'\).*{tmp_path}/b/c\.memmap"):
        TensorDict.load_memmap(tmp_path)
    assert not (tmp_path / "b" / "c.memmap").exists()
    (tmp_path / "b" / "meta.json").unlink()
    with pytest.raises(FileNotFoundError, match=rf"'b'.*{tmp_path}/b/meta\.json"):
        TensorDict.load_memmap(tmp_path)


def test_what_is_no_regular_file(tmp_path: pathlib.Path) -> None:
    put(tmp_path, {**NODE, "a": LEAF})
    (tmp_path / "a.memmap").mkdir()
    with pytest.raises(SaveError, match=r"'a'.*not a regular file"):
        TensorDict.load_memmap(tmp_path)
    (tmp_path / "meta.json").unlink()
    os.mkfifo(tmp_path / "meta.json")
    with pytest.raises(SaveError, match="not a regular file"):
        TensorDict.load_memmap(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "x/../../secret"])
@pytest.mark.parametrize("robust", [True, False])
def test_names_do_not_leave_the_folder(name: str, robust: bool, tmp_path: pathlib.Path) -> None:
    put(tmp_path / "outside", NODE)
    (tmp_path / "secret.memmap").write_bytes(bytes(8))
    put(tmp_path / "secret", NODE)
    (tmp_path / "save" / "x").mkdir(parents=True)
    for spec in (LEAF, {"type": "TensorDict"}):
        put(tmp_path / "save", {**NODE, name: spec})
        with pytest.raises((SaveError, FileNotFoundError)) as caught:
            TensorDict.load_memmap(tmp_path / "save", robust_key=robust)
        assert repr(name)[1:-1] in str(caught.value)
    with pytest.raises((SaveError, FileNotFoundError), match=r"'\.\.'"):
        TensorDict.load_memmap(tmp_path / "save", subpath=("..",), robust_key=robust)


def test_nesting_without_end(tmp_path: pathlib.Path) -> None:
    put(tmp_path, {**NODE, "b": {"type": "TensorDict"}})
    (tmp_path / "b").symlink_to(".")
    with pytest.raises(OSError, match="'b'"):
        TensorDict.load_memmap(tmp_path)


def test_sizes_without_end(tmp_path: pathlib.Path) -> None:
    for size, dim in (([0, 2**40], 1), ([0, 2**62, 2**62], 2), ([0, 0, 2**40], 2)):
        with pytest.raises(SaveError, match="members"):
            to_container(Specification(VALUE_STACK, torch.Size(size), stack_dim=dim, value=[]), ("s",))
    assert to_container(Specification(VALUE_STACK, torch.Size([0, 3]), stack_dim=1, value=[])).batch_size == (0, 3)
    members = lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2))])
    members.memmap(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    for count in (3, 10**6, 2**70, -1, 1.0):
        (tmp_path / "meta.json").write_text(json.dumps({**meta, "_count": count}))
        with pytest.raises((SaveError, FileNotFoundError)):
            TensorDict.load_memmap(tmp_path)


@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_files_nested_without_end(depth: int, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    node = '{"kind":"TensorDict","batch_size":[],"entries":{"a":'
    spec = node * depth + "{}" + "}}" * depth
    own = json.dumps({"separator": ".", "tensors": {}, "locked": False})[:-1] + f',"structure":{spec}}}'
    tail = b'{"cls":"TensorDict","non_tensors":{},"leaves":{},"cls_metadata":{}}'
    parts = [own.encode(), len(own).to_bytes(8, "little"), b"tensdict", tail, len(tail).to_bytes(8, "little")]
    path.write_bytes(b"".join(parts))
    with pytest.raises(SaveError):
        TensorDict.from_consolidated(path)
    structure = f'{{"version":1,"separator":".","root":{spec}}}'
    header = json.dumps({"__metadata__": {"tensordict_structure": structure}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SaveError):
        TensorDict.from_safetensors(path)


@pytest.mark.parametrize(
    "kind",
    [
        "<class 'some.module.Item'>",
        "<class 'tensordict.Item'>",
        "<class 'os.system'>",
        "<class 'evil.TensorDict'>",
    ],
)
def test_classes_are_not_imported(kind: str, tmp_path: pathlib.Path) -> None:
    put(tmp_path, {**NODE, "_type": kind})
    before = set(sys.modules)
    with pytest.raises(UnsupportedEntryError, match=r"neither a container that this version"):
        TensorDict.load_memmap(tmp_path)
    assert set(sys.modules) == before


def test_newer_metadata_is_read(tmp_path: pathlib.Path) -> None:
    extra = {"_format_version": 1, "_class": "tensordict:TensorDict", "_future": {"x": 1}, "_also": None}
    put(tmp_path, {**NODE, **extra, "a": {**LEAF, "_future": 3}}, a=bytes(8))
    assert list(TensorDict.load_memmap(tmp_path).keys()) == ["a"]
    put(tmp_path, {"shape": [2], "_class": "tensordict:TensorDict", "a": LEAF})
    assert TensorDict.load_memmap(tmp_path).device is None


@pytest.mark.parametrize("odd", [{}, {"shape": [3, 1]}, {"shape": [2, 1], "_row": [3]}, {"shape": [2, 1], "_row": 1}])
def test_ragged_leaf_with_an_odd_table_is_refused_by_name(odd: dict[str, object], tmp_path: pathlib.Path) -> None:
    put(tmp_path, {**NODE, "r": {**LEAF, "is_nested": True, **odd}})
    with pytest.raises(SaveError, match="'r'.*(table|rows)"):
        TensorDict.load_memmap(tmp_path)


# --- entries that cannot be saved ---------------------------------------------------------------------------------

UNSAVEABLE: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", UNSAVEABLE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_unsaveable_entry(kind: str, tmp_path: pathlib.Path) -> None:
    td = make()
    td["b"]._entries["odd"] = UNSAVEABLE[kind]()
    for method in ("memmap", "memmap_", "memmap_like"):
        for prefix in (tmp_path / "saved", None):
            with pytest.raises(NotImplementedError, match=r"\('b', 'odd'\)"):
                getattr(td, method)(prefix)
    assert not os.listdir(tmp_path)
    assert not td.is_locked
    assert type(td["a"]) is torch.Tensor


# --- disks that do not play along ---------------------------------------------------------------------------------


def assert_unchanged(td: TensorDict) -> None:
    assert not td.is_locked
    assert not td.is_memmap()
    assert td.device is None
    assert type(td["a"]) is type(td["b", "c"]) is torch.Tensor
    assert td["b", "c"].sum() == 6


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("method", ["memmap", "memmap_", "memmap_like"])
@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over a save"])
def test_full_disk(
    over: bool, method: str, num_threads: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "saved"
    if over:
        TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3, 2)}}, [3]).memmap(folder)
    before = tree(tmp_path)
    calls: list[int] = []

    owner, name = (system, "reserve") if method == "memmap_like" else (os, "pwrite")
    real = getattr(owner, name)

    def full(fd: int, *args: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".memmap"):
            return real(fd, *args)
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 12

    monkeypatch.setattr(owner, name, full)
    td = make()
    # Without, `memmap_like` opens what is there, and writes nothing.
    more = {"overwrite": True} if method == "memmap_like" else {}
    with pytest.raises(OSError, match=r"entry .*No space left") as caught:
        getattr(td, method)(folder, num_threads=num_threads, **more)
    assert caught.value.errno == errno.ENOSPC
    assert ".memmap" in str(caught.value)
    assert_unchanged(td)
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == (["deep"] if over else [])


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over a save"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_full_disk_at_a_small_file(
    number: int, over: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal and the descriptions: whichever it is, its path is in the error, and the old save stays."""
    folder = tmp_path / "saved"
    if over:
        TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3, 2)}}, [3]).memmap(folder)
    before = tree(tmp_path)
    real, calls = os.pwrite, []

    def full(fd: int, *args: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.endswith(".memmap"):
            calls.append(path)
            if len(calls) > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *args)

    monkeypatch.setattr(os, "pwrite", full)
    td = make()
    with pytest.raises(OSError, match=r"cannot write the file .*No space left") as caught:
        td.memmap(folder)
    assert caught.value.errno == errno.ENOSPC and str(tmp_path) in caught.value.filename
    assert_unchanged(td)
    assert tree(tmp_path) == before


def test_limit_of_the_kernel(tmp_path: pathlib.Path) -> None:
    """A real refusal in the middle of a file, from the limit on file sizes, in a process of its own."""
    program = f"""
import errno, os, resource, torch
from tensordict import TensorDict
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
td = TensorDict(a=torch.zeros(10), b=dict(big=torch.ones(1 << 20)))
for method in (td.memmap, td.memmap_, td.memmap_like):
    try:
        method({str(tmp_path / "saved")!r})
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        assert "('b', 'big')" in str(error) and "big.memmap" in str(error), error
    else:
        raise AssertionError("saved more than the limit")
    assert not os.listdir({str(tmp_path)!r})
    assert not td.is_locked and type(td["a"]) is torch.Tensor
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "done\n", result.stderr


def test_failing_metadata(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def refuse(source: str, target: str) -> None:
        if target.endswith("meta.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    td = make()
    # The files of a save to a new folder are moved at once; those of one to a folder that is there, one by one.
    (tmp_path / "saved").mkdir()
    with pytest.raises(OSError, match=r"meta\.json"):
        td.memmap_(tmp_path / "saved")
    assert_unchanged(td)
    assert os.listdir(tmp_path) == ["saved"] and not os.listdir(tmp_path / "saved")


def test_file_in_the_way(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("mine")
    for prefix in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
            make().memmap(prefix)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "b").write_text("mine")
    with pytest.raises(NotADirectoryError, match="'b'"):
        make().memmap(tmp_path / "saved")
    (tmp_path / "saved" / "b").unlink()
    (tmp_path / "saved" / "a.memmap").mkdir()
    td = make()
    with pytest.raises(IsADirectoryError, match="'a'"):
        td.memmap_(tmp_path / "saved")
    assert_unchanged(td)
    assert tree(tmp_path) == {"file": b"mine"}


@pytest.fixture
def open_folder() -> Iterator[pathlib.Path]:
    """A folder that other users may enter. Pytest takes this right from the parents of `tmp_path` at any time."""
    folder = pathlib.Path(tempfile.mkdtemp())
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != pathlib.Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    yield folder
    for path in (folder, folder / "saved", folder / "saved" / "b"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_without_permission(open_folder: pathlib.Path) -> None:
    """A user without write permission: saving is refused, loading gives private maps."""
    program = f"""
import os, torch
from tensordict import TensorDict
root = {str(open_folder)!r}
TensorDict(a=torch.arange(3), b=dict(c=torch.ones(2))).memmap(root + "/saved")
for folder, _, files in os.walk(root):
    for file in files:
        os.chmod(os.path.join(folder, file), 0o444)
    os.chmod(folder, 0o555)
os.chmod(root + "/saved/b/c.memmap", 0)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
td = TensorDict(a=torch.zeros(3), b=dict(c=torch.ones(2)))
for prefix, named in ((root + "/new", "new"), (root + "/saved", "/saved")):
    try:
        td.memmap_(prefix)
    except PermissionError as error:
        assert named in str(error) and root in str(error), error
    else:
        raise AssertionError("wrote into a folder without permission")
    assert not td.is_locked and type(td["a"]) is torch.Tensor
try:
    TensorDict.load_memmap(root + "/saved")
except PermissionError as error:
    assert "('b', 'c')" in str(error) and "c.memmap" in str(error), error
else:
    raise AssertionError("read without permission")
os.chdir("/")
from tensordict import MemoryMappedTensor
x = MemoryMappedTensor.from_filename(root + "/saved/a.memmap", torch.int64, (3,))
x += 1
assert x.tolist() == [1, 2, 3]
assert MemoryMappedTensor.from_filename(root + "/saved/a.memmap", torch.int64, (3,)).tolist() == [0, 1, 2]
print("done")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "done\n", result.stderr


def leaf_link(save: pathlib.Path, outside: pathlib.Path) -> str:
    (save / "a.memmap").rename(outside)
    (save / "a.memmap").symlink_to(outside)
    return "entry 'a'"


def folder_link(save: pathlib.Path, outside: pathlib.Path) -> str:
    (save / "b").rename(outside)
    (save / "b").symlink_to(outside)
    return "entry 'b'"


def meta_link(save: pathlib.Path, outside: pathlib.Path) -> str:
    (save / "b" / "meta.json").rename(outside)
    (save / "b" / "meta.json").symlink_to(outside)
    return "entry 'b'"


def relative_link(save: pathlib.Path, outside: pathlib.Path) -> str:
    leaf_link(save, outside)
    (save / "a.memmap").unlink()
    (save / "a.memmap").symlink_to(f"b/../../{outside.name}")
    return "entry 'a'"


@pytest.mark.parametrize("move", [leaf_link, folder_link, meta_link, relative_link])
def test_links_that_lead_out_of_the_save(
    tmp_path: pathlib.Path, move: Callable[[pathlib.Path, pathlib.Path], str]
) -> None:
    save = tmp_path / "save"
    TensorDict(a=torch.zeros(2), b={"c": torch.ones(2)}).memmap(save)
    entry = move(save, tmp_path / "outside")
    with pytest.raises(SaveError, match=f"{entry}.*is a link that leads out of the save"):
        TensorDict.load_memmap(save)
    (problem,) = verify(save, raises=False).problems
    assert "leads out of the save" in problem


def test_links_within_the_save_and_to_it(tmp_path: pathlib.Path) -> None:
    save = tmp_path / "save"
    TensorDict(a=torch.zeros(2), b={"c": torch.ones(2)}).memmap(save)
    (save / "a.memmap").rename(save / "b" / "kept")
    (save / "a.memmap").symlink_to("b/kept")
    (tmp_path / "link").symlink_to(save)
    for path in (save, tmp_path / "link"):
        loaded = TensorDict.load_memmap(path)
        assert loaded["a"].tolist() == [0, 0] and loaded["b", "c"].tolist() == [1, 1]
        assert verify(path).ok
    assert TensorDict.load_memmap(tmp_path / "link", subpath="b")["c"].tolist() == [1, 1]


@pytest.mark.parametrize("shape", [[1 << 40, 1 << 40], [0, 1 << 40, 1 << 40], [1 << 62]])
@pytest.mark.parametrize("file", ["there", "missing"])
def test_shapes_that_no_tensor_has(shape: list[int], file: str, tmp_path: pathlib.Path) -> None:
    TensorDict(a=torch.zeros(2)).memmap(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["a"]["shape"] = shape
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    if file == "missing":
        (tmp_path / "a.memmap").unlink()
    with pytest.raises(SaveError, match="'a'.* is larger than that of a tensor can be"):
        TensorDict.load_memmap(tmp_path)
    assert not verify(tmp_path, raises=False).ok
