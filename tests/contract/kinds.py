"""The registry of container kinds: each has a factory and its capabilities.

A later container joins the suite by one more `Kind` in `KINDS`. Tests read the capabilities; they never ask for a
class or a name.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from contract.model import Path, Plain
from tensordict import (
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    TensorDictParams,
    lazy_cat,
    lazy_stack,
    set_lazy_legacy,
)

# Nested containers with more batch dims than their parent, and these dims.
EXTRA: dict[Path, tuple[int, ...]] = {("b", "d"): (5,)}


@dataclass(frozen=True)
class Kind:
    """How to make a container of one kind.

    name: the test id.
    build: (plain content, kind, empty folder) -> container with that content.
    locked: whether it is built locked; `unlock_` then makes it writable.
    keeps_identity: whether the tensor that was written out of place is the very tensor that is read.
    keeps_order: whether keys come in the order of writing.
    holds_views: whether indexing with ints and slices gives views of the entries.
    index_writes: whether writes into the container at any index, a list or a mask too, are writes into this one.
    resizes: whether the batch size can be set.
    gives_own_class: whether the results of operations are of the same class.
    reads_memory: whether the tensor that a key gives is the memory of the entry, so that writing to it writes there.
    in_memory: whether the entries are in memory, each at its address, and are pickled with the container; otherwise
        they are in a file that it is over.
    any_values: whether any value can be an entry, rather than what a file can hold.
    holds_values: whether values that are no tensors can be entries.
    any_names: whether entries of any name can be added, not only declared fields.
    is_module: whether it is a module of torch, too: its state dict, pickle and `repr` are those of one, and its tensors
        are not exchanged for memory-mapped ones.
    slow: whether it is left to `make test-slow`, as others show the same and this one takes a minute.
    library: the module that the kind needs beside torch; its tests are skipped where it is not installed.
    python: the oldest version of Python that this library supports.
    stacked_at: the nested container that is a lazy stack.
    stack_dims: the dims that lazy stacks run over, the outermost first, each of the dims that are left to it.
    """

    name: str
    build: Callable[[Plain, Kind, pathlib.Path], Any]
    batch_size: tuple[int, ...] = (3, 4)
    nested: bool = True
    device: str | None = None
    names: tuple[str, ...] | None = None
    locked: bool = False
    keeps_identity: bool = True
    keeps_order: bool = True
    holds_views: bool = True
    index_writes: bool = False
    resizes: bool = True
    gives_own_class: bool = True
    reads_memory: bool = True
    in_memory: bool = True
    any_values: bool = True
    holds_values: bool = True
    any_names: bool = True
    is_module: bool = False
    slow: bool = False
    library: str = ""
    python: tuple[int, int] = (3, 10)
    stack_dims: tuple[int, ...] = ()
    stacked_at: Path = ()

    def plain(self) -> Plain:
        """The content as fresh plain tensors, each call the same."""
        return content(self.batch_size, self.nested)

    def pieces(self, path: Path) -> int:
        """How many tensors hold the entry at `path`."""
        sizes = list(self.batch_size)
        count = math.prod(sizes.pop(dim) for dim in self.stack_dims)
        return count if path[: len(self.stacked_at)] == self.stacked_at else 1

    @property
    def reason_to_skip(self) -> str:
        """Why this process cannot build the kind; empty where it can."""
        if sys.version_info < self.python:
            return "{} needs Python {}.{}".format(self.library, *self.python)
        if self.library and importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return ""

    @property
    def stacked(self) -> set[int]:
        """The batch dims that lazy stacks run over."""
        dims = list(range(len(self.batch_size)))
        return {dims.pop(dim) for dim in self.stack_dims}

    def calls(self, path: Path) -> int:
        """How many entries at `path` the containers have that `apply` goes through: one for each member of a stack."""
        return self.pieces(path) if path[: len(self.stacked_at)] != path[:1] or not self.stacked_at else 1

    @property
    def extra(self) -> dict[Path, tuple[int, ...]]:
        return EXTRA if self.nested else {}


def content(batch_size: tuple[int, ...], nested: bool) -> Plain:
    """Entries of several dtypes and shapes that share the leading `batch_size`; all elements of a leaf differ."""

    def ramp(*rest: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (*batch_size, *rest)
        return torch.arange(math.prod(shape)).reshape(shape).to(dtype)

    plain: Plain = {"a": ramp(2, dtype=torch.int64), "mask": ramp() % 2 == 0}
    if nested:
        plain["b"] = {"c": ramp() + 0.5, "d": {"e": ramp(5, dtype=torch.float64)}}
    plain["z"] = ramp(1, 2)
    return plain


def build_dense(plain: Plain, kind: Kind, folder: pathlib.Path) -> TensorDict:
    names = None if kind.names is None else list(kind.names)
    return _tree(plain, kind, (), names)


def _tree(plain: Plain, kind: Kind, path: Path, names: list[str] | None) -> TensorDict:
    entries = {
        name: _tree(value, kind, (*path, name), None) if isinstance(value, dict) else value.clone()
        for name, value in plain.items()
    }
    batch_size = (*kind.batch_size, *EXTRA.get(path, ()))
    return TensorDict(entries, batch_size=batch_size, device=kind.device, names=names)


def build_locked(plain: Plain, kind: Kind, folder: pathlib.Path) -> TensorDict:
    return build_dense(plain, kind, folder).lock_()


def build_consolidated(plain: Plain, kind: Kind, folder: pathlib.Path) -> TensorDict:
    return build_dense(plain, kind, folder).consolidate()


def build_memmap(plain: Plain, kind: Kind, folder: pathlib.Path) -> TensorDict:
    return build_dense(plain, kind, folder).memmap_(folder / "saved")


def build_anonymous(plain: Plain, kind: Kind, folder: pathlib.Path) -> TensorDict:
    return build_dense(plain, kind, folder).memmap_()


def build_lazy_view(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    dense = build_dense(plain, kind, folder)
    source = dense.transpose(0, 1).clone()
    with set_lazy_legacy(True):
        return source.transpose(0, 1)


def build_lazy(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    return _stacked(build_dense(plain, kind, folder), kind.stack_dims)


def _stacked(dense: TensorDict, dims: tuple[int, ...]) -> Any:
    """Lazy stacks along these dims, each of the dims that the ones before it leave."""
    if not dims:
        return dense.clone()
    members = [_stacked(member, dims[1:]) for member in dense.unbind(dims[0])]
    return LazyStackedTensorDict(*members, stack_dim=dims[0], stack_dim_name=dense.names[dims[0]])


def build_lazy_locked(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    return build_lazy(plain, kind, folder).lock_()


def build_lazy_inside(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    dense = build_dense(plain, kind, folder)
    dense["b"] = _stacked(dense["b"], kind.stack_dims)
    return dense


def build_h5(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    made = build_dense(plain, kind, folder).to_h5(folder / "saved.h5")
    if kind.device is None:
        return made
    made.close()
    return TensorDict.from_h5(folder / "saved.h5", mode="r+", device=kind.device)


def build_h5_locked(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    return build_h5(plain, kind, folder).lock_()


def build_lazy_cat(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    dense = build_dense(plain, kind, folder)
    return lazy_cat([part.clone() for part in dense.split([1, 0, len(dense) - 1], 0)])


def start_redis() -> str:
    """Return the socket of the server that all tests of this process share."""
    # Imported here, so that the other kinds run where redis is not installed.
    from redis_server import shared_socket

    return shared_socket()


def build_redis(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    return build_dense(plain, kind, folder).to_store(unix_socket_path=start_redis())


def build_redis_lazy(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    return build_lazy(plain, kind, folder).to_store(unix_socket_path=start_redis())


def build_zarr(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    path = folder / "saved.zarr"
    shutil.copytree(_zarr_of(kind), path)
    return TensorDict.from_zarr(path, mode="r+", device=kind.device)


@functools.cache
def _zarr_of(kind: Kind) -> str:
    """A folder that is copied, which is three times faster than to write it."""
    path = f"{_folder.name}/{kind.name}"
    build_dense(kind.plain(), kind, pathlib.Path(path)).to_zarr(path).close()
    return path


_folder = tempfile.TemporaryDirectory()


def build_zarr_locked(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    return build_zarr(plain, kind, folder).lock_()


def build_params(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    """Of buffers, which may be written in place as parameters may not."""
    return TensorDictParams(build_dense(plain, kind, folder), no_convert=True)


def build_params_frozen(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    """Of parameters, beside tensors of integers, which are buffers."""
    return TensorDictParams(build_dense(plain, kind, folder)).requires_grad_(False)


def build_params_locked(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    return build_params(plain, kind, folder).lock_()


LAZY = dict.fromkeys(("keeps_identity", "gives_own_class", "reads_memory"), False)

VIEW = dict.fromkeys(("keeps_identity", "resizes", "gives_own_class"), False)

FILE = dict.fromkeys(
    ("keeps_identity", "keeps_order", "holds_views", "gives_own_class", "reads_memory", "in_memory", "any_values"),
    False,
)

VIEWED: dict[str, Any] = {**FILE, "index_writes": True}

CAT = dict.fromkeys(("keeps_identity", "holds_views", "resizes", "gives_own_class", "reads_memory", "in_memory"), False)

PARAMS: dict[str, Any] = {"gives_own_class": False, "is_module": True}

KINDS: list[Kind] = [
    Kind("dense", build_dense, nested=False),
    Kind("nested", build_dense),
    Kind("one-dim", build_dense, batch_size=(4,)),
    Kind("no-dim", build_dense, batch_size=()),
    Kind("unit-dim", build_dense, batch_size=(2, 1, 3)),
    Kind("named", build_dense, names=("time", "env")),
    Kind("on-device", build_dense, device="cpu"),
    Kind("locked", build_locked, locked=True),
    Kind("consolidated", build_consolidated, locked=True),
    Kind("memmap", build_memmap, device="cpu", locked=True),
    Kind("memmap-anonymous", build_anonymous, batch_size=(4,), device="cpu", locked=True),
    Kind("lazy-view", build_lazy_view, **VIEW),
    Kind("lazy-view-named", build_lazy_view, batch_size=(2, 1, 3), names=("time", "env", "unit"), **VIEW),
    Kind("lazy", build_lazy, stack_dims=(0,), **LAZY),
    Kind("lazy-dim-1", build_lazy, stack_dims=(1,), resizes=False, **LAZY),
    Kind("lazy-one-dim", build_lazy, batch_size=(4,), stack_dims=(0,), resizes=False, **LAZY),
    Kind("lazy-unit-dim", build_lazy, batch_size=(2, 1, 3), stack_dims=(1,), resizes=False, **LAZY),
    Kind("lazy-in-lazy", build_lazy, stack_dims=(1, 0), resizes=False, **LAZY),
    Kind("lazy-named", build_lazy, names=("time", "env"), stack_dims=(1,), resizes=False, **LAZY),
    Kind("lazy-on-device", build_lazy, device="cpu", stack_dims=(0,), **LAZY),
    Kind("lazy-locked", build_lazy_locked, locked=True, stack_dims=(0,), **LAZY),
    Kind("lazy-inside", build_lazy_inside, stack_dims=(0,), stacked_at=("b",), **{**LAZY, "gives_own_class": True}),
    Kind("h5", build_h5, library="h5py", **VIEWED),
    Kind(
        "h5-named",
        build_h5,
        library="h5py",
        batch_size=(2, 1, 3),
        names=("time", "env", "unit"),
        device="cpu",
        **VIEWED,
    ),
    Kind("h5-locked", build_h5_locked, library="h5py", locked=True, **VIEWED),
    Kind("lazy-cat", build_lazy_cat, **CAT),
    Kind("lazy-cat-named", build_lazy_cat, batch_size=(2, 1, 3), names=("time", "env", "unit"), device="cpu", **CAT),
    Kind("redis", build_redis, library="redis", **FILE),
    Kind(
        "redis-lazy",
        build_redis_lazy,
        library="redis",
        slow=True,
        stack_dims=(0,),
        holds_values=False,
        **{**FILE, "keeps_order": True},
    ),
    Kind("zarr", build_zarr, library="zarr", python=(3, 11), **VIEWED),
    Kind(
        "zarr-named",
        build_zarr,
        slow=True,
        library="zarr",
        python=(3, 11),
        batch_size=(2, 1, 3),
        names=("time", "env", "unit"),
        device="cpu",
        **VIEWED,
    ),
    Kind("zarr-locked", build_zarr_locked, slow=True, library="zarr", python=(3, 11), locked=True, **VIEWED),
    Kind("params", build_params, keeps_identity=False, **PARAMS),
    Kind("params-frozen", build_params_frozen, keeps_identity=False, **PARAMS),
    Kind("params-named", build_params, names=("time", "env"), device="cpu", keeps_identity=False, **PARAMS),
    Kind("params-locked", build_params_locked, locked=True, keeps_identity=False, **PARAMS),
]


# --- tensorclasses ----------------------------------------------------------------------------------------------------


class Deep(TensorClass):
    """The content of `b.d`."""

    e: torch.Tensor
    a: Any = None
    b: Any = None
    c: Any = None
    d: Any = None
    mask: Any = None
    new: Any = None
    newer: Any = None


class Inner(TensorClass):
    """The content of `b`."""

    c: torch.Tensor
    d: Deep
    a: Any = None
    b: Any = None
    e: Any = None
    mask: Any = None
    new: Any = None
    newer: Any = None


class Content(TensorClass):
    """The content of all kinds, and the names that tests write."""

    a: torch.Tensor
    mask: torch.Tensor
    b: Any = None
    z: torch.Tensor | None = None
    n: Any = None
    x: Any = None
    new: Any = None
    newer: Any = None
    new0: Any = None
    new1: Any = None
    new2: Any = None
    one: Any = None
    only: Any = None
    fresh: Any = None
    hollow: Any = None
    other: Any = None
    renamed: Any = None
    third: Any = None
    c: Any = None
    d: Any = None
    e: Any = None
    b2: Any = None
    deep: Any = None
    deeper: Any = None
    moved: Any = None
    top: Any = None
    # The flat names of nested entries.
    b_c: Any = None
    b_d_e: Any = None
    n_new: Any = None
    a_x: Any = None
    b_x: Any = None
    c_x: Any = None
    d_x: Any = None
    e_x: Any = None


def build_tensorclass(of: Kind) -> Callable[[Plain, Kind, pathlib.Path], Any]:
    """A tensorclass over a container of another kind."""

    def build(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
        return Content.from_tensordict(of.build(plain, of, folder))

    return build


def build_typed(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    """Tensorclasses all the way down."""
    dense = build_typed_inside(plain, kind, folder)
    return Content.from_tensordict(dense)


def build_typed_inside(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    """Tensorclasses nested in a plain container."""
    dense = build_dense(plain, kind, folder)
    inner = dense["b"]
    inner["d"] = Deep.from_tensordict(inner["d"])
    dense["b"] = Inner.from_tensordict(inner)
    return dense


def build_typed_lazy(plain: Plain, kind: Kind, folder: pathlib.Path) -> Any:
    """A lazy stack of tensorclasses, which is one itself."""
    return lazy_stack([member.clone() for member in build_typed(plain, kind, folder).unbind(0)])


# One for every class and state of container; the shapes of the batch are the business of the kinds above.
FACED = {
    "nested",
    "named",
    "on-device",
    "locked",
    "memmap",
    "lazy-view",
    "lazy",
    "lazy-dim-1",
    "lazy-in-lazy",
    "h5",
    "zarr",
}
DECLARED = {"any_names": False}
KINDS += [
    replace(
        kind,
        name=f"tensorclass-{kind.name}",
        build=build_tensorclass(kind),
        slow=kind.name == "zarr",
        **DECLARED,
    )
    for kind in KINDS
    if kind.name in FACED
]
KINDS += [
    Kind("typed", build_typed, **DECLARED),
    Kind("typed-inside", build_typed_inside),
    Kind("typed-lazy", build_typed_lazy, stack_dims=(0,), **{**LAZY, **DECLARED}),
]
