"""TypedTensorDict: a TensorDict whose keys are declared and checked."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree
from typing_extensions import NotRequired, Required

from tensordict import pytree
from tensordict.annotations import UNION, resolve, scope_of
from tensordict.contract import Contract
from tensordict.errors import FieldError
from tensordict.fields import listed
from tensordict.keys import Path
from tensordict.nontensor import unwrap
from tensordict.tensordict import TensorDict
from tensordict.views import is_non_tensor

if TYPE_CHECKING:
    from typing_extensions import Self

_NUMBERS = (bool, int, float, complex)


class TypedTensorDict(TensorDict):
    """A `TensorDict` with declared keys, which can be read and written as attributes too.

    A key is declared by an annotation; those in `NotRequired[...]`, or of a class made with `total=False`, may be
    missing. What is written under a declared key must be of its type: a tensor, a container of a class, any other value
    as :class:`~tensordict.NonTensorData` holds it; a container with the right keys is taken for a nested
    `TypedTensorDict`. Subclasses inherit the declarations. Results of operations are of the same class.

    Args:
        source: a mapping or a container with all the required keys, and none that are not declared.
        batch_size: the leading dims that all entries share; none by default.
        device: when given, entries are moved to it.
        names: one name (or `None`) per batch dim.
        non_blocking: passed to device transfers.
        lock: lock the new container.
        **kwargs: entries, instead of `source`.

    Raises:
        TypeError: a required key is missing, a key is not declared, or a value is of another type.

    Example:
        >>> import torch
        >>> from typing import NotRequired
        >>> from tensordict import TypedTensorDict
        >>> class Step(TypedTensorDict):
        ...     obs: torch.Tensor
        ...     reward: NotRequired[torch.Tensor]
        >>> step = Step(obs=torch.zeros(3, 4), batch_size=[3])
        >>> step.reward = torch.ones(3)
        >>> step[0].obs.shape, step["reward"].sum()
        (torch.Size([4]), tensor(3.))
    """

    _stored_as = "TensorDict"
    # The declared keys with their types, and those of them that are no tensors.
    _types: ClassVar[dict[str, Any]] = {}
    _other_types: ClassVar[frozenset[str]] = frozenset()
    __required_keys__: ClassVar[frozenset[str]] = frozenset()
    __optional_keys__: ClassVar[frozenset[str]] = frozenset()
    __expected_keys__: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, total: bool = True, shadow: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = inspect.get_annotations(cls)
        scope = scope_of(cls, [hint for hint in own.values() if isinstance(hint, str)])
        types_, required = dict(cls._types), set(cls.__required_keys__)
        for name, hint in own.items():
            kind = resolve(hint, scope, f"{cls.__name__}.{name}")
            if typing.get_origin(kind) is ClassVar or kind is ClassVar:
                continue
            if hasattr(TypedTensorDict, name) and not shadow:
                raise FieldError(
                    f"the key {name!r} of {cls.__name__} would hide the attribute of that name that every TensorDict "
                    "has: rename it, or allow it with `shadow=True` in the head of the class"
                )
            needed = total
            while typing.get_origin(kind) in (NotRequired, Required):
                needed = typing.get_origin(kind) is Required
                (kind,) = typing.get_args(kind)
            types_[name] = kind
            required = required | {name} if needed else required - {name}
            setattr(cls, name, _entry(name))
        cls._types = types_
        cls._other_types = frozenset(name for name, kind in types_.items() if not _is_a(_SAMPLE, kind))
        cls.__required_keys__ = frozenset(required)
        cls.__optional_keys__ = frozenset(types_) - required
        cls.__expected_keys__ = frozenset(types_)
        _pytree.register_pytree_node(
            cls, pytree.flatten_container, pytree.unflatten_container, flatten_with_keys_fn=pytree._flatten_with_keys
        )

    def __init__(
        self,
        source: Any = None,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        if source is None:
            source = kwargs
        elif kwargs:
            raise ValueError("entries come from a mapping or from keyword arguments, not from both")
        given = {key if isinstance(key, str) else key[0] for key in source.keys()}
        cls = type(self)
        cls._check_required(given, f"{cls.__name__}()")
        if unknown := given - cls._types.keys():
            raise FieldError(
                f"{cls.__name__}() got {listed(unknown)}, which it does not declare; it has {listed(cls._types)}"
            )
        super().__init__(source, batch_size, device, names, non_blocking, lock)

    @classmethod
    def _check_required(cls, given: Any, what: str) -> None:
        if missing := cls.__required_keys__ - set(given):
            raise FieldError(f"{what} is missing {listed(missing)}, which {cls.__name__} requires")

    @classmethod
    def from_tensordict(cls, td: Any, *, check: bool = True) -> Self:
        """A typed container over the entries of another one, which are shared; keys that are not declared are kept.

        Args:
            td: the container.
            check: that the required keys are there and the declared ones of their types.

        Raises:
            TypeError: it is no container, a required key is missing, or a value is of another type.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict, TypedTensorDict
            >>> class Step(TypedTensorDict):
            ...     obs: torch.Tensor
            >>> td = TensorDict(obs=torch.zeros(3))
            >>> Step.from_tensordict(td).obs is td["obs"]
            True
        """
        if not isinstance(td, Contract):
            raise FieldError(f"{cls.__name__}.from_tensordict needs a container, got {type(td).__name__}")
        entries = dict(td._entries)
        if check:
            cls._check_required(entries, f"{cls.__name__}.from_tensordict()")
            for name, value in entries.items():
                entries[name] = cls._typed(name, value)
        return cls._make(entries, td._batch_size, td._device, td._names)

    # --- the doors --------------------------------------------------------------------------------------------------

    @classmethod
    def _typed(cls, name: str, value: Any) -> Any:
        """An entry as it is declared; raises when it is of another type."""
        kind = cls._types.get(name)
        if kind is None:
            return value
        if isinstance(kind, type) and issubclass(kind, TypedTensorDict) and isinstance(value, Contract):
            return value if isinstance(value, kind) else kind.from_tensordict(value)
        if not _is_a(value, kind):
            shown = type(unwrap(value)).__name__
            raise FieldError(
                f"{cls.__name__}.{name} is declared as {getattr(kind, '__name__', kind)} and cannot hold a {shown}"
            )
        return value

    # Plain tensors go in by shorter ways than `_admit`: they matter to the keys that are declared as something else.

    def _admit(self, item: Any, path: Path, non_blocking: bool = False) -> Any:
        return self._typed(path[-1], super()._admit(item, path, non_blocking))

    def _write_name(self, name: str, item: Any, non_blocking: bool = False, path: Path | None = None) -> None:
        if name in self._other_types and isinstance(item, Tensor):
            self._typed(name, item)
        super()._write_name(name, item, non_blocking, path)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write an entry at a key, or assign to a part of the batch; see any container's."""
        if type(index) is str and index in self._other_types:
            self._write_name(index, value)
        else:
            super().__setitem__(index, value)

    def _fill(self, source: Mapping[Any, Any], prefix: Path = (), non_blocking: bool = False) -> None:
        self._refuse_tensors(source)
        super()._fill(source, prefix, non_blocking)

    def _plan_update(self, source: Any, prefix: Path, plan: Any) -> None:
        self._refuse_tensors(source)
        super()._plan_update(source, prefix, plan)

    def _refuse_tensors(self, source: Any) -> None:
        for name in self._other_types:
            if isinstance(value := source.get(name), Tensor):
                self._typed(name, value)


_SAMPLE = torch.empty(0)


def _is_a(value: Any, kind: Any) -> bool:
    """Whether an entry is of a declared type; numbers are stored as tensors."""
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if kind is None:
        kind = type(None)
    origin = typing.get_origin(kind)
    if origin in UNION:
        return any(_is_a(value, part) for part in typing.get_args(kind))
    if origin is typing.Literal:
        kinds: Any = tuple({type(choice) for choice in typing.get_args(kind)})
    else:
        kinds = kind if origin is None else origin
    if is_non_tensor(value):
        return isinstance(value, kinds) or all(isinstance(item, kinds) for item in value._flat_values())
    if isinstance(value, Tensor) and kinds in _NUMBERS:
        return True
    return isinstance(value, kinds)


def _entry(name: str) -> property:
    """The attribute of a key."""

    def read(self: Any) -> Any:
        if name in self._entries:
            return self[name]
        raise AttributeError(f"{type(self).__name__}.{name} is declared but not set")

    def write(self: Any, value: Any) -> None:
        self[name] = value

    def delete(self: Any) -> None:
        self.del_(name)

    return property(read, write, delete)
