"""Uses of tensorclasses that type checkers refuse; each line with `# bad` has one mistake.

Lines with `# mypy` are none: they show what mypy has no way to know. `docs/guides/typing.md` says what to write
instead.
"""

from __future__ import annotations

import torch

from tensordict import (
    LazyStackedTensorDictStore,
    TensorClass,
    TensorDict,
    TensorDictStore,
    TypedTensorDict,
    from_dict,
    save_checkpoint,
    stack,
    tensorclass,
)


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
TensorDictStore(port="6379")  # bad
TensorDictStore(ttl="60")  # bad
TensorDictStore.from_store(td_id="a", db="0")  # bad
TensorDictStore.from_tensordict(TensorDict(), host=1)  # bad
TensorDictStore.from_dict({}, prefix=1)  # bad
LazyStackedTensorDictStore(count=1, inner_batch_size=[], cache_metadata="no")  # bad
LazyStackedTensorDictStore.from_store(td_id="a", backend=1)  # bad
LazyStackedTensorDictStore.from_lazy_stack(TensorDict(), unix_socket_path=1)  # bad
TensorDict().to_store(port="6379")  # bad
TensorDict.from_parquet("a.parquet", columns=1)  # bad
TensorDict.from_parquet("a.parquet", batch_size_rows=2, dtype="float32")  # bad
TensorDict.from_csv("a.csv", dtype="float32")  # bad
TensorDict.from_json("a.json", nulls="drop")  # bad
save_checkpoint("folder", keep="all")  # bad
save_checkpoint("folder", return_early=True, overwrite="yes")  # bad
from_dict({}, batch_dims="1")  # bad
TensorDict().map_iter(len, chunksize="2")  # bad
