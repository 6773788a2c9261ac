"""What a container whose tensors are not in memory asks of where they are: a file, a folder, a server.

A store is a tree of groups, with arrays and texts in them, each with attributes. `PersistentTensorDict` and all that
reads or writes one go through the classes here, and need not know the kind of store; a new kind is a subclass of each.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, unquote

import torch

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, find_duplicate, joined
from tensordict.memory.stored_tensors import SPREAD, Selection, StoredTensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.io.saving.progress import Progress


# The attributes that say the batch size of a container, and the dtype of a tensor where the array has only its bits.
SIZE, DTYPE = "_batch_size", "_dtype"


# What will be read of an array of a shape; nothing for `None`.
Pick = Callable[[tuple[int, ...]], "Selection | None"]


# Names in a store begin with it if they are percent-encoded behind it, as the store cannot have them as they are.
ENCODED = "_%"


def encode_name(name: str) -> str:
    """Return the encoded form of a name."""
    return ENCODED + quote(name, safe="")


def decode_name(part: str) -> str:
    """Return the name that a part of a path in a store stands for."""
    return unquote(part[len(ENCODED) :]) if part.startswith(ENCODED) else part


def decode_names(parts: Iterable[str], decode: Callable[[str], str] = decode_name) -> list[str]:
    """Give the names of the entries of a group, whose links in the store are `parts`.

    Raises:
        ValueError: two of the links stand for one name, one of them being encoded.
    """
    names = list(map(decode, parts))
    if len(set(names)) != len(names):
        raise ValueError(f"the name {find_duplicate(names)!r:.200} is there twice, once in an encoded form")
    return names


class StaleError(SaveError):
    """An item is no longer what it was when it was looked up, as another process has changed the store."""


class Item(ABC):
    """What a name in a group stands for.

    Attributes:
        store: where it is.
        key: the nested key of the entry, for errors.
        address: what tells it from another item that takes its name; -1 for what has no name yet, or where none can.
    """

    def __init__(self, store: Store, key: Path, address: int) -> None:
        self.store = store
        self.key = key
        self.address = address

    @abstractmethod
    def attribute(self, name: str) -> str | list[int] | None:
        """A text or a row of integers that is noted on it; `None` when there is none.

        Raises:
            ValueError: it is neither.
        """

    @abstractmethod
    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        """Note a text or integers on it; `None` takes the attribute away."""

    def set_attributes(self, values: Mapping[str, str | int | Sequence[int] | None]) -> None:
        """Note several attributes at once."""
        for name, value in values.items():
            self.set_attribute(name, value)

    def text(self, name: str) -> str | None:
        """The text in an attribute; `None` when there is no such attribute, a `ValueError` when it is none."""
        found = self.attribute(name)
        if isinstance(found, list):
            raise ValueError(f"the attribute {name!r} is no text")
        return found

    def numbers(self, name: str) -> list[int] | None:
        """The integers in an attribute; `None` when there is no such attribute, a `ValueError` when it has others."""
        found = self.attribute(name)
        if isinstance(found, str):
            raise ValueError(f"the attribute {name!r} is no row of integers")
        return found


class Text(Item):
    """A text, which stands for a value that is no tensor."""

    @abstractmethod
    def content(self) -> str:
        """The text."""


class ArrayItem(Item):
    """An array that a tensor can be read from; an `Array` of `memory/stored_tensors.py`.

    Attributes:
        dtype: of the tensor.
        shape: of the array.
        has_one_name: whether no other name stands for it too.
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
        """Whether it reads as zeros, as nothing has been written to it."""
        return False

    def check(self) -> None:
        self.store.check()

    @abstractmethod
    def read(self, selection: Selection, dtype: object) -> Any: ...

    @abstractmethod
    def write(self, selection: Selection, values: object) -> None: ...

    def record_written(self) -> None:
        """Note that all elements have been written, so that `Store.find_damage` knows which parts must be there."""

    def tensor(self, device: torch.device | None) -> Any:
        """The tensor in it, not read."""
        return StoredTensor.of(self, self.dtype, device, self.key)


