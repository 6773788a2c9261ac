"""Devices and dtypes."""

from __future__ import annotations

import copy
import pathlib
import pickle
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from contract.kinds import Kind
from contract.model import Plain, assert_leaf, assert_matches, leaves, mapped, nodes
from tensordict import MemoryMappedTensor, TensorDict, assert_close, is_inexact, lazy_stack

DTYPES = {
    "double": torch.float64, "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "bool": torch.bool, "float16": torch.float16, "float32": torch.float32,
    "float64": torch.float64, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
    "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items(), ids=DTYPES.keys())
def test_cast_methods(td: Any, plain: Plain, kind: Kind, name: str, dtype: torch.dtype) -> None:
    expected = mapped(lambda leaf: leaf.to(dtype), plain)
    for result in (getattr(td, name)(), td.to(dtype), td.type(dtype)):
        assert_matches(result, expected, kind.batch_size, kind.extra)
        assert result.names == td.names and result.dtype == dtype
    assert_matches(td, plain, kind.batch_size, kind.extra)


FILTERED: dict[str, Any] = {
    "to": lambda td, choose: td.to(torch.float16, cast_filter=choose),
    "to a device": lambda td, choose: td.to("cpu", torch.float16, cast_filter=choose),
    "to a tensor": lambda td, choose: td.to(torch.zeros(1, dtype=torch.float16), cast_filter=choose),
    "half": lambda td, choose: td.half(cast_filter=choose),
    "type": lambda td, choose: td.type(torch.float16, cast_filter=choose),
    "type by name": lambda td, choose: td.type("torch.HalfTensor", cast_filter=choose),
    "cpu": lambda td, choose: td.cpu(dtype=torch.float16, cast_filter=choose),
}


@pytest.mark.parametrize("form", FILTERED)
def test_a_filter_selects_the_leaves_to_cast(td: Any, plain: Plain, kind: Kind, form: str) -> None:
    """The filter gets the key as a tuple and the leaf, in a lazy stack for each member."""
    asked: list[tuple[str, ...]] = []

    def choose(key: tuple[str, ...], leaf: torch.Tensor) -> bool:
        asked.append(key)
        assert leaf.dtype == leaves(plain)[key].dtype
        return is_inexact(key, leaf) and key != ("z",)

    result = FILTERED[form](td, choose)
    assert {key: asked.count(key) for key in asked} == {path: kind.pieces(path) for path in leaves(plain)}
    for path, leaf in leaves(plain).items():
        dtype = torch.float16 if leaf.is_floating_point() and path != ("z",) else leaf.dtype
        assert_leaf(result[path], leaf.to(dtype), path)
    assert result.batch_size == td.batch_size and result.names == td.names
    assert kind.is_module or result.is_locked == td.is_locked
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_a_filter_is_asked_only_about_casts(td: Any, plain: Plain, kind: Kind) -> None:
    def fail(key: object, leaf: object) -> bool:
        raise AssertionError

    for result in (td.to("cpu", cast_filter=fail), td.to(td.attrs(), cast_filter=fail)):
        assert_matches(result, plain, kind.batch_size, kind.extra)
    assert td.to("meta", torch.float16, cast_filter=is_inexact)["a"].dtype is torch.int64
    with pytest.raises(ZeroDivisionError):
        td.half(cast_filter=lambda key, leaf: 1 // 0)
    with pytest.raises(TypeError, match="cast_filter"):
        td.half(cast_filter="a")
    with pytest.raises(RuntimeError, match="entry 'z'"):
        td.qint8(cast_filter=lambda key, leaf: key == ("z",))


def test_dtype(td: Any) -> None:
    assert td.dtype is None
    assert td.select("a").dtype == torch.int64
    assert td.float().is_floating_point() and not td.int().is_floating_point()


TO: dict[str, tuple[dict[str, Any] | tuple[Any, ...], torch.dtype | None, str | None]] = {
    "device string": (("cpu",), None, "cpu"),
    "device": ((torch.device("cpu"),), None, "cpu"),
    "device keyword": ({"device": "cpu"}, None, "cpu"),
    "non_blocking": ({"device": "cpu", "non_blocking": True}, None, "cpu"),
    "dtype": ((torch.float64,), torch.float64, None),
    "dtype keyword": ({"dtype": torch.float64}, torch.float64, None),
    "dtype, non_blocking": ({"dtype": torch.float64, "non_blocking": True}, torch.float64, None),
    "device, dtype": (("cpu", torch.float64), torch.float64, "cpu"),
    "device, dtype keywords": ({"device": "cpu", "dtype": torch.float64}, torch.float64, "cpu"),
    "other": ((torch.zeros(1, dtype=torch.float64),), torch.float64, "cpu"),
}


@pytest.mark.parametrize("form", TO)
def test_to(td: Any, plain: Plain, kind: Kind, form: str) -> None:
    arguments, dtype, device = TO[form]
    result = td.to(**arguments) if isinstance(arguments, dict) else td.to(*arguments)
    expected = plain if dtype is None else mapped(lambda leaf: leaf.to(dtype), plain)
    assert_matches(result, expected, kind.batch_size, kind.extra)
    assert result.device == (td.device if device is None else torch.device(device))
    for path in nodes(plain):
        assert result[path].device == result.device
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_to_a_container(td: Any, plain: Plain, kind: Kind) -> None:
    """The other container's device, and its dtype where all its entries have the same."""
    other = TensorDict({"x": torch.zeros(1, dtype=torch.float64)}, device="cpu")
    result = td.to(other)
    assert_matches(result, mapped(lambda leaf: leaf.double(), plain), kind.batch_size, kind.extra)
    assert result.device == torch.device("cpu")
    other["y"] = torch.zeros(1, dtype=torch.int32)
    assert_matches(td.to(other), plain, kind.batch_size, kind.extra)


def test_to_without_arguments(td: Any, plain: Plain, kind: Kind) -> None:
    assert_matches(td.to(), plain, kind.batch_size, kind.extra)


def test_to_an_unknown_device(td: Any) -> None:
    with pytest.raises(RuntimeError):
        td.to("nowhere")


def test_to_meta(td: Any, plain: Plain, kind: Kind) -> None:
    result = td.to("meta")
    assert result.device == torch.device("meta") and result.is_meta
    for path, leaf in leaves(plain).items():
        assert result[path].is_meta and result[path].shape == leaf.shape and result[path].dtype == leaf.dtype
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_cpu(td: Any, plain: Plain, kind: Kind) -> None:
    result = td.cpu()
    assert_matches(result, plain, kind.batch_size, kind.extra)
    assert result.device == torch.device("cpu") and result.is_cpu and not result.is_cuda


CPU, CPU_1, CPU_2 = torch.device("cpu"), torch.device("cpu:1"), torch.device("cpu:2")


def test_the_index_of_the_cpu_is_kept(td: Any, plain: Plain, kind: Kind) -> None:
    """A container keeps the index of a CPU, which the tensors of torch do not have."""
    moved = td.to("cpu:1")
    assert_matches(moved, plain, kind.batch_size, kind.extra)
    assert td.device != CPU_1 and moved.device == CPU_1 and moved.is_cpu
    for again in (moved.to("cpu:1"), moved.to(CPU_1), moved.to(device="cpu:1")):
        assert again.device == CPU_1 and (again is moved or kind.is_module)
    assert moved.to("cpu:2").device == CPU_2 and moved.cpu().device == moved.to("cpu").device == CPU
    same = [moved, moved.clone(), moved.to(torch.float64), moved.to("cpu:1", torch.float64)]
    same += [copy.copy(moved), copy.deepcopy(moved), moved.to_tensordict(), moved.apply(torch.clone), moved + 1]
    if kind.batch_size:
        same += [moved[:1], moved[[0, 1]]]
    for result in same:
        assert result.device == CPU_1
        for path in nodes(plain):
            assert result[path].device == CPU_1
        for path in leaves(plain):
            assert result[path].device == CPU
    assert pickle.loads(pickle.dumps(moved)).device == CPU_1


def test_tensors_are_not_copied_for_the_index_of_the_cpu(td: Any, kind: Kind) -> None:
    def memory(container: Any) -> list[int]:
        return [leaf.untyped_storage().data_ptr() for leaf in tree_leaves(container) if type(leaf) is torch.Tensor]

    td, one = td.to("cpu"), td.to("cpu:1")
    if kind.reads_memory:
        assert memory(one) == memory(one.to("cpu:2")) == memory(one.cpu()) == memory(td)


def test_writes_into_a_container_with_an_index_of_the_cpu(td: Any, kind: Kind) -> None:
    moved = td.to("cpu:1")
    if not kind.any_names:
        return
    moved.unlock_()
    new, node = torch.ones(kind.batch_size), TensorDict({"x": torch.ones(kind.batch_size)}, kind.batch_size, CPU_2)
    moved["new"] = new
    moved.set("more", new)
    moved.update({"others": new, "node": node})
    assert moved["new"].device == moved["more"].device == moved["others"].device == CPU
    assert moved["node"].device == CPU_1 and moved["node", "x"].device == CPU and node.device == CPU_2
    assert moved.device == CPU_1
    if kind.keeps_identity and not kind.stack_dims:
        assert moved["new"] is moved["more"] is moved["others"] is new


def test_stacks_of_containers_with_other_indices_of_the_cpu(td: Any) -> None:
    one, two = td.to("cpu:1"), td.to("cpu:2")
    for stack in (torch.stack, TensorDict.maybe_dense_stack, lazy_stack):
        assert stack([one, one]).device == CPU_1
    # As the reference: the index of the first in a stack, none in a concatenation.
    assert torch.stack([one, two]).device == CPU_1
    if td.ndim:
        assert torch.cat([one, one]).device == CPU_1
        assert torch.cat([one, two]).device is None
    assert (one == two).all() and (one == two).device == (one + two).device == CPU_1
    assert_close(one, two)


def test_saves_of_a_container_with_an_index_of_the_cpu(td: Any, plain: Plain, tmp_path: pathlib.Path) -> None:
    """As the reference: a file of consolidated entries has the index, a folder of memory-mapped ones has not."""
    moved = td.to("cpu:1")
    moved.consolidate(filename=tmp_path / "one")
    loaded = TensorDict.from_consolidated(tmp_path / "one")
    assert loaded.device == CPU_1 and all(loaded[path].device == CPU_1 for path in nodes(plain))
    assert moved.consolidate(inplace=False).device == CPU_1
    moved.memmap(tmp_path / "many", copy_existing=True)
    assert TensorDict.load_memmap(tmp_path / "many").device == CPU
    loaded = TensorDict.load_memmap(tmp_path / "many", device="cpu:1")
    assert loaded.device == CPU_1 and all(loaded[path].device == CPU_1 for path in nodes(plain))
    # Mapped tensors stay mapped.
    assert all(isinstance(leaf, MemoryMappedTensor) for leaf in tree_leaves(loaded))


def test_device_property_is_read_only(td: Any) -> None:
    with pytest.raises((RuntimeError, AttributeError)):
        td.device = "cpu"


def test_clear_device(td: Any, plain: Plain, kind: Kind) -> None:
    moved = td.to("cpu")
    copy = moved.clone()
    assert copy.clear_device_() is copy
    assert copy.device is None
    for path in nodes(plain):
        assert copy[path].device is None
    assert_matches(copy, plain, kind.batch_size, kind.extra)


def test_auto_device(td: Any, kind: Kind) -> None:
    copy = td.clone().clear_device_()
    assert copy.auto_device_() is copy
    assert copy.device == torch.device("cpu")
    mixed = TensorDict({"a": torch.zeros(1), "b": torch.zeros(1, device="meta")}).auto_device_()
    assert mixed.device is None


def test_writes_move_to_the_device() -> None:
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3], device="meta")
    td["c"] = torch.zeros(3)
    td["n", "d"] = torch.zeros(3)
    td["m"] = TensorDict({"e": torch.zeros(3)}, [3])
    td.update({"f": torch.zeros(3), "o": {"g": torch.zeros(3)}})
    assert {leaf.device.type for leaf in td.values(True, True)} == {"meta"}
    assert td["m"].device == td["o"].device == torch.device("meta")


