"""The registry of container kinds: a factory each, with what the kind promises.

A later container joins the suite by one more `Kind` in `KINDS`. Tests read the capabilities; they never ask for a
class or a name.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from contract.model import Path, Plain
from tensordict import TensorDict

# The nested containers that have a batch size longer than their parent's, and by what.
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

    def plain(self) -> Plain:
        """The content as fresh plain tensors, each call the same."""
        return content(self.batch_size, self.nested)

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


def build_memmap(plain: Plain, kind: Kind, folder: pathlib.Path) -> TensorDict:
    return build_dense(plain, kind, folder).memmap_(folder / "saved")


def build_anonymous(plain: Plain, kind: Kind, folder: pathlib.Path) -> TensorDict:
    return build_dense(plain, kind, folder).memmap_()


KINDS: list[Kind] = [
    Kind("dense", build_dense, nested=False),
    Kind("nested", build_dense),
    Kind("one-dim", build_dense, batch_size=(4,)),
    Kind("no-dim", build_dense, batch_size=()),
    Kind("unit-dim", build_dense, batch_size=(2, 1, 3)),
    Kind("named", build_dense, names=("time", "env")),
    Kind("on-device", build_dense, device="cpu"),
    Kind("locked", build_locked, locked=True),
    Kind("memmap", build_memmap, device="cpu", locked=True),
    Kind("memmap-anonymous", build_anonymous, batch_size=(4,), device="cpu", locked=True),
]
