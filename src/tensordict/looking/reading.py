"""How much is read of leaves to show them: little of what is mapped from files, and nothing of what is in a store."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tensordict.core import ragged
from tensordict.core import torch_internals as internals
from tensordict.looking.tally import Numbers, Tally, numbers_of
from tensordict.memory import kernel

# The figures of a leaf read all of it. Of leaves in memory, about 10 ns an element; and of so many for all leaves.
_MOST, _MOST_IN_ALL = 1 << 20, 1 << 22
# The bytes of a leaf, and of all leaves, that are mapped from files: some pages of each.
_MAPPED, _MAPPED_IN_ALL = 16 << 10, 1 << 20
_FIRST = 8


class Budget:
    """What has been read of leaves so far, to show a container."""

    def __init__(self) -> None:
        self._spans = kernel.file_spans()
        self._starts = [start for start, _ in self._spans or ()]
        self._left, self._mapped_left = _MOST_IN_ALL, _MAPPED_IN_ALL

    def tally(self, parts: Sequence[Tensor]) -> Tally | str:
        """The figures of all elements of some tensors, or why they are not read."""
        count = sum(part.numel() for part in parts)
        if any(map(self._is_mapped, parts)):
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
        found.add(numbers_of(numbers))
        return found

    def _is_mapped(self, tensor: Tensor) -> bool:
        """Whether a tensor is in a file on a disk; where the kernel does not tell, whether it is on the CPU."""
        if tensor.device.type != "cpu":
            return False
        if self._spans is None:
            return True
        at = bisect.bisect_right(self._starts, address := tensor.data_ptr()) - 1
        return at >= 0 and address < self._spans[at][1]


def first_numbers(parts: Iterable[Tensor], most: int = _FIRST) -> list[Numbers]:
    """The first elements of some tensors one after the other, in the order in which they are kept; no other is read."""
    found: list[Numbers] = []
    for part in parts:
        if most <= 0:
            break
        found.append(numbers_of(part[first_index(part.shape, most)])[:most])
        most -= found[-1].size
    return found


def first_index(shape: Sequence[int], count: int) -> tuple[slice, ...]:
    """The index of the smallest part of a tensor that has its first elements."""
    index = []
    for size in reversed(shape):
        index.append(slice(min(size, count)))
        count = math.ceil(count / max(size, 1))
    return tuple(reversed(index))


def elements_of(tensor: Tensor) -> Tensor | str:
    """The tensor whose elements are those of a leaf, or why there is none that could be read."""
    if why := why_unreadable(tensor):
        return why
    if tensor.is_nested:
        # What is not so would be copied as a whole.
        return ragged.elements(tensor) if ragged.is_compact(tensor) else "its rows do not lie one behind the other"
    return tensor


def why_unreadable(tensor: Tensor) -> str:
    """Why a leaf has no elements that could be read; empty where it has."""
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
