"""Uses of tensorclasses that type checkers accept."""

from __future__ import annotations

from typing import assert_type

import torch

from tensordict import TensorClass, TypedTensorDict


class Inner(TensorClass):
    w: torch.Tensor
    note: str = ""


class Data(TensorClass):
    x: torch.Tensor
    inner: Inner | None = None
    label: str = "none"

    def doubled(self) -> torch.Tensor:
        return self.x * 2


class Step(TypedTensorDict):
    obs: torch.Tensor


item = Data(torch.zeros(3), Inner(w=torch.ones(3)), label="a", batch_size=[3], device="cpu", names=["time"], lock=False)
assert_type(item.x, torch.Tensor)
assert_type(item.inner, Inner | None)
assert_type(item.label, str)
assert_type(item.batch_size, torch.Size)
assert_type(item.clone(), Data)
assert_type(item.reshape(3, 1), Data)
assert_type(item.doubled(), torch.Tensor)
assert_type(Data.from_tensordict(item.to_tensordict()), Data)
item.x = torch.ones(3)
item.batch_size = []
assert_type(Step(obs=torch.zeros(3), batch_size=[3]).obs, torch.Tensor)
