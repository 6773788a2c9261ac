"""Blocks: many tensors in one buffer, for consolidated containers, pickles and messages."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensordict.core import foreach, ragged
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import joined
from tensordict.memory import files
from tensordict.memory.storable import SHARDED, is_sharded

# Tensors begin at multiples of this, or of the size of their elements if that is larger.
ALIGN = 8
# Tensors of up to this many bytes are moved by `memmove`: 0.6 us for 1 KiB; torch takes 2.5 us.
_SMALL = 64 << 10
# One job of a thread copies up to this many bytes.
_JOB = 4 << 20
# The storage of a consolidated container as bytes, and the number of leaves in it.
Consolidated = tuple[Tensor, int]


def new_bytes(nbytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Return uninitialized memory as a tensor of bytes.

    Copies of large tensors spend most of their time waiting for the system to find pages for this memory. Huge pages
    (madvise) are 2.7 times as fast if the system has them ready, and up to three times as slow if not.
    """
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Block:
    """One piece of memory, and tensors over it.

    Args:
        storage: the memory, as bytes.
        empty: empty tensors of its device by dtype, for blocks that share them.
    """

    __slots__ = ("_empty", "_untyped", "storage")

    def __init__(self, storage: Tensor, empty: dict[torch.dtype, Tensor] | None = None) -> None:
        self.storage = storage
        self._untyped = storage.untyped_storage()
        self._empty = {} if empty is None else empty

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], start: int, strides: Sequence[int] | None = None
    ) -> Tensor:
        """Return the tensor that begins at byte `start`; C-contiguous without `strides`.

        Autograd does not see the result as a view, so writing to it does not bump the version of other tensors.
        """
        if torch.compiler.is_compiling():
            # Dynamo cannot trace `set_`, so compiled code has views of the block.
            nbytes = math.prod(shape) * dtype.itemsize if strides is None else self.storage.numel() - start
            rest = self.storage[start : start + nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
            return rest.view(torch.Size(shape)) if strides is None else rest.as_strided(shape, strides)
        empty = self._empty.get(dtype)
        if empty is None:
            empty = self._empty[dtype] = torch.empty(0, dtype=dtype, device=self.storage.device)
        at = start // dtype.itemsize
        if strides is None:
            return empty.detach().set_(self._untyped, at, shape)  # type: ignore[call-overload, no-any-return]
        return empty.detach().set_(self._untyped, at, shape, strides)


class Layout:
    """The places of tensors in a block. A tensor that is added twice has one place."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.starts: list[int] = []
        self.nbytes = 0
        self._known: dict[int, int] = {}
        # First and last byte of each gap between tensors.
        self._gaps: list[tuple[int, int]] = []

    def add(self, tensor: Tensor) -> int:
        """Find a place for a tensor. Return the byte at which it begins."""
        start = self._known.get(id(tensor))
        if start is None:
            itemsize = tensor.itemsize
            step = itemsize if itemsize > ALIGN else ALIGN
            start = self._known[id(tensor)] = -(-self.nbytes // step) * step
            if start != self.nbytes:
                self._gaps.append((self.nbytes, start))
            self.nbytes = start + tensor.numel() * itemsize
            self.tensors.append(tensor)
            self.starts.append(start)
        return start

    def finish(self) -> None:
        """Pad the block to a multiple of `ALIGN`.

        `torch.save` gives the storage the dtype of the first tensor over it, so the length must be a multiple of the
        size of any element.
        """
        stop = -(-self.nbytes // ALIGN) * ALIGN
        if stop != self.nbytes:
            self._gaps.append((self.nbytes, stop))
            self.nbytes = stop

    def fill(self, block: Block, num_threads: int = 0, non_blocking: bool = False) -> None:
        """Copy the tensors to their places, by `num_threads` threads if that is more than one."""
        storage = block.storage
        # Zero the gaps, so that earlier content of this memory does not leak into files.
        if self._gaps:
            positions = [at for first, stop in self._gaps for at in range(first, stop)]
            storage[torch.tensor(positions, device=storage.device)] = 0
        rest: list[tuple[Tensor, int]] = []
        if type(storage) is not Tensor or not storage.is_cpu or torch.compiler.is_compiling() or foreach._transformed():
            rest = list(zip(self.tensors, self.starts, strict=True))
        else:
            base = storage.data_ptr()
            jobs: list[Callable[[], object]] = []
            for tensor, start in zip(self.tensors, self.starts, strict=True):
                nbytes = tensor.numel() * tensor.itemsize
                is_large = nbytes > _SMALL
                if not files.is_direct(tensor) or (is_large and num_threads <= 1):
                    rest.append((tensor, start))
                elif not is_large:
                    ctypes.memmove(base + start, tensor.data_ptr(), nbytes)
                else:
                    # Torch copies these faster than `memmove` does.
                    targets = torch.split(storage[start : start + nbytes], _JOB)
                    sources = torch.split(tensor.detach().reshape(-1).view(torch.uint8), _JOB)
                    jobs += [partial(_copy, target, source) for target, source in zip(targets, sources, strict=True)]
            files.run_all(jobs, num_threads)
        with torch.no_grad():
            views = [block.tensor(tensor.dtype, tensor.shape, start) for tensor, start in rest]
            foreach.copy_(views, [tensor for tensor, _ in rest], non_blocking)


def _copy(target: Tensor, source: Tensor) -> None:
    # Another thread has a mode of its own.
    with torch.inference_mode(target.is_inference()):
        target.copy_(source)


class CopyPlan:
    """The leaves of a container, and a plan for copying them into a block.

    Args:
        container: the container.
        content: refuse leaves on the meta device, which have no content.

    Raises:
        SaveError: a leaf is on the meta device.
        UnsupportedEntryError: a leaf has no elements in plain memory.
    """

    def __init__(self, container: Contract, content: bool = True) -> None:
        self.layout = Layout()
        self.leaves = container._leaves()
        for position, leaf in enumerate(self.leaves):
            if type(leaf) is Tensor and leaf.layout is torch.strided and not (leaf.is_meta or leaf.is_quantized):
                continue
            if problem := _describe_problem(leaf, content):
                path, _ = list(container._walk())[position]
                raise (SaveError if leaf.is_meta else UnsupportedEntryError)(f"entry {joined(path)!r} {problem}")
        add = self.layout.add
        self._places = [self._add_ragged_leaf(leaf) if leaf.is_nested else add(leaf) for leaf in self.leaves]
        self.layout.finish()

    def _add_ragged_leaf(self, leaf: Tensor) -> list[tuple[Tensor, int] | None] | None:
        if leaf.layout is not torch.jagged:
            return None
        # Torch computes only with jagged tensors that share one offsets tensor, so the layout keeps it shared.
        return [None if part is None else (part, self.layout.add(part)) for part in ragged.jagged_parts(leaf)]

    def over(self, block: Block) -> list[Tensor]:
        """Return the leaves over a block. One tensor under two keys stays one tensor."""
        made: dict[int, Tensor] = {}
        found: list[Tensor] = []
        for leaf, place in zip(self.leaves, self._places, strict=True):
            copied = made.get(id(leaf))
            if copied is None:
                if isinstance(place, int):
                    copied = block.tensor(leaf.dtype, leaf.shape, place)
                else:
                    copied = self._copy_ragged_leaf(leaf, place, block, made)
                made[id(leaf)] = copied
            found.append(copied)
        return found

    def _copy_ragged_leaf(
        self, leaf: Tensor, place: list[tuple[Tensor, int] | None] | None, block: Block, made: dict[int, Tensor]
    ) -> Tensor:
        if place is None:
            # Torch cannot make a nested tensor of the strided layout over a part of a storage: it copies its input.
            return ragged.deep_copy(leaf).requires_grad_(False).to(block.storage.device)
        parts: list[Any] = []
        for placed in place:
            if placed is not None and id(placed[0]) not in made:
                part, start = placed
                made[id(part)] = block.tensor(part.dtype, part.shape, start)
            parts.append(None if placed is None else made[id(placed[0])])
        return ragged.from_jagged(parts[0], parts[1], ragged.jagged_dim(leaf), parts[2])


def _describe_problem(leaf: Tensor, content: bool) -> str:
    """Return the reason why a leaf cannot be copied into a block; empty if it can."""
    if leaf.is_meta and content:
        return "is on the meta device and has no content"
    if leaf.layout not in (torch.strided, torch.jagged):
        return f"has the layout {leaf.layout} and cannot be consolidated; to_dense() gives what can"
    if leaf.is_quantized:
        return "is quantized and cannot be consolidated; dequantize() gives what can"
    if is_sharded(leaf):
        return f"cannot be consolidated: {SHARDED}"
    kind = type(leaf)
    if not leaf.is_nested and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {kind.__name__}, whose elements are not its own, and cannot be consolidated"
    return ""


def is_whole(leaves: Sequence[Tensor], consolidated: Consolidated | None) -> bool:
    """Return True if a block holds exactly these leaves: their number is unchanged, and all lie in its storage.

    Nested tensors of the strided layout are not checked, since they lie outside the block.
    """
    if consolidated is None or len(leaves) != consolidated[1]:
        return False
    plain = [leaf for leaf in leaves if not leaf.is_nested or leaf.layout is torch.jagged]
    parts = [leaf.values() if leaf.is_nested else leaf for leaf in plain]
    own = internals.storage_id(consolidated[0].untyped_storage())
    return [internals.storage_id(part.untyped_storage()) for part in parts].count(own) == len(parts)
