"""The interface of array stores (HDF5 files, Zarr groups, Redis servers), used by `PersistentTensorDict`.

A store is a tree of groups that hold arrays and texts, each with attributes. Containers use only the classes here, so
they work with every kind of store; a new kind subclasses each of them.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, unquote

import numpy as np
import torch

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, find_duplicate, joined
from tensordict.io.saving.progress import NO_BAR, Progress
from tensordict.memory.stored_tensors import SPREAD, Selection, StoredTensor

if TYPE_CHECKING:
    from typing_extensions import Self


# The attributes that say the batch size of a container, and the dtype of a tensor where the array has only its bits.
SIZE, DTYPE = "_batch_size", "_dtype"


# A function from the shape of an array to the selection that will be read; `None` if nothing will.
Pick = Callable[[tuple[int, ...]], "Selection | None"]


# Prefix of names that the store cannot hold literally. The rest of such a name is percent-encoded.
ENCODED = "_%"


def encode_name(name: str) -> str:
    """Return the encoded form of a name."""
    return ENCODED + quote(name, safe="")


def decode_name(part: str) -> str:
    """Return the name that a part of a path in a store stands for."""
    return unquote(part[len(ENCODED) :]) if part.startswith(ENCODED) else part


def decode_names(parts: Iterable[str]) -> list[str]:
    """Return the names of the entries of a group from `parts`, the names of its links in the store.

    Raises:
        ValueError: two links stand for one name, because one of them is encoded.
    """
    names = list(map(decode_name, parts))
    if len(set(names)) != len(names):
        raise ValueError(f"the name {find_duplicate(names)!r:.200} is there twice, once in an encoded form")
    return names


class StaleError(SaveError):
    """Another process changed an item of the store after it was looked up."""


class Item(ABC):
    """An object in a store: a group, an array or a text.

    Attributes:
        store: the store that holds it.
        key: the nested key of the entry, for errors.
        address: identity token; changes when the item is replaced. -1 for an item without a name.
    """

    def __init__(self, store: Store, key: Path, address: int) -> None:
        self.store = store
        self.key = key
        self.address = address

    @abstractmethod
    def attribute(self, name: str) -> str | list[int] | None:
        """Return an attribute, a text or a list of integers; `None` if it is missing.

        Raises:
            ValueError: the attribute has another type.
        """

    @abstractmethod
    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        """Set an attribute to a text or integers; `None` deletes it."""

    def set_attributes(self, values: Mapping[str, str | int | Sequence[int] | None]) -> None:
        """Set several attributes at once."""
        for name, value in values.items():
            self.set_attribute(name, value)

    def text(self, name: str) -> str | None:
        """Return an attribute that is a text; `None` if it is missing, a `ValueError` for integers."""
        found = self.attribute(name)
        if isinstance(found, list):
            raise ValueError(f"the attribute {name!r} is no text")
        return found

    def numbers(self, name: str) -> list[int] | None:
        """Return an attribute that is a list of integers; `None` if it is missing, a `ValueError` for a text."""
        found = self.attribute(name)
        if isinstance(found, str):
            raise ValueError(f"the attribute {name!r} is no row of integers")
        return found


class Text(Item):
    """A text in a store, which holds a value."""

    @property
    def is_pickled(self) -> bool:
        """True for a pickled value, which `pickled` reads."""
        return False

    def pickled(self) -> bytes:
        """Read a pickled value."""
        raise NotImplementedError

    @abstractmethod
    def content(self) -> str:
        """Read the text."""


class ArrayItem(Item):
    """An array in a store, which holds a leaf; implements the `Array` of `memory/stored_tensors.py`.

    Attributes:
        dtype: the dtype of the tensor.
        shape: the shape of the array.
        has_one_name: False if several names of the store stand for this array.
    """

    dtype: torch.dtype
    shape: torch.Size

    @property
    @abstractmethod
    def has_one_name(self) -> bool: ...

    @property
    def spread(self) -> int:
        return SPREAD

    @property
    def rows_together(self) -> int:
        return 1

    @property
    def is_blank(self) -> bool:
        """True if the array reads as zeros because nothing was written to it."""
        return False

    def check(self) -> None:
        self.store.check()

    @abstractmethod
    def read(self, selection: Selection, dtype: object) -> Any: ...

    @abstractmethod
    def write(self, selection: Selection, values: object) -> None: ...

    def record_written(self) -> None:
        """Record that all elements were written, so that `Store.find_damage` can report missing parts."""

    def tensor(self, device: torch.device | None) -> Any:
        """Return the array as a tensor that is read when it is used."""
        return StoredTensor.of(self, self.dtype, device, self.key)


class UnreadableItem(Item):
    """An item that is neither a tensor, a container nor a value; `why` says what it is."""

    def __init__(self, store: Store, key: Path, address: int, why: str) -> None:
        super().__init__(store, key, address)
        self.why = why

    def attribute(self, name: str) -> None:
        return None

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        raise self.refusal()

    def refusal(self) -> UnsupportedEntryError:
        """Return the error for reading this item."""
        return UnsupportedEntryError(
            f"entry {joined(self.key)!r} of the {self.store.kind} {self.store.name!r} is {self.why}, which has no form "
            "as a tensor or a container; td.select(...) takes the other entries"
        )


class ForeignArray(UnreadableItem):
    """An array of another program that torch has no dtype for, such as one of texts or dates. It is read as a value.

    Args:
        array: the array of the library of the store.
        kind: the kind of its elements, for errors.
    """

    def __init__(self, store: Store, key: Path, address: int, array: Any, kind: object) -> None:
        super().__init__(store, key, address, f"an array of {kind} of shape {list(array.shape)}")
        self._array = array

    def elements(self) -> Any:
        """Read the array, as a NumPy array."""
        with self.store.errors(self.key):
            return np.asarray(self._array[...])


class Group(Item):
    """A group of named items.

    The `new_...` methods make items without a name, and `attach` names them. A write that fails before `attach` changes
    nothing.
    """

    @property
    @abstractmethod
    def path(self) -> str:
        """Path of the group in the store, for `Store.group_at`; raises `SaveError` if the group was deleted."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the items, in the order of creation if the store keeps it."""

    @abstractmethod
    def find(self, name: str, known: Item | None = None) -> Item:
        """Look up an item by name. Links that lead out of the store are never followed.

        Args:
            name: the name of the item.
            known: the item that an earlier call returned, which is returned again if it is still current.

        Raises:
            KeyError: the name is missing.
            SaveError: the store is closed or broken.
        """

    def has(self, name: str) -> bool:
        """Return True if the group has an item of this name now."""
        try:
            self.find(name)
        except KeyError:
            return False
        return True

    @abstractmethod
    def check_name(self, name: str) -> None:
        """Raise a `SaveError` if the store cannot hold this name."""

    @abstractmethod
    def new_group(self, key: Path) -> Group:
        """Create a group without a name."""

    @abstractmethod
    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        """Create an array without a name; `options` as for `Store.check_options`."""

    @abstractmethod
    def new_text(self, key: Path, content: str) -> Text:
        """Create a text without a name; raises `UnicodeEncodeError` if it cannot be encoded as UTF-8."""

    def new_pickle(self, key: Path, content: bytes) -> Text:
        """Create a pickled value without a name, in a store that `holds_pickles`."""
        raise NotImplementedError

    @property
    def handle(self) -> Any:
        """The object of the library of the store: an open file or group."""
        raise NotImplementedError

    @abstractmethod
    def attach(self, name: str, item: Item) -> None:
        """Name an item, replacing the item that has this name."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a name, and its item unless that has another name."""


