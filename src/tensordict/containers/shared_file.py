"""Values that are no tensors and that processes share: they are read from their file, whoever has written it there.

Saving with `share_non_tensor=True`, or loading such a save, has a `SharedFile` take the place of the values of a
holder. A write puts a new file in the place of the old one in one step; a read asks the file system whether that has
happened, and reads the file if so. Operations give plain holders of what the file holds at the time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from typing import Any

import torch

from tensordict.containers.lazy.members import Members
from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.io.formats.meta import FolderSpecification, read_node
from tensordict.io.formats.value_files import Place
from tensordict.io.specification import specification_of
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


class SharedFile:
    """The file of a holder: that in the folder `place`, or else in a folder of its own, which goes away with it."""

    # The value of a `NonTensorData`, as it was read last.
    value: Any = None
    # The folder of a holder that is saved nowhere else.
    _folder: _Folder | None = None
    # What the file was when it was read.
    _seen: tuple[int, int, int] | None = None

    def __init__(self, holder: Contract, place: Place | None) -> None:
        form = specification_of(holder)
        if place is None:
            self._folder = _Folder()
            place = Place.of(self._folder.path)
            place.plan_write(form, (), True)()
        self.place, self._kind = place, form.kind

    def news(self) -> FolderSpecification | None:
        """What the file says, when it is not what was read last. When it is gone, or another save has taken the place,
        there is no news."""
        try:
            status = os.stat(f"{self.place.folder}/{META}")
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen or not self.place.exists():
                return None
            node = read_node(self.place.folder, ())
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._seen = seen
        return None if node.pickled or node.kind != self._kind else node

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_folder"}


class ValueInFile:
    """The value of a holder that has a `SharedFile`; any other holder has its own, which hides this descriptor."""

    def __get__(self, holder: Any, owner: object = None) -> Any:
        if holder is None:
            return self
        file = holder._file
        if (news := file.news()) is not None:
            file.value = news.value
        return file.value


_containers: Any = Members.__dict__["containers"]


class MembersInFile(Members):
    """The members of a stack of values that has a `SharedFile`: new ones whenever the file is new."""

    __slots__ = ("file",)

    def __init__(self, file: SharedFile, *facts: Any) -> None:
        self.file = file
        super().__init__(*facts)

    @property
    def containers(self) -> list[Any]:
        found: list[Any] = _containers.__get__(self)
        news = self.file.news()
        first = (found or [self.template])[0]
        size = first._batch_size
        size = torch.Size((*size[: self.dim], len(found), *size[self.dim :]))
        if news is None or not news.has_size or news.batch_size != size:
            return found
        stack = makers.values(news.value, size, self.dim, first._device)
        self.containers = found = stack._entries.containers
        for member in found if first._locked else ():
            member._lock_owners = first._lock_owners
            member._lock_tree()
        return found

    @containers.setter
    def containers(self, members: list[Any]) -> None:
        _containers.__set__(self, members)


def members_in(file: SharedFile | None, members: Members) -> Members:
    """The same members, from now on read from this file; from none without one."""
    facts = (members.containers, members.dim, members.hook_in, members.hook_out, members.template, members.name)
    return Members(*facts) if file is None else MembersInFile(file, *facts)
