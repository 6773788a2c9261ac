"""Settings for the whole program, or for a `with` block."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from tensordict.core import torch_internals as internals

_get_defaults_to_none = True


def set_get_defaults_to_none(set_to_none: bool = True) -> None:
    """Choose the result of `get(key)` for a missing key when no default is given.

    Args:
        set_to_none: `True` (the initial state) returns `None`; `False` raises `KeyError`.

    Example:
        >>> import tensordict
        >>> td = tensordict.TensorDict()
        >>> assert td.get("missing") is None
        >>> tensordict.set_get_defaults_to_none(False)
        >>> try:
        ...     td.get("missing")
        ... except KeyError:
        ...     print("missing")
        missing
        >>> tensordict.set_get_defaults_to_none(True)
    """
    global _get_defaults_to_none
    _get_defaults_to_none = bool(set_to_none)


def get_defaults_to_none(set_to_none: bool = True) -> bool:
    """Return whether `get(key)` returns `None` for a missing key when no default is given.

    The argument exists for compatibility with the public signature, and has no effect.
    """
    return _get_defaults_to_none


# --- switches ---------------------------------------------------------------------------------------------------------


class _Modes(threading.local):
    """The modes of the blocks that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[bool] = []


class _Switch(internals.Decorator):
    """The base of on/off settings: for a block of one thread, or, with `set()`, for the rest of the program."""

    _blocks: _Modes
    _chosen: bool | None

    def __init__(self, mode: bool) -> None:
        super().__init__()
        if not isinstance(mode, bool):
            raise TypeError(f"{type(self).__name__} takes True or False, got {mode!r} of type {type(mode).__name__}")
        self._mode = mode

    def set(self) -> None:
        """Apply the choice to the rest of the program; inside a block, to the rest of that block."""
        if self._blocks.stack:
            self._blocks.stack[-1] = self._mode
        else:
            type(self)._chosen = self._mode

    @classmethod
    def _current(cls) -> bool | None:
        stack = cls._blocks.stack
        return stack[-1] if stack else cls._chosen

    def clone(self) -> _Switch:
        """Return a copy with the same choice; a decorated function uses a new one for every call."""
        return type(self)(self._mode)

    def __enter__(self) -> None:
        self._blocks.stack.append(self._mode)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._blocks.stack.pop()


