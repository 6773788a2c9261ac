"""`set_skip_existing`: modules that leave alone what a container has already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.keys import Key, path_of

if TYPE_CHECKING:
    from tensordict.nn.module import TensorDictModuleBase

F = TypeVar("F", bound=Callable[..., Any])

_skip = False


class set_skip_existing(internals.Decorator):  # a function to its callers, as in the public API
    """Have modules not run when the container has all of their out-keys; for a `with` block or as a decorator.

    As a decorator of a method that takes a container, it returns the container at once if the mode is on and the
    container has all out-keys; methods whose out-keys are among the in-keys always run. All modules of this package
    are decorated with the mode `None`. The mode holds for all threads.

    Args:
        mode: whether modules skip what exists. `None`, for decorators only: as the block says that the call is in.
        in_key_attr: the attribute of the decorated method's object that holds the in-keys.
        out_key_attr: the same for the out-keys.

    Raises:
        RuntimeError: `None` is given to a `with` block.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, set_skip_existing
        >>> double = TensorDictModule(lambda x: 2 * x, in_keys=["x"], out_keys=["y"])
        >>> with set_skip_existing():
        ...     double(TensorDict(x=torch.ones(1), y=torch.zeros(1)))["y"]
        tensor([0.])
    """

    def __init__(self, mode: bool | None = True, in_key_attr: str = "in_keys", out_key_attr: str = "out_keys") -> None:
        super().__init__()
        self.mode = mode
        self.in_key_attr = in_key_attr
        self.out_key_attr = out_key_attr

    def clone(self) -> set_skip_existing:
        return type(self)(self.mode, self.in_key_attr, self.out_key_attr)

    def __call__(self, func: F) -> F:
        mode, in_key_attr, out_key_attr = self.mode, self.in_key_attr, self.out_key_attr

        @functools.wraps(func)
        def skipping(_self: object, tensordict: Contract, *args: object, **kwargs: object) -> Any:
            if (_skip if mode is None else mode) and _exists(
                tensordict, getattr(_self, in_key_attr), getattr(_self, out_key_attr)
            ):
                return tensordict
            if mode is None or mode is _skip:
                return func(_self, tensordict, *args, **kwargs)
            with set_skip_existing(mode):
                return func(_self, tensordict, *args, **kwargs)

        return cast("F", skipping)

    def __enter__(self) -> None:
        if self.mode is None:
            raise RuntimeError("set_skip_existing(None) decorates methods; a with block takes True or False")
        global _skip
        self._before = _skip
        _skip = self.mode

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        global _skip
        _skip = self._before


def skip_existing() -> bool:
    """Whether modules leave entries alone that exist already; see :class:`set_skip_existing`.

    Example:
        >>> from tensordict.nn import set_skip_existing, skip_existing
        >>> with set_skip_existing(True):
        ...     skip_existing()
        True
    """
    return _skip


class _set_skip_existing_None(set_skip_existing):
    """`set_skip_existing(None)`, under the name that clients import."""

    def __init__(self) -> None:
        super().__init__(None)


def is_skipped(module: TensorDictModuleBase, tensordict: Contract) -> bool:
    """Whether a module is not to run on a container, since it has all the out-keys."""
    return _skip and _exists(tensordict, module.in_keys, module.out_keys)


def _exists(tensordict: Contract, in_keys: Sequence[Key], out_keys: Sequence[Key]) -> bool:
    """Whether the container has all the out-keys, none of which is read."""
    return not any(key in in_keys for key in out_keys) and all(tensordict._has(path_of(key)) for key in out_keys)
