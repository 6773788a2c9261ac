"""Pickling of containers: what survives it, and what is handed to other processes."""

from __future__ import annotations

import copy
import io
import os
import pickle
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)
from tensordict.core.exceptions import SaveError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


@tensorclass
class Pair:
    x: Tensor
    note: str = "n"


class Step(TypedTensorDict):
    obs: Tensor


class Own(TensorDict):
    """A class of the program that pickles in a way of its own."""

    def __reduce__(self) -> Any:
        return _own, (self["a"] + 1,)


def _own(a: Tensor) -> Own:
    return Own(a=a)


def sent(value: Any, protocol: int | None = None) -> Any:
    return pickle.loads(pickle.dumps(value, protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_all_kinds_of_entries(protocol: int) -> None:
    td = TensorDict(
        {
            "turned": torch.arange(6.0).view(2, 3)[:, ::2],
            "spread": torch.ones(2, 1).expand(2, 5),
            "empty": torch.zeros(2, 0),
            "big": torch.arange(100_000).view(2, -1),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "conj": torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
            "n": TensorDict({"x": torch.ones(2, 3)}, [2, 3], names=["time", "env"]),
            "stack": lazy_stack([TensorDict(u=torch.ones(size)) for size in (1, 2)]),
            "pair": Pair(torch.ones(2), batch_size=[2]),
            "step": Step(obs=torch.ones(2), batch_size=[2]),
            "value": NonTensorData({1, 2}, batch_size=[2]),
            "own": UnbatchedTensor(torch.arange(3)),
        },
        [2],
        device="cpu",
    ).lock_()
    again = sent(td, protocol)
    assert list(again.keys()) == list(td.keys())
    for name in ("turned", "spread", "empty", "big", "half", "conj"):
        assert torch.equal(again[name], td[name])
        assert again[name].dtype == td[name].dtype
    assert (again["turned"].stride(), again["spread"].stride()) == ((3, 2), (1, 0))
    assert (again["n"].names, again["n"].batch_size, again.device) == (["time", "env"], (2, 3), torch.device("cpu"))
    assert (again.is_locked, again["n"].is_locked) == (True, True)
    with pytest.raises(RuntimeError, match="outermost"):
        again["n"].unlock_()
    assert isinstance(again.get("stack"), LazyStackedTensorDict)
    assert again.get("stack").tensordicts[1]["u"].tolist() == [1, 1]
    assert (type(again["pair"]), again["pair"].note) == (Pair, "n")
    assert type(again["value"]) is set
    assert type(again.get("own")) is UnbatchedTensor
    assert again.get("own").batch_size == (2,)
    if protocol != 2:
        # `torch.save` uses protocol 2; its files know the classes of the package only.
        assert type(again["step"]) is Step


@pytest.mark.parametrize("protocol", PROTOCOLS[1:])
def test_what_is_shared_in_the_tree_stays_shared(protocol: int) -> None:
    base, node = torch.arange(10.0), TensorDict(x=torch.ones(3))
    td = TensorDict(
        {"a": base, "same": base, "part": base[2:5], "n": {"row": base.view(2, 5)[1]}, "m": node, "k": node}
    )
    again = sent(td, protocol)
    assert again["a"] is again["same"]
    assert again.get("m") is again.get("k")
    again["a"].fill_(7)
    assert again["part"].tolist() == [7] * 3
    assert again["n", "row"].tolist() == [7] * 5
    # Each storage is one of its own, which can be moved and resized.
    again["m", "x"].resize_(1000).fill_(5)
    assert again["a"].tolist() == [7] * 10


def test_only_what_is_reached_is_kept() -> None:
    big = torch.zeros(1_000_000)
    assert len(pickle.dumps(TensorDict(a=big[5:8], b=big[6:9]))) < 2000
    again = sent(TensorDict(a=big[1:4], b=torch.arange(5).to(torch.complex128)[2:], c=big.view(torch.float64)[1:3]))
    assert again["b"].tolist() == [2, 3, 4]


# Torch 2.11 says so wherever a sparse tensor is made.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_tensors_that_torch_pickles() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    wants = torch.ones(2, requires_grad=True)
    marked = torch.ones(2)
    marked.mark = "m"
    sparse = torch.eye(2).to_sparse()
    with torch.no_grad():
        td = TensorDict(p=parameter, tied={"p": parameter}, wants=wants, marked=marked, sparse=sparse)
    again = sent(td)
    assert type(again["p"]) is torch.nn.Parameter
    assert again["p"] is again["tied", "p"]
    assert again["wants"].requires_grad
    assert again["marked"].mark == "m"
    assert again["sparse"].is_sparse


def test_memory_mapped_leaves_are_references_to_their_files(tmp_path: Any) -> None:
    td = TensorDict(a=torch.zeros(3)).memmap_(tmp_path)
    again = sent(td)
    assert isinstance(again["a"], MemoryMappedTensor)
    td["a"].fill_(4)
    assert again["a"].tolist() == [4, 4, 4]


def test_memory_mapped_parts_of_files(tmp_path: Any) -> None:
    whole = MemoryMappedTensor.from_tensor(torch.arange(24).view(4, 6), filename=tmp_path / "x")
    for view in (whole, whole[:2], whole[1:], whole[:, 2:4], whole[::2], whole[2, 3], whole[4:]):
        again = sent(view)
        assert type(again) is MemoryMappedTensor and (again.shape, again.stride()) == (view.shape, view.stride())
        assert (again == view).all()
    assert sent(whole).filename == str(tmp_path / "x")
    message = pickle.dumps(whole)
    os.truncate(tmp_path / "x", 8)
    with pytest.raises(SaveError, match=r"has 8 bytes, but shape \[4, 6\] of torch.int64 needs 192"):
        pickle.loads(message)


def test_ragged_leaves() -> None:
    rows = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(2.0)], layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(2.0)])
    holes = torch.nested.nested_tensor_from_jagged(torch.arange(9.0), torch.tensor([0, 4, 8]), torch.tensor([2, 3]))
    td = TensorDict(rows=rows, twice=rows * 2, strided=strided, holes=holes, batch_size=[2])
    for value in (td, td.consolidate()):
        again = sent(value)
        assert (again["rows"] + again["twice"]).values().tolist() == [0, 3, 6, 0, 3]
        assert [row.tolist() for row in again["strided"].unbind()] == [[0, 1, 2], [0, 1]]
        assert [row.tolist() for row in again["holes"].unbind()] == [[0, 1], [4, 5, 6]]
        assert again.is_consolidated() == value.is_consolidated()


