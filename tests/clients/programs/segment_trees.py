"""The two trees of TorchRL's compiled part in NumPy, put in its place: the wheel's is built for another torch."""

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import prioritized


class _Tree:
    """`size` numbers that can be read and written at indices and reduced over ranges."""

    dtype: type
    neutral: float
    reduce: Any

    def __init__(self, size: int) -> None:
        self.values = np.full(size, self.neutral, self.dtype)

    def __getitem__(self, index: Any) -> Any:
        found = self.values[np.asarray(index)]
        return torch.from_numpy(found.copy()) if isinstance(index, torch.Tensor) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[np.asarray(index)] = np.asarray(value)

    def query(self, left: Any, right: Any) -> Any:
        """Reduce the elements from `left` up to `right`; arrays give one result for each pair."""
        if np.ndim(left) == 0:
            return self.reduce(self.values[int(left) : int(right)], initial=self.neutral)
        return np.array([self.query(*pair) for pair in zip(left, right, strict=True)], self.dtype)


class _SumTree(_Tree):
    neutral = 0.0
    reduce = np.add.reduce

    def scan_lower_bound(self, mass: Any) -> Any:
        """Return the first indices where the running sum reaches `mass`."""
        found = np.searchsorted(np.cumsum(self.values), np.asarray(mass), side="left")
        return torch.from_numpy(found) if isinstance(mass, torch.Tensor) else found


class _MinTree(_Tree):
    neutral = float("inf")
    reduce = np.minimum.reduce


for _width, _dtype in (("Fp32", np.float32), ("Fp64", np.float64)):
    for _name, _base in (("SumSegmentTree", _SumTree), ("MinSegmentTree", _MinTree)):
        setattr(prioritized, _name + _width, type(_name + _width, (_base,), {"dtype": _dtype}))
