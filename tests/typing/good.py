"""Uses of tensorclasses that type checkers accept."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from tensordict import TensorClass, TensorDict, TensorDictStore, TypedTensorDict, save_checkpoint, tensorclass


class Inner(TensorClass):
    w: torch.Tensor
    note: str = ""


class Data(TensorClass):
    x: torch.Tensor
    inner: Inner | None = None
    label: str = "none"

    def doubled(self) -> torch.Tensor:
        return self.x * 2


class More(Data):
    count: ClassVar[int] = 0
    parts: list[int] = field(default_factory=list[int])
    anything: Any = None

    @property
    def total(self) -> torch.Tensor:
        return self.x.sum()

    @classmethod
    def of_none(cls) -> More:
        return cls(torch.zeros(0))


class Cast(TensorClass, autocast=True):
    x: torch.Tensor
    n: int = 0


T = TypeVar("T")


class Holding(TensorClass, Generic[T]):
    x: torch.Tensor
    held: T


@tensorclass
class Decorated:
    x: torch.Tensor
    label: str = "none"

    def doubled(self) -> torch.Tensor:
        return self.x * 2


@tensorclass(frozen=True)
class Frozen:
    x: torch.Tensor


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

more = More(torch.zeros(3), label="b", parts=[1], batch_size=[3])
assert_type(more.parts, list[int])
assert_type(more.total, torch.Tensor)
assert_type(More.of_none().to("cpu"), More)
assert_type(more.inner, Inner | None)
assert_type(Cast(torch.zeros(3), 2).n, int)
assert_type(Holding(torch.zeros(3), "a").held, str)
assert_type(Decorated(torch.zeros(3), label="a").doubled(), torch.Tensor)
assert_type(Frozen(torch.zeros(3)).x, torch.Tensor)
assert_type(Data.from_dict({"x": torch.zeros(3)}), Data)
assert_type(Data.from_namedtuple((1, 2)), Data)
assert_type(item.lock_(), Data)
assert_type(item.apply(torch.exp), Data)
assert_type(Data.fields()[0].name, str)


class Counted(TensorClass):
    """A class with something to do once its fields are there."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x + 1


# A container works as a data set.
for batch in DataLoader(TensorDict({"x": torch.zeros(4)}, batch_size=[4]), batch_size=2, shuffle=True):
    _ = batch["x"]
for batch in DataLoader(Data(x=torch.zeros(4), batch_size=[4]), batch_size=2):
    _ = batch.x


# Further arguments are for the library that connects, reads or writes.
def use_options() -> None:
    store = TensorDictStore(port=6379, ttl=60.0, batch_size=[3], password="secret")
    TensorDictStore.from_store(td_id=store.td_id, db=0, ssl=True)
    assert_type(item.to_tensordict().to_store(host="localhost", ttl=60.0), TensorDictStore)
    assert_type(Data.from_parquet("a.parquet", columns=["x"], filters=[("x", ">", 0)]), Data)
    assert_type(next(Data.from_parquet("a.parquet", batch_size_rows=2, dtype=torch.float32)), Data)
    assert_type(Data.from_csv("a.csv", dtype=torch.float32, sep=";"), Data)
    assert_type(Data.from_json("a.json", lines=True, nulls="mask", encoding="utf-8"), Data)
    save_checkpoint("folder", keep=3, model={"weight": torch.zeros(3)}, step=4)
