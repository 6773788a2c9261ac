"""Copies of state dicts, and saves in the background; `save_checkpoint` uses both."""

from __future__ import annotations

import atexit
import copy
import os
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tensordict.core.devices import wait_for
from tensordict.memory.storable import is_sharded

T = TypeVar("T")

# The types of a state dict that hold other values.
_MAPPINGS, _SEQUENCES = {dict, OrderedDict, Counter}, {list, tuple}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def map_tensors(
    value: Any,
    fn: Callable[[tuple[Any, ...], Any], Any],
    path: tuple[Any, ...] = (),
    is_leaf: Callable[[Any], bool] = _is_tensor,
) -> Any:
    """Replace the tensors and arrays in a state dict. Dicts and lists in it are copied, other values are kept.

    Args:
        value: the state dict, or a value in it.
        fn: takes the keys and positions that lead to a tensor or an array, and the tensor. Returns its replacement.
        path: the keys and positions that lead to `value`.
        is_leaf: returns True for the values to replace.

    Example:
        >>> import torch
        >>> from tensordict.io.snapshots import map_tensors
        >>> map_tensors({"a": [torch.ones(2), 3]}, lambda path, tensor: path)
        {'a': [('a', 0), 3]}
    """
    if is_leaf(value):
        return fn(path, value)
    kind = type(value)
    if kind in _MAPPINGS:
        # Keeps the attributes of an OrderedDict, in which a module stores its versions.
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = map_tensors(item, fn, (*path, key), is_leaf)
        return made
    if kind in _SEQUENCES:
        return kind([map_tensors(item, fn, (*path, at), is_leaf) for at, item in enumerate(value)])
    return value


class StateCopier:
    """Takes the tensors of state dicts. Tensors over the same memory, such as tied weights, become one.

    Args:
        copies: copy the tensors to memory of the CPU, so that the program may change its own.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._seen: dict[object, Any] = {}
        self._devices: set[torch.device] = set()

    def take(self, path: tuple[Any, ...], value: Any) -> Any:
        """Return a tensor without its graph, or an array; see `map_tensors`. Sharded tensors are returned unchanged."""
        if not isinstance(value, Tensor):
            return value.copy() if self._copies else value
        if is_sharded(value):
            return value
        tensor = value.detach()
        try:
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        except RuntimeError:  # The tensor has no memory of its own; the saver names it.
            return tensor
        if not tensor.numel() or not place[0]:
            return self._copy(tensor)
        if place not in self._seen:
            # Keep the tensor, so that no other one gets its memory.
            self._seen[place] = (tensor, self._copy(tensor))
        return self._seen[place][1]

    def wait(self) -> None:
        """Wait for the copies from other devices."""
        wait_for(self._devices)
        self._devices.clear()

    def _copy(self, tensor: Tensor) -> Tensor:
        if not self._copies or tensor.is_meta or tensor.layout is not torch.strided:
            return tensor
        if tensor.is_cpu:
            return tensor.clone(memory_format=torch.contiguous_format)
        self._devices.add(tensor.device)
        # The accelerator copies to pinned memory in the background. Torch keeps this memory for the next save.
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        return target.copy_(tensor, non_blocking=True)


# --- in the background ------------------------------------------------------------------------------------------------


class BackgroundSave(Future[T], Generic[T]):
    """The result of a save that runs in a thread. Its error is raised by :meth:`result`, or else by the next save."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.process = os.getpid()
        self.is_seen = False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the save and return its result, or raise its error."""
        try:
            return super().result(timeout)
        finally:
            self.is_seen |= self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the save and return its error; `None` without one."""
        try:
            return super().exception(timeout)
        finally:
            self.is_seen |= self.done()


_earlier: list[BackgroundSave[Any]] = []


def start_save(run: Callable[[], T]) -> BackgroundSave[T]:
    """Run a save in a new thread. The interpreter waits for it before it ends."""
    save: BackgroundSave[T] = BackgroundSave()

    def work() -> None:
        try:
            result = run()
        except BaseException as error:  # Whoever waits gets it.
            save.set_exception(error)
        else:
            save.set_result(result)

    _earlier[:] = [save]
    threading.Thread(target=work, name="tensordict-checkpoint").start()
    return save


def wait_for_earlier_save() -> None:
    """Wait for the save that runs in the background. Raises its error, unless somebody has seen it."""
    while _earlier:
        save = _earlier.pop()
        # A forked process does not have the thread.
        if save.process == os.getpid():
            wait([save])
            if not save.is_seen:
                save.result()


@atexit.register
def _report_unseen_error() -> None:
    """Warn of the last save if it failed and nobody has asked for its error. Python has waited for its thread."""
    for save in _earlier:
        if save.process == os.getpid() and save.done() and not save.is_seen and (error := save.exception()) is not None:
            warnings.warn(f"the last save in the background failed: {error}", stacklevel=1)