def test_a_node_given_to_a_parent_with_a_device_is_left_alone() -> None:
    node = TensorDict({"x": torch.zeros(2)})
    parent = TensorDict({"n": node}, device="meta")
    assert parent["n", "x"].is_meta and not node["x"].is_meta and node.device is None


def test_no_device_by_default() -> None:
    td = TensorDict({"a": torch.zeros(1), "b": torch.zeros(1, device="meta")})
    assert td.device is None and not td.is_cpu and not td.is_cuda and not td.is_meta


@pytest.mark.gpu
def test_cuda(td: Any, plain: Plain, kind: Kind) -> None:
    moved = td.to("cuda")
    assert moved.is_cuda and moved.device.type == "cuda"
    assert all(leaf.is_cuda for leaf in moved.values(True, True))
    assert_matches(moved.cpu(), plain, kind.batch_size, kind.extra)
    assert_matches(td.cuda().to("cpu", non_blocking=True), plain, kind.batch_size, kind.extra)
    moved.unlock_()["new"] = torch.ones(kind.batch_size)
    assert moved["new"].is_cuda
    # A lazy stack stacks its members' leaves when they are read, so its members have the pinned ones.
    pinned = [leaf for leaf in tree_leaves(td.clone().clear_device_().pin_memory()) if isinstance(leaf, torch.Tensor)]
    assert pinned and all(leaf.is_pinned() for leaf in pinned)


def test_detach_in_place(td: Any, plain: Plain, kind: Kind) -> None:
    # Leaves that are views have nothing to be detached from.
    assert td.detach_() is td and not td.requires_grad
    assert_matches(td, plain, kind.batch_size, kind.extra)
