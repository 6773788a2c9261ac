"""Non-tensor values that processes share through a file, for `save(share_non_tensor=True)`.

Such a save, or loading one, gives each holder a `SharedFile`. A write replaces the file in one step. A read checks
whether the file was replaced, and reads it if so. Operations return plain holders with the values at that time.
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
    """A temporary folder, deleted together with this object in the process that made it."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="tensordict-")
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: str, process: int) -> None:
    # A forked child has a copy of the object and must not delete the folder of its parent.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


class SharedFile:
    """The file of a holder, in the folder `place`; without one, in a temporary folder."""

    # The value of a `NonTensorData` at the last read.
    value: Any = None
    # The temporary folder, for a holder that is not part of a save.
    _folder: _Folder | None = None
    # The inode, modification time and size of the file at the last read.
    _seen: tuple[int, int, int] | None = None

    def __init__(self, holder: Contract, place: Place | None) -> None:
        form = specification_of(holder)
        if place is None:
            self._folder = _Folder()
            place = Place.of(self._folder.path)
            place.plan_write(form, (), True)()
        self.place, self._kind = place, form.kind

    def read_changes(self) -> FolderSpecification | None:
        """Read the file if it has changed since the last read; otherwise return `None`.

        Also returns `None` if the file is gone, or belongs to another save.
        """
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
    """Descriptor that reads the value of a holder from its `SharedFile`.

    Other holders have an instance attribute of the same name, which takes precedence.
    """

    def __get__(self, holder: Any, owner: object = None) -> Any:
        if holder is None:
            return self
        file = holder._file
        if (changed := file.read_changes()) is not None:
            file.value = changed.value
        return file.value


_containers: Any = Members.__dict__["containers"]


class MembersInFile(Members):
    """The members of a stack of values with a `SharedFile`. They are made anew when the file has changed."""

    __slots__ = ("file",)

    def __init__(self, file: SharedFile, *facts: Any) -> None:
        self.file = file
        super().__init__(*facts)

    @property
    def containers(self) -> list[Any]:
        found: list[Any] = _containers.__get__(self)
        changed = self.file.read_changes()
        first = (found or [self.template])[0]
        size = first._batch_size
        size = torch.Size((*size[: self.dim], len(found), *size[self.dim :]))
        if changed is None or not changed.has_size or changed.batch_size != size:
            return found
        stack = makers.values(changed.value, size, self.dim, first._device)
        self.containers = found = stack._entries.containers
        for member in found if first._locked else ():
            member._lock_owners = first._lock_owners
            member._lock_tree()
        return found

    @containers.setter
    def containers(self, members: list[Any]) -> None:
        _containers.__set__(self, members)


def members_in(file: SharedFile | None, members: Members) -> Members:
    """Return the same members, read from this file from now on; `None` makes plain members."""
    facts = (members.containers, members.dim, members.hook_in, members.hook_out, members.template, members.name)
    return Members(*facts) if file is None else MembersInFile(file, *facts)
