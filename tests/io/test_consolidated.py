"""Consolidated containers: in memory, in a file, and files that are damaged or of the reference."""

from __future__ import annotations

import functools
import io
import json
import os
import pathlib
import pickle
import struct
import tempfile
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reference import Reference
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    from_consolidated,
    lazy_stack,
    tensorclass,
)
from tensordict.core.exceptions import LockedError, SaveError, UnsupportedEntryError
from tensordict.io.formats import consolidated
from tensordict.memory import files

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

ROOT = pathlib.Path(__file__).parents[2]
SAMPLE = pathlib.Path("/work/shared/format/samples/nested.consolidated")
DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16"]
DTYPES += ["float32", "float64", "complex64", "complex128", "float8_e4m3fn"]


@tensorclass
class Sample:
    image: Tensor
    note: str | None = None


def jagged(factor: float = 1.0) -> Tensor:
    rows = [torch.arange(6.0).view(3, 2), torch.arange(2.0).view(1, 2)]
    return torch.nested.nested_tensor([row * factor for row in rows], layout=torch.jagged)


def content() -> TensorDict:
    td = TensorDict({name: torch.arange(6).view(2, 3).to(getattr(torch, name)) for name in DTYPES}, [2], names=["time"])
    shared = jagged()
    td["rows"], td["twice"] = shared, shared * 2
    td["strided"] = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(2.0)])
    td["n"] = {
        "empty": torch.zeros(2, 0),
        "deep": {"turned": torch.arange(6.0).view(3, 2).T},
        "leaves": {"x": torch.ones(2)},
    }
    td["value"] = NonTensorData({"k": [1, (2.0, None)]}, batch_size=[2])
    td["nothing"] = MetaData(float("nan"), batch_size=[2])
    td["values"] = NonTensorStack("a", "b")
    td["stack"] = lazy_stack([TensorDict(u=torch.ones(count), s="x") for count in (1, 2)])
    td["item"] = Sample(image=torch.ones(2, 2), note="n", batch_size=[2])
    td["own"] = UnbatchedTensor(torch.arange(5))
    return td


