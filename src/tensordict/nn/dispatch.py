"""`dispatch`: let a method that takes a container be called with tensors, by position or by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from tensordict.containers.dense import TensorDict
from tensordict.core import torch_internals as internals
from tensordict.core.keys import Key, path_of, unravel_key_list
from tensordict.ops.collection import TensorCollection

_enabled = True
_ABSENT = inspect.Parameter.empty


class _Dispatch:
    """Let a method that takes a container be called with the entries themselves.

    The arguments are the entries at the in-keys, by position in their order or by name. `separator` joins the parts of
    a nested key to a name. The arguments are put into a container for the call. The call returns the entries at the
    out-keys: one value for one out-key, else a tuple. If the first argument is a container, the method runs unchanged.
    The keys are read from the instance at every call.

    It works with and without arguments. The first parameter of the method after `self` must be named `tensordict`.

    Args:
        separator: joins the parts of a nested key to the name of an argument.
        source: the attribute that holds the in-keys, or the keys themselves.
        dest: the attribute that holds the out-keys, or the keys themselves. The entry `"_"` is not returned.
        auto_batch_size: use the leading dims that all arguments share as batch size; otherwise use no batch dims.

    Raises:
        RuntimeError: the method has no parameter named `tensordict`, or an entry is given by position and by name.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tensordict.nn import dispatch
        >>> class Scale(nn.Module):
        ...     in_keys = ["x", ("opts", "factor")]
        ...     out_keys = ["y"]
        ...     @dispatch
        ...     def forward(self, tensordict):
        ...         return tensordict.set("y", tensordict["x"] * tensordict["opts", "factor"])
        >>> Scale()(torch.ones(2), opts_factor=torch.tensor([2.0, 3.0]))
        tensor([2., 3.])
    """

    separator: str
    source: str | list[Key]
    dest: str | list[Key]
    auto_batch_size: bool

    DEFAULT_SEPARATOR = "_"
    DEFAULT_SOURCE = "in_keys"
    DEFAULT_DEST = "out_keys"

    def __new__(
        cls,
        separator: str | Callable[..., Any] = DEFAULT_SEPARATOR,
        source: str | Sequence[Key] = DEFAULT_SOURCE,
        dest: str | Sequence[Key] = DEFAULT_DEST,
        auto_batch_size: bool = True,
    ) -> Any:
        if callable(separator):
            return cls(auto_batch_size=auto_batch_size)(separator)
        self = super().__new__(cls)
        self.separator = separator
        self.source = source if isinstance(source, str) else unravel_key_list(list(source))
        self.dest = dest if isinstance(dest, str) else unravel_key_list(list(dest))
        self.auto_batch_size = auto_batch_size
        return self

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a method."""
        signature = inspect.signature(func)
        names = list(signature.parameters)
        if len(names) < 2 or names[1] != "tensordict":
            raise RuntimeError(
                "the first argument of the wrapped function must be named 'tensordict'; "
                f"{func.__qualname__} takes {names[1:2] or 'none'}"
            )

        @functools.wraps(func)
        def call(_self: object, first: object = _ABSENT, /, *args: object, **kwargs: object) -> Any:
            if isinstance(first, TensorCollection):
                # Passing `*args, **kwargs` takes 0.1 us even when they are empty.
                return func(_self, first, *args, **kwargs) if args or kwargs else func(_self, first)
            if first is not _ABSENT:
                args = (first, *args)
            if "tensordict" in kwargs or not _enabled:
                return func(_self, *args, **kwargs)
            return self._call_with_entries(func, _self, args, kwargs)

        # `inspect` then shows that the arguments of the container may be left out.
        call.__signature__ = _make_optional(signature)  # type: ignore[attr-defined]
        return call

    def get_source(self, func: Callable[..., Any], self_func: object) -> list[Key]:
        """Return the in-keys: those of `source`, or the attribute of `self_func` that it names.

        Args:
            func: the decorated method; ignored.
            self_func: the object whose method is called.
        """
        return getattr(self_func, self.source) if isinstance(self.source, str) else self.source

    def _call_with_entries(
        self, func: Callable[..., Any], module: object, args: Sequence[object], kwargs: dict[str, object]
    ) -> Any:
        in_keys = self.get_source(func, module)
        entries: dict[Key, object] = dict(zip(in_keys, args))
        if kwargs:
            for key in in_keys:
                name = key if type(key) is str else self.separator.join(path_of(key))
                if name in kwargs:
                    if key in entries:
                        raise RuntimeError(
                            f"{type(module).__name__} got the entry {key!r} twice, by position and as {name!r}: "
                            "Duplicated argument in args and kwargs."
                        )
                    entries[key] = kwargs.pop(name)
        given = TensorDict.from_dict(entries, auto_batch_size=True) if self.auto_batch_size else TensorDict(entries)
        result: object = func(module, given, *args[len(in_keys) :], **kwargs)
        if not isinstance(result, TensorCollection):
            raise TypeError(
                f"{type(module).__name__}.{func.__name__} must return a container for its out-keys to be read, "
                f"got {type(result).__name__}"
            )
        out_keys = getattr(module, self.dest) if isinstance(self.dest, str) else self.dest
        values = [result[key] for key in out_keys if key != "_"]
        return values[0] if len(values) == 1 else tuple(values)


if TYPE_CHECKING:
    # Typed as a function, because the type of a decorated method cannot be expressed.
    @overload
    def dispatch(separator: Callable[..., Any]) -> Callable[..., Any]: ...
    @overload
    def dispatch(
        separator: str = ...,
        source: str | Sequence[Key] = ...,
        dest: str | Sequence[Key] = ...,
        auto_batch_size: bool = ...,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
    def dispatch(*args: object, **kwargs: object) -> Any: ...
else:
    dispatch = _Dispatch
    _Dispatch.__name__ = _Dispatch.__qualname__ = "dispatch"

_modules = _Dispatch(auto_batch_size=False)


def entries_as_container(
    module: object,
    forward: Callable[..., Any],
    args: Sequence[object],
    tensordict_out: object,
    kwargs: dict[str, object],
) -> Any:
    """Call `forward` of a module of this package without a container, as `dispatch` does."""
    if "tensordict" in kwargs or not _enabled:
        raise TypeError(f"{type(module).__name__} takes a container, got {type(args[0]).__name__}")
    if tensordict_out is not None:
        kwargs["tensordict_out"] = tensordict_out
    # A call without arguments arrives here with `None`.
    given = () if len(args) == 1 and args[0] is None else args
    return _modules._call_with_entries(forward, module, given, kwargs)


def _make_optional(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature with `None` as the default of positional arguments that have no default."""
    required = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return signature.replace(
        parameters=[
            p.replace(default=None) if p.kind is required and p.default is p.empty else p
            for p in signature.parameters.values()
        ]
    )


class _set_dispatch_td_nn_modules(internals.Decorator):
    """Switch `dispatch` on or off. When off, methods get their arguments unchanged.

    TorchRL's replay buffers switch it off, so that their transforms accept data that is not in a container.
    """

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.mode = mode

    def clone(self) -> _set_dispatch_td_nn_modules:
        return type(self)(self.mode)

    def __enter__(self) -> None:
        global _enabled
        self._before = _enabled
        _enabled = self.mode

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        global _enabled
        _enabled = self._before
