"""Containers of `DTensor` leaves: the parameters of modules that FSDP2 shards over real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tensordict import TensorDict, TensorDictParams
from tensordict.core.exceptions import SaveError, TransferError

pytestmark = pytest.mark.seconds


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(3, tmp_path_factory.mktemp("three"))
    yield ranks
    ranks.close()


def sharded(seed: int) -> tuple[nn.Module, TensorDict]:
    """A module whose parameters are sharded over all ranks, in parts of unequal sizes, and what they are as a whole."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    whole = TensorDict.from_module(net).data.clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net, whole


def _from_module(rank: int) -> None:
    net, whole = sharded(0)
    params = TensorDict.from_module(net)
    assert all(isinstance(leaf, DTensor) for leaf in params.values(True, True))
    assert params["0", "weight"] is net[0].weight
    full = params.full_tensor()
    assert not any(isinstance(leaf, DTensor) for leaf in full.values(True, True))
    assert (full == whole).all()
    assert full["0", "weight"].shape == (7, 5)
    assert (TensorDict.from_module(net, as_module=True).full_tensor() == whole).all()
    assert isinstance(TensorDict.from_module(net, as_module=True), TensorDictParams)
    state = TensorDict.from_module(net, use_state_dict=True)
    assert all(isinstance(leaf, DTensor) for leaf in state.values(True, True))
    assert (state.full_tensor() == whole).all()


def test_from_module_and_full_tensor(two: Ranks) -> None:
    two.run(_from_module)


def _training(rank: int) -> None:
    """Gradients, arithmetic and writing in place on what is sharded."""
    net, whole = sharded(1)
    inputs = torch.arange(10.0).view(2, 5) / 10
    net(inputs).square().sum().backward()
    params = TensorDict.from_module(net)
    gradients = params.apply(lambda parameter: parameter.grad)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    whole.to_module(plain, return_swap=False)
    plain(inputs).square().sum().backward()
    expected = TensorDict.from_module(plain).apply(lambda parameter: parameter.grad)
    for key, gradient in gradients.full_tensor().items(True, True):
        torch.testing.assert_close(gradient, expected[key])
    halved = (params.data * 0.5).full_tensor()
    assert (halved == whole * 0.5).all()
    before = params.data.clone()
    params.data.mul_(2)
    assert (params.data.full_tensor() == whole * 2).all()
    assert (TensorDict.from_module(net).data.full_tensor() == whole * 2).all()
    params.data.update_(before)
    torch.testing.assert_close(net(inputs), plain(inputs))


def test_gradients_arithmetic_and_writing(two: Ranks) -> None:
    two.run(_training)


def _state_dict(rank: int) -> None:
    net, whole = sharded(2)
    params = TensorDict.from_module(net).data
    state = {name: value.clone() for name, value in params.state_dict().items()}
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    params.zero_()
    assert (params.full_tensor() == 0).all()
    params.load_state_dict(state)
    assert (params.full_tensor() == whole).all()
    assert all(isinstance(leaf, DTensor) for leaf in params.values(True, True))


def test_state_dict(two: Ranks) -> None:
    two.run(_state_dict)


def _save(rank: int, folder: str) -> None:
    net, _ = sharded(3)
    params = TensorDict.from_module(net).data
    params["note"] = "step 7"
    dcp.save({"params": params.state_dict(values=True)}, checkpoint_id=folder)


def _load(rank: int, folder: str) -> None:
    _, whole = sharded(3)
    net, other = sharded(4)
    params = TensorDict.from_module(net).data
    params["note"] = "none"
    assert not (params.exclude("note").full_tensor() == whole).all()
    state = params.state_dict(values=True)
    dcp.load({"params": state}, checkpoint_id=folder)
    params.load_state_dict(state)
    assert params["note"] == "step 7"
    assert (TensorDict.from_module(net).data.full_tensor() == whole).all()
    # Into whole tensors too, on every rank.
    alone = other.zero_()
    alone["note"] = ""
    state = alone.state_dict(values=True)
    dcp.load({"params": state}, checkpoint_id=folder)
    alone.load_state_dict(state)
    assert (alone.exclude("note") == whole).all()


@pytest.mark.filterwarnings("ignore")
def test_saved_by_two_ranks_and_loaded_by_three(two: Ranks, three: Ranks, tmp_path: Any) -> None:
    two.run(_save, str(tmp_path / "two"))
    three.run(_load, str(tmp_path / "two"))
    three.run(_save, str(tmp_path / "three"))
    two.run(_load, str(tmp_path / "three"))


def _refused(rank: int) -> None:
    net, whole = sharded(5)
    params = TensorDict.from_module(net).data
    if rank == 0:
        with pytest.raises(SaveError, match=r"\('0', 'weight'\).*DTensor.*full_tensor"):
            params.send(1)
    else:
        with pytest.raises(TransferError, match="nothing was sent.*DTensor"):
            whole.clone().recv(0)
    with pytest.raises(TransferError, match="DTensor"):
        params.all_reduce()
    full = params.full_tensor()
    full.send(1) if rank == 0 else full.zero_().recv(0)
    assert (full == whole).all()


def test_sending_needs_full_tensors(two: Ranks) -> None:
    two.run(_refused)
