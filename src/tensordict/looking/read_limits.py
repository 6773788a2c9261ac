"""Limit how much notebook trees and reports read of leaves: little of mapped files, nothing of stores."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tensordict.core import ragged
from tensordict.core import torch_internals as internals
from tensordict.looking.tally import Numbers, Tally, to_numbers
from tensordict.memory import kernel

# Limits in elements for leaves in memory: one leaf, and all leaves. Statistics read every element (about 10 ns each).
_MOST, _MOST_IN_ALL = 1 << 20, 1 << 22
# Limits in bytes for leaves mapped from files, a few pages each: one leaf, and all leaves.
_MAPPED, _MAPPED_IN_ALL = 16 << 10, 1 << 20
_FIRST = 8


class Budget:
    """Counts what was read for the display of one container, and refuses more than the limits above."""

    def __init__(self) -> None:
        self._spans = kernel.file_spans()
        self._starts = [start for start, _ in self._spans or ()]
        self._left, self._mapped_left = _MOST_IN_ALL, _MAPPED_IN_ALL

    def tally(self, parts: Sequence[Tensor]) -> Tally | str:
        """Return the figures of all elements of some tensors, or the reason why they are not read."""
        count = sum(part.numel() for part in parts)
        if any(map(self._is_in_file, parts)):
            nbytes = sum(part.numel() * part.itemsize for part in parts)
            if nbytes > min(_MAPPED, self._mapped_left):
                return "in a file, which is read no further; describe() reads all and has the statistics"
            self._mapped_left -= nbytes
        elif count > min(_MOST, self._left) or len(parts) > _MOST >> 10:
            return f"{count:,} elements are not all read to be shown; describe() has the statistics"
        else:
            self._left -= count
        found = Tally()
        numbers = torch.cat([part.detach().reshape(-1) for part in parts]) if len(parts) > 1 else parts[0]
        found.add(to_numbers(numbers))
        return found

    def _is_in_file(self, tensor: Tensor) -> bool:
        """Return whether a tensor is mapped from a file. If the kernel cannot tell, each CPU tensor counts."""
        if tensor.device.type != "cpu":
            return False
        if self._spans is None:
            return True
        at = bisect.bisect_right(self._starts, address := tensor.data_ptr()) - 1
        return at >= 0 and address < self._spans[at][1]


def first_numbers(parts: Iterable[Tensor], most: int = _FIRST) -> list[Numbers]:
    """Return the first elements of some tensors, in memory order. Reads no other elements."""
    found: list[Numbers] = []
    for part in parts:
        if most <= 0:
            break
        found.append(to_numbers(part[first_index(part.shape, most)])[:most])
        most -= found[-1].size
    return found


def first_index(shape: Sequence[int], count: int) -> tuple[slice, ...]:
    """Return the index of the smallest part of a tensor that contains its first `count` elements."""
    index = []
    for size in reversed(shape):
        index.append(slice(min(size, count)))
        count = math.ceil(count / max(size, 1))
    return tuple(reversed(index))


def elements_of(tensor: Tensor) -> Tensor | str:
    """Return the elements of a leaf as a tensor, or the reason why they cannot be read."""
    if why := why_unreadable(tensor):
        return why
    if tensor.is_nested:
        # Reading the elements of a ragged tensor with gaps would copy all of it.
        return ragged.pack_elements(tensor) if ragged.is_compact(tensor) else "its rows do not lie one behind the other"
    return tensor


def why_unreadable(tensor: Tensor) -> str:
    """Return the reason why the elements of a leaf cannot be read; "" when they can."""
    if tensor.device.type == "meta" or isinstance(tensor, internals.FakeTensor):
        return "it has a shape and no elements"
    if internals.is_transformed(tensor):
        return "it stands for many tensors in a function of torch.func"
    if is_lazy(tensor):
        return "it has not been initialized"
    if not tensor.is_nested and (
        tensor.layout is not torch.strided or tensor.is_quantized or internals.is_wrapper(tensor)
    ):
        return f"elements of a {type(tensor).__name__} of the layout {tensor.layout} are not shown"
    return ""