def from_environment(name: str) -> bool | None:
    """Read an on/off environment variable; `None` if it is not set.

    Raises:
        ValueError: its value means neither on nor off.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    if value.lower() in ("1", "true", "yes", "on", "t", "y"):
        return True
    if value.lower() in ("0", "false", "no", "off", "f", "n"):
        return False
    raise ValueError(f"the environment variable {name} must be 1 or 0, got {value!r}")


# --- lazy results of `torch.stack` and of the shape methods -----------------------------------------------------------

# True if any thread may be in `lazy_legacy()` mode. While it is False, operations skip the check of their own thread.
lazy_legacy_possible = False

_open_blocks = 0  # blocks that ask for lazy results, in all threads
_changing = threading.Lock()


class set_lazy_legacy(_Switch):  # a function to its callers, as in torch
    """Choose whether `torch.stack` and the shape methods give lazy results, for a `with` block or a decorated function.

    When on, stacking containers gives a lazy stack. `view`, `permute`, `transpose`, `squeeze` and `unsqueeze` give a
    :class:`~tensordict.LazyView`, which passes new entries and writes on to its source. Initially off.

    A block affects its own thread only, like torch's grad mode. `set_lazy_legacy(mode).set()` makes the choice for the
    rest of the program and all threads; inside a block, until that block ends.

    Args:
        mode: whether results are lazy.

    Raises:
        TypeError: `mode` is not a bool.
    Example:
        >>> import torch
        >>> from tensordict import TensorDict, set_lazy_legacy
        >>> td = TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3])
        >>> with set_lazy_legacy(True):
        ...     flat = td.view(-1)
        >>> flat["b"] = torch.ones(6)
        >>> td["b"].shape
        torch.Size([2, 3])
    """

    _blocks = _Modes()
    _chosen = None

    def set(self) -> None:
        """Apply the choice to the rest of the program; inside a block, to the rest of that block."""
        stack = self._blocks.stack
        before = stack[-1] if stack else self._mode
        super().set()
        _change(self._mode - before)

    def __enter__(self) -> None:
        super().__enter__()
        if self._mode:
            _change(1)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._blocks.stack[-1]:
            _change(-1)
        super().__exit__(exc_type, exc, traceback)


def lazy_legacy(allow_none: bool = False) -> bool | None:
    """Return whether `torch.stack` and the shape methods give lazy results here; see :class:`set_lazy_legacy`.

    Args:
        allow_none: return `None` instead of `False` if no choice was made.

    Example:
        >>> from tensordict import lazy_legacy, set_lazy_legacy
        >>> with set_lazy_legacy(True):
        ...     lazy_legacy()
        True
    """
    mode = set_lazy_legacy._current()
    return mode if allow_none else bool(mode)


def _change(blocks: int) -> None:
    """Add `blocks` to the number of blocks that ask for lazy results, and update `lazy_legacy_possible`."""
    global _open_blocks, lazy_legacy_possible
    with _changing:
        _open_blocks += blocks
        lazy_legacy_possible = _open_blocks > 0 or bool(set_lazy_legacy._chosen)


# --- non-tensor values ------------------------------------------------------------------------------------------------


class set_capture_non_tensor_stack(_Switch):  # a function to its callers, as in torch
    """Choose the stack of equal `NonTensorData`, for a `with` block or a decorated function.

    Initially, such a stack is always a `NonTensorStack`. A block affects its own thread only.
    `set_capture_non_tensor_stack(mode).set()` makes the choice for the rest of the program.

    Args:
        mode: `True` gives one `NonTensorData` with the common value, `False` gives a `NonTensorStack`.

    Raises:
        TypeError: `mode` is not a bool.

    Example:
        >>> import torch
        >>> from tensordict import NonTensorData, set_capture_non_tensor_stack
        >>> with set_capture_non_tensor_stack(True):
        ...     torch.stack([NonTensorData("a"), NonTensorData("a")])
        NonTensorData(data=a, batch_size=torch.Size([2]), device=None)
    """

    _blocks = _Modes()
    _chosen = None


class set_list_to_stack(_Switch):  # a function to its callers, as in torch
    """Choose how to store a list that is not an array of numbers, for a `with` block or a decorated function.

    A block affects its own thread only. `set_list_to_stack(mode).set()` makes the choice for the rest of the program.

    Args:
        mode: `True` (initially) gives a `NonTensorStack`, whose first batch dim runs over the list. `False` gives one
            `NonTensorData` that holds the list.

    Raises:
        TypeError: `mode` is not a bool.

    Example:
        >>> from tensordict import TensorDict, set_list_to_stack
        >>> TensorDict({"a": ["x", "y"]}, batch_size=[2])[0]["a"]
        'x'
        >>> with set_list_to_stack(False):
        ...     TensorDict({"a": ["x", "y"]}, batch_size=[2])[0]["a"]
        ['x', 'y']
    """

    _blocks = _Modes()
    _chosen = None


def capture_non_tensor_stack(allow_none: bool = False) -> bool | None:
    """Return whether a stack of equal `NonTensorData` becomes one of them; see :class:`set_capture_non_tensor_stack`.

    Args:
        allow_none: return `None` instead of `False` if no choice was made.

    Example:
        >>> from tensordict import capture_non_tensor_stack
        >>> capture_non_tensor_stack(), capture_non_tensor_stack(allow_none=True)
        (False, None)
    """
    mode = set_capture_non_tensor_stack._current()
    return mode if allow_none else bool(mode)


def list_to_stack(allow_none: bool = False) -> bool | None:
    """Return whether a list that is not an array of numbers becomes a stack of values; see :class:`set_list_to_stack`.

    Args:
        allow_none: return `None` instead of `True` if no choice was made.

    Example:
        >>> from tensordict import list_to_stack
        >>> list_to_stack()
        True
    """
    mode = set_list_to_stack._current()
    return mode if allow_none or mode is not None else True


# --- the kernel -------------------------------------------------------------------------------------------------------


class set_kernel_memory_info(_Switch):  # a function to its callers, as in torch
    """Choose whether the package asks the kernel about memory, for a `with` block or a decorated function.

    The kernel tells which file lies behind shared memory, so that it is mapped again instead of copied. It tells which
    pages of a map were written to, so that only these go to another process. It tells which pages of a file are in
    memory, so that all others are fetched at once. Without its answers, results are the same, with more copies and in
    more time.

    Initially on, unless the environment variable `TENSORDICT_KERNEL_MEMORY_INFO` is `0`. A block affects its own thread
    only. `set_kernel_memory_info(mode).set()` makes the choice for the rest of the program.

    Args:
        mode: whether to ask the kernel.

    Raises:
        TypeError: `mode` is not a bool.

    Example:
        >>> from tensordict.core.settings import kernel_memory_info, set_kernel_memory_info
        >>> with set_kernel_memory_info(False):
        ...     kernel_memory_info()
        False
    """

    _blocks = _Modes()
    _chosen = from_environment("TENSORDICT_KERNEL_MEMORY_INFO")


def kernel_memory_info() -> bool:
    """Return whether the package asks the kernel about memory; see :class:`set_kernel_memory_info`."""
    mode = set_kernel_memory_info._current()
    return True if mode is None else mode
