"""`set_skip_existing`: skip modules whose results a container has already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tensordict.core.contract import Contract
from tensordict.core.keys import Key, path_of, unravel_key_list
from tensordict.nn.choices import Choice, Setting

if TYPE_CHECKING:
    from tensordict.nn.module import TensorDictModuleBase

F = TypeVar("F", bound=Callable[..., Any])

Mode = bool | list[Key]

_choice: Choice[Mode] = Choice(False)


class set_skip_existing(Setting):  # a function to its callers, as in the public API
    """Skip modules when the container has all of their out-keys; for a `with` block or as a decorator.

    A decorated method that takes a container returns the container at once if the mode is on and the container has all
    out-keys. Methods with a key among both in-keys and out-keys always run. All modules of this package behave as if
    decorated with the mode `None`.

    Args:
        mode: whether to skip modules. A list of keys skips only modules whose out-keys are all in the list. `None`, for
            decorators only, follows the surrounding block.
        in_key_attr: the attribute that holds the in-keys, on the object of the decorated method.
        out_key_attr: the attribute that holds the out-keys.
        thread_local: `True` affects only the calling thread, and keeps the blocks of other threads out of it; see
            :class:`set_interaction_type`. `False` affects all threads.

    Raises:
        RuntimeError: a `with` block gets `None`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, set_skip_existing
        >>> double = TensorDictModule(lambda x: 2 * x, in_keys=["x"], out_keys=["y"])
        >>> with set_skip_existing():
        ...     double(TensorDict(x=torch.ones(1), y=torch.zeros(1)))["y"]
        tensor([0.])
    """

    _choice = _choice

    def __init__(
        self,
        mode: Mode | None = True,
        in_key_attr: str = "in_keys",
        out_key_attr: str = "out_keys",
        *,
        thread_local: bool = False,
    ) -> None:
        super().__init__(mode, thread_local)
        self.mode = mode
        self.in_key_attr = in_key_attr
        self.out_key_attr = out_key_attr

    def clone(self) -> set_skip_existing:
        return type(self)(self.mode, self.in_key_attr, self.out_key_attr, thread_local=self._thread_local)

    def __call__(self, func: F) -> F:
        mode, in_key_attr, out_key_attr = self.mode, self.in_key_attr, self.out_key_attr

        @functools.wraps(func)
        def skipping(_self: object, tensordict: Contract, *args: object, **kwargs: object) -> Any:
            before = skip_existing()
            current = before if mode is None else mode
            if current and _has_results(current, tensordict, getattr(_self, in_key_attr), getattr(_self, out_key_attr)):
                return tensordict
            if current is before:
                return func(_self, tensordict, *args, **kwargs)
            with set_skip_existing(mode, thread_local=self._thread_local):
                return func(_self, tensordict, *args, **kwargs)

        return cast("F", skipping)

    def __enter__(self) -> None:
        if self.mode is None:
            raise RuntimeError("set_skip_existing(None) decorates methods; a with block takes True, False or keys")
        super().__enter__()


def skip_existing() -> Mode:
    """Return whether modules are skipped when their results exist, or the list of keys that are not written again.

    See :class:`set_skip_existing`.

    Example:
        >>> from tensordict.nn import set_skip_existing, skip_existing
        >>> with set_skip_existing(True):
        ...     skip_existing()
        True
    """
    return _choice.get() if _choice.in_threads else _choice.shared


class _set_skip_existing_None(set_skip_existing):
    """`set_skip_existing(None)`, under a name that client programs import."""

    def __init__(self) -> None:
        super().__init__(None)


def must_skip(module: TensorDictModuleBase, tensordict: Contract) -> bool:
    """Return whether to skip a module, because the container has all of its out-keys."""
    mode = _choice.shared
    if mode is False and not _choice.in_threads:
        return False
    mode = _choice.get()
    return bool(mode) and _has_results(mode, tensordict, module.in_keys, module.out_keys)


def _has_results(mode: Mode, tensordict: Contract, in_keys: Sequence[Key], out_keys: Sequence[Key]) -> bool:
    """Return whether the container has all out-keys, none of them is an in-key, and the mode skips all of them."""
    if isinstance(mode, list) and not set(out_keys).issubset(unravel_key_list(mode)):
        return False
    return not any(key in in_keys for key in out_keys) and all(tensordict._has(path_of(key)) for key in out_keys)