def test_ragged_leaves_in_a_storage_of_any_length() -> None:
    rows = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    td = TensorDict(rows=rows, twice=rows * 2, last=torch.ones(1)).consolidate()
    file = io.BytesIO()
    torch.save(td, file)
    again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert (again["rows"] + again["twice"]).values().tolist() == [0, 3, 6, 0, 3] and again["last"].tolist() == [1]


def test_classes_with_ways_of_their_own_keep_them() -> None:
    td = TensorDict(inner=Own(a=torch.zeros(1)), other=torch.ones(1))
    again = sent(td)
    assert type(again["inner"]) is Own
    assert again["inner", "a"].tolist() == [1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["dense", "stack", "class"])
def test_consolidated_containers_stay_so(protocol: int, kind: str) -> None:
    td: Any = TensorDict(
        {"a": torch.arange(100_000), "n": {"b": torch.ones(3, dtype=torch.int8)}, "u": UnbatchedTensor(torch.ones(2))}
    )
    if kind == "stack":
        td = lazy_stack([td, td.clone()])
    elif kind == "class":
        td = Pair(torch.arange(5.0))
    consolidated = td.consolidate()
    again = sent(consolidated, protocol)
    assert type(again) is type(td)
    assert again.is_consolidated()
    assert again.is_locked
    assert len({leaf.untyped_storage().data_ptr() for leaf in again._leaves()}) == 1
    assert all(torch.equal(*pair) for pair in zip(again._leaves(), td._leaves(), strict=True))
    assert len(pickle.dumps(consolidated)) < consolidated._consolidated[0].numel() + 3000


def test_a_storage_that_is_no_longer_whole_is_not_pickled_along() -> None:
    td = TensorDict(a=torch.zeros(100_000), b=torch.ones(2)).consolidate()
    td._unlock_tree()
    del td["a"]
    assert len(pickle.dumps(td)) < 2000
    assert sent(td)["b"].tolist() == [1, 1]


def test_out_of_band() -> None:
    td = TensorDict(a=torch.arange(100_000), b=torch.ones(2)).consolidate()
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(td, 5, buffer_callback=buffers.append)
    assert len(head) < 2000
    assert [buffer.raw().nbytes for buffer in buffers] == [800_008]
    # Without a copy on the way there; what cannot be written to is copied on the way back.
    again = pickle.loads(head, buffers=buffers)
    assert again["a"].data_ptr() == td["a"].data_ptr()
    frozen = pickle.loads(head, buffers=[bytes(buffer) for buffer in buffers])
    assert frozen["a"].data_ptr() != td["a"].data_ptr()
    frozen["a"].fill_(1)
    assert td["a"][2] == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_under_another_default_device(protocol: int) -> None:
    td = TensorDict(small=torch.arange(3), large=torch.arange(100_000))
    with torch.device("meta"):
        again = sent(td, protocol)
    assert all(torch.equal(again[name], td[name]) for name in ("small", "large"))


