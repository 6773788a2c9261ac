"""Another process at the end of a pipe, and what tests ask of containers on both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing as mp


def serving(serve: Callable[[Any], None], method: str) -> Iterator[Any]:
    """Yield a pipe to a process that serves at its other end until it gets `None`."""
    context = mp.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    # So that the end of the process is noticed here, too.
    theirs.close()
    yield ours
    ours.send(None)
    process.join()
    assert process.exitcode == 0


def leaf_of(container: Any) -> torch.Tensor:
    """The first tensor of a container, as plain elements of its own memory."""
    leaf = next(leaf for _, leaf in container._walk())
    return (leaf.values() if leaf.is_nested else leaf).detach().as_subclass(torch.Tensor)


def set_first(leaf: torch.Tensor, value: float) -> None:
    leaf[(0,) * leaf.dim()] = value


def shared_memory() -> int:
    """Return the bytes of anonymous shared memory that this process has touched."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssShmem:"))
    return int(line.split()[1]) * 1024
