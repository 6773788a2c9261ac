"""Sharded leaves (`DTensor`): all ranks gather them, and one rank saves them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from tensordict.core.contract import ContainerT, Contract
from tensordict.core.exceptions import TransferError
from tensordict.core.keys import joined
from tensordict.memory.mapped import PathLike
from tensordict.memory.storable import is_sharded
from tensordict.parallel.verdicts import TAKEN, exchange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def gather_leaves(container: ContainerT) -> ContainerT:
    """Replace each sharded leaf by the whole tensor; other leaves are shared. See `TensorDict.full_tensor`."""
    return container._map(lambda leaf: leaf.full_tensor() if is_sharded(leaf) else leaf)


def has_sharded_leaves(container: Contract) -> bool:
    """Return whether a container has a sharded leaf."""
    return any(map(is_sharded, container._leaves()))


def save_whole(
    container: Any,
    path: PathLike | None,
    return_early: bool,
    write: Callable[[Any], Any],
    load: Callable[[], Any],
) -> Any:
    """Gather the sharded leaves of a container on all ranks, have one rank save it, and load it on all ranks.

    All ranks of the largest mesh of a leaf must make this call. After each step they exchange their errors. A step that
    fails on one rank ends the call on all of them.

    Args:
        container: has the same sharded leaves on all ranks, and at least one.
        path: the path of the save; with `None` each rank writes to its own memory.
        return_early: must be false, because all ranks must gather in the same order.
        write: saves a container of whole tensors. With a path, only the first rank of the mesh calls it.
        load: loads the save at the path.

    Returns:
        the result of `load`; without a path, the result of `write`.

    Raises:
        TransferError: another rank failed, or the ranks have different leaves or paths.
    """
    if return_early:
        raise ValueError("full_tensor=True gathers DTensors, which all ranks do in one order: not with return_early")
    if path is None:
        return write(gather_leaves(container))
    sharded = [(joined(key), leaf) for key, leaf in container._walk() if is_sharded(leaf)]
    ranks = _Ranks(max((leaf.device_mesh for _, leaf in sharded), key=lambda mesh: mesh.size()))
    forms = [f"{key} {leaf.dtype} {leaf.shape} {leaf.placements}" for key, leaf in sharded]
    ranks.compare(f"{len(forms)} DTensors ({sharded[0][0]!r}, ...) to {os.fspath(path)!r}", forms)

    def gather(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        whole = leaf.full_tensor()
        # The other ranks take part and free the whole tensor at once. The first rank keeps all leaves on the CPU, which
        # has more memory.
        return whole.cpu() if ranks.is_first else leaf

    with torch.no_grad():
        whole = container._map(gather)
    ranks.run(lambda: write(whole) if ranks.is_first else None)
    return ranks.run(load)


class _Ranks:
    """The ranks of a device mesh, which exchange their errors.

    A mesh has a process group for each row along each of its dims, but no group for all ranks. An error is therefore
    passed on along one dim after the other.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError("this rank is not in the device mesh of the sharded entries, whose ranks save them")
        self.is_first = not any(coordinate)
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]

    def run(self, step: Callable[[], T]) -> T:
        """Run a step on this rank. An error of any rank is raised on all of them.

        Raises:
            TransferError: the step failed on another rank.
        """
        try:
            result = step()
        except Exception as error:  # catch all: the other ranks wait for a verdict
            self._settle(error)
            raise
        self._settle()
        return result

    def compare(self, call: str, forms: list[str]) -> None:
        """Check that all ranks make the same call.

        Args:
            call: what is saved, and where.
            forms: describe the entries.

        Raises:
            TransferError: two ranks differ.
        """
        digest = hashlib.blake2b(repr((call, forms)).encode(), digest_size=8).hexdigest()
        problem = None
        for group in self._groups:
            for rank, (_, text) in enumerate(exchange(digest + call, group, "save")):
                if text[: len(digest)] != digest and problem is None:
                    there = text[len(digest) :]
                    detail = there if there != call else f"{there} of other names, shapes, dtypes or placements"
                    problem = TransferError(
                        f"rank {dist.get_rank()} saves {call}, and rank {dist.get_global_rank(group, rank)} {detail}"
                    )
        self._settle(problem)
        if problem is not None:
            raise problem

    def _settle(self, problem: Exception | None = None) -> None:
        """Send the error of this rank to the other ranks. Without one, raise if another rank had an error."""
        text = "" if problem is None else f"rank {dist.get_rank()}: {type(problem).__name__}: {problem}"
        for group in self._groups:
            text = next((why for state, why in exchange(text, group, "save") if state != TAKEN), "")
        if text and problem is None:
            raise TransferError(f"another rank of the device mesh failed: {text}")