class Other(Item):
    """What has no form as a tensor, a container or a value; `why` says what it is."""

    def __init__(self, store: Store, key: Path, address: int, why: str) -> None:
        super().__init__(store, key, address)
        self.why = why

    def attribute(self, name: str) -> None:
        return None

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        raise self.refusal()

    def refusal(self) -> UnsupportedEntryError:
        """The error of reading it."""
        return UnsupportedEntryError(
            f"entry {joined(self.key)!r} of the {self.store.kind} {self.store.name!r} is {self.why}, which has no form "
            "as a tensor or a container; td.select(...) takes the other entries"
        )


class Group(Item):
    """Items under names. What is made has no name until it is put under one, so that what fails leaves no trace."""

    @property
    @abstractmethod
    def path(self) -> str:
        """Where it is in the store, for `Store.group_at`; a `SaveError` when it was taken out."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names in it, in the order in which they were made where the store keeps that."""

    @abstractmethod
    def find(self, name: str, known: Item | None = None) -> Item:
        """What a name stands for, `known` being what it stood for the last time. Nothing leads out of the store.

        Raises:
            KeyError: there is no such name.
            SaveError: the store was closed, or is broken.
        """

    def has(self, name: str) -> bool:
        """Whether there is such a name now."""
        try:
            self.find(name)
        except KeyError:
            return False
        return True

    @abstractmethod
    def check_name(self, name: str) -> None:
        """Raise a `SaveError` when nothing can have that name."""

    @abstractmethod
    def new_group(self, key: Path) -> Group:
        """A group without a name."""

    @abstractmethod
    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        """An array without a name; the options are those that `Store.checked_options` takes."""

    @abstractmethod
    def new_text(self, key: Path, content: str) -> Text:
        """A text without a name; a `UnicodeEncodeError` when it has no UTF-8 form."""

    @abstractmethod
    def put(self, name: str, item: Item) -> None:
        """Give an item the name, in the place of what has it."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Take a name away, and what it stands for unless that has another one."""


