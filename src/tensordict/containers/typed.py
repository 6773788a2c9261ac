"""TypedTensorDict: the wrapper with declared, typed keys, as `typing.TypedDict` has them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import NotRequired, Required

from tensordict.containers.dense import TensorDict
from tensordict.containers.fields import quote_names
from tensordict.containers.nontensor import NonTensorDataBase, unwrap, wrap
from tensordict.containers.tensordict_base import TensorDictBase
from tensordict.containers.wrapper import FieldWrapper, container_of, register_wrapper
from tensordict.core.annotations import UNION, is_any_of, kinds_of, resolve, scope_of
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import FieldError
from tensordict.core.key_views import is_non_tensor
from tensordict.core.signatures import spells
from tensordict.ops.dims.rows import LATER_METHODS
from tensordict.ops.printing import Printing

if TYPE_CHECKING:
    from typing import TypeVar

    from typing_extensions import Self, Unpack

    from tensordict.ops.converting import FromDict

    SelfT = TypeVar("SelfT", bound="TypedTensorDict")

_NUMBERS = (bool, int, float, complex)
# The number types that an annotation accepts besides itself, as type checkers do.
_TOWER: dict[Any, Any] = {float: (float, int), complex: (complex, float, int)}
# The arguments of the constructor, which a class with `shadow` may have as keys.
_OWN_ARGUMENTS = ("source", "batch_size", "device", "names", "non_blocking", "lock")


class TypedTensorDict(FieldWrapper, TensorDictBase):
    """A container with declared keys, which can also be read and written as attributes.

    An annotation declares a key. A key may be missing if it is `NotRequired[...]`, has a default, or belongs to a class
    made with `total=False`. The attribute of a missing key reads as its default, which is not stored as an entry. A
    value written under a declared key must have the declared type: a tensor, a container class, or the type of a
    non-tensor value. A container with the right keys is accepted for a nested `TypedTensorDict`. Subclasses inherit
    the declarations. Operations return the same class.

    It wraps the container that holds the entries: a `TensorDict`, or any other container with :meth:`from_tensordict`.

    Options are given as `TypedTensorDict["shadow", "frozen"]` or as `class Step(TypedTensorDict, shadow=True)`. They
    mean the same as for a :class:`~tensordict.TensorClass`: `autocast`, `nocast`, `tensor_only`, `frozen` (new
    containers are locked), `shadow` (keys may have the names of methods, which they hide).

    Args:
        source: a mapping or a container with all required keys and no undeclared ones.
        batch_size: the leading dims that all entries share; empty by default.
        device: if given, entries are moved to it.
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
    # A lazy stack may contain members of other classes, with other keys.
    _wraps_stacks = False
    # The declared keys with their types, and the keys with a type other than a tensor.
    _types: ClassVar[dict[str, Any]] = {}
    _other_types: ClassVar[frozenset[str]] = frozenset()
    # The arguments of the constructor that are keys in this class (with `shadow`).
    _masked: ClassVar[tuple[str, ...]] = ()
    __required_keys__: ClassVar[frozenset[str]] = frozenset()
    __optional_keys__: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, total: bool = True, **options: object) -> None:
        super().__init_subclass__(**options)
        own = inspect.get_annotations(cls)
        scope = scope_of(cls, own.values())
        types_, required = dict(cls._types), set(cls.__required_keys__)
        for name, hint in own.items():
            kind = resolve(hint, scope, f"{cls.__name__}.{name}")
            if typing.get_origin(kind) is ClassVar or kind is ClassVar:
                continue
            if hasattr(TypedTensorDict, name) and name not in LATER_METHODS and not cls._shadow:
                raise FieldError(
                    f"the key {name!r} of {cls.__name__} would hide the attribute of that name that every TensorDict "
                    'has: rename it, or allow it with TypedTensorDict["shadow"]'
                )
            default = vars(cls).get(name, MISSING)
            needed = total and default is MISSING
            while typing.get_origin(kind) in (NotRequired, Required):
                needed = typing.get_origin(kind) is Required
                (kind,) = typing.get_args(kind)
            types_[name] = kind
            required = required | {name} if needed else required - {name}
            setattr(cls, name, _make_property(name, kind, default))
        cls._types = types_
        cls._other_types = frozenset(name for name, kind in types_.items() if not _has_type(_SAMPLE, kind))
        cls._masked = tuple(name for name in _OWN_ARGUMENTS if name in types_)
        cls._stores_tensors = not (cls._other_types or cls._autocast or cls._tensor_only)
        cls._nodes = frozenset(
            name for name, kind in types_.items() if any(is_any_of(part, (Contract,)) for part in kinds_of(kind))
        )
        if cls._tensor_only and (others := cls._other_types - cls._nodes):
            raise FieldError(
                f"{cls.__name__} is tensor_only, but {quote_names(others)} are neither tensors nor containers"
            )
        cls.__required_keys__ = frozenset(required)
        cls.__optional_keys__ = frozenset(types_) - required
        cls.__expected_keys__ = frozenset(types_)
        register_wrapper(cls)

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
        cls = type(self)
        if cls._masked:
            given = (source, batch_size, device, names, non_blocking, lock)
            own = dict(zip(_OWN_ARGUMENTS, given, strict=True))
            for name in cls._masked:
                value, own[name] = own[name], None
                if value is not None and value is not False:
                    kwargs[name] = value
            source, batch_size, device, names, non_blocking, lock = own.values()
        if source is None:
            source = kwargs
        elif kwargs:
            raise ValueError("entries come from a mapping or from keyword arguments, not from both")
        elif not isinstance(source, (Contract, Mapping)):
            raise TypeError(f"{cls.__name__} is made of a mapping or a container, got {type(source).__name__}")
        declared = {key if isinstance(key, str) else key[0] for key in source.keys()}
        cls._check_required_keys(declared, f"{cls.__name__}()")
        if source is kwargs and (unknown := declared - cls._types.keys()):
            raise FieldError(
                f"{cls.__name__}() got {quote_names(unknown)}, which it does not declare; "
                f"it has {quote_names(cls._types)}"
            )
        container = self._begin(batch_size, device, names)
        entries = {key: self._as_entry(key, item) if type(key) is str else item for key, item in source.items()}
        container._fill(entries, (), container._queues_transfers(non_blocking))
        if device is not None:
            container._wait_for_transfers(non_blocking)
        if lock or cls._frozen:
            container._lock_tree()

    @classmethod
    def _check_required_keys(cls, given: Any, what: str) -> None:
        if missing := cls.__required_keys__ - set(given):
            raise FieldError(f"{what} is missing {quote_names(missing)}, which {cls.__name__} requires")

    @classmethod
    def from_tensordict(cls: type[SelfT], td: Any, *, check: bool = True) -> SelfT:
        """Wrap a container of any kind in this class, without a copy. Both read and write the same entries.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict, TypedTensorDict
            >>> class Step(TypedTensorDict):
            ...     obs: torch.Tensor
            >>> td = TensorDict(obs=torch.zeros(3))
            >>> step = Step.from_tensordict(td)
            >>> step.obs = torch.ones(3)
            >>> td["obs"]
            tensor([1., 1., 1.])

        Args:
            td: the container. Undeclared keys are kept, and its lock is not changed.
            check: check that the required keys exist and that declared keys have the right types.

        Raises:
            TypeError: `td` is not a container, a required key is missing, or a value has another type.
        """
        if not is_node(td) or td._is_non_tensor:
            raise FieldError(f"{cls.__name__}.from_tensordict needs a container, got {type(td).__name__}")
        self = cls._wrap_container(container_of(td))
        if check:
            entries = self._structure()
            cls._check_required_keys(entries, f"{cls.__name__}.from_tensordict()")
            for name, value in entries.items():
                cls._check_type(name, value)
        return self

    @classmethod
    @spells(TensorDict.from_dict)
    def from_dict(cls, input_dict: object, *, check: bool = True, **options: Unpack[FromDict]) -> Self:
        """Make a container from a (nested) dict; for the other arguments see :meth:`TensorDict.from_dict`.

        Args:
            check: check that the required keys exist and that declared keys have the right types. Without it, reading a
                key that is missing raises an `AttributeError`. Undeclared keys are kept.

        Raises:
            TypeError: a required key is missing, or a value has another type.
        """
        if check:
            return super().from_dict(input_dict, **options)
        return cls.from_tensordict(TensorDict.from_dict(input_dict, **options), check=False)

    # Prints like a `TensorDict`, also over a container with its own `repr`.
    __repr__ = Printing.__repr__

    # --- checking types ---------------------------------------------------------------------------------------------

    @classmethod
    def _hint_of(cls, name: str) -> Any:
        return cls._types.get(name, Any)

    @classmethod
    def _check_type(cls, name: str, value: Any) -> Any:
        """Return an entry as its declared type; raise if it has another type."""
        kind = cls._types.get(name)
        if kind is None:
            return value
        if isinstance(kind, type) and issubclass(kind, TypedTensorDict) and isinstance(value, Contract):
            return value if isinstance(value, kind) else kind.from_tensordict(value)
        if not _has_type(value, kind):
            shown = type(unwrap(value)).__name__
            raise FieldError(
                f"{cls.__name__}.{name} is declared as {getattr(kind, '__name__', kind)} and cannot hold a {shown}"
            )
        return value

    def _as_entry(self, name: str, value: object, keep: bool = False) -> Any:
        if name not in self._types:
            return value
        if type(value) is Tensor and not self._autocast and name not in self._other_types:
            return value
        container = self._tensordict
        kind = self._types[name]
        if isinstance(kind, type) and issubclass(kind, NonTensorDataBase) and not isinstance(value, (Tensor, Contract)):
            value = kind(value, batch_size=container._batch_size, device=container._device, names=container._names)
        elif value is None:
            value = wrap(None, container._batch_size, container._device, container._names)
        else:
            value = super()._as_entry(name, value, keep)
            if not isinstance(value, (Tensor, Contract)):
                value = container._admit(value, (name,))
        return self._check_type(name, value)

    def _check_fields(self, source: Any) -> None:
        entries = source._structure() if isinstance(source, Contract) else source
        for name in entries.keys() & self._types.keys():
            value = entries[name]
            # A container that is merged into a nested one is checked there.
            if isinstance(value, (Tensor, Contract)) and not (is_node(value) and is_node(self._node(name))):
                self._check_type(name, value)


