"""Names that the programs use: `from differ.prelude import *` lets a minimised program run alone."""

# ruff: noqa: F401, F403
import collections
import contextlib
import copy
import dataclasses
import io
import math
import operator
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

import tensordict
from tensordict import *
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    UnbatchedTensor,
    is_tensor_collection,
    merge_tensordicts,
    pad,
    pad_sequence,
    tensorclass,
    unravel_key,
    unravel_key_list,
)
from tensordict import utils as tdu
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    dispatch,
    set_interaction_type,
)
from tensordict.nn.distributions import OneHotCategorical

warnings.simplefilter("ignore")

f16, f32, f64, bf16, c64 = torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64
i8, i16, i32, i64, u8, bl = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool


def T(*shape: int, dt: torch.dtype = f32, s: int = 0, rg: bool = False) -> torch.Tensor:
    """A tensor of small numbers that depend on `s` only."""
    values = (torch.arange(math.prod(shape)) * 7 + s * 5) % 13 - 4
    if dt is bl:
        values = values % 2 == 0
    elif dt is u8:
        values = values.abs()
    values = values.to(dt)
    if dt.is_floating_point:
        values = values / 2
    values = values.reshape(shape)
    return values.requires_grad_() if rg else values


def J(rows: int, *feature: int, dt: torch.dtype = f32, s: int = 0) -> torch.Tensor:
    """A ragged leaf with `rows` rows of 1 to 3 elements."""
    tensors = [T((s + i) % 3 + 1, *feature, dt=dt, s=i) for i in range(rows)]
    return torch.nested.nested_tensor(tensors, layout=torch.jagged)


@tensorclass
class TCA:
    a: torch.Tensor
    b: Any = None
    s: str = None


class TCB(TensorClass):
    a: torch.Tensor
    x: Optional[torch.Tensor] = None  # noqa: UP045
    child: Any = None

    @property
    def double_a(self) -> torch.Tensor:
        return self.a * 2


class TCN(TensorClass["nocast"]):
    a: torch.Tensor
    s: str = "d"
    n: Any = 3


class TCC(TensorClass["autocast"]):
    a: torch.Tensor
    s: str = "d"
    n: int = 3


class TCO(TensorClass["tensor_only"]):
    a: torch.Tensor
    b: torch.Tensor = None


class TCF(TensorClass["frozen"]):
    a: torch.Tensor
    b: Any = None


class TCS(TensorClass["shadow"]):
    a: torch.Tensor
    keys: Any = None
    values: Any = None


@tensorclass(frozen=True)
class TCD:
    a: torch.Tensor
    b: Any = None


class TCM(TensorClass["autocast"]):
    a: torch.Tensor
    i: int = 0
    f: float = 0.0
    s: str = ""
    t: TCA = None
    d: TensorDict = None


class TCX(TensorClass["nocast", "frozen"]):
    a: torch.Tensor
    b: Any = None


class TCE(TensorClass["tensor_only", "frozen"]):
    a: torch.Tensor
    b: torch.Tensor = None


# Level 0.14.3 lacks these options, so the names stay undefined there.
with contextlib.suppress(TypeError):

    class TCK(TensorClass, kw_only=True, cast_filter=lambda key, value: key[-1] == "a"):
        a: torch.Tensor
        b: torch.Tensor = None


with contextlib.suppress(TypeError):

    @tensorclass(skip_post_init_on_rebuild=True)
    class TCP:
        a: torch.Tensor
        n: int = 0

        def __post_init__(self) -> None:
            self.n = (self.n or 0) + 1


with contextlib.suppress(ImportError):
    from tensordict import TypedTensorDict

    class TDT(TypedTensorDict):
        a: torch.Tensor
        b: torch.Tensor = torch.zeros(())