def test_copies_do_not_go_this_way() -> None:
    base = torch.arange(10.0)
    td = TensorDict(a=base, part=base[2:5])
    copied = copy.deepcopy(td)
    copied["a"].fill_(1)
    assert copied["part"].tolist() == [1, 1, 1]
    assert base[2] == 2


def test_torch_save_stores_storages() -> None:
    base = torch.zeros(10_000)
    td = TensorDict(a=base, view=base[:5000])
    buffer = io.BytesIO()
    torch.save({"td": td, "base": base}, buffer)
    assert buffer.tell() < 45_000
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loaded["base"].fill_(1)
    assert loaded["td"]["view"].sum() == 5000


def _child(inbox: Any, outbox: Any) -> None:
    while (td := inbox.get()) is not None:
        td["a"].fill_(5)
        outbox.put((type(td).__name__, td.is_consolidated(), td["a"].is_shared()))


@pytest.mark.seconds
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_memory(method: str) -> None:
    context = mp.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=_child, args=(inbox, outbox), daemon=True)
    process.start()
    plain = TensorDict(a=torch.zeros(3), b=torch.ones(2, dtype=torch.int8))
    stack = lazy_stack([TensorDict(a=torch.zeros(3)), TensorDict(a=torch.zeros(3))])
    mapped = TensorDict(a=torch.zeros(3)).memmap_()
    try:
        for td in (plain, plain.clone().consolidate(), plain.consolidate(share_memory=True), mapped):
            inbox.put(td)
            name, consolidated, shared = outbox.get(timeout=60)
            assert (name, consolidated) == ("TensorDict", td.is_consolidated())
            assert shared or td is mapped
            assert td["a"].tolist() == [5, 5, 5]
        inbox.put(stack.consolidate())
        assert outbox.get(timeout=60)[:2] == ("LazyStackedTensorDict", True)
        inbox.put(None)
        process.join(60)
    finally:
        process.kill()


def test_views_without_elements_that_begin_beyond_their_storage():
    td = TensorDict(x=torch.zeros(4, 0), batch_size=[4])[2:]
    assert td["x"].storage_offset() * td["x"].itemsize > td["x"].untyped_storage().nbytes()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(td, protocol))["x"].shape == (2, 0)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_consolidated_parameters_stay_parameters(protocol: int) -> None:
    params = TensorDictParams(TensorDict(a=torch.ones(3), n={"b": torch.zeros(2), "c": torch.arange(2)}))
    held = params.consolidate()
    assert type(held) is TensorDictParams
    found = pickle.loads(pickle.dumps(held, protocol))
    assert type(found) is TensorDictParams
    assert found.is_consolidated()
    assert [name for name, _ in found.named_parameters()] == ["a", "n.b"]
    assert [name for name, _ in found.named_buffers()] == ["n.c"]
    assert len({leaf.untyped_storage().data_ptr() for leaf in found.values(True, True)}) == 1


def test_consolidated_containers_without_tensors_in_torch_files(tmp_path: Any) -> None:
    td = TensorDict(s=NonTensorData("x"), n={}).consolidate()
    torch.save(td, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=False)
    assert found["s"] == "x" and "n" in found.keys() and found.is_consolidated() is td.is_consolidated()


def test_consolidated_parameters_in_torch_files(tmp_path: Any) -> None:
    params = TensorDictParams(TensorDict(a=torch.ones(3), c=torch.arange(2))).consolidate()
    torch.save(params, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt")
    assert type(found) is TensorDictParams
    assert found.is_consolidated()
    assert [name for name, _ in found.named_parameters()] == ["a"]


def test_parameters_that_require_no_grad_and_those_with_attributes() -> None:
    frozen, marked = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(2))
    marked.note = "x"
    found = pickle.loads(pickle.dumps(TensorDict(frozen=frozen, marked=marked, again=marked)))
    assert [leaf.requires_grad for leaf in found.values()] == [False, True, True]
    assert found["marked"] is found["again"]
    assert type(found["frozen"]) is torch.nn.Parameter
    assert found["marked"].note == "x"


def test_the_state_says_what_differs_from_the_default():
    td = TensorDict(a=torch.ones(2), batch_size=[2])
    assert td.__getstate__().keys() == {"_entries", "_batch_size"}
    named = TensorDict(a=torch.ones(2), batch_size=[2], names=["time"], device="cpu").lock_()
    named.own = "of the program"
    assert named.__getstate__().keys() == {"_entries", "_batch_size", "_names", "_device", "_locked", "own"}
    for made in (td, named):
        again = object.__new__(TensorDict)
        state = made.__getstate__()
        again.__setstate__(state)
        assert again.names == made.names and again.device == made.device and again.is_locked == made.is_locked
        assert again.__dict__.get("own") == made.__dict__.get("own")
        assert state.keys() == made.__getstate__().keys()
