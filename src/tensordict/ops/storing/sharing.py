"""`TensorDict.share_memory_`: move the leaves to memory that other processes can see."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel import shared_memory

if TYPE_CHECKING:
    SelfT = TypeVar("SelfT", bound="Sharing")


class Sharing(Leaves):
    """The method `share_memory_`. `Leaves.is_shared` tells whether it was called."""

    def share_memory_(self: SelfT) -> SelfT:
        """Move the leaves to shared memory, and lock the container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3)).share_memory_()
            >>> td.is_shared(), td["a"].is_shared(), td.is_locked
            (True, True, True)

        Processes that receive the container, when they start or through a queue or a pipe, share the memory of its
        tensors: all of them see in-place writes. Leaves in shared memory, in a file or on an accelerator are not moved.
        Each process gets its own copy of values. To share new values too, use `memmap_(share_non_tensor=True)`.

        Returns:
            the same container, with the same tensor objects. :meth:`is_shared` is true until it is unlocked.

        Raises:
            RuntimeError: a leaf has a layout that cannot be shared, or the system has no shared memory left; the error
                names the entry. Or the entries are in a file; `to_tensordict()` makes a copy that can be shared.
        """
        if self._wrapped_container()._is_in_file:
            raise UnsupportedEntryError(
                "a container over a file, or over other containers, has no memory to share: use "
                "to_tensordict().share_memory_(), or open the file in the other processes"
            )
        shared_memory.share(self)
        if not self._locked:
            self._lock_tree()
        self._mark(shared=True)
        return self
