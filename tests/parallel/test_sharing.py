"""Memory that processes share: share_memory_, and containers through pipes, queues and data loaders."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from piped import leaf_of, serving, set_first, shared_memory
from torch.utils.data import DataLoader

from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
)

BIG = 1 << 20  # bytes of the leaf that must not be in any message


class Sample(TensorClass):
    x: torch.Tensor
    label: str


def nested() -> TensorDict:
    return TensorDict(x=torch.zeros(8, BIG // 32), inner={"y": torch.ones(8, dtype=torch.int64)}, batch_size=[8])


def ragged() -> TensorDict:
    rows = [torch.zeros(n, BIG // 64) for n in (2, 3)]
    return TensorDict(x=torch.nested.nested_tensor(rows, layout=torch.jagged), batch_size=[2])


KINDS: dict[str, Any] = {
    "dense": nested,
    "lazy": lambda: lazy_stack([nested(), nested()]),
    "tensorclass": lambda: Sample(x=torch.zeros(8, BIG // 32), label="cat", batch_size=[8]),
    "params": lambda: TensorDictParams(nested()),
    "values": lambda: nested().set("label", "cat").set("loss", NonTensorData(len, batch_size=[8])),
    "unbatched": lambda: nested().set("scale", UnbatchedTensor(torch.zeros(BIG // 4))),
    "consolidated": lambda: nested().consolidate(),
    "ragged": ragged,
}


def echo(pipe: Any) -> None:
    """Write 7 into the first element of every container that comes, and say what it was like."""
    while (found := pipe.recv()) is not None:
        set_first(leaf_of(found), 7)
        pipe.send((type(found).__name__, found.is_locked, found.is_shared(), found.is_memmap()))


@pytest.fixture(scope="module")
def forked() -> Iterator[Any]:
    yield from serving(echo, "fork")


@pytest.fixture(scope="module")
def spawned() -> Iterator[Any]:
    yield from serving(echo, "spawn")


# --- share_memory_ ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_share_memory_moves_every_leaf_and_locks(kind):
    container = KINDS[kind]()
    leaves = [leaf for _, leaf in container._walk()]
    assert not container.is_shared()
    assert container.share_memory_() is container
    assert container.is_shared() and container.is_locked
    assert [leaf for _, leaf in container._walk()] and all(
        one is other for one, (_, other) in zip(leaves, container._walk(), strict=True)
    )
    assert all((leaf.values() if leaf.is_nested else leaf).is_shared() for leaf in leaves)
    assert container.share_memory_().is_shared()


def test_nested_containers_are_shared_and_their_parents_are_not():
    td = nested().share_memory_()
    assert td["inner"].is_shared() and td["inner"].is_locked
    parent = TensorDict(child=nested(), batch_size=[8])
    parent["child"].share_memory_()
    assert parent["child"].is_shared() and not parent.is_shared() and not parent.is_locked


def test_members_of_a_lazy_stack_are_shared():
    stack = lazy_stack([nested(), nested()]).share_memory_()
    assert all(member.is_shared() and member.is_locked for member in stack.tensordicts)
    stack.unlock_()
    assert not stack.is_shared() and not stack.tensordicts[0].is_shared()


def test_unlocking_ends_the_shared_state_and_not_the_sharing():
    td = nested().share_memory_()
    td.unlock_()
    assert not td.is_shared() and not td["inner"].is_shared() and td["x"].is_shared()
    assert td.share_memory_().is_shared()


def test_views_of_the_batch_are_shared_and_copies_are_not():
    td = nested().share_memory_()
    for view in (td[0], td[2:4], td[..., 1]):
        assert view.is_shared() and view.is_locked and view["inner"].is_shared()
    for copied in (td.clone(), td.copy(), td[torch.tensor([0, 1])], td.select("x")):
        assert not copied.is_shared() and not copied.is_locked


def test_tensors_over_the_same_storage_stay_so():
    base = torch.zeros(4, 3)
    td = TensorDict(a=base[:2], b=base[2:], batch_size=[2]).share_memory_()
    base[3] = 1
    assert base.is_shared() and td["b"][1].tolist() == [1, 1, 1]


def test_a_consolidated_container_stays_so():
    td = nested().consolidate().share_memory_()
    assert td.is_consolidated() and td["x"].untyped_storage()._cdata == td["inner", "y"].untyped_storage()._cdata


def test_memory_mapped_leaves_stay_where_they_are(tmp_path):
    td = nested().memmap_(tmp_path)
    address = td["x"].data_ptr()
    assert td.share_memory_().is_shared() and td.is_memmap() and td["x"].data_ptr() == address
    plain = TensorDict.load_memmap(tmp_path).as_tensor().share_memory_()
    plain["x"][0, 0] = 3
    assert TensorDict.load_memmap(tmp_path)["x"][0, 0] == 3


def test_gradients_are_kept():
    weight = torch.zeros(3, requires_grad=True)
    td = TensorDict(w=weight, twice=weight * 2).share_memory_()
    td["twice"].sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2, 2]


def test_what_cannot_be_shared_is_named_and_nothing_is_moved():
    td = TensorDict(a=torch.zeros(3), inner={"s": torch.eye(3).to_sparse()}, batch_size=[3])
    with pytest.raises(RuntimeError, match=r"'inner.*s'.*sparse"):
        td.share_memory_()
    assert not td["a"].is_shared() and not td.is_locked and not td.is_shared()


# --- pipes and queues -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_container_travels_as_handles(kind, forked):
    container = KINDS[kind]().share_memory_()
    assert len(ForkingPickler.dumps(container)) < 4096
    before = shared_memory()
    forked.send(container)
    name, locked, shared, memmap = forked.recv()
    assert leaf_of(container).view(-1)[0] == 7
    assert (name, locked, shared, memmap) == (type(container).__name__, True, True, False)
    assert shared_memory() - before < BIG / 2


@pytest.mark.parametrize("kind", ["dense", "lazy"])
def test_a_shared_container_travels_to_a_spawned_process(kind, spawned):
    container = KINDS[kind]().share_memory_()
    spawned.send(container)
    assert spawned.recv()[1:3] == (True, True)
    assert leaf_of(container).view(-1)[0] == 7


def in_folder(tmp_path: Any) -> TensorDict:
    return nested().memmap_(tmp_path / "saved")


def anonymous(tmp_path: Any) -> TensorDict:
    return nested().memmap_()


@pytest.mark.parametrize("make", [in_folder, anonymous])
@pytest.mark.parametrize("index", [None, slice(2, 5), 3, slice(1, 8, 3)])
def test_a_memory_mapped_container_travels_as_references(make, index, tmp_path, forked):
    whole = make(tmp_path)
    td = whole if index is None else whole[index]
    assert len(ForkingPickler.dumps(td)) < 4096
    before = shared_memory()
    forked.send(td)
    assert forked.recv() == ("TensorDict", True, False, True)
    expected = torch.zeros(8, BIG // 32)
    first = 0 if index is None else range(8)[index][0] if isinstance(index, slice) else index
    expected[first, 0] = 7
    assert torch.equal(whole["x"], expected)
    assert shared_memory() - before < 2 * BIG


def test_a_memory_mapped_view_has_its_strides(tmp_path):
    whole = nested().memmap_(tmp_path / "saved")
    again = pickle.loads(ForkingPickler.dumps(whole["x"][1::2, 3:9]))
    assert isinstance(again, MemoryMappedTensor) and again.filename == whole["x"].filename
    assert again.stride() == (2 * BIG // 32, 1) and again.storage_offset() == BIG // 32 + 3
    again[0, 0] = 9
    assert whole["x"][1, 3] == 9


def test_memory_mapped_members_travel_as_references(tmp_path, forked):
    stack = lazy_stack([nested().memmap_(tmp_path / str(i)) for i in range(3)])
    assert len(ForkingPickler.dumps(stack)) < 4096
    forked.send(stack)
    assert forked.recv()[0] == LazyStackedTensorDict.__name__
    assert stack.tensordicts[0]["x"][0, 0] == 7


def test_a_spawned_process_maps_the_same_file(tmp_path, spawned):
    td = nested().memmap_(tmp_path / "saved")
    spawned.send(td[4])
    assert spawned.recv()[3]
    assert td["x"][4, 0] == 7 and td["x"].sum() == 7


def test_plain_containers_are_shared_by_sending_them(forked):
    # As torch does with tensors: the storage is moved, and then both have it.
    td = nested()
    forked.send(td)
    assert forked.recv() == ("TensorDict", False, False, False)
    assert td["x"][0, 0] == 7 and td["x"].is_shared() and not td.is_shared()


def test_queues_carry_what_a_child_made():
    context = mp.get_context("fork")
    queue, done = context.Queue(), context.SimpleQueue()
    process = context.Process(target=_child_of_two, args=(queue, done), daemon=True)
    process.start()
    td = queue.get(timeout=60)
    assert td.is_shared() and td["inner", "y"].tolist() == [1] * 8
    done.put(True)
    process.join()
    assert process.exitcode == 0


def _child_of_two(queue: Any, done: Any) -> None:
    # OpenMP's threads do not survive a fork.
    torch.set_num_threads(1)
    queue.put(nested().share_memory_())
    # Until the other side has it, this process has to be there to hand it over.
    done.get()


# --- protocol 5 -------------------------------------------------------------------------------------------------------


def test_leaves_are_buffers_out_of_band():
    td = nested()
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(td, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 4096
    assert sum(buffer.raw().nbytes for buffer in buffers) >= BIG
    td["x"][0, 0] = 5  # The buffers are the memory of the leaves.
    again = pickle.loads(message, buffers=buffers)
    assert again["x"][0, 0] == 5 and again["x"].data_ptr() == td["x"].data_ptr()


def test_read_only_buffers_are_copied():
    td = nested()
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(td, protocol=5, buffer_callback=buffers.append)
    frozen = [buffer.raw().tobytes() for buffer in buffers]
    again = pickle.loads(message, buffers=frozen)
    again["x"].fill_(1)
    assert (pickle.loads(message, buffers=frozen)["x"] == 0).all() and (again["inner", "y"] == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_out_of_band(kind):
    container = KINDS[kind]()
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(container, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(message, buffers=buffers)
    assert type(again) is type(container) and again.batch_size == container.batch_size
    assert torch.equal(leaf_of(again), leaf_of(container))
    # Parameters are torch's business, which pickles them in band.
    assert kind == "params" or len(message) < 8192


# --- data loaders -----------------------------------------------------------------------------------------------------


def stacked(samples: Any) -> Any:
    # A container gives a batch of its own in one step; other datasets give lists of samples.
    return torch.stack(samples) if isinstance(samples, list) else samples


def data() -> TensorDict:
    return TensorDict(
        x=torch.arange(12.0).reshape(6, 2),
        inner={"y": torch.arange(6)},
        pid=torch.zeros(6, dtype=torch.int64),
        batch_size=[6],
    )


class Marked(torch.utils.data.Dataset):
    """Items of a container that carry the process that read them."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __len__(self) -> int:
        return len(self.container)

    def __getitem__(self, index: int) -> Any:
        return self.container[index].clone().set_("pid", torch.tensor(os.getpid()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_container_is_a_dataset(workers, mapped, tmp_path):
    td = data().memmap_(tmp_path / "saved") if mapped else data()
    loader = DataLoader(
        td, batch_size=4, collate_fn=stacked, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    batches = list(loader)
    assert [batch.batch_size for batch in batches] == [(4,), (2,)]
    assert torch.equal(torch.cat(batches)["inner", "y"], torch.arange(6))
    assert torch.equal(torch.cat(batches)["x"], data()["x"])


def test_batches_come_from_the_workers():
    loader = DataLoader(Marked(data()), batch_size=2, collate_fn=stacked, num_workers=2, multiprocessing_context="fork")
    seen = torch.cat(list(loader))
    assert len(set(seen["pid"].tolist())) == 2 and os.getpid() not in seen["pid"]
    assert torch.equal(seen["x"], data()["x"])


def test_batches_are_cut_in_one_step():
    loader = DataLoader(data(), batch_size=4, collate_fn=lambda batch: batch)
    assert [batch["inner", "y"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


def test_tensorclasses_and_values_in_batches():
    samples = [Sample(x=torch.full((2,), float(i)), label=str(i), batch_size=[]) for i in range(4)]
    loader = DataLoader(samples, batch_size=2, collate_fn=stacked, num_workers=1, multiprocessing_context="fork")
    first, second = loader
    assert type(first) is Sample and first.x.tolist() == [[0, 0], [1, 1]] and second.label == ["2", "3"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_default_collate_function(workers, tmp_path):
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    whole = list(DataLoader(data(), batch_size=4, **options))
    assert [batch.batch_size for batch in whole] == [(4,), (2,)] and torch.equal(torch.cat(whole)["x"], data()["x"])
    mapped = list(DataLoader(data().memmap_(tmp_path / "saved"), batch_size=4, **options))
    assert torch.equal(torch.cat(mapped)["inner", "y"], torch.arange(6))
    stacked_samples = list(DataLoader(Marked(data()), batch_size=3, **options))
    assert [type(batch) for batch in stacked_samples] == [TensorDict] * 2
    assert torch.equal(torch.cat(stacked_samples)["x"], data()["x"])
    samples = [Sample(x=torch.full((2,), float(i)), label=str(i), batch_size=[]) for i in range(4)]
    first, second = DataLoader(samples, batch_size=2, **options)
    assert type(first) is Sample and first.x.tolist() == [[0, 0], [1, 1]] and second.label == ["2", "3"]
    (mixed,) = DataLoader([{"td": data()[i], "at": i} for i in range(3)], batch_size=3, **options)
    assert mixed["at"].tolist() == [0, 1, 2] and torch.equal(mixed["td"]["x"], data()["x"][:3])


def test_the_default_collate_function_for_containers_of_other_kinds():
    lazy = lazy_stack([TensorDict(x=torch.full((2,), i)) for i in range(4)])
    assert [batch["x"].tolist() for batch in DataLoader(lazy, batch_size=2)] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    values = [NonTensorData("a"), NonTensorData("b")]
    (batch,) = DataLoader(values, batch_size=2)
    assert batch.tolist() == ["a", "b"]
    uneven = [TensorDict(x=torch.zeros(1)), TensorDict(y=torch.zeros(1))]
    (batch,) = DataLoader(uneven, batch_size=2)
    assert type(batch) is LazyStackedTensorDict and [list(member.keys()) for member in batch.unbind(0)] == [
        ["x"],
        ["y"],
    ]


@pytest.mark.gpu
def test_batches_are_pinned():
    loader = DataLoader(data(), batch_size=3, collate_fn=stacked, pin_memory=True)
    assert all(batch["x"].is_pinned() and batch["inner", "y"].is_pinned() for batch in loader)
