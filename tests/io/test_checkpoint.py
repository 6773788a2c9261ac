"""Containers in the files of `torch.save`, copies of all kinds, and PyTorch's distributed checkpoints."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tensordict import (
    MemoryMappedTensor,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    assert_close,
    lazy_stack,
    tensorclass,
)
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.formats import torch_files


class Point(TensorClass):
    x: torch.Tensor
    label: str = "none"


class Frozen(TensorClass, frozen=True):
    x: torch.Tensor


def nested() -> TensorDict:
    td = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "b": {"c": torch.ones(3)}, "s": "x"}, [3], names=["t"])
    td["values"] = NonTensorStack("a", ("b",), {"c": 1})
    td["unbatched"] = UnbatchedTensor(torch.ones(5))
    td["point"] = Point(torch.zeros(3), "p", batch_size=[3])
    td["odd"] = lazy_stack([TensorDict({"x": torch.ones(i + 1)}) for i in range(3)])
    return td


def through_torch(value: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


ROOTS = {
    "nested": nested,
    "locked": lambda: nested().lock_(),
    "device": lambda: TensorDict({"a": torch.ones(2)}, [2], device="cpu"),
    "lazy": lambda: lazy_stack([TensorDict({"x": torch.ones(i)}) for i in (1, 2)]),
    "lazy faces": lambda: lazy_stack([Point(torch.ones(i)) for i in (1, 2)]),
    "frozen": lambda: Frozen(torch.ones(2), batch_size=[2]),
    "value": lambda: NonTensorData("x", batch_size=[2]),
    "meta": lambda: MetaData({"a": (1, 2)}),
    "values": lambda: NonTensorStack(1, 2),
}


# --- torch.save and torch.load ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROOTS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_every_kind_comes_back(name: str, weights_only: bool) -> None:
    td = ROOTS[name]()
    again = through_torch(td, weights_only)
    assert type(again) is type(td) and again.is_locked == td.is_locked
    assert (again.batch_size, again.device, again.names) == (td.batch_size, td.device, td.names)
    if td._is_non_tensor:
        assert again.tolist() == td.tolist()
    else:
        assert_close(again, td)
    if name == "locked":
        assert again["b"].is_locked and again["point"].is_locked
        with pytest.raises(RuntimeError, match="lock"):
            again["b"].unlock_()


def test_what_is_held_twice_stays_one() -> None:
    leaf, inner = torch.zeros(2), TensorDict({"x": torch.ones(2)})
    again = through_torch(TensorDict({"a": leaf, "b": leaf, "c": inner, "view": leaf[:1]}))
    again["a"].fill_(3)
    assert again["b"].tolist() == [3, 3] and again["view"].tolist() == [3]
    first, second = through_torch([inner, inner])
    assert first is second


def test_leaves_of_every_sort() -> None:
    rows = [torch.ones(2), torch.ones(3)]
    td = TensorDict(
        {
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "turned": torch.arange(4).reshape(2, 2).t(),
            "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "empty": torch.zeros(2, 0),
        },
        [2],
    )
    again = through_torch(td)
    assert isinstance(again["parameter"], torch.nn.Parameter) and again["half"].dtype is torch.bfloat16
    assert again["turned"].stride() == (1, 2) and again["jagged"].values().tolist() == [1] * 5


def test_memory_mapped_leaves_are_saved_with_their_content(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.arange(4000.0).reshape(1000, 4)}, [1000]).memmap(tmp_path / "td")
    again = through_torch(td)
    assert type(again["a"]) is torch.Tensor and not again.is_memmap() and torch.equal(again["a"], td["a"])
    file = io.BytesIO()
    torch.save(td[0], file)
    assert len(file.getvalue()) < 4000, "a part of a file has been saved as all of it"
    anonymous = TensorDict({"a": torch.ones(2), "b": torch.ones(3)}).memmap_()
    assert (through_torch(anonymous) == anonymous).all()
    # By pickle, it is a reference to the file as before.
    assert isinstance(pickle.loads(pickle.dumps(td))["a"], MemoryMappedTensor)
    td.unlock_()
    assert through_torch({"x": td["a"]})["x"].shape == (1000, 4)


class Own(TensorDict):
    """A program's own container."""


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("pwned",)


def test_what_weights_only_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError):
        through_torch(TensorDict({"s": Harmful()}))
    assert "pwned" not in capsys.readouterr().out
    # A class of the program is pickled as such.
    own = Own({"a": torch.ones(1)})
    assert type(through_torch(own, False)) is Own
    with pytest.raises(pickle.UnpicklingError, match="Own"):
        through_torch(own)


def test_hostile_arguments() -> None:
    size = torch.Size([2])
    leaf = torch.zeros(2)
    bad = [
        ("TensorDict", size, None, None, {"a": torch.zeros(3)}, None, None, False),
        ("TensorDict", size, None, None, {"a": 1}, None, None, False),
        ("TensorDict", size, None, None, {1: leaf}, None, None, False),
        ("TensorDict", size, None, None, [leaf], None, None, False),
        ("TensorDict", [2], None, None, {}, None, None, False),
        ("TensorDict", size, "cpu", None, {}, None, None, False),
        ("TensorDict", size, None, ["a", "b"], {}, None, None, False),
        ("TensorDict", size, None, [1], {}, None, None, False),
        ("LazyStackedTensorDict", size, None, None, {"0": leaf}, 0, None, False),
        ("LazyStackedTensorDict", size, None, None, {"x": TensorDict()}, 0, None, False),
        ("LazyStackedTensorDict", size, None, None, {}, 1, None, False),
        ("NonTensorStack", size, None, None, {}, 0, [1], False),
        ("UnbatchedTensor", size, None, None, {}, None, None, False),
        (None, size, None, None, {}, None, None, False),
    ]
    for arguments in bad:
        with pytest.raises(SaveError):
            torch_files.restored(*arguments)
    with pytest.raises(UnsupportedEntryError, match=r"os\.system"):
        torch_files.restored("os.system", size, None, None, {}, None, None, False)


