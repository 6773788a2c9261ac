"""Types that strict type checkers infer for results of this package, one a line."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from tensordict import (
    LazyConcatenatedTensorDict,
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    PackLayout,
    PersistentTensorDict,
    TensorClass,
    TensorCollection,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    cat,
    from_dict,
    from_module,
    from_pytree,
    lazy_cat,
    lazy_stack,
    load_memmap,
    maybe_dense_stack,
    merge_tensordicts,
    pad,
    pad_sequence,
    stack,
    tensorclass,
    unpad_sequence,
)
from tensordict.nn import TensorDictModule, TensorDictSequential


class Data(TensorClass):
    x: Tensor
    label: str = "none"


class Frozen(TensorClass, frozen=True):
    x: Tensor
    label: str = "none"


class More(Frozen, frozen=True):
    y: int = 0


@tensorclass
class Decorated(TensorClass):
    x: Tensor


@tensorclass(frozen=True)
class FrozenDecorated(TensorClass):
    x: Tensor


# Pyright understands options in brackets, and gets no ignore here. Mypy looks for a type called `frozen` in this file
# before it asks what `TensorClass` is; what the class is it knows all the same.
class InBrackets(TensorClass["frozen"]):  # type: ignore[name-defined, type-arg]
    x: Tensor


class TwoInBrackets(TensorClass["autocast", "shadow"]):  # type: ignore[name-defined, type-arg]
    x: Tensor
    n: int = 0


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def scaled(name: str, leaf: Tensor) -> Tensor:
    return leaf * len(name)


x = torch.zeros(3)
mask = torch.tensor([True, False, True])
td = TensorDict({"a": x, "b": {"c": x}}, [3])
data = Data(x, batch_size=[3])
lazy = lazy_stack([td, td])

# --- reading and indexing ---------------------------------------------------------------------------------------------

assert_type(td["a"], Any)
assert_type(td["b", "c"], Any)
assert_type(td["b", ("c",)], Any)
assert_type(td[0], TensorDict)
assert_type(td[:2], TensorDict)
assert_type(td[...], TensorDict)
assert_type(td[None], TensorDict)
assert_type(td[()], TensorDict)
assert_type(td[mask], TensorDict)
assert_type(td[..., 0], TensorDict)
assert_type(td[[0, 1]], TensorDict)
assert_type(data[0], Data)
assert_type(data[mask].x, Tensor)
assert_type(lazy[0], TensorCollection)
assert_type(lazy[:1], LazyStackedTensorDict)
assert_type(iter(td), Iterator[TensorDict])
assert_type([part.x for part in data], list[Tensor])
assert_type(td.unbind(0), tuple[TensorDict, ...])
assert_type(td.get_item_shape("a"), torch.Size)

# --- tensorclasses and their options ----------------------------------------------------------------------------------

assert_type(Frozen(x, "a", batch_size=[3], device="cpu")[0], Frozen)
assert_type(Frozen(x, batch_size=[3]).batch_size, torch.Size)
assert_type(More(x, y=1, batch_size=[3])[1:].y, int)
assert_type(Decorated(x, batch_size=[3])[0], Decorated)
assert_type(FrozenDecorated(x, batch_size=[3])[0].x, Tensor)
assert_type(InBrackets(x, batch_size=[3])[0].x, Tensor)
assert_type(TwoInBrackets(x, 1, batch_size=[3], device="cpu", names=["time"], lock=True)[:2], TwoInBrackets)
assert_type(TwoInBrackets(x, n=2).batch_size, torch.Size)
assert_type(TwoInBrackets(x).n, int)
assert_type(data.to_tensordict(), TensorDict)

# --- stacks -----------------------------------------------------------------------------------------------------------

assert_type(stack([td, td]), TensorDict)
assert_type(stack([data, data], dim=1), Data)
assert_type(stack([x, x]), Tensor)
assert_type(cat([data, data]), Data)
assert_type(lazy, LazyStackedTensorDict)
assert_type(lazy_stack([data, data]), Data)
assert_type(maybe_dense_stack([td, td]), TensorDictBase)
assert_type(lazy_cat([td, td]), LazyConcatenatedTensorDict)
assert_type(lazy_cat([td, td])[1:], LazyConcatenatedTensorDict)
assert_type(lazy_cat([td, td])[mask], TensorDict)
assert_type(lazy_cat([td, td]).select("a"), LazyConcatenatedTensorDict)
assert_type(lazy_cat([data, data]), Data)
assert_type(TensorDict.stack([td, td]), TensorDict)
assert_type(TensorDict.lazy_stack([td, td]), LazyStackedTensorDict)
assert_type(td.to_lazystack(), LazyStackedTensorDict)
assert_type(lazy.densify(), TensorDict)
assert_type(pad(td, [0, 1]), TensorDict)
assert_type(pad_sequence([td, td]), TensorDict)
assert_type(pad_sequence([data, data], padding_value={"x": 1}, padding_side="left"), Data)
assert_type(unpad_sequence(td, mask), LazyStackedTensorDict)
assert_type(td.pack(), tuple[Tensor, PackLayout])
assert_type(merge_tensordicts(td, td), TensorDict)

# --- functions of entries ---------------------------------------------------------------------------------------------

assert_type(td.apply(torch.exp), TensorDict)
assert_type(data.apply(torch.exp), Data)
assert_type(td.apply(torch.exp, filter_empty=True), TensorDict | None)
assert_type(td.named_apply(scaled), TensorDict)
assert_type(td + 1, TensorDict)
assert_type(td.sum(0), TensorDict)
assert_type(td.mean(dim="feature"), TensorDict)
assert_type(td.sum(reduce=True), Tensor)
assert_type(td.amax(), TensorDict)
assert_type(td.min(), TensorDict)
assert_type(td.max(0), torch.return_types.max)
assert_type((td == td).all(), bool)
assert_type((td == td).any(0), TensorDict)
assert_type(data.to("cpu").reshape(3, 1), Data)
assert_type(td.map(lambda part: part.sum(reduce=True)), Tensor)
assert_type(td.apply(lambda leaf, other: leaf + other, td), TensorDict)
assert_type(td.keys(), KeysView[str])
assert_type(td.keys(True, True), KeysView[str | tuple[str, ...]])
assert_type(td.items(), ItemsView[str, Any])
assert_type(TensorDict.from_any({"a": x}), TensorDict)
assert_type(from_pytree([x, {"a": x}]), TensorDict)
assert_type(NonTensorData("a").to_tensordict(), NonTensorData)
assert_type(MetaData("a").data, str)

# --- containers whose results are others ------------------------------------------------------------------------------

with td.to_h5("/tmp/saved.h5") as stored:
    assert_type(stored[0], TensorDictBase)
    assert_type(stored["a"], Any)
    assert_type(stored + 1, TensorDict)
    assert_type(stored.apply(torch.exp), TensorDict)
    assert_type(stored.clone(), TensorDict)
    assert_type(stored.clone(newfile="/tmp/copy.h5"), PersistentTensorDict)
    assert_type(stored.lock_(), PersistentTensorDict)
params = TensorDictParams(td)
assert_type(params.data, TensorDict)
assert_type(params * 2, TensorDict)
assert_type(params.clone(), TensorDictParams)
assert_type(lazy.unbind(0), tuple[TensorCollection, ...])

# --- modules ----------------------------------------------------------------------------------------------------------

net = TensorDictModule(nn.Linear(1, 1), in_keys=["a"], out_keys=["y"])
seq = TensorDictSequential(net, net)
assert_type(net(td), TensorDict)
assert_type(net(data), Data)
assert_type(seq(td, tensordict_out=data), Data)
assert_type(seq(x), Any)
assert_type(seq.select_out_keys("y"), TensorDictSequential)
assert_type(seq[:1], TensorDictSequential)
assert_type(net.reset_parameters_recursive(), None)
assert_type(net.reset_parameters_recursive(td), TensorDict)

# --- files and other structures ---------------------------------------------------------------------------------------

assert_type(td.memmap("/tmp/saved"), TensorDict)
assert_type(td.memmap("/tmp/saved", return_early=True), Future[TensorDict])
assert_type(data.save("/tmp/saved", checksum=True), Data)
assert_type(TensorDict.load_memmap("/tmp/saved"), TensorDict)
assert_type(Data.load("/tmp/saved"), Data)
assert_type(load_memmap("/tmp/saved"), TensorCollection)
assert_type(td.to_h5("/tmp/saved.h5"), PersistentTensorDict)
assert_type(TensorDict.from_h5("/tmp/saved.h5"), PersistentTensorDict)
assert_type(TensorDict.from_zarr("/tmp/saved.zarr"), PersistentTensorDict)
assert_type(td.consolidate(), TensorDict)
assert_type(from_dict({"a": x}), TensorDict)
assert_type(from_module(nn.Linear(1, 1)), TensorDict)
assert_type(TensorDict.from_module(nn.Linear(1, 1), as_module=True), TensorDictParams)
assert_type(td.to_namedtuple(Pair), Pair)
assert_type(td.to_dict(), dict[str, Any])