class Point(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Rec:
    a: Any
    b: Any


class Net(torch.nn.Module):
    """Two layers and a buffer, with weights that do not depend on a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(2, 3)
        self.register_buffer("buf", torch.zeros(3))
        self.seq = torch.nn.Sequential(torch.nn.Linear(3, 2))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(T(*parameter.shape, s=i))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.seq(self.l(x) + self.buf)


class IndependentNormal(torch.distributions.Independent):
    """A normal distribution whose last dim is an event."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(torch.distributions.Normal(loc, scale), 1)

    @property
    def deterministic_sample(self) -> torch.Tensor:
        return self.base_dist.loc


class TanhNormal(torch.distributions.TransformedDistribution):
    """A distribution without a mean."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(torch.distributions.Normal(loc, scale), torch.distributions.TanhTransform())


class Disp(torch.nn.Module):
    """A module that is called with a container or with its entries."""

    in_keys = ["a", ("n", "b")]
    out_keys = ["m1", "m2"]

    @dispatch
    def forward(self, tensordict: Any) -> Any:
        tensordict["m1"] = tensordict["a"] + 1
        return tensordict.set("m2", tensordict["n", "b"] * 2)


class Disp2(TensorDictModuleBase):
    """The same, with keys of the instance, another separator and a container of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["a", "b"], ["m1"]

    @dispatch(separator="__", auto_batch_size=False)
    def forward(self, tensordict: Any) -> Any:
        return TensorDict({"m1": tensordict["a"]}, tensordict.batch_size)


_folder = tempfile.gettempdir()
_paths = 0


def enter(folder: str) -> None:
    """Make new paths in `folder` from now on."""
    global _folder, _paths
    _folder, _paths = folder, 0


def P(end: str = "") -> str:
    """A new path."""
    global _paths
    _paths += 1
    return os.path.join(_folder, f"p{_paths}{end}")


def roundtrip(x: Any) -> Any:
    """`x` through pickle."""
    return pickle.loads(pickle.dumps(x))


def torchsave(x: Any, **options: Any) -> Any:
    """`x` through `torch.save`."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False, **options)


def under(setting: Any, function: Callable[[], Any]) -> Any:
    """Call a function within the block of a setting."""
    with setting:
        return function()


def leaves(x: Any) -> Iterator[torch.Tensor]:
    """All tensors that a result holds."""
    if isinstance(x, torch.Tensor):
        yield x
    elif is_tensor_collection(x):
        if tensordict.is_non_tensor(x):
            return
        parts = x.tensordicts if isinstance(x, LazyStackedTensorDict) else [v for _, v in x.items()]
        for part in parts:
            yield from leaves(part)
    elif isinstance(x, dict):
        for part in x.values():
            yield from leaves(part)
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from leaves(part)


def mutate(x: Any) -> None:
    """Overwrite every tensor of a result in place."""
    for leaf in list(leaves(x)):
        leaf = leaf.detach()
        if leaf.is_nested:
            leaf = leaf.values()
        if leaf.device.type != "meta" and leaf.numel():
            leaf.fill_(not bool(leaf.flatten()[0]) if leaf.dtype is bl else 77)


def _takes_keys(x: Any) -> bool:
    if not is_tensor_collection(x) or isinstance(x, torch.Tensor):
        return False
    return not (tensordict.is_non_tensor(x) or tensordict.is_tensorclass(x))


def graft(x: Any) -> None:
    """Add a key to every container of a result."""
    if isinstance(x, (list, tuple)):
        for part in x:
            graft(part)
    elif not _takes_keys(x):
        return
    elif isinstance(x, LazyStackedTensorDict):
        for member in x.tensordicts:
            graft(member)
    else:
        for _, part in list(x.items()):
            graft(part)
        x["grafted"] = torch.zeros(x.batch_size)


def _is_container(x: Any) -> bool:
    return is_tensor_collection(x) and not isinstance(x, torch.Tensor) and not tensordict.is_non_tensor(x)


def _of_parts(make: Callable[[Any], Any], x: Any) -> Any:
    """`x`, made anew if it is a container; the containers of a list one by one."""
    if type(x) in (list, tuple):
        return type(x)(_of_parts(make, part) for part in x)
    if not _is_container(x):
        return x
    out = make(x)
    if x.names != out.names:
        out.names = x.names
    return out.lock_() if x.is_locked else out


def as_dense(x: Any) -> Any:
    """The same containers, without lazy stacks."""
    return _of_parts(_dense, x)


def _dense(x: Any) -> Any:
    if isinstance(x, LazyStackedTensorDict):
        return torch.stack([as_dense(member) for member in x.tensordicts], x.stack_dim).contiguous()
    out = x.copy().unlock_()
    for key, part in x.items():
        if _is_container(part):
            out.set(key, as_dense(part))
    return out


def with_leaves(x: Any) -> Any:
    """The same containers with a leaf more in each, except in tensorclasses."""
    return _of_parts(_filled, x)


def _filled(x: Any) -> Any:
    if isinstance(x, LazyStackedTensorDict):
        return LazyStackedTensorDict(*map(with_leaves, x.tensordicts), stack_dim=x.stack_dim)
    out = x.copy().unlock_()
    for key, part in x.items():
        if _is_container(part):
            out.set(key, with_leaves(part))
    return out if tensordict.is_tensorclass(x) else out.set("added", torch.zeros(x.batch_size))


def as_tensordict(x: Any) -> Any:
    """The same containers as `TensorDict`s."""
    return _of_parts(lambda part: part.to_tensordict(), x)


def fresh(x: Any) -> Any:
    """The same containers over memory of their own."""
    return _of_parts(lambda part: part.clone().unlock_(), x)


def plainest(x: Any) -> Any:
    """The same containers, as dense `TensorDict`s with a leaf more and memory of their own."""
    return fresh(with_leaves(as_dense(as_tensordict(x))))
