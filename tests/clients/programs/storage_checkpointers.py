"""Checkpointers of replay buffers: flat, nested and HDF5 saves, their hooks, and the data that come back."""

import contextlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from recording import Record, case, run
from torchrl.data import (
    CompressedListStorage,
    CompressedListStorageCheckpointer,
    FlatStorageCheckpointer,
    H5Combine,
    H5Split,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Nested2TED,
    NestedStorageCheckpointer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    StorageCheckpointerBase,
    StorageEnsembleCheckpointer,
    TED2Flat,
    TED2Nested,
    TensorDictReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
)

from tensordict import PersistentTensorDict, TensorDict, TensorDictBase

CHECKPOINTERS = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "tensor": TensorStorageCheckpointer,
}


def trajectories(*lengths: int, ends: bool = True) -> TensorDict:
    """Trajectories of these lengths, one after another; without `ends` the last one goes on."""
    steps = []
    for number, length in enumerate(lengths):
        time = torch.arange(length + 1.0) + 100 * number + 1
        observation = torch.stack([time, -time], -1)
        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = ends or number < len(lengths) - 1
        never = torch.zeros_like(done)
        steps.append(
            TensorDict(
                {
                    "observation": observation[:-1],
                    "pixels": {"grey": time[:-1].to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 3)},
                    "action": torch.randint(4, (length,)),
                    "done": never,
                    "terminated": never,
                    "truncated": never,
                    "next": {
                        "observation": observation[1:],
                        "pixels": {"grey": time[1:].to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 3)},
                        "reward": torch.randn(length, 1),
                        "done": done,
                        "terminated": done,
                        "truncated": never,
                    },
                },
                [length],
            )
        )
    return torch.cat(steps)


def buffer(size: int, checkpointer: StorageCheckpointerBase, kind: type[TensorStorage]) -> TensorDictReplayBuffer:
    made = TensorDictReplayBuffer(storage=kind(size), batch_size=4)
    made.storage.checkpointer = checkpointer
    return made


def save_and_load(
    record: Record,
    name: str,
    make: Callable[[], StorageCheckpointerBase],
    size: int,
    pieces: list[TensorDict],
    kind: type[TensorStorage],
) -> None:
    """Saves a buffer, loads it into an empty one and into one that has data, and writes both of them down."""
    source = buffer(size, make(), kind)
    for piece in pieces:
        source.extend(piece)
    source.dumps(name)
    for target in ("empty", "filled"):
        other = buffer(size, make(), kind)
        if target == "filled":
            other.extend(trajectories(size))
        record.error(f"{name} {target} loaded", lambda other=other: other.loads(name))
        if record.values[f"{name} {target} loaded"]:
            # TorchRL cannot load what it saved of a buffer that was filled exactly into one that has data.
            continue
        record(f"{name} {target}", other[:])
        record(f"{name} {target} length", len(other))
        record(f"{name} {target} extended", other.extend(trajectories(2)))
        record(f"{name} {target} then", other[:])


def in_every_form(
    record: Record, size: int, pieces: Callable[[], list[TensorDict]], kind: type[TensorStorage] = LazyTensorStorage
) -> None:
    for name, make in CHECKPOINTERS.items():
        torch.manual_seed(0)
        save_and_load(record, name, make, size, pieces(), kind)


