"""Wrapper, the base of containers that wrap another one, and FieldWrapper, the base of those with declared fields."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.fields import OPTIONS
from tensordict.containers.nontensor import wrap
from tensordict.core import torch_internals as internals
from tensordict.core.annotations import cast as as_annotated
from tensordict.core.annotations import kinds_of
from tensordict.core.contract import Contract, Device, Names, is_node, state_of
from tensordict.core.exceptions import FieldError, suggest
from tensordict.core.keys import Path
from tensordict.core.shapes import as_size
from tensordict.io.formats import pickled_containers
from tensordict.ops.collection import TensorCollection
from tensordict.ops.entries.assigning import Assign
from tensordict.ops.entries.copying import TRANSIENT
from tensordict.ops.entries.numbers import to_tensor
from tensordict.ops.entries.write_plans import Update, Write

if TYPE_CHECKING:
    from typing_extensions import Self

MethodT = TypeVar("MethodT", bound="Callable[..., Any]")
_NUMBERS = (bool, int, float, complex)
# Instances of these are stored as values, never converted to tensors.
_VALUES = (str, tuple, range, complex, np.generic)


def _prefer_override(shared: MethodT) -> MethodT:
    """Return a method that calls the override in the class of the wrapped container, if any, and `shared` otherwise."""
    name = shared.__name__

    @wraps(shared)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        container = self._tensordict
        if getattr(type(container), name) is shared:
            return shared(self, *args, **kwargs)
        return self._rewrap(getattr(container, name)(*map(container_of, args), **kwargs))

    return cast("MethodT", method)


class Wrapper(TensorCollection):
    """A container that wraps another one, `_tensordict`, and whose operations return its own class.

    It forwards the state and the walks of the contract to the wrapped container, and wraps their results. Operations
    are inherited from :class:`~tensordict.TensorCollection` and built on these walks. `_prefer_override` handles the
    few operations that some containers override.
    """

    _is_over_another = True
    _tensordict: Any
    # True if the lazy stack of instances is an instance.
    _wraps_stacks: ClassVar[bool] = True

    if not TYPE_CHECKING:
        _entries = state_of("_tensordict", "_entries", lambda self: self._tensordict._entries)
        _batch_size = state_of("_tensordict", "_batch_size", lambda self: self._tensordict._batch_size)
        _device = state_of("_tensordict", "_device", lambda self: self._tensordict._device)
        _names = state_of("_tensordict", "_names", lambda self: self._tensordict._names)
        _locked = state_of("_tensordict", "_locked", lambda self: self._tensordict._locked)
        _backing = state_of("_tensordict", "_backing", lambda self: self._tensordict._backing)

    # --- wrapping containers --------------------------------------------------------------------------------------

    @classmethod
    def _wrap_container(cls, container: object) -> Self:
        """Make an instance over an existing container, without checks."""
        self = object.__new__(cls)
        object.__setattr__(self, "_tensordict", container)
        return self

    def _wrapped_container(self) -> Any:
        return self._tensordict

    def _rewrap(self, result: Any) -> Any:
        if result is self._tensordict:
            return self
        if isinstance(result, Contract):
            return self._wrap_container(result)
        if type(result) in (list, tuple) and result and isinstance(result[0], Contract):
            return type(result)(map(self._rewrap, result))
        return result

    @classmethod
    def _make(cls, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        return cls._wrap_container(TensorDict._make(entries, batch_size, device, names))

    def _build(self, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        return self._wrap_container(self._tensordict._build(entries, batch_size, device, names))

    def _subset(self, entries: dict[str, Any], device: torch.device | None) -> Self:
        return self._wrap_container(self._tensordict._subset(entries, device))

    def _as_result(self, stack: Any) -> Any:
        members = stack._entries
        if not self._wraps_stacks or any(type(member) is not type(self) for member in members.sample):
            return stack
        members.containers = [member._tensordict for member in members.containers]
        if members.template is not None:
            members.template = members.template._tensordict
        return self._wrap_container(stack)

    def _dense(self, hooked: bool = False) -> Any:
        return self._rewrap(self._tensordict._dense(hooked))

    def _restack(self, members: Sequence[Any], dim: int | None = None) -> Self:
        return self._wrap_container(self._tensordict._restack(list(map(container_of, members)), dim))

    # --- the walks --------------------------------------------------------------------------------------------------

    def _map(self, fn: Any, size: Any = None, batch_dims: int = 0, rename: Any = None, on_node: Any = None) -> Self:
        return self._wrap_container(self._tensordict._map(fn, size, batch_dims, rename, on_node))

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        return self._wrap_container(self._tensordict._rebuilt(leaves))

    def _map_many(self, fn: Any, sizes: Any, batch_dims: int, rename: Any, on_node: Any = None) -> list[Self]:
        return list(map(self._wrap_container, self._tensordict._map_many(fn, sizes, batch_dims, rename, on_node)))

    def _plan_write(self, write: Write, source: object, prefix: Path = ()) -> None:
        self._tensordict._plan_write(write, container_of(source), prefix)

    def _index(self, index: object) -> Any:
        return self._rewrap(self._tensordict._index(index))

    # --- operations that lazy stacks, lazy views or stored containers override ----------------------------------------

    clone = _prefer_override(TensorCollection.clone)
    __repr__ = _prefer_override(TensorCollection.__repr__)

    # --- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(pickled_containers.convert_state(type(self), state))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result = memo[id(self)] = self._wrap_container(copy.deepcopy(self._tensordict, memo))
        return result

    def __setitem__(self, index: object, value: object) -> None:
        """Write an entry by its name, or assign to a part of the batch; as `TensorDict.__setitem__` does."""
        if type(index) is str:
            self._write_name(index, value)
        else:
            super().__setitem__(index, value)


class FieldWrapper(Wrapper):
    """A wrapper whose class declares its entries. `_as_entry` casts and checks every value that is written."""

    _autocast: ClassVar[bool] = False
    _frozen: ClassVar[bool] = False
    _nocast: ClassVar[bool] = False
    _shadow: ClassVar[bool] = False
    # Nothing reads it: `__post_init__` never runs for results.
    _skip_post_init_on_rebuild: ClassVar[bool] = False
    _tensor_only: ClassVar[bool] = False
    # True if all tensors are stored without casting or checking.
    _stores_tensors: ClassVar[bool] = True
    # The fields of a `tensor_only` class that may hold a container.
    _nodes: ClassVar[frozenset[str]] = frozenset()
    # The setter of each field.
    _setters: ClassVar[dict[str, Callable[[Any, Any], None]]] = {}
    __expected_keys__: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: object) -> None:
        given = {name: options.pop(name) for name in OPTIONS if name in options}
        super().__init_subclass__(**options)
        for name, chosen in given.items():
            setattr(cls, f"_{name}", bool(chosen))
        if cls._autocast + cls._nocast + cls._tensor_only > 1:
            raise FieldError(f"{cls.__name__}: autocast, nocast and tensor_only are exclusive features: choose one")

    def __class_getitem__(cls, item: object) -> Any:
        """Return a subclass with these options, or a generic class with these type arguments."""
        options = item if isinstance(item, tuple) else (item,)
        if not all(isinstance(option, str) for option in options):
            if not hasattr(cls, "__parameters__"):
                raise TypeError(f"{cls.__name__} is not a generic class: {cls.__name__}[...] takes options, {OPTIONS}")
            return super().__class_getitem__(item)  # type: ignore[misc]
        unknown = [option for option in options if option not in OPTIONS]
        if unknown:
            raise ValueError(f"unknown options {unknown} of {cls.__name__}; known are {list(OPTIONS)}")
        name = "_".join((cls.__name__, *sorted(set(options))))
        metaclass: Any = type(cls)
        return metaclass(name, (cls,), {"__module__": cls.__module__}, **dict.fromkeys(options, True))

    # --- writing ------------------------------------------------------------------------------------------------------

    def _begin(self, batch_size: Any = None, device: Any = None, names: Any = None) -> Any:
        """Give this instance a new container without entries, and return it."""
        if device is None and names is None:
            container = TensorDict._make({}, as_size(batch_size), None, None)
        else:
            container = TensorDict(None, batch_size, device, names)
        object.__setattr__(self, "_tensordict", container)
        return container

    @classmethod
    def _hint_of(cls, name: str) -> Any:
        """Return the declared type of a field; `Any` for other names."""
        raise NotImplementedError

    def _is_number(self, name: str, value: object) -> bool:
        """Return whether a number has the type of a field that is declared for numbers alone, so that it stays one."""
        kinds = kinds_of(self._hint_of(name))
        return all(kind in (*_NUMBERS, type(None)) for kind in kinds) and isinstance(value, tuple(kinds))

    def _as_entry(self, name: str, value: object, keep: bool = False) -> Any:
        """Convert the value of a field for the container. With `keep`, a mapping is stored as a value, not as a node.

        Raises:
            TypeError: the options of the class do not allow the value. The error names class and field.
        """
        if value is None or (self._stores_tensors and (type(value) is str or isinstance(value, (Tensor, Contract)))):
            return value
        where = f"{type(self).__name__}.{name}"
        if self._autocast:
            value = as_annotated(value, self._hint_of(name), where)
        elif self._tensor_only and not isinstance(value, (Tensor, Contract)):
            if name in self._nodes:
                # The container converts it, and makes a nested container of a mapping.
                return value
            try:
                value = to_tensor(value, (name,), None)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f"{where} is a field of a tensor_only class, got a {type(value).__name__}: pass a tensor, or drop "
                    "tensor_only"
                ) from None
        if isinstance(value, (Tensor, Contract)):
            return value
        if (
            # A `numpy.float64` is a subclass of both, and counts as a number.
            (isinstance(value, _VALUES) and not isinstance(value, float))
            or (keep and isinstance(value, Mapping))
            or (self._nocast and isinstance(value, (*_NUMBERS, np.ndarray)))
            or (self._autocast and not hasattr(value, "__array__"))
            or (isinstance(value, _NUMBERS) and self._tensordict._batch_size and self._is_number(name, value))
        ):
            container = self._tensordict
            return wrap(value, container._batch_size, container._device, container._names)
        return value

    def _store_entry(self, name: str, item: object, non_blocking: bool = False, path: Path | None = None) -> None:
        """Store a result of `_as_entry`. `None` deletes the entry."""
        container = self._tensordict
        if item is None:
            if name in container._entries:
                container.del_(name)
            return
        try:
            container._write_name(name, item, non_blocking, path)
        except (RuntimeError, TypeError) as error:
            raise with_class_name(error, type(self)) from error

    def _write_name(self, name: str, item: object, non_blocking: bool = False, path: Path | None = None) -> None:
        if type(item) is not Tensor or not self._stores_tensors:
            item = self._as_entry(name, item)
        if name not in self._setters:
            self._check_field(name)
        FieldWrapper._store_entry(self, name, item, non_blocking, path)

    def _plan_write(self, write: Write, source: object, prefix: Path = ()) -> None:
        if isinstance(source, (Contract, Mapping)) and (write.adds or isinstance(write, Assign)):
            self._check_fields(source)
            if isinstance(write, Update) and not isinstance(source, Contract):
                source = self._as_entries(source, write)
        super()._plan_write(write, source, prefix)

    def _as_entries(self, source: Mapping[Any, Any], write: Update) -> dict[Any, Any]:
        """Convert the items of a mapping for an update of the container."""
        container = self._tensordict
        items: dict[Any, Any] = {}
        for key, value in source.items():
            name = key if isinstance(key, str) else key[0]
            # A container that is merged into a nested one does not replace the field, so it is not converted.
            merged = isinstance(value, (Mapping, Contract)) and is_node(container._node(name)) and write.merges(value)
            items[key] = value if merged or key != name else self._as_entry(name, value)
            if items[key] is None:
                # `update` stores a holder of `None` over an existing entry. The field then reads as `None`.
                if name in container._entries:
                    items[key] = wrap(None, container._batch_size, container._device, container._names)
                else:
                    del items[key]
        return items

    def _check_fields(self, source: object) -> None:
        """Raise if a mapping or container to be written has keys or values that the class does not allow."""

    if not TYPE_CHECKING:
        # Hidden from type checkers, which would otherwise accept any attribute.
        def __getattr__(self, name: str) -> Any:
            if name == "_tensordict":
                # The class has its own constructor, which is assigning the first field.
                return self._begin()
            # Other names belong to the wrapped container, such as the `stack_dim` of a lazy stack.
            if name in self.__expected_keys__:
                raise AttributeError(f"{type(self).__name__}.{name} is declared but not set")
            if name.startswith("_") or not hasattr(type(self._tensordict), name):
                raise AttributeError(
                    f"{type(self).__name__} has no attribute {name!r}; its fields are {sorted(self.__expected_keys__)}"
                    f"{suggest(name, self.__expected_keys__)}"
                )
            value = getattr(self._tensordict, name)
            return partial(self._call_on_container, value) if callable(value) else value

    def _call_on_container(self, method: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call a method that only the wrapped container has. Containers among its arguments must have these fields."""
        for arg in args:
            for item in arg if isinstance(arg, (list, tuple)) else [arg]:
                if isinstance(item, Contract):
                    self._check_fields(item)
        plain = [list(map(container_of, arg)) if isinstance(arg, (list, tuple)) else container_of(arg) for arg in args]
        return self._rewrap(method(*plain, **kwargs))


def container_of(value: object) -> Any:
    """Return the container in a wrapper, and any other value unchanged."""
    return value._wrapped_container() if isinstance(value, Contract) else value


def with_class_name(error: Exception, cls: type[Any]) -> Exception:
    """Return an error about an entry with the class name prepended to its message."""
    message = str(error)
    return type(error)(f"{cls.__name__}: {message}") if message.startswith("entry ") else error


def register_wrapper(cls: type[Wrapper]) -> None:
    """Register a class as a pytree node. Its leaves are the leaves of the wrapped container."""

    def flatten(instance: Any) -> tuple[list[Any], Any]:
        container = instance._tensordict
        node = internals.pytree_nodes[type(container)]
        values, context = node.flatten_fn(container)
        return values, (type(container), context)

    def flatten_with_keys(instance: Any) -> tuple[list[Any], Any]:
        container = instance._tensordict
        values, context = internals.pytree_nodes[type(container)].flatten_with_keys_fn(container)
        return values, (type(container), context)

    def unflatten(values: Any, context: Any) -> Any:
        kind, inner = context
        container = internals.pytree_nodes[kind].unflatten_fn(values, inner)
        return None if container is None else cls._wrap_container(container)

    internals.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
