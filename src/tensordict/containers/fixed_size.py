"""FixedSize, the base of containers whose batch size follows from other containers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path
from tensordict.ops.collection import TensorCollection
from tensordict.ops.entries.write_plans import Resize, Write


class FixedSize(TensorCollection):
    """A container whose batch size, in `_size`, cannot be changed."""

    _size: torch.Size
    # For the error: what the batch size belongs to, what it follows from, and what to do instead.
    _size_reason: ClassVar[tuple[str, str, str]]

    @property
    def _batch_size(self) -> torch.Size:
        return self._size

    @_batch_size.setter
    def _batch_size(self, size: torch.Size) -> None:
        self._refuse_size(size)

    def _refuse_size(self, size: torch.Size) -> None:
        if size != self._size:
            what, origin, instead = self._size_reason
            raise ShapeError(
                f"the batch size {list(self._size)} of {what} follows from {origin} and cannot become {list(size)}; "
                f"{instead}"
            )

    def _plan_write(self, write: Write, source: Any, prefix: Path = ()) -> None:
        if isinstance(write, Resize):
            self._refuse_size(source)
        super()._plan_write(write, source, prefix)
