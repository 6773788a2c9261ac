"""Values that are no tensors and that processes share: each is read from its file, whoever has written it there.

Saving with `share_non_tensor=True`, or loading such a save, makes holders into these. A write puts a new file in the
place of the old one in one step; a read asks the file system whether that has happened, and reads the file if so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from typing import Any

from tensordict.containers.lazy.members import Members
from tensordict.containers.lazy.vmapping import flatten_stack, flatten_stack_with_keys, unflatten_stack
from tensordict.containers.nontensor import MetaData, NonTensorData, NonTensorStack
from tensordict.containers.nontensor_base import Saved, flatten_holder, flatten_holder_with_keys, unflatten_holder
from tensordict.core import pytree, registry
from tensordict.io.forms import to_form
from tensordict.io.meta import Node, read_node
from tensordict.io.value_files import Place
from tensordict.memory.names import META


class _Folder:
    """A new folder, which goes away with this object in the process that made it."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="tensordict-")
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: str, process: int) -> None:
    # A child process has a copy of the object, and not the right to take the folder away.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


class _Following(Saved):
    """What follows a file. Operations give plain holders of what it holds at the time."""

    _follows = True
    _stored_as: str
    # What the file was when it was read.
    _seen: tuple[int, int, int] | None = None
    # The folder of a value that is saved nowhere else.
    _folder: _Folder | None = None

    @classmethod
    def _take(cls, holder: Any) -> None:
        """Have a holder, which has just been saved or loaded, follow its file.

        Its class is changed because who has it (its container, the caller of `memmap_`) is to have one that follows.
        """
        if holder._place is None:
            folder = _Folder()
            place = Place.of(folder.path)
            place.writing(to_form(holder), (), True)()
            holder._folder, holder._place = folder, place
        holder.__class__ = cls
        holder._seen = None

    def _news(self) -> Node | None:
        """What the file says, when it is not what was read last. When it is gone, or another save has taken the place,
        there is no news."""
        place = self._place
        assert place is not None
        try:
            status = os.stat(f"{place.folder}/{META}")
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen or not place.stands():
                return None
            node = read_node(place.folder, ())
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._seen = seen
        return None if node.pickled or node.kind != self._stored_as else node

    def _let_go(self) -> None:
        """Follow no more."""
        raise NotImplementedError

    def _unlock_tree(self) -> None:
        super()._unlock_tree()  # type: ignore[misc]
        self._let_go()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[misc]
        state.pop("_folder", None)
        return state


class _FollowingOne(_Following):
    """A holder that follows its file."""

    @property
    def _value(self) -> Any:
        news = self._news()
        if news is not None:
            self.__dict__["_value"] = news.value
        return self.__dict__["_value"]

    @_value.setter
    def _value(self, value: Any) -> None:
        self.__dict__["_value"] = value

    def _let_go(self) -> None:
        value = self._value
        self.__class__ = registry.lookup(self._stored_as)
        self._value = value


@registry.register
class FollowingNonTensorData(_FollowingOne, NonTensorData):
    """A :class:`NonTensorData` whose value is shared between processes."""

    _stored_as = "NonTensorData"
    _of = NonTensorData._of  # type: ignore[assignment]


@registry.register
class FollowingMetaData(_FollowingOne, MetaData):
    """A :class:`MetaData` whose value is shared between processes."""

    _stored_as = "MetaData"
    _of = MetaData._of  # type: ignore[assignment]


@registry.register
class FollowingNonTensorStack(_Following, NonTensorStack):
    """A :class:`NonTensorStack` whose values are shared between processes."""

    _stored_as = "NonTensorStack"
    _over = NonTensorStack._over  # type: ignore[assignment]

    @property  # type: ignore[override]
    def _entries(self) -> Members:
        members: Members = self.__dict__["_entries"]
        news = self._news()
        if news is None or news.batch_size is None or tuple(news.batch_size) != self._shape_in(members):
            return members
        device = members.sample[0]._device
        members = NonTensorStack._of_lists(news.value, self._shape_in(members), members.dim, device)._entries
        self._entries = members
        if self._sealed:
            self._lock_tree()
        return members

    @_entries.setter
    def _entries(self, members: Members) -> None:
        self.__dict__["_entries"] = members

    @staticmethod
    def _shape_in(members: Members) -> Any:
        size = members.sample[0]._batch_size
        return (*size[: members.dim], len(members.containers), *size[members.dim :])

    def _let_go(self) -> None:
        members = self._entries
        self.__class__ = NonTensorStack  # type: ignore[assignment]
        self._entries = members


for _cls in (FollowingNonTensorData, FollowingMetaData):
    pytree.register(_cls, flatten_holder, unflatten_holder, flatten_holder_with_keys)
pytree.register(FollowingNonTensorStack, flatten_stack, unflatten_stack, flatten_stack_with_keys)