def test_a_class_that_the_program_lacks(tmp_path: pathlib.Path) -> None:
    program = (
        "import sys, torch\nfrom tensordict import TensorClass, TensorDict\n"
        "class Elsewhere(TensorClass):\n    x: torch.Tensor\n"
        "torch.save(TensorDict({'e': Elsewhere(torch.ones(1))}), sys.argv[1])\n"
    )
    path = tmp_path / "x.pt"
    subprocess.run([sys.executable, "-c", program, path], check=True)
    with pytest.raises(UnsupportedEntryError, match="Elsewhere.*import the module"):
        torch.load(path, weights_only=True)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROOTS)
def test_deep_copies(name: str) -> None:
    td = ROOTS[name]()
    copied = copy.deepcopy(td)
    assert type(copied) is type(td) and (copied.batch_size, copied.names) == (td.batch_size, td.names)
    if td._is_non_tensor:
        assert copied.tolist() == td.tolist()
        return
    assert_close(copied, td)
    theirs = {leaf.data_ptr() for leaf in td._leaves()}
    assert not theirs & {leaf.data_ptr() for leaf in copied._leaves()}


def test_deep_copies_of_values_are_their_own() -> None:
    td = TensorDict({"meta": MetaData([1]), "data": NonTensorData([1]), "stack": NonTensorStack([1], [2])[0]})
    copied = copy.deepcopy(td)
    copied["data"].append(2)
    assert (td["data"], copied["data"]) == ([1], [1, 2])


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------

single = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
)


@single
def test_a_container_is_loaded_in_place(tmp_path: pathlib.Path) -> None:
    td = nested()
    dcp.save({"td": td, "step": 3}, checkpoint_id=tmp_path)
    other = nested().zero_()
    leaf = other["a"]
    loaded = {"td": other, "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["td"] is other and other["a"] is leaf and loaded["step"] == 3
    assert_close(other, td)
    names = set(dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata)
    assert {"td.a", "td.b.c", "td.point.x", "td.odd.2.x"} <= names


@single
def test_into_memory_mapped_and_locked_containers(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.arange(6.0), "b": {"c": torch.ones(2)}})
    dcp.save({"td": td}, checkpoint_id=tmp_path / "checkpoint")
    other = td.memmap_like(tmp_path / "data")
    dcp.load({"td": other}, checkpoint_id=tmp_path / "checkpoint")
    assert (TensorDict.load_memmap(tmp_path / "data") == td).all()


@single
def test_values_go_along_when_asked_to(tmp_path: pathlib.Path) -> None:
    dcp.save({"td": nested().state_dict(values=True)}, checkpoint_id=tmp_path)
    other = nested()
    other["s"], other["point"].label = "other", "other"
    other["values"] = NonTensorStack(1, 2, 3)
    state = other.state_dict(values=True)
    dcp.load({"td": state}, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    assert (other["s"], other["point"].label, other["values"]) == ("x", "p", ["a", ("b",), {"c": 1}])


@single
def test_a_checkpoint_of_other_keys_changes_nothing(tmp_path: pathlib.Path) -> None:
    dcp.save({"td": TensorDict({"a": torch.ones(2)})}, checkpoint_id=tmp_path)
    other = TensorDict({"a": torch.zeros(2), "more": torch.zeros(2)})
    with pytest.raises(dcp.api.CheckpointException, match="more"):
        dcp.load({"td": other}, checkpoint_id=tmp_path)
    assert (other == 0).all()


RANK = """
import sys, warnings
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tensordict import TensorDict

step, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{folder}/{step}-group", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
whole = torch.arange(24.0).reshape(8, 3)

def made(value, placement):
    return TensorDict({"w": {"sharded": distribute_tensor(value, mesh, [placement])}, "plain": value[0].clone()})

if step == "save":
    td = made(whole, Shard(0))
    assert td["w", "sharded"].to_local().shape == (8 // world, 3)
    dcp.save({"td": td}, checkpoint_id=f"{folder}/checkpoint")
else:
    # Other ranks, along another dim: the planner brings the pieces where they belong.
    td = made(torch.zeros(8, 3), Shard(1) if step == "other-dim" else Shard(0))
    kept = td["w", "sharded"]
    dcp.load({"td": td}, checkpoint_id=f"{folder}/checkpoint")
    assert td["w", "sharded"] is kept
    assert torch.equal(kept.full_tensor(), whole) and torch.equal(td["plain"], whole[0])
dist.destroy_process_group()
"""


def run_ranks(step: str, world: int, folder: pathlib.Path) -> None:
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            command = [sys.executable, "-W", "ignore", "-c", RANK, step, str(rank), str(world), str(folder)]
            with open(folder / f"{step}-{rank}.log", "wb") as log:
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log))
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=300) == 0, (folder / f"{step}-{rank}.log").read_text()[-3000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.seconds
def test_resharding_between_processes(tmp_path: pathlib.Path) -> None:
    for step, world in (("save", 2), ("other-dim", 2), ("one", 1)):
        run_ranks(step, world, tmp_path)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    yield
    assert not torch.distributed.is_initialized()


def test_numbers_of_a_tensorclass_stay_values_in_a_plain_container() -> None:
    @tensorclass(autocast=True)
    class Counted:
        a: torch.Tensor
        count: int = 3

    loaded = TensorDict().load_state_dict(Counted(a=torch.ones(2), batch_size=[2]).state_dict())
    assert loaded.batch_size == (2,) and loaded["count"] == 3
