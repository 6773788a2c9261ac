"""Uses of tensorclasses that type checkers refuse; each line with `# bad` has one mistake.

Lines with `# mypy` are none: they show what mypy has no way to know. `docs/guides/typing.md` says what to write
instead.
"""

from __future__ import annotations

import torch

from tensordict import TensorClass, TensorDict, TypedTensorDict, stack, tensorclass


class Data(TensorClass):
    x: torch.Tensor
    label: str = "none"


class More(Data):
    count: int = 0


@tensorclass
class Decorated:
    x: torch.Tensor
    label: str = "none"


@tensorclass(frozen=True)
class Frozen:
    x: torch.Tensor


@tensorclass(kw_only=True)
class ByName:
    x: torch.Tensor


class ByNameToo(TensorClass, kw_only=True):
    x: torch.Tensor


class FrozenData(TensorClass, frozen=True):
    x: torch.Tensor


class Step(TypedTensorDict):
    obs: torch.Tensor


# A string within brackets is the name of a type to mypy, looked up in this file, whatever the class says.
class InBrackets(TensorClass["frozen"]):  # mypy
    x: torch.Tensor


def as_data(cls: type[object]) -> type[Data]:
    return Data


# What a decorator makes of a class mypy does not look at. A type that is `Decorated` and a `TensorClass` as well, which
# a decorator would have to return for indexing and `batch_size=`, no checker has a name for.
@as_data
class Replaced:
    pass


Replaced(torch.zeros(3))  # mypy
item = Data(torch.zeros(3), batch_size=[3])
Data(batch_size=[3])  # bad
Data(torch.zeros(3), "a", "b")  # bad
Data(torch.zeros(3), unknown=1)  # bad
Data(torch.zeros(3), label=3)  # bad
Data("x")  # bad
item.x = "a"  # bad
print(item.unknown)  # bad
item.label.missing()  # bad
print(item.reshape(3, 1).unknown)  # bad
item.x.missing()  # bad
More(torch.zeros(3), "a", "b")  # bad
More(torch.zeros(3)).count = "many"  # bad
Decorated()  # bad
Decorated(torch.zeros(3), unknown=1)  # bad
Decorated(torch.zeros(3), label=3)  # bad
Decorated(torch.zeros(3)).x = "a"  # bad
print(Decorated(torch.zeros(3)).unknown)  # bad
print(Frozen(torch.zeros(3)).y)  # bad
ByName(torch.zeros(3))  # bad
ByNameToo(torch.zeros(3))  # bad
print(ByName(x=torch.zeros(3)).x, ByNameToo(x=torch.zeros(3), batch_size=[3])[0].x)
Step(obs=torch.zeros(3)).obs = "a"  # bad
print(Step(obs=torch.zeros(3)).unknown)  # bad
Frozen(torch.zeros(3)).x = torch.ones(3)  # bad
Decorated(torch.zeros(3), batch_size=[3])  # bad
print(Decorated(torch.zeros(3))[0])  # bad
print(FrozenData(torch.zeros(3), batch_size=[3])[0].y)  # bad
FrozenData(torch.zeros(3)).x = torch.ones(3)  # bad
print(TensorDict()[0].unknown)  # bad
stack([TensorDict()]).missing()  # bad
TensorDict().memmap(unknown=1)  # bad
TensorDict().memmap(return_early=True).lock_()  # bad