class Store(ABC):
    """A store that is open, shared by all containers over it.

    Attributes:
        backend: the name of the kind of store in `BACKENDS`, which is that of its format.
        kind: what errors call it.
        a_kind: the same, with an article.
        suffixes: what the names of paths end with that stand for it.
        name: where it is.
        mode: `"r"`, or `"r+"` when it can be written to.
        shares: whether one item may have several names, so that what is in it already is not copied.
        rewrites: whether a tensor is written into the array that is there, where that fits it, and not into a new one.
        is_together: whether requests are sent together already, or always by themselves; see `together`.
        texts_are_json: whether a value that is a text is noted as JSON too, and not as it is.
        opens_urls: whether `open` and `create` take a `Remote`, too.
        holds_ragged: whether ragged tensors are kept in it.
        notes: whether batch sizes and names that a container is given are noted in it.
        progress: is told of the bytes of the tensors that are written.
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

    def __init__(self, name: str, mode: str) -> None:
        self.name = name
        self.mode = mode
        self.notes = True
        self.progress: Progress | None = None

    @classmethod
    @abstractmethod
    def open(cls, name: object, mode: str, *, locking: object = None) -> Self:
        """Open one; `mode` is one of those of a file, `locking` as in `PersistentTensorDict.LOCKING`.

        Raises:
            OSError: it is missing, there already, or locked by a writer.
            SaveError: it is none of this kind, or broken.
        """

    @classmethod
    @abstractmethod
    def over(cls, handle: object) -> tuple[Self, Group]:
        """The store and the group of a group that the library of the store has opened."""

    @classmethod
    def create(cls, target: object, overwrite: bool = False) -> Self:
        """Open a new one for what is saved in it; `target` is an empty file or folder, or another store.

        Raises:
            SaveError: there is something in it, without `overwrite`.
        """
        return cls.open(target, "w", locking=False)

    @staticmethod
    def is_folder(path: str) -> bool:
        """Whether what is saved at a path is a folder, and not a file."""
        return False

    @staticmethod
    def mode_of_saved(path: str) -> str:
        """The mode in which what was saved at a path is opened again."""
        return "r+"

    @staticmethod
    def is_handle(value: object) -> bool:
        """Whether a value is a group that the library of the store has opened, and not where a store is."""
        return not isinstance(value, (str, bytes, os.PathLike))

    @staticmethod
    @abstractmethod
    def is_at(path: str) -> bool:
        """Whether one is at this path, a file or a folder, as what it begins with has it; it may still be broken."""

    @staticmethod
    @abstractmethod
    def strangers(path: str, container: Any) -> Collection[str]:
        """The names in the one at this path that neither this package nor the reference saved `container` under.

        Raises:
            SaveError: it cannot be read.
        """

    @staticmethod
    @abstractmethod
    def checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options for arrays that are made; a `TypeError` names those that there are not."""

    @staticmethod
    def compressed_by(name: str) -> Mapping[str, Any]:
        """The options for arrays that are compressed in the way of this name."""
        return {"compression": name}

    @property
    @abstractmethod
    def root(self) -> Group:
        """The outermost group."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it has not been closed."""

    @abstractmethod
    def flush(self) -> None:
        """Have others that open it see what was written."""

    @abstractmethod
    def close(self) -> None:
        """Close it, for all containers over it; without effect when it is closed."""

    @contextlib.contextmanager
    def errors(self, key: Path) -> Iterator[None]:
        """A block in which errors of its library, and any `ValueError`, become a `SaveError` that names the key."""
        try:
            yield
        except SaveError as error:
            if key and repr(joined(key)) not in str(error):
                raise SaveError(f"entry {joined(key)!r}: {error}") from error
            raise
        except IndexError:
            raise
        except Exception as error:
            # Codecs raise what they like.
            where = f"entry {joined(key)!r} " if key else ""
            if isinstance(error, OSError) and error.errno:
                raise OSError(error.errno, f"{where}cannot be read or written ({error})", self.name) from error
            raise SaveError(f"{where}of the {self.kind} {self.name!r}: {error}") from error

    def find_damage(self, num_threads: int) -> list[str]:
        """Look for parts of arrays that are missing or cannot be decoded; a sentence for each array, with its key.

        Stores that keep an array in one piece find nothing: opening them tells.
        """
        return []

    def check(self) -> None:
        """Raise a `SaveError` when it was closed."""
        if not self.is_open:
            raise SaveError(f"the {self.kind} {self.name!r} was closed; open it again")

    def check_writable(self) -> None:
        """Raise a `SaveError` when it cannot be written to."""
        self.check()
        if self.mode == "r":
            raise SaveError(f"the {self.kind} {self.name!r} is open for reading only; open it with mode='r+' to write")

    def group_at(self, path: str, key: Path = ()) -> Group:
        """The group at a path, which errors call `key`.

        Raises:
            KeyError: there is none.
        """
        group = self.root
        for part in filter(None, path.split("/")):
            found = group.find(self.decoded(part))
            if not isinstance(found, Group):
                raise KeyError(f"{path!r} is no group of the {self.kind} {self.name!r}")
            group = found
        group.key = key
        return group

    @staticmethod
    def decoded(part: str) -> str:
        """The name that a part of a path stands for."""
        return decode_name(part)

    @property
    def source(self) -> object:
        """What `open` takes for it."""
        return self.name

    @property
    def is_together(self) -> bool:
        return True

    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> contextlib.AbstractContextManager[None]:
        """A block whose requests are sent together, where the store is asked by requests.

        What is written in it is there at its end, and none of it when the block fails. `items` are groups and arrays of
        which the block will read what `pick` says, and the texts.
        """
        return contextlib.nullcontext()

    def undo_on_failure(self, undo: Callable[[], None]) -> None:  # noqa: B027
        """Call `undo` if the surrounding block of `together` fails; does nothing outside of such a block."""

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Batch sizes that are set in the block, as they were found by looking at the store, are not noted in it."""
        self.notes = False
        try:
            yield
        finally:
            self.notes = True