_SAMPLE = torch.empty(0)


def _has_type(value: Any, kind: object) -> bool:
    """Return whether an entry has a declared type. A tensor matches number types, as numbers are stored as tensors."""
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if kind is None:
        kind = type(None)
    origin = typing.get_origin(kind)
    if origin in UNION:
        return any(_has_type(value, part) for part in typing.get_args(kind))
    if origin is typing.Literal:
        kinds: Any = tuple({type(choice) for choice in typing.get_args(kind)})
    else:
        kinds = _TOWER.get(kind, kind) if origin is None and isinstance(kind, type) else origin or kind
    if is_non_tensor(value):
        return isinstance(value, kinds) or all(isinstance(item, kinds) for item in value._flat_values())
    if isinstance(value, Tensor) and kind in _NUMBERS:
        return True
    return isinstance(value, kinds)


def _make_property(name: str, kind: object, default: object) -> property:
    """Return the property that reads and writes a key."""
    nested = kind if isinstance(kind, type) and issubclass(kind, TypedTensorDict) else None
    # A bool and a value, because `torch.compile` cannot trace `MISSING`.
    has_default = default is not MISSING
    value_of_missing = default if has_default else None

    def read(self: Any) -> Any:
        value = self._tensordict._entries.get(name)
        if type(value) is Tensor:
            return value
        if value is None:
            if not has_default:
                raise AttributeError(name)  # Python then calls `__getattr__`, which raises the full message.
            return value_of_missing
        if nested is not None and is_node(value) and not isinstance(value, nested):
            return nested._wrap_container(container_of(value))
        return unwrap(value)

    def write(self: Any, value: Any) -> None:
        self._write_name(name, value)

    def delete(self: Any) -> None:
        self.del_(name)

    return property(read, write, delete)