class Store(ABC):
    """An open store, shared by all containers that read from it.

    Attributes:
        backend: key of the class in `BACKENDS`, equal to the name of the format.
        kind: the noun that errors use.
        a_kind: `kind` with its article.
        suffixes: file name endings of this kind of store.
        name: path or address of the store.
        mode: `"r"`, or `"r+"` if the store is writable.
        shares: True if an item may have several names. Storing an item of the store again adds a name, without a copy.
        rewrites: True if a tensor of the same shape and dtype overwrites the existing array.
        is_together: True if `together` has nothing to combine, or a block of it is already open.
        texts_are_json: True if string values are stored as JSON, like other values.
        opens_urls: True if `open` and `create` accept a `Remote`.
        holds_ragged: True if the store can hold ragged tensors.
        holds_pickles: True if the store can hold pickled values.
        notes: True if the batch sizes and names of containers are written to the store.
        progress: progress bar that counts the bytes written; `None` for none.
        allow_pickle: values that JSON cannot hold are pickled and unpickled, if the store can hold pickles.
        reads_stacks: a `ForeignArray` whose leading dims are the batch dims is read as one value for each element.
    """

    backend: ClassVar[str]
    kind: ClassVar[str]
    a_kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    shares: ClassVar[bool] = False
    rewrites: ClassVar[bool] = True
    texts_are_json: ClassVar[bool] = False
    opens_urls: ClassVar[bool] = False
    holds_ragged: ClassVar[bool] = False
    holds_pickles: ClassVar[bool] = False
    allow_pickle = False
    reads_stacks = False

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self.mode = mode
        self.notes = True
        self.progress: Progress = NO_BAR

    @classmethod
    @abstractmethod
    def open(cls, name: object, mode: str, *, locking: object = None) -> Self:
        """Open a store; `mode` as for a file, `locking` as in `PersistentTensorDict.LOCKING`.

        Raises:
            OSError: the store is missing, already exists, or is locked by a writer.
            SaveError: the path holds something else, or a broken store.
        """

    @classmethod
    def over(cls, handle: object) -> tuple[Self, Group]:
        """Wrap a group that the library of the store has opened; returns the store and the group."""
        raise TypeError(f"{cls.a_kind} is not opened by an object of a library, got {type(handle).__name__}")

    @classmethod
    def create(cls, target: object, overwrite: bool = False) -> Self:
        """Create a store to save into; `target` is an empty file or folder, or a store.

        Raises:
            SaveError: `target` has content, and `overwrite` is False.
        """
        return cls.open(target, "w", locking=False)

    @staticmethod
    def is_folder(path: str) -> bool:
        """Return True if a store at this path is a folder, False if it is a file."""
        return False

    @staticmethod
    def choose_mode(path: str) -> str:
        """Return the mode that reopens a store which was just saved at a path."""
        return "r+"

    @staticmethod
    def is_handle(value: object) -> bool:
        """Return True if a value is an open group of the library, False if it is a path."""
        return not isinstance(value, (str, bytes, os.PathLike))

    @staticmethod
    def is_at(path: str) -> bool:
        """Return True if the file or folder at this path begins like such a store. Its content is not checked."""
        return False

    @staticmethod
    def strangers(path: str, container: Any) -> Collection[str]:
        """List names in the store at this path that saving `container` cannot have written, here or by the reference.

        Raises:
            SaveError: the store cannot be read.
        """
        return ()

    @staticmethod
    @abstractmethod
    def check_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check the options for new arrays and return them; raises `TypeError` for unknown ones."""

    @staticmethod
    def choose_compression(name: str) -> Mapping[str, Any]:
        """Return the options that compress new arrays with the codec of this name."""
        return {"compression": name}

    @property
    @abstractmethod
    def root(self) -> Group:
        """The outermost group."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """False once the store is closed."""

    @abstractmethod
    def flush(self) -> None:
        """Make what was written visible to others that open the store."""

    @abstractmethod
    def close(self) -> None:
        """Close the store for all containers that read from it; a second call does nothing."""

    @contextlib.contextmanager
    def errors(self, key: Path) -> Iterator[None]:
        """Turn errors of the library, and any `ValueError`, into a `SaveError` that names the key."""
        try:
            yield
        except SaveError as error:
            if key and repr(joined(key)) not in str(error):
                raise SaveError(f"entry {joined(key)!r}: {error}") from error
            raise
        except (IndexError, ConnectionError):
            raise
        except Exception as error:
            # Codecs raise exceptions of any type.
            where = f"entry {joined(key)!r} " if key else ""
            if isinstance(error, OSError) and error.errno:
                raise OSError(error.errno, f"{where}cannot be read or written ({error})", self.name) from error
            raise SaveError(f"{where}of the {self.kind} {self.name!r}: {error}") from error

    def find_damage(self, num_threads: int) -> list[str]:
        """Find arrays with parts that are missing or cannot be decoded; returns one sentence per array, with its key.

        Stores that keep an array in one piece return nothing, because opening them detects damage.
        """
        return []

    def check(self) -> None:
        """Raise a `SaveError` if the store is closed."""
        if not self.is_open:
            raise SaveError(f"the {self.kind} {self.name!r} was closed; open it again")

    def check_writable(self) -> None:
        """Raise a `SaveError` if the store is closed or read-only."""
        self.check()
        if self.mode == "r":
            raise SaveError(f"the {self.kind} {self.name!r} is open for reading only; open it with mode='r+' to write")

    def group_at(self, path: str, key: Path = ()) -> Group:
        """Return the group at a path; errors name it `key`.

        Raises:
            KeyError: the path leads to no group.
        """
        group = self.root
        for part in filter(None, path.split("/")):
            found = group.find(self.decode_part(part))
            if not isinstance(found, Group):
                raise KeyError(f"{path!r} is no group of the {self.kind} {self.name!r}")
            group = found
        group.key = key
        return group

    @staticmethod
    def decode_part(part: str) -> str:
        """Return the name that one part of a path stands for."""
        return decode_name(part)

    @property
    def source(self) -> object:
        """The argument that makes `open` open this store again."""
        return self.name

    @property
    def is_together(self) -> bool:
        return True

    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> contextlib.AbstractContextManager[Any]:
        """Combine the requests of a block into one, for stores on servers.

        The writes of the block become visible together at its end, or not at all if the block fails.

        Args:
            items: groups and arrays that the block will read.
            pick: selects the elements that the block will read from each array.
        """
        return contextlib.nullcontext()

    def undo_on_failure(self, undo: Callable[[], None]) -> None:  # noqa: B027
        """Call `undo` if the surrounding block of `together` fails; does nothing outside of such a block."""

    @contextlib.contextmanager
    def suspend_notes(self) -> Iterator[None]:
        """Do not write batch sizes that the block sets, because they were derived from the content of the store."""
        self.notes = False
        try:
            yield
        finally:
            self.notes = True
