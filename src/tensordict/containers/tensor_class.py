"""TensorClass: the wrapper whose entries are the fields of a class, and the decorator `tensorclass`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import dataclass_transform

from tensordict.containers.dense import TensorDict
from tensordict.containers.fields import FieldTable, make_field_table
from tensordict.containers.nontensor import NonTensorData, unwrap
from tensordict.containers.wrapper import FieldWrapper, container_of, register_wrapper, with_class_name
from tensordict.core import registry
from tensordict.core.contract import Contract, is_flat, is_node
from tensordict.core.exceptions import ContainerExpected, FieldError
from tensordict.looking.shown_entries import list_entries
from tensordict.ops.casting import CASTS, CastFilter
from tensordict.ops.entries.reading import AS_SET, NO_DEFAULT
from tensordict.ops.printing import format_compactly, format_entry, is_compact, sort_lines

__all__ = ["TensorAttrs", "TensorClass", "is_tensorclass", "tensorclass"]

if TYPE_CHECKING:
    from typing import Generic, TypeVar

    from typing_extensions import Self, TypedDict, Unpack

    C = TypeVar("C")
    V = TypeVar("V")
    SelfT = TypeVar("SelfT", bound="TensorClass")

if TYPE_CHECKING:
    _NONE: Any = None

    class _Argument(Generic[V]):
        """An attribute of type `V` whose setter accepts any object."""

        @overload
        def __get__(self, instance: None, owner: Any = None) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: Any = None) -> V: ...
        def __get__(self, instance: object, owner: object = None) -> Any: ...
        def __set__(self, instance: object, value: object) -> None: ...

    @dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
    class _Dataclass(type):
        """Tells type checkers that the annotated attributes of a class are parameters of its constructor.

        `dataclass_transform` on a base class would make it count as not frozen, and forbid frozen subclasses.
        """

else:
    _Dataclass = type


@registry.register
class TensorClass(FieldWrapper, metaclass=_Dataclass):
    """A container whose entries are the fields of a class, read and written as attributes.

    `class Data(TensorClass)` with annotated fields makes `Data` a dataclass. Its instances have all operations of a
    `TensorDict`, and the results are `Data` again. A field holds a tensor, a container, or any other value. A field
    that is `None` has no entry. `@tensorclass` above a plain class makes the same kind of class. A class with its own
    `__init__` assigns the fields there; its constructor also takes `batch_size`, `device`, `names` and `lock`.

    Options are given as `TensorClass["autocast", "frozen"]`, as `class Data(TensorClass, autocast=True)`, or to the
    decorator. Type checkers understand the last two, and pyright also the first. mypy reads a string in brackets as
    the name of a type, so that line needs an ignore.

    - `autocast`: cast values to the annotated type of the field.
    - `nocast`: store numbers as values, not as tensors.
    - `tensor_only`: all fields are tensors or containers. Mappings become containers; other values raise.
    - `frozen`: fields cannot be assigned, and the container is locked.
    - `shadow`: fields may have the names of methods, which they hide.
    - `kw_only`: the fields that this class declares are given by name only. Not in brackets, and not inherited.
    - `skip_post_init_on_rebuild`: accepted for compatibility. `__post_init__` runs for new instances only: in the
      constructor, `from_tensordict`, `from_dict` and `copy.replace`. It does not run for results, such as `data[0]`.
    - `cast_filter`: a function of a key and a tensor. It selects the tensors that `to`, `float()` and other casts of an
      instance change; see :meth:`TensorDict.to`. A call may pass another filter, or `None` for all tensors. Casts of a
      container that holds the instance ignore it.

    Args:
        *args: the fields by position, in the order of the class.
        batch_size: the leading dims that all tensors share; empty by default.
        device: if given, tensors are moved to it, now and on every later write.
        names: one name (or `None`) per batch dim.
        non_blocking: passed to device transfers.
        lock: lock the new container.
        **kwargs: the fields by name.

    Raises:
        TypeError: a field is missing, unknown, or of a type that the class refuses.
        RuntimeError: a field does not fit the batch size.

    Example:
        >>> import torch
        >>> from tensordict import TensorClass
        >>> class Frame(TensorClass):
        ...     image: torch.Tensor
        ...     label: str = "none"
        >>> frames = Frame(torch.zeros(4, 3, 8, 8), label="cat", batch_size=[4])
        >>> frames[0].image.shape, frames[0].label
        (torch.Size([3, 8, 8]), 'cat')
        >>> type(frames.reshape(2, 2)).__name__
        'Frame'
    """

    if TYPE_CHECKING:
        # Declared as fields, so that they become parameters of the constructor of every subclass.
        batch_size: _Argument[torch.Size] = dataclasses.field(default=_NONE, kw_only=True)
        device: _Argument[torch.device | None] = dataclasses.field(default=_NONE, kw_only=True)
        names: _Argument[list[str | None]] = dataclasses.field(default=_NONE, kw_only=True)  # type: ignore[override]
        # These are not `InitVar`s, because mypy would require every `__post_init__` to take them.
        non_blocking: bool | None = dataclasses.field(default=None, kw_only=True)
        lock: bool = dataclasses.field(default=False, kw_only=True)

    _layout: ClassVar[FieldTable] = None  # type: ignore[assignment]
    _is_tensorclass: ClassVar[bool] = True
    _has_post_init: ClassVar[bool] = False
    # The fields for which `__setattr__` stores a plain tensor without casting or checking its type.
    _takes_tensors: ClassVar[frozenset[str]] = frozenset()
    # The default of the argument `cast_filter` of all casts.
    _cast_filter: ClassVar[CastFilter | None] = None

    def __init_subclass__(cls, kw_only: bool = False, **options: object) -> None:
        if "cast_filter" in options:
            cls._cast_filter = _check_filter(cls, options.pop("cast_filter"))
        super().__init_subclass__(**options)
        cls._has_post_init = hasattr(cls, "__post_init__")
        cls._stores_tensors = not (cls._autocast or cls._tensor_only)
        cls._layout = make_field_table(cls, TensorClass, kw_only)
        cls._optional = cls.__expected_keys__ = frozenset(cls._layout.names)
        cls._nodes = cls._layout.containers
        properties = {name: _make_property(cls, name) for name in cls._layout.names}
        cls._setters = {name: made.fset for name, made in properties.items() if made.fset is not None}
        cls._takes_tensors = frozenset(properties if cls._stores_tensors and not cls._frozen else ())
        for name, made in properties.items():
            setattr(cls, name, made)
        _prefer_own(cls)
        if cls._cast_filter is not None:
            _filter_casts(cls)
        cls.__hash__ = object.__hash__ if cls._frozen else None  # type: ignore[assignment]
        registry.declare(cls)
        register_wrapper(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        # Runs only if a class defines `__init__` and calls `super().__init__`. Other classes have a generated one.
        if self._layout is None:
            raise FieldError(f"{type(self).__name__} has no fields: make a subclass with annotated ones")
        self._layout.constructor(self, *args, **kwargs)

    def _store_fields(
        self, values: dict[str, Any], batch_size: object, device: object, names: object, non_blocking: bool | None
    ) -> None:
        """Store the values of all fields in a new container."""
        # `_begin` is called as a function, because a method call takes twice as long in a class with `__getattr__`.
        container = FieldWrapper._begin(self, batch_size, device, names)
        if not self._stores_tensors:
            values = {name: self._as_entry(name, value, True) for name, value in values.items()}
        try:
            container._fill(values, (), device is not None and container._queues_transfers(non_blocking), self)
        except (RuntimeError, TypeError) as error:
            raise with_class_name(error, type(self)) from error
        if device is not None:
            container._wait_for_transfers(non_blocking)

    # --- fields -----------------------------------------------------------------------------------------------------

    @classmethod
    def _hint_of(cls, name: str) -> Any:
        return cls._layout.hint_of(name) if name in cls._layout.names else Any

    def _check_field(self, name: str) -> None:
        """Raise unless a name is a field or an entry."""
        if name not in self._layout.names and name not in self._tensordict._entries:
            raise FieldError(f"cannot set {name!r}, {self._layout.describe_fields(name)}")

    def _check_fields(self, source: Any) -> None:
        for key in source._structure() if isinstance(source, Contract) else source:
            self._check_field(key if isinstance(key, str) else key[0])

    def __setattr__(self, name: str, value: object) -> None:
        # A fast path for tensors and strings, which saves two of the calls in the setter.
        kind = type(value)
        if (kind is Tensor or kind is str) and name in self._takes_tensors:
            try:
                self._tensordict._write_name(name, value)
            except (RuntimeError, TypeError) as error:
                raise with_class_name(error, type(self)) from error
            return
        setter = self._setters.get(name)
        if setter is not None:
            setter(self, value)
            return
        if not hasattr(type(self), name):
            raise FieldError(f"cannot set the attribute {name!r}, {self._layout.describe_fields(name)}")
        if self._frozen and not name.startswith("_"):
            raise dataclasses.FrozenInstanceError(f"cannot assign to {name!r} of the frozen {type(self).__name__}")
        object.__setattr__(self, name, value)

    @classmethod
    def fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """Return the fields of the class, as :func:`dataclasses.fields` does."""
        return dataclasses.fields(cls)

    # --- reading ----------------------------------------------------------------------------------------------------

    def get(self, key: object, default: object = AS_SET, **kwargs: object) -> Any:
        """Return the value at a (nested) key: a tensor, a container, or any other value that was assigned.

        Example:
            >>> import torch
            >>> from tensordict import TensorClass
            >>> class Named(TensorClass):
            ...     name: str
            ...     value: torch.Tensor | None = None
            >>> Named("a").get("name"), Named("a").get("value", 0), Named("a").get("other", 0)
            ('a', None, 0)

        Args:
            key: the name of a field, or a tuple of names.
            default: returned if the entry is missing, as in :meth:`TensorDict.get`. A field that is `None` does not
                count as missing, so the result for it is `None`.
            **kwargs: options of lazy stacks, see :meth:`LazyStackedTensorDict.get`.
        """
        if type(key) is str:
            value = None if kwargs else self._tensordict._entries.get(key)
            if type(value) is Tensor:
                return value
        name = key[0] if type(key) is tuple and len(key) == 1 else key
        if type(name) is str and name in self._layout.names:
            default = None
        return unwrap(self._tensordict.get(key, default, **kwargs))

    def set(  # type: ignore[override]
        self: SelfT,
        key: object,
        value: object,
        inplace: bool = False,
        non_blocking: bool = False,
        overwrite: bool = False,
    ) -> SelfT:
        """Write a field, or an entry of a nested container, as :meth:`TensorDict.set` does.

        Example:
            >>> import torch
            >>> from tensordict import TensorClass
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> Point(torch.zeros(2)).set("x", value=torch.ones(2)).x
            tensor([1., 1.])

        A dict is stored as a value, as when you assign to the field, unless the field is cast to a container. Use
        :meth:`update` to make a nested container of a dict.
        """
        if inplace or overwrite or type(key) is not str:
            return super().set(key, value, inplace, non_blocking=non_blocking, overwrite=overwrite)
        if type(value) is dict and key in self._layout.names:
            value = self._as_entry(key, value, True)
        FieldWrapper._write_name(self, key, value, non_blocking)
        return self

    def pop(self, key: object, default: object = NO_DEFAULT) -> Any:
        """Delete the entry at a (nested) key and return its value; see :meth:`TensorDict.pop`."""
        return unwrap(self._tensordict.pop(key, default))

    def extend(self, *args: object, **kwargs: object) -> None:
        """Add members to a lazy stack of instances; see :meth:`LazyStackedTensorDict.extend`.

        Example:
            >>> import torch
            >>> from tensordict import TensorClass, lazy_stack
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> points = lazy_stack([Point(torch.zeros(2))])
            >>> points.extend([Point(torch.zeros(3))])
            >>> points.batch_size
            torch.Size([2])

        Raises:
            AttributeError: this instance is not a lazy stack.
        """
        self._call_on_container(self._tensordict.extend, *args, **kwargs)

    # --- from and to other forms ------------------------------------------------------------------------------------

    @classmethod
    def from_tensordict(
        cls: type[SelfT], tensordict: object, non_tensordict: Mapping[str, Any] | None = None, safe: bool | None = True
    ) -> SelfT:
        """Wrap a container in an instance, without copying it. Both read and write the same entries.

        A nested `TensorDict` becomes an instance of the tensorclass that its field is annotated with, if all its keys
        are fields of that class. The instance then wraps a shallow copy of the container, which keeps its own entries.

        Example:
            >>> import torch
            >>> from tensordict import TensorClass, TensorDict
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> td = TensorDict(x=torch.zeros(2))
            >>> Point.from_tensordict(td).x is td["x"]
            True

        Args:
            tensordict: a container whose keys are fields of the class. Missing fields are `None`.
            non_tensordict: values of further fields. If given, the instance wraps a shallow copy of the container.
            safe: `False` skips the check that `tensordict` is a container.

        Raises:
            TypeError: `tensordict` is not a container.
            ValueError: a key is not a field of the class.
        """
        container = container_of(tensordict)
        if safe is not False and not isinstance(container, Contract):
            raise ContainerExpected(
                f"{cls.__name__}.from_tensordict needs a container, got {type(tensordict).__name__}; use "
                f"{cls.__name__}.from_dict for a mapping"
            )
        unknown = sorted({*container.keys(), *(non_tensordict or ())}.difference(cls._layout.names))
        if unknown:
            raise FieldError(f"{cls.__name__}.from_tensordict got {unknown}, {cls._layout.describe_fields()}")
        if non_tensordict:
            container = container.copy()
        self = cls._wrap_container(cls._wrap_nested(container))
        for name, value in (non_tensordict or {}).items():
            self._store_entry(name, self._as_entry(name, value, True))
        if cls._has_post_init:
            self.__post_init__()  # type: ignore[attr-defined]
        if cls._frozen:
            self._tensordict._lock_tree()
        return self

    @classmethod
    def _wrap_nested(cls, container: Any) -> Any:
        """Return the container with nested containers wrapped in the tensorclasses of their fields, if there are any.

        A container that makes its entries on reading, as a lazy stack does, is returned unchanged.
        """
        entries = container._entries
        if not isinstance(entries, dict) or is_flat(entries):
            return container
        found = {}
        for name, value in entries.items():
            if is_node(value) and not value._is_non_tensor and not is_tensorclass(value):
                kind = cls._layout.tensorclass_of(name)
                if kind is not None and kind._layout.names.keys() >= set(value._structure()):
                    found[name] = kind.from_tensordict(value.copy())
        if not found:
            return container
        made = container._build({**entries, **found}, container._batch_size, container._device, container._names)
        if container._locked:
            made._lock_tree()
            made._mark_as(container)
        return made

    def __replace__(self, /, **changes: Any) -> Self:
        """Make an instance with other values in some fields, as `copy.replace` of Python 3.13 does.

        Example:
            >>> import torch
            >>> from tensordict import TensorClass
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            ...     name: str = "a"
            >>> Point(torch.zeros(2), batch_size=[2]).__replace__(name="b").name
            'b'

        Args:
            **changes: fields, or other arguments of the constructor, such as `batch_size`.

        Returns:
            a new instance, which the constructor makes. It shares the other values, and keeps the batch size, device
            and names unless they are given. It is not locked.

        Raises:
            TypeError: the constructor does not take such an argument.
        """
        container = self._tensordict
        state = {"batch_size": container._batch_size, "device": container._device, "names": container._names}
        given = {name: value for name, value in state.items() if name not in self._layout.masked}
        given.update({f.name: container._entries.get(f.name) for f in self.fields() if f.init})
        return type(self)(**{**given, **changes})

    @classmethod
    def from_dict(cls: type[SelfT], input_dict: Any, **kwargs: Any) -> SelfT:
        """Make an instance from a mapping of fields; for the arguments see :meth:`TensorDict.from_dict`."""
        given = {key: value for key, value in input_dict.items() if value is not None}
        return cls.from_tensordict(TensorDict.from_dict(given, **kwargs))

    def __repr__(self) -> str:
        """Return the class, the fields sorted by name with their shapes and dtypes, the batch size and the device."""
        if is_compact():
            return format_compactly(self)
        entries = list_entries(self._tensordict)
        lines = sort_lines(f"{name}={format_entry(value, '    ')}" for name, value in entries.items())
        lines += [f"{name}=None" for name in self._layout.names if name not in entries]
        return f"{type(self).__name__}(\n    " + ",\n    ".join([*lines, *self._facts()]) + ")"


# --- making classes ---------------------------------------------------------------------------------------------------


def _make_property(cls: type[TensorClass], name: str) -> property:
    """Return the property that reads and writes a field."""
    stores_tensors = cls._stores_tensors

    def read(self: Any) -> Any:
        value = self._tensordict._entries.get(name)
        # The body of `unwrap`, inlined: its calls would take 90 of 200 ns.
        kind = type(value)
        if kind is Tensor:
            return value
        if kind is NonTensorData:
            return value._value
        if value is None:
            return None
        return value._unwrap_value() if getattr(kind, "_is_non_tensor", False) is True else value

    def write(self: Any, value: Any) -> None:
        if type(value) is not Tensor or not stores_tensors:
            value = self._as_entry(name, value, True)
        self._store_entry(name, value)

    def refuse(self: object, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to the field {name!r} of the frozen {cls.__name__}")

    if cls._frozen:
        write = refuse

    def delete(self: object) -> None:
        write(self, None)

    return property(read, write, delete)


if TYPE_CHECKING:

    class _ClassOptions(TypedDict, total=False):
        autocast: bool
        frozen: bool
        nocast: bool
        shadow: bool
        tensor_only: bool
        skip_post_init_on_rebuild: bool
        cast_filter: CastFilter | None


@overload
@dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
def tensorclass(cls: type[C], /) -> type[C]: ...
@overload
@dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
def tensorclass(*, kw_only: Literal[False] = ..., **options: Unpack[_ClassOptions]) -> Callable[[type[C]], type[C]]: ...
@overload
@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field, dataclasses.Field))
def tensorclass(*, kw_only: bool, **options: Unpack[_ClassOptions]) -> Callable[[type[C]], type[C]]: ...
@dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
def tensorclass(
    cls: object = None,
    /,
    *,
    autocast: bool = False,
    frozen: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    skip_post_init_on_rebuild: bool = False,
    cast_filter: CastFilter | None = None,
    kw_only: bool = False,
) -> Any:
    """Make a tensorclass of a plain class with annotated fields. Use it bare or with options: see :class:`TensorClass`.

    Example:
        >>> import torch
        >>> from tensordict import TensorClass, tensorclass
        >>> @tensorclass
        ... class Point:
        ...     x: torch.Tensor
        ...     y: torch.Tensor
        >>> point = Point(x=torch.zeros(3), y=torch.ones(3), batch_size=[3])
        >>> issubclass(Point, TensorClass), point[1:].y
        (True, tensor([1., 1.]))

    Type checkers see the fields of a decorated class as parameters, and the class itself unchanged. Derive it from
    `TensorClass`, with or without the decorator, to tell them that it is a container.

    Returns:
        a subclass of :class:`TensorClass`, with the name, the bases and the body of `cls`.
    """
    given = {
        "autocast": autocast,
        "frozen": frozen,
        "nocast": nocast,
        "shadow": shadow,
        "tensor_only": tensor_only,
        "skip_post_init_on_rebuild": skip_post_init_on_rebuild,
        "kw_only": kw_only,
    }
    options: dict[str, Any] = {name: True for name, chosen in given.items() if chosen}
    if cast_filter is not None:
        options["cast_filter"] = cast_filter
    if cls is None:
        return partial(tensorclass, **options)
    if not isinstance(cls, type):
        raise TypeError(f"@tensorclass decorates a class, got {cls!r}")
    return _make_subclass(cls, options)


def _make_subclass(cls: Any, options: dict[str, Any]) -> Any:
    """Return a subclass of `TensorClass` with the name, the bases and the body of `cls`."""
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    if "__dataclass_fields__" in body:
        # The class is a dataclass already. Drop its generated methods and keep its fields.
        for name, spec in body.pop("__dataclass_fields__").items():
            if name in inspect.get_annotations(cls):
                spec.kw_only = spec.kw_only or bool(options.get("kw_only"))
                body[name] = spec
        for name in (
            "__init__",
            "__repr__",
            "__eq__",
            "__hash__",
            "__dataclass_params__",
            "__match_args__",
            "__replace__",
        ):
            body.pop(name, None)
    bases = tuple(base for base in cls.__bases__ if base is not object)
    if not issubclass(cls, TensorClass):
        bases = (*bases, TensorClass)
    made = type(cls)(cls.__name__, bases, body, **options)
    for value in body.values():
        _rebind(value, cls, made)
    return made


def _check_filter(cls: type[Any], cast_filter: Any) -> CastFilter | None:
    if cast_filter is not None and not callable(cast_filter):
        raise TypeError(f"{cls.__name__}: cast_filter takes a key and a tensor and returns a bool, got {cast_filter!r}")
    return cast_filter  # type: ignore[no-any-return]


def _filter_casts(cls: type[TensorClass]) -> None:
    """Make the filter of the class the default of all casts, unless a field or a method of the class hides them."""
    for name in CASTS:
        shared = getattr(TensorClass, name)
        if getattr(cls, name) is shared:
            setattr(cls, name, _use_filter_of_class(shared))


def _use_filter_of_class(cast: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(cast)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("cast_filter", type(self)._cast_filter)
        return cast(self, *args, **kwargs)

    return method


def _prefer_own(cls: type[TensorClass]) -> None:
    """Replace methods that a class inherits from a dataclass by the methods of `TensorClass`."""
    for name in ("__repr__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__replace__"):
        owner = next(parent for parent in cls.__mro__ if name in vars(parent))
        if dataclasses.is_dataclass(owner) and not issubclass(owner, TensorClass):
            setattr(cls, name, getattr(TensorClass, name))


def _rebind(value: object, old: type[Any], new: type[Any]) -> None:
    """Make `super()` and `__class__` in a method refer to the new class, also below decorators."""
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    else:
        # The functions inside class methods, static methods and objects of `functools`.
        parts = [getattr(value, name, None) for name in ("__func__", "func", "__wrapped__")]
    for cell in getattr(value, "__closure__", None) or ():
        if not isinstance(cell, CellType):
            continue
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # The name has no value yet.
        if content is old:
            cell.cell_contents = new
        elif isinstance(content, FunctionType):
            parts.append(content)
    for part in parts:
        if part is not None and part is not value:
            _rebind(part, old, new)


def is_tensorclass(obj: object) -> bool:
    """Return whether an object, or a class, is a tensorclass.

    Example:
        >>> import torch
        >>> from tensordict import TensorClass, TensorDict, is_tensorclass
        >>> class Point(TensorClass):
        ...     x: torch.Tensor
        >>> is_tensorclass(Point), is_tensorclass(Point(torch.zeros(1))), is_tensorclass(TensorDict())
        (True, True, False)
    """
    cls = obj if isinstance(obj, type) else type(obj)
    return issubclass(cls, Contract) and getattr(cls, "_is_tensorclass", False)


@registry.register
class TensorAttrs(TensorClass, nocast=True):
    """The device, dtype and shape of a tensor. `td.attrs()` replaces each leaf by one.

    Args:
        tgt_device: the device, `None` if it does not matter.
        tgt_dtype: the dtype, `None` if it does not matter.
        tgt_shape: the shape, `None` if it does not matter.

    Example:
        >>> import torch
        >>> from tensordict import TensorAttrs
        >>> TensorAttrs("cpu", torch.float32).tgt_dtype
        torch.float32
    """

    tgt_device: torch.device | str | int | None = None
    tgt_dtype: torch.dtype | None = None
    tgt_shape: Sequence[int] | None = None
