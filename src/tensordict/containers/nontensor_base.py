"""Values that are no tensors: where they are saved, and the pytree form of their containers."""

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
    """Whether an index takes everything."""
    items = at if type(at) is tuple else (at,)
    return all(type(item) is slice and item == slice(None) for item in items)


def check_held(items: Sequence[Any], path: Path) -> None:
    """Raise unless all of these are holders."""
    for item in items:
        if not item._is_non_tensor:
            where = f"entry {joined(path)!r} is" if path else "joining takes"
            raise TypeError(f"{where} a value that is no tensor in one input and a {type(item).__name__} in another")


V = TypeVar("V", default=Any)
_typed: dict[tuple[Any, Any], Any] = {}


class OfTypeMeta(type):
    """The class of the classes that `MetaData[str]` and its kin are, which no module has under their name."""


if TYPE_CHECKING:

    class _Value(Generic[V]):
        """An attribute that holds the value."""

        def __get__(self, instance: object, owner: object = None) -> V: ...
        def __set__(self, instance: object, value: V) -> None: ...

    class _Of(Generic[V]):
        """What type checkers know of the parameter."""

        data: _Value[V]

else:
    _Of = {V: object}


class OfType(_Of[V], metaclass=OfTypeMeta):
    """A class of holders that has a subclass for each type of values, `MetaData[str]`, which checks its value."""

    _holds: Any = Any

    if not TYPE_CHECKING:

        def __class_getitem__(cls, kind: object) -> Any:
            """The subclass whose value is of this type: a class, a union, a `Literal`; the same one each time."""
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
        """Raise `TypeError` unless a value is of the type of this class."""
        if not is_a(value, cls._holds):
            shown = getattr(cls._holds, "__name__", cls._holds)
            raise TypeError(f"Expected data of type {shown}, got {type(value).__name__}: {cls.__name__} holds no other")


def _reduced(cls: Any) -> Any:
    for (parent, kind), made in _typed.items():
        if made is cls:
            return operator.getitem, (parent, kind)
    return cls.__qualname__


copyreg.pickle(OfTypeMeta, _reduced)


@dataclass
class HolderFields:
    """What the fields of a holder are called."""

    data: Any
    _metadata: dict[str, Any] | None = None
    _is_non_tensor: bool = True


class Saved(Contract):
    """What a holder, or a stack of them, knows of the file that it is saved in: what is written into it goes there."""

    _place: Place | None = None
    # What the values are read from each time, when processes share them.
    _file: SharedFile | None = None

    def _put_at(self, place: Place | None, shared: bool) -> None:
        """Say in which folder the values are saved; those that are `shared` are read from there from now on.

        Without a folder, shared values are put into one of their own, which goes away with the last holder.
        """
        self._place = place
        if shared or self._file is not None:
            file = SharedFile(self, place)
            self._place = file.place
            self._read_from(file)

    def _read_from(self, file: SharedFile | None) -> None:
        """Have the values read from this file, or keep those that it holds now."""
        raise NotImplementedError

    def _unlock_tree(self) -> None:
        super()._unlock_tree()  # type: ignore[misc]
        if self._file is not None:
            self._read_from(None)

    def _take_value(self, other: object) -> None:
        """Take over the values of another holder of this kind and batch size, as they are in the file."""
        raise NotImplementedError

    def _writing(self, after: object, key: Path = ()) -> Callable[[], None]:
        """What writes the values of `after` to the file of this holder, when it has one.

        Raises:
            UnsupportedEntryError: JSON cannot hold them.
            ShapeError: processes share this holder, and it would become a stack.
        """
        if self._place is None or (self._file is None and self._memmap_prefix is None):
            return _nothing
        if self._file is not None and specification_of(after).kind != specification_of(self).kind:
            where = f"entry {joined(key)!r}: " if key else ""
            raise ShapeError(
                f"{where}a {specification_of(self).kind} that other processes share has one value for all of its "
                "batch: save the maybe_to_stack() of it to give its elements values of their own"
            )
        return self._place.plan_write(specification_of(after, key), key, self._file is not None)


def _nothing() -> None:
    """Write to no file."""


class HolderContext(NamedTuple):
    """Everything about a holder, which has no leaves. As in `Context`, batch sizes are equal if their lengths are."""

    cls: type[Any]
    value: Any
    batch_size: pytree.HeldSize
    names: tuple[str | None, ...] | None
    device: torch.device | None

    def __eq__(self, other: object) -> bool:
        if type(other) is not HolderContext or not same_value(self.value, other.value):
            return False
        return self._compared() == other._compared()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[object, ...]:
        return self.cls, pytree.count_dims(self.batch_size), self.names, self.device


def flatten_holder(holder: Any) -> tuple[list[Any], HolderContext]:
    names = None if holder._names is None else tuple(holder._names)
    return [], HolderContext(
        type(holder), holder._value, pytree.to_context_size(holder._batch_size), names, holder._device
    )


def flatten_holder_with_keys(holder: Contract) -> tuple[list[tuple[Any, Any]], HolderContext]:
    return [], flatten_holder(holder)[1]


def unflatten_holder(values: object, context: HolderContext) -> Any:
    """A holder with the batch size of the context, or of zeros where `torch.export` has lost one that varies.

    The container that the holder is in gives it its own batch size.
    """
    size = context.batch_size
    if isinstance(size, pytree.BatchDims):
        size = (0,) * size if size.size is None else size.size
    return context.cls._of(context.value, torch.Size(size), context.device, context.names)