def without_files(function: Callable[[], None]) -> None:
    """Calls `function` in another folder: rows that were never written have any bytes in its files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        function()


@case
def of_full_buffers(record: Record) -> None:
    in_every_form(record, 12, lambda: [trajectories(5, 3, 4)])


@case
def of_buffers_with_room(record: Record) -> None:
    without_files(lambda: in_every_form(record, 20, lambda: [trajectories(5, 3, 4)]))


@case
def of_trajectories_that_go_on(record: Record) -> None:
    without_files(lambda: in_every_form(record, 20, lambda: [trajectories(5, 3, 4, ends=False)]))


@case
def of_buffers_written_around(record: Record) -> None:
    in_every_form(record, 12, lambda: [trajectories(4, 3), trajectories(5, 2)])


@case
def of_mapped_buffers(record: Record) -> None:
    in_every_form(record, 12, lambda: [trajectories(5, 3, 4)], LazyMemmapStorage)


@case
def of_one_trajectory(record: Record) -> None:
    for name in ("flat", "nested"):
        save_and_load(record, name, CHECKPOINTERS[name], 8, [trajectories(8)], LazyTensorStorage)


@case
def saved_twice(record: Record) -> None:
    for name, make in CHECKPOINTERS.items():
        source = buffer(12, make(), LazyTensorStorage)
        source.extend(trajectories(5, 3, 4))
        source.dumps(name)
        source.extend(trajectories(2, 2))
        record.error(f"{name} again", lambda source=source, name=name: source.dumps(name))
        other = buffer(12, make(), LazyTensorStorage)
        record.error(f"{name} loaded", lambda other=other, name=name: other.loads(name))
        if other.storage.initialized:
            record(name, other[:])


@case
def of_several_environments(record: Record) -> None:
    """Storages with a dim of environments beside the time dim."""
    for name, make in CHECKPOINTERS.items():
        torch.manual_seed(0)
        rows = [trajectories(3, 4, 3), trajectories(5, 5)]
        data = torch.stack(rows)
        source = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
        source.storage.checkpointer = make()
        source.extend(data)
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=4)
        other.storage.checkpointer = make()
        record.error(f"{name} saved", lambda source=source, name=name: source.dumps(name))
        record.error(f"{name} loaded", lambda other=other, name=name: other.loads(name))
        if other.storage.initialized:
            record(name, other[:])
    record("one", torch.ones(1))


@case
def one_file(record: Record) -> None:
    """The HDF5 checkpointer with a file name and settings of its own; the file as a container."""
    for name, path, options in (
        ("named", "saves", {"checkpoint_file": "mine.h5"}),
        ("without times", "saves2", {"h5_kwargs": {"track_times": False}}),
    ):
        source = buffer(12, H5StorageCheckpointer(**options), LazyTensorStorage)
        source.extend(trajectories(5, 3, 4))
        source.dumps(path)
        file = next(Path(path).rglob("*.h5"))
        stored = PersistentTensorDict.from_h5(str(file))
        record(f"{name} keys", sorted(map(str, stored.keys())))
        record(f"{name} entries", sorted(map(str, stored["traj_0"].keys(True, True))))
        # A number that is a value is read as a tensor on the reference.
        record(f"{name} length", int(stored["_len"]))
        record(f"{name} first", stored["traj_0", "observation"])
        record(f"{name} batch size", tuple(stored["traj_0"].batch_size))
        other = buffer(12, H5StorageCheckpointer(**options), LazyTensorStorage)
        other.loads(path)
        record(name, other[:])


@case
def hooks_by_themselves(record: Record) -> None:
    """The conversions that the checkpointers use, on containers."""
    data = trajectories(5, 3, 4)
    flat, nested = TED2Flat(), TED2Nested()
    for hook in (flat, nested):
        hook.shift, hook.is_full = 5, True
    record("flat", flat(data.clone()))
    ragged = nested(data.clone())
    record("ragged size", tuple(ragged.batch_size))
    keys = sorted(map(str, ragged.keys(True, True)))
    record("ragged keys", keys)
    for key in (("observation",), ("action",), ("reward",), ("pixels", "grey")):
        leaf = ragged.get(key)
        name = ".".join(key)
        record(f"{name} is nested", leaf.is_nested)
        record(f"{name} rows", [row.clone() for row in leaf.unbind(0)])
        record(f"{name} sizes", leaf._nested_tensor_size())
    split = H5Split()(ragged)
    record("split", [sorted(map(str, split.keys())), split["traj_1", "observation"]])
    combined = H5Combine()(split)
    record("combined", [row.clone() for row in combined.get("observation").unbind(0)])
    record("back", Nested2TED()(combined))
    record("back at once", Nested2TED()(ragged))


@case
def ragged_files(record: Record) -> None:
    """The nested save, read as a container: its ragged leaves, row by row."""
    source = buffer(12, NestedStorageCheckpointer(), LazyTensorStorage)
    source.extend(trajectories(5, 3, 4))
    source.dumps("nested")
    data = TensorDict.load_memmap("nested/storage")
    record("size", tuple(data.batch_size))
    for key in (("observation",), ("pixels", "grey"), ("action",), ("done",)):
        leaf = data.get(key)
        record(".".join(key), [row.clone() for row in leaf.unbind(0)])
        record(f"{'.'.join(key)} dtype", leaf.dtype)
    record("row", data[1].get("observation"))
    record("copied", [row.clone() for row in data.clone().get("observation").unbind(0)])
    data.memmap("again", copy_existing=True)
    again = TensorDict.load_memmap("again")
    record("again", [row.clone() for row in again.get("observation").unbind(0)])


def twice(data: TensorDictBase, path: Path | None = None) -> TensorDictBase:
    return data.clone().set("twice", data["action"] * 2)


def once(data: TensorDictBase, out: TensorDictBase | None = None) -> TensorDictBase:
    return data.exclude("twice")


@case
def hooks_of_ones_own(record: Record) -> None:
    source, other = (buffer(12, TensorStorageCheckpointer(), LazyTensorStorage) for _ in range(2))
    source.storage.checkpointer.register_save_hook(twice)
    other.storage.checkpointer.register_load_hook(once)
    source.extend(trajectories(5, 7))
    source.dumps("own")
    record("saved", TensorDict.load_memmap("own/storage")["twice"])
    other.loads("own")
    record("loaded", other[:])


@case
def pytrees(record: Record) -> None:
    def make() -> ReplayBuffer:
        made = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=2)
        made.storage.checkpointer = TensorStorageCheckpointer()
        return made

    source, other = make(), make()
    source.extend({"pair": (torch.arange(6.0), torch.ones(6, 2)), "nested": {"value": torch.arange(6)}})
    source.dumps("tree")
    other.extend({"pair": (torch.zeros(6), torch.zeros(6, 2)), "nested": {"value": torch.zeros(6).long()}})
    other.loads("tree")
    record("loaded", other.storage[:])
    record("metadata", json.loads(Path("tree/storage/storage_metadata.json").read_text()))


@case
def compressed(record: Record) -> None:
    """Rows of unequal lengths: their files differ, so the save lies elsewhere."""
    without_files(lambda: packed(record))


def packed(record: Record) -> None:
    def make() -> ReplayBuffer:
        storage = CompressedListStorage(8, compression_level=3)
        storage.checkpointer = CompressedListStorageCheckpointer()
        return ReplayBuffer(storage=storage, collate_fn=torch.stack, batch_size=3)

    source, other = make(), make()
    source.extend(list(torch.arange(24.0).view(4, 3, 2)))
    source.dumps("packed")
    other.loads("packed")
    record("length", len(other))
    record("rows", [other[position] for position in range(len(other))])
    record("sample", other.sample())


def ensemble() -> ReplayBufferEnsemble:
    parts = [TensorDictReplayBuffer(storage=LazyMemmapStorage(10), batch_size=3) for _ in range(2)]
    return ReplayBufferEnsemble(*parts, batch_size=6)


@case
def ensembles(record: Record) -> None:
    source, other = ensemble(), ensemble()
    for number in range(2):
        source[number].extend(trajectories(4 + number))
    for made in (source, other):
        record("checkpointer" if made is source else "another", type(made.storage.checkpointer).__name__)
        made.storage.checkpointer = StorageEnsembleCheckpointer()
    source.dumps("both")
    other.loads("both")
    record("parts", [other[number][:] for number in range(2)])
    record("sample", other.sample())


def checkpointers_of_storages() -> Iterator[tuple[str, StorageCheckpointerBase]]:
    for kind in (ListStorage, LazyStackStorage, LazyTensorStorage, LazyMemmapStorage):
        yield kind.__name__, kind(4).checkpointer


@case
def defaults(record: Record) -> None:
    for name, checkpointer in checkpointers_of_storages():
        record(name, type(checkpointer).__name__)
    source = ReplayBuffer(storage=ListStorage(4))
    source.extend([torch.ones(1)])
    record.error("list", lambda: source.dumps("list"))
    stacked = TensorDictReplayBuffer(storage=LazyStackStorage(8), batch_size=2)
    stacked.extend(trajectories(3))
    record.error("lazy stack", lambda: stacked.dumps("stack"))
    empty = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    record.error("empty", lambda: empty.dumps("empty"))
    record("one", torch.ones(1))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run()
