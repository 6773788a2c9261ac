"""Base classes of the holders in `nontensor.py`: typed holders, holders with a file, and their pytree form."""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import torch
from typing_extensions import TypeVar

from tensordict.containers.shared_file import SharedFile
from tensordict.core import pytree
from tensordict.core.annotations import is_a
from tensordict.core.contract import Contract
from tensordict.core.equality import same_value
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path, joined
from tensordict.io.formats.value_files import Place
from tensordict.io.specification import specification_of


def is_all(at: object) -> bool:
    """Return whether an index selects everything."""
    items = at if type(at) is tuple else (at,)
    return all(type(item) is slice and item == slice(None) for item in items)


def check_holders(items: Sequence[Any], path: Path) -> None:
    """Raise unless all items are holders."""
    for item in items:
        if not item._is_non_tensor:
            where = f"entry {joined(path)!r} is" if path else "joining takes"
            raise TypeError(f"{where} a value that is no tensor in one input and a {type(item).__name__} in another")


V = TypeVar("V", default=Any)
_typed: dict[tuple[Any, Any], Any] = {}


class TypedHolderMeta(type):
    """The metaclass of holders, for pickling: no module has an attribute for a class such as `MetaData[str]`."""


if TYPE_CHECKING:

    class _Value(Generic[V]):
        """The type of the attribute `data`."""

        def __get__(self, instance: object, owner: object = None) -> V: ...
        def __set__(self, instance: object, value: V) -> None: ...

    class _GenericBase(Generic[V]):
        """The generic base that type checkers see."""

        data: _Value[V]

else:
    _GenericBase = {V: object}


class TypedHolder(_GenericBase[V], metaclass=TypedHolderMeta):
    """The base of holders that can be subscripted with a type: `MetaData[str]` checks that its value is a string."""

    _holds: Any = Any

    if not TYPE_CHECKING:

        def __class_getitem__(cls, kind: object) -> Any:
            """Return the subclass for values of this type (a class, a union, a `Literal`), always the same object."""
            if isinstance(kind, TypeVar):
                return cls
            key = (cls, kind)
            if key not in _typed:
                name = f"{cls.__name__}[{getattr(kind, '__name__', kind)}]"
                _typed[key] = made = type(cls)(name, (cls,), {"__module__": cls.__module__, "_holds": kind})
                made._stored_as = cls.__name__
                pytree.register(made, flatten_holder, unflatten_holder, flatten_holder_with_keys)
            return _typed[key]

    def __init__(self, data: V, *args: object, **kwargs: object) -> None:
        super().__init__(data, *args, **kwargs)  # type: ignore[call-arg]
        self._check_value(self._value)  # type: ignore[attr-defined]

    @classmethod
    def _check_value(cls, value: object) -> None:
        """Raise `TypeError` unless a value has the type of this class."""
        if not is_a(value, cls._holds):
            shown = getattr(cls._holds, "__name__", cls._holds)
            raise TypeError(f"Expected data of type {shown}, got {type(value).__name__}: {cls.__name__} holds no other")


def _reduce_class(cls: Any) -> Any:
    for (parent, kind), made in _typed.items():
        if made is cls:
            return operator.getitem, (parent, kind)
    return cls.__qualname__


copyreg.pickle(TypedHolderMeta, _reduce_class)


@dataclass
class HolderFields:
    """The public fields of a holder, for `fields()`."""

    data: Any
    _metadata: dict[str, Any] | None = None
    _is_non_tensor: bool = True


class SavedHolder(Contract):
    """The base of holders and their stacks that may belong to a save. Writing into one then writes to its file."""

    _place: Place | None = None
    # The file that the values are read from at each access, if processes share them.
    _file: SharedFile | None = None

    def _put_at(self, place: Place | None, shared: bool) -> None:
        """Set the folder of the saved values. `shared` values are read from there from now on.

        Shared values without a folder get a temporary one, which is deleted with the last holder.
        """
        self._place = place
        if shared or self._file is not None:
            file = SharedFile(self, place)
            self._place = file.place
            self._use_file(file)

    def _use_file(self, file: SharedFile | None) -> None:
        """Read the values from this file from now on; `None` keeps the present values in memory."""
        raise NotImplementedError

    def _unlock_tree(self) -> None:
        super()._unlock_tree()  # type: ignore[misc]
        if self._file is not None:
            self._use_file(None)

    def _take_value(self, other: object) -> None:
        """Take the values of another holder of the same kind and batch size, which was read from a file."""
        raise NotImplementedError

    def _prepare_write(self, after: object, key: Path = ()) -> Callable[[], None]:
        """Return a function that writes the values of `after` to the file of this holder, if it has one.

        Raises:
            UnsupportedEntryError: JSON cannot hold the values.
            ShapeError: processes share this holder, and it would become a stack.
        """
        if self._place is None or (self._file is None and self._memmap_prefix is None):
            return _nothing
        if self._file is not None and specification_of(after).kind != specification_of(self).kind:
            where = f"entry {joined(key)!r}: " if key else ""
            raise ShapeError(
                f"{where}a {specification_of(self).kind} that other processes share has one value for its whole "
                "batch: save its maybe_to_stack() to give its elements values of their own"
            )
        return self._place.plan_write(specification_of(after, key), key, self._file is not None)


def _nothing() -> None:
    """Do nothing, for holders without a file."""


class HolderContext(NamedTuple):
    """The pytree context of a holder, which has no leaves. As in `Context`, batch sizes of equal length are equal."""

    cls: type[Any]
    value: Any
    batch_size: pytree.HeldSize
    names: tuple[str | None, ...] | None
    device: torch.device | None

    def __eq__(self, other: object) -> bool:
        if type(other) is not HolderContext or not same_value(self.value, other.value):
            return False
        return self._comparison_key() == other._comparison_key()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._comparison_key())

    def _comparison_key(self) -> tuple[object, ...]:
        return self.cls, pytree.count_dims(self.batch_size), self.names, self.device


def flatten_holder(holder: Any) -> tuple[list[Any], HolderContext]:
    names = None if holder._names is None else tuple(holder._names)
    return [], HolderContext(
        type(holder), holder._value, pytree.to_context_size(holder._batch_size), names, holder._device
    )


def flatten_holder_with_keys(holder: Contract) -> tuple[list[tuple[Any, Any]], HolderContext]:
    return [], flatten_holder(holder)[1]


def unflatten_holder(values: object, context: HolderContext) -> Any:
    """Rebuild a holder from its context.

    The batch size consists of zeros if `torch.export` has dropped a varying one. The container of the holder sets it.
    """
    size = context.batch_size
    if isinstance(size, pytree.BatchDims):
        size = (0,) * size if size.size is None else size.size
    return context.cls._of(context.value, torch.Size(size), context.device, context.names)
