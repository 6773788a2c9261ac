"""Sharing: containers in memory that other processes can see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel import shared_memory

if TYPE_CHECKING:
    from typing_extensions import Self


class Sharing(Leaves):
    """`share_memory_`; what tells whether it was called is `is_shared`."""

    def share_memory_(self) -> Self:
        """Move the leaves to shared memory, and lock the container.

        A process that gets the container, at its start or through a queue or a pipe, has its tensors over the same
        memory: what one writes in place, all see. Leaves that are in shared memory, in a file or on an accelerator
        already stay where they are. Values that are no tensors are copied to each process; save the container with
        `memmap_(share_non_tensor=True)` to have them follow.

        Returns:
            the same container, with the same tensors, for which :meth:`is_shared` holds until it is unlocked.

        Raises:
            RuntimeError: a leaf has a layout that cannot be shared, or the system has no more shared memory; the entry
                is named. The entries are in a file: `to_tensordict` gives a copy that can be shared.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3)).share_memory_()
            >>> td.is_shared(), td["a"].is_shared(), td.is_locked
            (True, True, True)
        """
        if self._wrapped_container()._is_in_file:
            raise UnsupportedEntryError(
                "a container over a file, or over other containers, has no memory to share; "
                "to_tensordict().share_memory_() has, and other "
                "processes can open the file themselves"
            )
        shared_memory.share(self)
        if not self._locked:
            self._lock_tree()
        self._mark(shared=True)
        return self
