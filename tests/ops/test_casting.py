"""`to`, the dtype casts, the device of a container, and what torch knows of the leaves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    is_floating,
    is_inexact,
    lazy_stack,
)


def make(**kwargs: Any) -> TensorDict:
    return TensorDict({"a": torch.rand(3, 4), "b": {"c": torch.arange(3)}}, [3], **kwargs)


DTYPES = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
    "double": torch.float64,
    "float": torch.float32,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "half": torch.float16,
    "int": torch.int32,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
}


@pytest.mark.parametrize("name", DTYPES)
def test_every_cast_reaches_every_leaf_and_agrees_with_torch(name: str) -> None:
    td = make(names=["x"])
    cast = getattr(td, name)()
    assert cast is not td
    assert cast.batch_size == td.batch_size
    assert cast.names == cast["b"].names == ["x"]
    for key, value in cast.items(True, True):
        assert value.dtype == DTYPES[name]
        assert torch.equal(value, td[key].to(DTYPES[name]))


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float8_e4m3fn])
def test_to_dtype_gives_a_new_container_even_when_nothing_changes(dtype: torch.dtype) -> None:
    td = TensorDict(a=torch.ones(3).to(dtype))
    cast = td.to(dtype)
    assert cast is not td
    assert cast["a"] is td["a"]
    assert cast.device is None
    assert cast.dtype == td.type(dtype).dtype == dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # which torch says once in a process
def test_complex32() -> None:
    assert make().complex32().dtype == torch.complex32


@pytest.mark.parametrize("name", ["qint8", "qint32", "quint8", "quint4x2"])
def test_casts_that_torch_lacks_name_the_entry(name: str) -> None:
    with pytest.raises(RuntimeError, match="entry 'a'"):
        getattr(make(), name)()


def test_type_takes_names_of_tensor_types() -> None:
    assert make().type("torch.DoubleTensor").dtype == torch.float64
    assert make().lock_().type(torch.FloatTensor).is_locked


def test_filters_of_casts_meet_every_kind_of_entry() -> None:
    asked: list[tuple[tuple[str, ...], type]] = []

    def choose(key: tuple[str, ...], leaf: object) -> bool:
        asked.append((key, type(leaf)))
        return is_inexact(leaf)

    td = TensorDict(
        a=torch.ones(2), text="t", u=UnbatchedTensor(torch.ones(3)), p=torch.nn.Parameter(torch.ones(2)), empty={}
    )
    half = td.half(cast_filter=choose)
    plain = torch.Tensor
    assert asked == [(("a",), plain), (("u",), UnbatchedTensor), (("p",), torch.nn.Parameter)]
    assert half["text"] == "t" and list(half.keys()) == list(td.keys())
    assert type(half.get("u")) is UnbatchedTensor and half["a"].dtype == half.get("u").dtype == torch.float16
    # A stack without members keeps its keys, and casts them too.
    stack = lazy_stack([TensorDict(a=torch.ones(1), b=torch.ones(1, dtype=torch.int32))] * 2)
    none = stack[:0].double(cast_filter=is_inexact)
    assert none["a"].dtype == torch.float64 and none["b"].dtype == torch.int32
    nodes = TensorDict({"n": {"s": stack}}).double(cast_filter=lambda key, leaf: key == ("n", "s", "a"))
    assert type(nodes["n", "s"]) is LazyStackedTensorDict and nodes["n", "s"][1]["a"].dtype == torch.float64
    assert nodes["n", "s", "b"].dtype == torch.int32


def test_filters_of_casts_and_other_options_of_to() -> None:
    td = make()
    choose = is_floating
    assert td.to(torch.float16, cast_filter=choose, inplace=True) is td
    assert td["a"].dtype == torch.float16 and td["b", "c"].dtype == torch.int64
    copied = td.to(torch.float64, cast_filter=choose, copy=True, batch_size=[])
    assert copied["b", "c"] is not td["b", "c"] and not copied.batch_size and copied["a"].dtype == torch.float64
    with td.to(torch.float64, cast_filter=choose) as double:
        double["a"] += 1
        assert double["b", "c"] is td["b", "c"]
    assert td["a"].dtype == torch.float16 and td["a"].min() >= 1
    assert td.to(torch.float64, cast_filter=lambda key, leaf: False)["a"] is td["a"]


def test_filters_of_casts_get_the_parameters() -> None:
    params = TensorDictParams(TensorDict({"n": {"w": torch.ones(2), "b": torch.zeros(2)}, "count": torch.tensor(1)}))
    is_parameter = lambda key, leaf: isinstance(leaf, torch.nn.Parameter) and key[-1] == "w"  # noqa: E731
    half = params.to(torch.float16, cast_filter=is_parameter)
    assert [leaf.dtype for leaf in half.values(True, True)] == [torch.float16, torch.float32, torch.int64]
    assert half["n", "b"] is params["n", "b"] and isinstance(half["n", "w"], torch.nn.Parameter)
    assert params.half(cast_filter=is_parameter)["n", "w"].dtype == torch.float16


def test_to_device_sets_it_at_every_level_and_shares_leaves() -> None:
    td = make(names=["x"])
    moved = td.to("cpu")
    assert moved is not td
    assert td.device is td["b"].device is None
    assert moved.device == moved["b"].device == torch.device("cpu")
    assert moved["a"] is td["a"]
    assert moved.names == ["x"]
    assert moved.to("cpu") is moved
    assert moved.to("cpu:0")["a"] is moved["a"] and moved.to("cpu:0").device == torch.device("cpu:0")
    assert moved.to(torch.device("cpu")) is moved
    assert moved.cpu() is moved
    assert moved.to(device="cpu", non_blocking=True) is moved


def test_the_index_of_the_cpu_concerns_no_tensor() -> None:
    one, leaf, array = torch.device("cpu:1"), torch.zeros(2), np.zeros(2)
    td = TensorDict({"a": leaf, "n": {"b": leaf}, "text": "t", "u": UnbatchedTensor(leaf)}, [2], device="cpu:1")
    assert td.device == td["n"].device == td.get("text").device == one and td["a"] is td["n", "b"] is leaf
    assert td.get("u").data.data_ptr() == leaf.data_ptr()
    td["array"] = array
    array += 1
    assert td["array"].tolist() == [1.0, 1.0]
    assert tree_map(torch.clone, td).device == one
    plain = td.select("a", "n")
    assert plain.apply(lambda x: x, device="cpu:2")["a"] is leaf and plain.to(plain.attrs()).device == one
    assert NonTensorData("x").to("cpu:1").to("cpu:2").device == torch.device("cpu:2")
    plain.load_state_dict(plain.to("cpu").state_dict())
    assert plain.device == one
    assert TensorDict({}, device="meta:1").device == torch.device("meta:1")


def test_the_index_of_the_cpu_under_compile() -> None:
    def run(td: TensorDict) -> tuple[TensorDict, ...]:
        td["b"] = td["a"] + 1
        return td + 1, td.to("cpu:2"), td.cpu(), TensorDict({"a": td["a"]}, device="cpu:3"), torch.stack([td, td.cpu()])

    results = torch.compile(run, backend="eager", fullgraph=True)(TensorDict({"a": torch.zeros(2)}, [2], "cpu:1"))
    assert [str(result.device) for result in results] == ["cpu:1", "cpu:2", "cpu", "cpu:3", "cpu:1"]


def test_to_without_anything_to_do_is_the_same_container() -> None:
    td = make()
    assert td.to() is td
    assert td.to(None) is td
    assert td.to(non_blocking=True) is td


def test_forms_of_to() -> None:
    td = make()
    for cast in (
        td.to("cpu", torch.float64),
        td.to("cpu", torch.float64, True),
        td.to(device="cpu", dtype=torch.float64),
        td.to(torch.zeros(1, dtype=torch.float64)),
        td.to(other=TensorDict(x=torch.zeros(1, dtype=torch.float64), device="cpu")),
        td.to(TensorDict(x=torch.zeros(1, dtype=torch.float64), device="cpu")),
    ):
        assert cast.dtype == torch.float64
        assert cast.device == cast["b"].device == torch.device("cpu")
    assert td.to(None, torch.float64).device is None
    # A container of mixed dtypes asks for its device only.
    assert td.to(make(device="cpu"))["b", "c"].dtype == torch.int64


def test_meta() -> None:
    meta = make().to("meta")
    assert meta.is_meta
    assert not meta.is_cpu
    assert meta["b", "c"].device.type == meta["b"].device.type == "meta"


def test_copy() -> None:
    td = make(device="cpu")
    for copied in (td.to("cpu", copy=True), td.to(torch.float32, False, True), td.to(copy=True)):
        assert copied is not td
        assert copied["a"] is not td["a"]
        assert torch.equal(copied["a"], td["a"])


def test_memory_format_is_for_leaves_with_its_number_of_dims() -> None:
    td = TensorDict(image=torch.zeros(2, 3, 4, 5), flat=torch.zeros(2, 3))
    formatted = td.to(memory_format=torch.channels_last)
    assert formatted["image"].is_contiguous(memory_format=torch.channels_last)
    assert formatted["flat"] is td["flat"]


def test_batch_size() -> None:
    td = make()
    cast = td.to(torch.float64, batch_size=[])
    assert cast.batch_size == torch.Size([])
    assert td.batch_size == torch.Size([3])
    assert td.to(batch_size=[]) is td
    assert td.batch_size == torch.Size([])
    with pytest.raises(RuntimeError, match="'a'"):
        td.to(batch_size=[5])


def test_inplace() -> None:
    td = make()
    child = td["b"]
    assert td.to("meta", torch.float16, inplace=True) is td
    assert td.device == child.device == torch.device("meta")
    assert td["a"].dtype == child["c"].dtype == torch.float16
    locked = make().lock_()
    before = locked["a"]
    with pytest.raises(RuntimeError, match="locked"):
        locked.to(torch.float64, inplace=True)
    assert locked["a"] is before


def test_bad_arguments() -> None:
    td = make()
    with pytest.raises(TypeError, match="unknown keywords \\['typo'\\]"):
        td.to("cpu", typo=1)
    with pytest.raises(TypeError, match="by position and by keyword"):
        td.to("cpu", device="cpu")
    with pytest.raises(TypeError, match="at most 3"):
        td.to(torch.float32, False, False, True)
    with pytest.raises(TypeError, match="a device is"):
        td.to(object())
    with pytest.raises(TypeError, match=r"needs a torch\.dtype"):
        td.to("cpu", "float32")
    with pytest.raises(RuntimeError, match="device"):
        td.to("nonsense")


def test_the_lock_is_kept() -> None:
    td = make().lock_()
    for cast in (td.to("cpu"), td.to(torch.float64), td.half(), td.cpu(), td.detach(), td.data):
        assert cast.is_locked
        assert cast["b"].is_locked
        with pytest.raises(RuntimeError, match="locked"):
            cast["b"].unlock_()
    assert not make().half().is_locked
    assert not td.contiguous().is_locked


def test_as_a_context_manager() -> None:
    td = make(device="cpu")
    a, c = td["a"], td["b", "c"]
    expected = a + 1
    with td.to(torch.float64) as double:
        double["a"] += 1
        double["new"] = torch.zeros(3, dtype=torch.float64)
    # Written leaves are written in place, in their own dtype; the others are not touched.
    assert td["a"] is a
    assert torch.allclose(a, expected)
    assert td["b", "c"] is c
    assert td["new"].dtype == torch.float64
    # A lossy cast keeps the digits of unmodified entries.
    exact = a.clone()
    with td.to(torch.int32) as whole:
        whole["b", "c"] += 1
    assert torch.equal(td["a"], exact)
    assert td["b", "c"].tolist() == [1, 2, 3]


def test_as_a_context_manager_with_gradients() -> None:
    td = TensorDict(a=torch.ones(2, requires_grad=True))
    with td.to(torch.float64) as double:
        double["a"] = double["a"] * 3
    assert td["a"].dtype == torch.float32
    (gradient,) = torch.autograd.grad(td["a"].sum(), [td["a"]])
    assert gradient.tolist() == [1, 1]
    assert td["a"].grad_fn is not None


def test_a_cast_does_not_keep_its_source_alive() -> None:
    td = make()
    alive = weakref.ref(td)
    cast = td.to(torch.float64)
    del td
    gc.collect()
    assert alive() is None
    assert cast.dtype == torch.float64


def test_a_cast_of_a_memory_mapped_container_is_in_memory() -> None:
    td = make().memmap_()
    cast = td.double()
    assert type(cast["a"]) is torch.Tensor
    assert not cast.is_memmap()
    assert td.to("cpu") is td
    assert isinstance(td.float()["a"], MemoryMappedTensor)


def test_device_property() -> None:
    td = make()
    with pytest.raises(RuntimeError, match=r"td\.to\(device\)"):
        td.device = "cpu"
    assert td.auto_device_() is td
    assert td.is_cpu
    assert td["b"].is_cpu
    assert not td.is_cuda
    assert td.lock_().clear_device_() is td
    assert td.device is td["b"].device is None
    assert not td.is_cpu
    mixed = TensorDict(a=torch.zeros(1), b=torch.zeros(1, device="meta"))
    assert mixed.auto_device_().device is None
    assert TensorDict().auto_device_().device is None


def test_dtype() -> None:
    assert make().dtype is None
    assert make().float().dtype == torch.float32
    assert TensorDict().dtype is None
    assert make().float().is_floating_point()
    assert not make().is_floating_point()


def test_gradients() -> None:
    td = make().float()
    assert not td.requires_grad
    assert td.requires_grad_() is td
    assert td.requires_grad
    assert td.grad is None
    td["a"].sum().backward()
    grad = td.grad
    assert list(grad.keys(True, True)) == ["a"]
    assert torch.equal(grad["a"], torch.ones(3, 4))
    # A computed tensor has an empty `.grad`; reading it does not warn.
    assert (td.apply(lambda x: x * 2)).grad is None
    detached = td.detach()
    assert not detached.requires_grad
    assert detached["a"].data_ptr() == td["a"].data_ptr()
    assert not td.data.requires_grad
    assert td.requires_grad
    assert td.detach_() is td
    assert not td.requires_grad


def test_requires_grad_changes_nothing_when_a_leaf_cannot() -> None:
    td = make()
    with pytest.raises(RuntimeError, match=r"\('b', 'c'\).*int64"):
        td.requires_grad_()
    assert not td["a"].requires_grad
    assert td.requires_grad_(False) is td


def test_lazy_stacks_are_not_contiguous_wherever_they_are() -> None:
    stack = lazy_stack([TensorDict(x=torch.zeros(3)), TensorDict(x=torch.ones(3))])
    td = TensorDict({"a": torch.zeros(2), "n": {"stack": stack}}, [2], names=["time"])
    assert not td.is_contiguous() and td.exclude(("n", "stack")).is_contiguous()
    assert not TensorDict(s=["x", "y"], batch_size=[2]).is_contiguous() and TensorDict(s="x").is_contiguous()
    dense = td.contiguous()
    assert type(dense["n", "stack"]) is TensorDict and dense.is_contiguous() and dense.names == ["time"]
    assert dense["n", "stack", "x"].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_ragged_leaves_are_plain_tensors_already() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict({"r": ragged, "p": torch.nn.Parameter(torch.ones(2))}, [2])
    plain = lazy_stack([td, td]).as_tensor()[0]
    assert plain["r"] is ragged and type(plain["p"]) is torch.Tensor


def test_contiguous() -> None:
    td = TensorDict({"a": torch.rand(3, 4).T, "b": {"c": torch.zeros(4)}}, [4])
    assert not td.is_contiguous()
    contiguous = td.contiguous()
    assert contiguous.is_contiguous()
    assert contiguous["b", "c"] is td["b", "c"]
    assert torch.equal(contiguous["a"], td["a"])
    child = td["b"]
    assert td.contiguous(inplace=True) is td
    assert td.is_contiguous()
    assert td["b"] is child
    with pytest.raises(RuntimeError, match="locked"):
        TensorDict(a=torch.zeros(3, 4).T).lock_().contiguous(inplace=True)
    # Nothing has to be replaced here.
    TensorDict(a=torch.zeros(3)).lock_().contiguous(inplace=True)


def test_canonical_strides() -> None:
    odd = torch.zeros(1, 4).T
    assert odd.is_contiguous()
    assert odd.stride() == (1, 4)
    td = TensorDict(a=odd, b=torch.zeros(2, 3))
    assert td.contiguous()["a"].stride() == (1, 4)
    assert td.contiguous(canonical=True)["a"].stride() == (1, 1)
    assert td.contiguous(canonical=True)["b"] is td["b"]


def test_addresses_and_sizes() -> None:
    shared = torch.zeros(8)
    td = TensorDict(a=shared, b={"c": shared[2:]}, d=shared)
    addresses = td.data_ptr()
    assert addresses["a"].item() == shared.data_ptr()
    assert addresses["b", "c"].item() == shared.data_ptr() + 8
    assert td.data_ptr(storage=True)["b", "c"].item() == shared.data_ptr()
    assert td.param_count() == 22
    assert td.bytes() == 88
    assert td.param_count(count_duplicates=False) == 14
    assert td.bytes(count_duplicates=False) == 56
    trained = TensorDict(a=torch.ones(2, requires_grad=True))
    trained["a"].sum().backward()
    assert trained.bytes() == 16


def test_is_shared_is_about_the_container() -> None:
    assert not TensorDict(a=torch.zeros(2).share_memory_()).is_shared()
    assert not make(device="cpu").is_shared()


def test_pinning_without_an_accelerator_is_torchs_error() -> None:
    if torch.accelerator.is_available():
        assert make().pin_memory()["a"].is_pinned()
    else:
        with pytest.raises(RuntimeError):
            make().pin_memory()


@pytest.mark.gpu
def test_to_cuda_and_back() -> None:
    td = TensorDict({f"k{i}": torch.rand(1000, 100) for i in range(20)} | {"b": {"c": torch.arange(1000)}}, [1000])
    moved = td.to("cuda")
    assert moved.device == moved["b"].device == torch.device("cuda", torch.cuda.current_device())
    assert moved.is_cuda
    assert moved.is_shared()
    assert moved.to("cuda") is moved
    assert moved.cuda() is moved
    back = moved.cpu()
    for key, value in back.items(True, True):
        assert torch.equal(value, td[key])
    half = td.to("cuda", torch.float16)
    assert half.dtype == torch.float16
    # With non_blocking the caller waits.
    queued = moved.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(queued["k3"], td["k3"])


@pytest.mark.gpu
def test_copies_are_queued_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    td = TensorDict({f"k{i}": torch.rand(100) for i in range(20)})
    waits = []
    real = torch.cuda.Stream.synchronize
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda stream: (waits.append(stream), real(stream)))
    moved = td.to("cuda")
    assert len(waits) == 1
    moved.to("cpu")
    assert len(waits) == 2
    td.to("cuda", non_blocking=True)
    assert len(waits) == 2


@pytest.mark.gpu
def test_pinned_memory() -> None:
    td = make()
    pinned = td.pin_memory(num_threads=2)
    assert pinned["a"].is_pinned()
    assert pinned["b", "c"].is_pinned()
    assert not td["a"].is_pinned()
    assert td.pin_memory_() is td
    assert td["a"].is_pinned()
    moved = make().to("cuda", non_blocking_pin=True)
    assert moved.is_cuda
    assert moved.record_stream(torch.cuda.Stream()) is moved


@pytest.mark.gpu
def test_cuda_as_a_context_manager() -> None:
    td = make(device="cpu")
    a = td["a"]
    expected = a * 2
    with td.to("cuda") as moved:
        moved["a"] *= 2
        moved["new"] = torch.ones(3)
    assert td["a"] is a
    assert torch.equal(a, expected)
    assert td["new"].device.type == "cpu"


def test_one_wait_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device takes the path of an accelerator, on which there is nothing to wait for."""
    waits: list[list[torch.device]] = []
    monkeypatch.setattr("tensordict.ops.casting.wait_for", lambda devices: waits.append(list(devices)))
    td = make()
    td.to("meta")
    td.to("meta", torch.float16)
    assert waits == [[torch.device("meta")]] * 2
    waits.clear()
    td.to("meta", non_blocking=True)
    assert waits == []
    # Nothing came from another device, so there is nobody to wait for.
    td.to("cpu", torch.float64)
    assert waits == []


@pytest.mark.seconds
@pytest.mark.parametrize(
    "fn",
    [
        lambda td: td.to(torch.float64),
        lambda td: td.to("cpu"),
        lambda td: td.half(),
        lambda td: td.detach().contiguous(),
        lambda td: (td.clone() == td) & (td < 1),
    ],
)
def test_compiles_without_a_graph_break(fn: Any) -> None:
    td = make()
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="eager", fullgraph=True)(td)
    expected = fn(td)
    assert compiled.device == expected.device
    for key, value in expected.items(True, True):
        assert torch.equal(compiled[key], value)
        assert compiled[key].dtype == value.dtype


@pytest.mark.parametrize(("number", "dtype"), [(float, torch.float64), (int, torch.int64), (bool, torch.bool)])
def test_types_of_numbers_are_dtypes_as_for_tensors(number: type, dtype: torch.dtype) -> None:
    td = make()
    for cast in (td.to(number), td.to(dtype=number), td.to("cpu", number)):
        assert cast["a"].dtype is cast["b", "c"].dtype is torch.zeros(1).to(number).dtype is dtype
    with pytest.raises(TypeError, match="type of a number, got <class 'str'>"):
        td.to(str)