def plain(value: Any) -> Any:
    """Summarize for comparison: the bits and forms of tensors, and the `repr` of values, which handles `nan`."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_nested:
        return [plain(row) for row in value.unbind()]
    value = value.as_subclass(Tensor).contiguous()
    return str(value.dtype), tuple(value.shape), value.view(-1).view(torch.uint8).tolist()


def facts(td: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"": (type(td).__name__, tuple(td.batch_size), td.names)}
    for key in td.exclude("stack").keys(True):
        value = td.get(key)
        name = key if isinstance(key, str) else "/".join(key)
        if hasattr(value, "batch_size") and not isinstance(value, Tensor):
            found[name] = (type(value).__name__, tuple(value.batch_size), getattr(value, "data", None) is None)
        else:
            found[name] = (type(value).__name__, plain(value))
    found["values"] = [repr(td[key]) for key in ("value", "nothing")] + [td.get("values").tolist()]
    found["members"] = [plain(member["u"]) for member in td.get("stack").tensordicts]
    return found


def is_one_storage(td: Any) -> bool:
    ends = {
        (leaf.values() if leaf.is_nested else leaf).untyped_storage().data_ptr()
        for leaf in td._leaves()
        if leaf.numel() and (not leaf.is_nested or leaf.layout is torch.jagged)
    }
    return len(ends) == 1


# --- in memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_all_kinds_of_entries_are_kept_and_lie_in_one_storage(num_threads: int) -> None:
    td = content()
    result = td.consolidate(num_threads=num_threads)
    assert facts(result) == facts(td)
    assert result.is_consolidated()
    assert result.is_locked
    assert not td.is_consolidated()
    assert not td.is_locked
    assert is_one_storage(result)
    # Rows that could be computed with each other still can.
    assert (result["rows"] + result["twice"]).values().tolist() == (td["rows"] + td["twice"]).values().tolist()


def test_leaves_are_aligned_copies_without_garbage_between_them() -> None:
    td = TensorDict({f"{name}{turn}": torch.ones(3, dtype=getattr(torch, name)) for name in DTYPES for turn in (0, 1)})
    result = td.consolidate()
    taken = torch.zeros(result._consolidated[0].numel(), dtype=torch.bool)
    for leaf in result.values():
        start = leaf.storage_offset() * leaf.itemsize
        assert start % max(8, leaf.itemsize) == 0
        assert not taken[start : start + leaf.nbytes].any()
        taken[start : start + leaf.nbytes] = True
    assert not result._consolidated[0][~taken].any()
    result["float320"].fill_(5)
    assert td["float320"].tolist() == [1, 1, 1]
    assert not any(leaf._is_view() for leaf in result.values())


def test_large_leaves_and_leaves_that_are_gathered() -> None:
    big = torch.arange(12_000_000, dtype=torch.int32)
    td = TensorDict(
        big=big,
        turned=big[:600].view(20, 30).T,
        conj=torch.ones(4, dtype=torch.complex64).conj(),
        one=big[:1].expand(9),
    )
    for num_threads in (0, 3):
        result = td.consolidate(num_threads=num_threads)
        assert torch.equal(result["big"], big)
        assert all(torch.equal(result[key], td[key]) and result[key].is_contiguous() for key in td.keys())


@pytest.mark.parametrize("num_threads", [0, 2])
def test_large_leaves_in_inference_mode(num_threads: int) -> None:
    with torch.inference_mode():
        td = TensorDict(a=torch.rand(1 << 20), b=torch.rand(1 << 18))
        assert (td.consolidate(num_threads=num_threads) == td).all()
    plain = TensorDict(a=torch.rand(1 << 20), b=torch.rand(1 << 18))
    with torch.inference_mode():
        assert (plain.consolidate(num_threads=num_threads) == plain).all()


def test_what_is_one_tensor_stays_one() -> None:
    x = torch.ones(3)
    result = TensorDict({"a": x, "n": {"b": x}}).consolidate()
    assert result["a"] is result["n", "b"]
    assert result._consolidated[0].numel() == 16


def test_consolidating_again_gives_the_same_container() -> None:
    td = TensorDict(a=torch.ones(3)).consolidate()
    assert td.consolidate() is td
    assert td.contiguous().is_consolidated() is False
    assert td.clone().is_consolidated() is False
    assert td.copy().is_consolidated() is False


def test_it_ends_with_the_structure() -> None:
    def loaded() -> TensorDict:
        return pickle.loads(
            pickle.dumps(TensorDict(a=torch.ones(3), n={"b": torch.ones(2)}).consolidate(inplace=False))
        )

    td = loaded()
    td["a"].add_(1)
    td.set_("a", torch.zeros(3))
    td["n"].update_({"b": torch.zeros(2)})
    assert td.is_consolidated()
    td.unlock_()
    assert not td.is_consolidated()
    for change in (
        lambda td: td.set("new", torch.ones(1)),
        lambda td: td["n"].set("b", torch.ones(2)),
        lambda td: td.pop("a"),
    ):
        td = from_unlocked()
        assert td.is_consolidated()
        change(td)
        assert not td.is_consolidated()
        assert set(pickle.loads(pickle.dumps(td)).keys(True, True)) == set(td.keys(True, True))


def from_unlocked() -> TensorDict:
    """A container as `from_consolidated` gives it: consolidated, and not locked."""
    td = TensorDict(a=torch.ones(3), n={"b": torch.ones(2)}).consolidate()
    td._unlock_tree()
    return td


def test_in_place() -> None:
    td = TensorDict(a=torch.ones(3), n={"b": torch.ones(2)})
    node = td["n"]
    assert td.consolidate(inplace=True) is td
    assert td["n"] is node
    assert td.is_consolidated()
    assert td.is_locked
    stack = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
    assert stack.consolidate(inplace=True).is_consolidated()
    locked = TensorDict(a=torch.ones(3)).lock_()
    with pytest.raises(LockedError, match="unlock"):
        locked.consolidate(inplace=True)


def test_early_return() -> None:
    td = content()
    future = td.consolidate(num_threads=2, return_early=True)
    assert isinstance(future, Future)
    assert facts(future.result(timeout=30)) == facts(td)
    assert isinstance(TensorDict(a=torch.ones(1)).consolidate(return_early=True), TensorDict)
    with pytest.raises(NotImplementedError, match="return_early"):
        td.consolidate(num_threads=2, return_early=True, non_blocking=True)


def test_shared_memory() -> None:
    td = TensorDict(a=torch.ones(3), b=torch.ones(2)).consolidate(share_memory=True)
    assert td["a"].is_shared()
    assert td["b"].untyped_storage().is_shared()
    assert TensorDict().consolidate(share_memory=True).is_consolidated()


def test_devices() -> None:
    td = TensorDict(a=torch.ones(3), n={"b": torch.ones(2, dtype=torch.int8)}, device="cpu")
    meta = td.consolidate(device="meta")
    assert (meta.device, meta["n"].device, meta["n", "b"].device) == (torch.device("meta"),) * 3
    moved = td.consolidate().to("meta")
    assert moved.is_consolidated()
    assert moved.is_locked
    assert moved["n", "b"].device.type == "meta"
    source = TensorDict(a=torch.ones(3)).consolidate().requires_grad_()
    here = source.to("cpu")
    assert here["a"] is source["a"]
    assert here["a"].requires_grad
    assert here.is_consolidated()
    assert here.device == torch.device("cpu")
    assert not td.consolidate().to(torch.float64).is_consolidated()
    with pytest.raises(SaveError, match="entry 'a' is on the meta device"):
        meta.clone().consolidate(device="cpu")
    with pytest.raises(ValueError, match="file"):
        td.consolidate("unused", device="meta")


@pytest.mark.gpu
def test_gpu(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.arange(300.0), b=torch.ones(2, dtype=torch.complex128))
    moved = td.consolidate(device="cuda")
    assert moved["a"].is_cuda
    assert torch.equal(moved["a"].cpu(), td["a"])
    back = moved.to("cpu")
    assert back.is_consolidated()
    assert torch.equal(back["b"], td["b"])
    restored = pickle.loads(pickle.dumps(moved))
    assert restored.is_consolidated()
    assert restored["a"].is_cuda
    assert td.consolidate().to("cuda").is_consolidated()
    assert torch.equal(td.to("cuda").consolidate(tmp_path / "x")["a"], td["a"])
    assert td.consolidate(pin_memory=True)["a"].is_pinned()


def test_entries_that_cannot_be_consolidated() -> None:
    sparse = torch.eye(3).to_sparse()
    td = TensorDict(a=torch.ones(3), n=TensorDict(s=sparse))
    with pytest.raises(UnsupportedEntryError, match=r"'n', 's'.*to_dense"):
        td.consolidate()
    assert sorted(td.keys()) == ["a", "n"]
    assert not td.is_locked


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("use_buffer", [False, True])
def test_file_and_back(tmp_path: pathlib.Path, num_threads: int, use_buffer: bool) -> None:
    td = content()
    path = tmp_path / "file"
    saved = td.consolidate(path, num_threads=num_threads, use_buffer=use_buffer, durable=True)
    assert facts(saved) == facts(td)
    assert saved.is_consolidated()
    assert saved.is_locked
    assert (saved.device, saved["n"].device) == (torch.device("cpu"),) * 2
    again = from_consolidated(path)
    assert facts(again) == facts(td)
    assert list(again.keys()) == list(td.keys())
    assert again.is_consolidated()
    assert not again.is_locked
    assert (again["rows"] + again["twice"]).size(0) == 2
    # Writes to the saved container reach the file, unless it has a buffer; loaded ones copy on write.
    saved["float32"].fill_(9)
    again["float64"].fill_(9)
    fresh = TensorDict.from_consolidated(path)
    assert (fresh["float32"] == 9).all() != use_buffer
    assert not (fresh["float64"] == 9).any()
    assert os.listdir(tmp_path) == ["file"]


def test_small_cases(tmp_path: pathlib.Path) -> None:
    for td in (
        TensorDict(),
        TensorDict(a=torch.zeros(0)),
        TensorDict(batch_size=[2, 3], names=["a", None]),
        NonTensorData((1, 2), batch_size=[2]),
        NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d")),
        lazy_stack([TensorDict(a=torch.ones(2, 1), batch_size=[2]) for _ in range(3)], 1),
        Sample(image=torch.ones(2), batch_size=[2]).lock_(),
        TensorDict(
            {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "": torch.ones(2), "cls": {"leaves": torch.ones(3)}}
        ),
    ):
        td.consolidate(tmp_path / "x")
        again = from_consolidated(tmp_path / "x")
        assert type(again) is type(td)
        assert again.batch_size == td.batch_size
        assert again.names == td.names
        assert again.is_locked == td.is_locked
        assert again.is_consolidated()
        assert list(again.keys(True, True)) == list(td.keys(True, True))
        if isinstance(td, (NonTensorData, NonTensorStack)):
            assert again.tolist() == td.tolist()


def test_a_container_that_is_consolidated_is_written_all_the_same(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.ones(3)).consolidate()
    saved = td.consolidate(tmp_path / "x")
    assert from_consolidated(tmp_path / "x")["a"].tolist() == [1, 1, 1]
    assert saved is not td


def test_the_old_file_stays_until_the_new_one_is_there(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    old = TensorDict(a=torch.ones(1000)).consolidate(path)
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_bytes", full)
    with pytest.raises(OSError, match="cannot write the file") as error:
        TensorDict(a=torch.zeros(10)).consolidate(path)
    assert error.value.errno == 28
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]
    monkeypatch.undo()
    TensorDict(a=torch.zeros(10)).consolidate(path)
    # Processes that mapped the old file keep it.
    assert old["a"].sum() == 1000
    assert from_consolidated(path)["a"].tolist() == [0] * 10


def test_values_that_json_cannot_hold_are_refused_before_writing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedEntryError, match=r"'n', 'o'"):
        TensorDict({"a": torch.ones(1), "n": TensorDict(o=object())}).consolidate(tmp_path / "x")
    with pytest.raises(SaveError, match="meta device"):
        TensorDict(a=torch.ones(1, device="meta")).consolidate(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="cannot write"):
        TensorDict(a=torch.ones(1)).consolidate(tmp_path / "missing" / "x")
    assert os.listdir(tmp_path) == []


def test_classes_are_looked_up_and_not_imported(tmp_path: pathlib.Path) -> None:
    Sample(image=torch.ones(2), batch_size=[2]).consolidate(tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    assert b"Sample" in data
    (tmp_path / "x").write_bytes(data.replace(b"Sample", b"Simple"))
    with pytest.raises(UnsupportedEntryError, match="import the module"):
        from_consolidated(tmp_path / "x")


# --- damaged files ----------------------------------------------------------------------------------------------------


def test_sample_of_the_reference() -> None:
    if not SAMPLE.exists():
        pytest.skip("the samples of the reference are not here")
    td = from_consolidated(SAMPLE)
    assert (td["a"].tolist(), td["b", "c"].tolist(), td["b", "c"].dtype) == ([0, 1, 2], [1, 1], torch.int8)
    assert td.is_consolidated()


def foreign(root: Any, payload: bytes = bytes(64)) -> bytes:
    text = root if isinstance(root, bytes) else json.dumps(root).encode()
    return payload + text + struct.pack("<q", len(text))


def node(leaves: Any, **others: Any) -> dict[str, Any]:
    metadata = {"device": None, "names": [], "batch_size": [], "is_locked": False}
    return {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": metadata, **others}


LEAF = ["torch.float32", [4], 0, 16, 0]
OFFSETS = ["torch.int64", [3], 16, 40, 0, 1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        bytes(8),
        struct.pack("<q", -5),
        bytes(64) + struct.pack("<q", 2**62),
        foreign(b"nonsense"),
        foreign(b"[]"),
        foreign(b'{"a": 1, "a": 2}'),
        foreign(b'{"cls": "\xff"}'),
        foreign(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        foreign({}),
        foreign(node({"a": 3})),
        foreign(node({"a": ["torch.load", [4], 0, 16, 0]})),
        foreign(node({"a": ["torch.float32", [4], 56, 72, 0]})),
        foreign(node({"a": ["torch.float32", [4], -16, 0, 0]})),
        foreign(node({"a": ["torch.float32", [4.0], 0, 16, 0]})),
        foreign(node({"a": ["torch.float32", [2**40, 2**40], 0, 16, 0]})),
        foreign(node({"a": ["torch.float32", [0, 2**40, 2**40], 0, 0, 0]})),
        foreign(node({"a": ["torch.float32", [5], 0, 16, 0]})),
        foreign(node({"a": ["torch.float32", [4], 2, 18, 0]})),
        foreign(node({"a": ["torch.float32", [4], 0, 16, "0"]})),
        foreign(node({"a": LEAF, "b": ["torch.float32", [4], 8, 24, 0]})),
        foreign(node({"<NJT_VALUES>j": LEAF, "<NJT_OFFSETS>j": OFFSETS}), struct.pack("<16x3q24x", 0, 9, 2)),
        foreign(node({"<NJT_VALUES>j": LEAF, "<NJT_OFFSETS>j": OFFSETS}), struct.pack("<16x3q24x", 0, -1, 4)),
        foreign(node({"<NJT_VALUES>j": LEAF, "<NJT_OFFSETS>j": OFFSETS[:5]})),
        foreign(node({"a": LEAF}, cls="os.system")),
        foreign(node({"a": LEAF}, child=3)),
        foreign(node({"a": LEAF}, non_tensors={"x": 3})),
        foreign({**node({"a": LEAF}), "cls_metadata": {"batch_size": [7], "names": [None], "device": None}}),
        foreign({**node({}), "cls": "LazyStackedTensorDict", "cls_metadata": {"stack_dim": 9}, "0": node({"a": LEAF})}),
        foreign({**node({}), "cls": "NonTensorStack", "cls_metadata": {"stack_dim": 0}, "0": node({"a": LEAF})}),
    ],
)
def test_hostile_files(tmp_path: pathlib.Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(SaveError, match="x'"):
        from_consolidated(path)


def test_what_is_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        from_consolidated(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="regular file|directory"):
            from_consolidated(path)


@functools.cache
def sound() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        content().consolidate(f"{folder}/x")
        return pathlib.Path(folder, "x").read_bytes()


@given(st.data())
def test_mutated_files_give_a_container_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    changed = bytearray(sound())
    described = changed.index(consolidated.MAGIC)
    for _ in range(data.draw(st.integers(1, 4))):
        # The descriptions are changed more often than the tensors.
        position = data.draw(
            st.integers(0, len(changed) - 1)
            | st.integers(max(0, min(described - 3000, len(changed) - 1)), len(changed) - 1)
        )
        kind = data.draw(st.sampled_from(["set", "digit", "cut", "drop", "double"]))
        if kind == "set":
            changed[position] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            digits = [at for at in range(position, min(position + 200, len(changed))) if chr(changed[at]).isdigit()]
            if digits:
                changed[digits[0]] = data.draw(st.sampled_from(b"0123456789-"))
        elif kind == "cut":
            changed = changed[: max(position, 20)]
        elif kind == "drop":
            del changed[position : position + data.draw(st.integers(1, 9))]
        else:
            changed[position:position] = changed[position : position + data.draw(st.integers(1, 9))]
        if len(changed) < 20:
            break
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(bytes(changed))
    try:
        td = from_consolidated(path)
    except SaveError:
        return
    for leaf in td._leaves():
        # Every byte is read, which a tensor beyond the end of the file would not survive.
        pickle.dumps(leaf.values().clone() if leaf.is_nested else leaf.clone())


# --- the reference ----------------------------------------------------------------------------------------------------

READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
td = TensorDict.from_consolidated(sys.argv[1])
found = {}
for key, x in td.exclude("stack").items(True, True):
    if isinstance(x, torch.Tensor) and x.is_nested:
        found[json.dumps(key)] = [row.tolist() for row in x.unbind()]
    elif isinstance(x, torch.Tensor):
        found[json.dumps(key)] = [str(x.dtype), list(x.shape), x.contiguous().view(-1).view(torch.uint8).tolist()]
    else:
        found[json.dumps(key)] = x
stack = [list(member["u"].shape) for member in td["stack"].tensordicts]
print(json.dumps([list(td.batch_size), td.names, found, stack, td["value"], td.get("values").tolist()]))
"""

WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
td = TensorDict({name: torch.arange(6).view(2, 3).to(getattr(torch, name))
                 for name in ["bool", "uint16", "int64", "bfloat16", "complex64"]}, [2], names=["time"])
td["n"] = {"empty": torch.zeros(2, 0), "o/dd": {"x": torch.ones(2)}}
td["rows"] = torch.nested.nested_tensor([torch.arange(3.), torch.arange(2.)], layout=torch.jagged)
values, offsets, lengths = torch.arange(10.), torch.tensor([0, 4, 8]), torch.tensor([2, 3])
td["holes"] = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
td["value"] = NonTensorData({"k": [1, None]}, batch_size=[2])
td["values"] = NonTensorStack("a", "b")
td["stack"] = LazyStackedTensorDict(TensorDict(u=torch.ones(1)), TensorDict(u=torch.ones(2)), stack_dim_name="time")
td.lock_().consolidate(sys.argv[1])
"""


@pytest.mark.reference
def test_the_reference_reads_ours(behaviour: Reference, tmp_path: pathlib.Path) -> None:
    td = content()
    td.consolidate(tmp_path / "x")
    batch_size, names, found, stack, value, values = json.loads(behaviour.run(READ, tmp_path / "x"))
    assert (batch_size, names, stack, value, values) == ([2], ["time"], [[1], [2]], {"k": [1, [2.0, None]]}, ["a", "b"])
    for name in DTYPES:
        raw = td[name].contiguous().view(-1).view(torch.uint8).tolist()
        dtype = "torch.uint8" if name == "float8_e4m3fn" else f"torch.{name}"
        assert found[f'"{name}"'] == [dtype, [2, 3], raw]
    assert found['"rows"'] == [row.tolist() for row in td["rows"].unbind()]
    assert found['["n", "deep", "turned"]'][1] == [2, 3]
    assert found['["item", "image"]'][1] == [2, 2]


@pytest.mark.reference
def test_ours_reads_the_reference(behaviour: Reference, tmp_path: pathlib.Path) -> None:
    behaviour.run(WRITE, tmp_path / "x")
    td = from_consolidated(tmp_path / "x")
    assert (td.batch_size, td.names, td.is_locked, td.is_consolidated()) == ((2,), ["time"], True, False)
    for name in ["bool", "uint16", "int64", "bfloat16", "complex64"]:
        assert plain(td[name]) == plain(torch.arange(6).view(2, 3).to(getattr(torch, name)))
    assert (td["n", "empty"].shape, td["n", "o/dd", "x"].tolist()) == ((2, 0), [1, 1])
    assert [row.tolist() for row in td["rows"].unbind()] == [[0, 1, 2], [0, 1]]
    assert [row.tolist() for row in td["holes"].unbind()] == [[0, 1], [4, 5, 6]]
    assert (td["value"], td.get("values").tolist()) == ({"k": [1, None]}, ["a", "b"])
    assert isinstance(td.get("stack"), LazyStackedTensorDict)
    assert [member["u"].shape for member in td["stack"].tensordicts] == [(1,), (2,)]
    assert td.get("stack").names == ["time"]


def test_torch_save() -> None:
    td = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(2, dtype=torch.int8)}, "s": "x"}).consolidate()
    for weights_only in (False, True):
        buffer = io.BytesIO()
        torch.save(td, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=weights_only)
        assert again.is_consolidated()
        assert again.is_locked
        assert (again["a"].tolist(), again["n", "b"].tolist(), again["s"]) == ([0, 1, 2], [1, 1], "x")
    ragged = TensorDict(a=torch.ones(2), rows=jagged(), batch_size=[2]).consolidate()
    buffer = io.BytesIO()
    torch.save(ragged, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)["rows"].values().tolist() == jagged().values().tolist()


@pytest.mark.parametrize("uneven", [False, True])
def test_a_lazy_stack_over_files_is_read(tmp_path: pathlib.Path, uneven: bool) -> None:
    pytest.importorskip("h5py")
    members = [TensorDict(a=torch.full((1 + at * uneven,), float(at)), n={"b": torch.tensor(at)}) for at in range(2)]
    files = [member.to_h5(tmp_path / f"{at}.h5") for at, member in enumerate(members)]
    found = lazy_stack(files).consolidate(inplace=False)
    for file in files:
        file.close()
    assert found.is_consolidated()
    for ours, theirs in zip(found.unbind(0), members, strict=True):
        assert torch.equal(ours["a"], theirs["a"]) and torch.equal(ours["n", "b"], theirs["n", "b"])
    with pytest.raises(UnsupportedEntryError, match="cannot be consolidated in place"):
        lazy_stack([TensorDict.from_h5(tmp_path / "0.h5")]).consolidate(inplace=True)
