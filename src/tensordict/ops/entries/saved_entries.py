"""`SavedEntries`: the entries of a container in a loaded save, which writes new entries beside the saved ones."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import joined
from tensordict.io.formats import meta
from tensordict.io.formats.directory import FolderOptions, plan_files, plan_save
from tensordict.io.formats.loading import LoadOptions, load_directory
from tensordict.io.saving import commit
from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.memory.names import LEAF_SUFFIX, META, file_name, folder_name
from tensordict.ops.entries.adding import NewEntry, write_tensor

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# The seconds that a new entry waits for another process that adds one to the same folder.
_PATIENCE = 30.0


class SavedEntries(dict[str, Any]):
    """The entries of a container in a loaded save.

    Loaded with `mode="r+"`, a new entry is written to the folder of the container, and a tensor that replaces one of
    its shape and dtype is copied into it. With any other mode, the first new entry warns that it stays in memory.

    Only containers of a loaded save pay for this: a check in `set` would slow down all containers.

    Args:
        owner: the container.
        mode: the mode that the save was loaded with.
        told: empty until the warning; the containers of a save share it.
    """

    __slots__ = ("_mode", "_owner", "_told")

    def __init__(self, owner: Any, mode: str | None, told: list[str]) -> None:
        super().__init__(owner._entries)
        self._owner, self._mode, self._told = weakref.ref(owner), mode, told

    def __setitem__(self, name: str, value: Any) -> None:
        if self._mode != "r+" and torch.compiler.is_compiling():
            super().__setitem__(name, value)  # Compiled code cannot warn.
            return
        owner: Any = self._owner()
        if owner is not None and (name not in self or self._mode == "r+"):
            value = self._store(owner, name, value)
        super().__setitem__(name, value)

    def update(self, other: Any = (), /, **kwargs: Any) -> None:
        """Add or replace several entries, one after the other."""
        for name, value in dict(other, **kwargs).items():
            self[name] = value

    def __reduce__(self) -> Any:
        # A copy or a pickle is in memory.
        return dict, (dict(self),)

    def _store(self, owner: Any, name: str, value: Any) -> Any:
        """Write an entry, if it belongs into a file, and return the object to store."""
        if name in self:
            return self._replace(owner, name, value)
        if self._mode == "r+" and owner._memmap_prefix is not None:
            return self._write(owner, name, value)
        how = 'load the save with mode="r+" to write new entries to its folder, or save the container with memmap_()'
        self._warn(name, f"the new entry {name!r} stays in memory: {how}")
        return value

    def _replace(self, owner: Any, name: str, value: Any) -> Any:
        """Copy a value into the entry that it replaces, and return the entry. Return the value if it does not fit."""
        old = self[name]
        if isinstance(value, MemoryMappedTensor):
            return value  # It has a file, for example after `memmap_`.
        if isinstance(old, Contract) and isinstance(value, Contract) and old._is_non_tensor and value._is_non_tensor:
            old._replacing(owner, name, value, (), owner._batch_size, (name,))()  # type: ignore[attr-defined]
            return self[name]
        if _is_plain(old) and _is_plain(value) and (old.shape, old.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                old.copy_(value)
            return old
        how = "it has another kind, shape or dtype than the saved entry, whose file does not change"
        self._warn(name, f"the entry {name!r} stays in memory: {how}; memmap_() saves the container anew")
        return value

    def _warn(self, name: str, text: str) -> None:
        if not self._told:
            self._told.append(name)
            warnings.warn(text, stacklevel=_count_own_frames())

    def _write(self, owner: Any, name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, Contract):
            plain = value.detach().cpu()
            plain = plain.clone() if isinstance(plain, MemoryMappedTensor) else plain
            return write_tensor(owner, (name,), NewEntry.of(plain))
        saved = _write_node(os.path.abspath(owner._memmap_prefix), name, value, set(self))
        watch_entries(saved, self._mode, self._told)
        return saved


def watch_entries(container: Any, mode: str | None, told: list[str] | None = None) -> None:
    """Make all containers of a loaded save write, or report, their new entries."""
    told = [] if told is None else told
    node = container._wrapped_container()
    if node._is_non_tensor or isinstance(node, Tensor):
        return
    if (members := node._members()) is not None:
        for member in members:
            watch_entries(member, mode, told)
    elif type(node._entries) is dict:
        for value in node._entries.values():
            if isinstance(value, Contract):
                watch_entries(value, mode, told)
        node._entries = SavedEntries(node, mode, told)


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Contract) and not value.is_nested


def _write_node(folder: str, name: str, value: Any, siblings: set[str]) -> Any:
    """Save a nested container or a value to a folder in the folder of its parent, and load it from there.

    The description of the parent is written last, in one step. A process that is killed before leaves a folder that no
    description names, which the next entry of this name replaces.
    """
    key = (name,)
    path = f"{folder}/{folder_name(name, True, {file_name(leaf, True) + LEAF_SUFFIX for leaf in siblings})}"
    options = FolderOptions(copy_existing=True)
    with commit.hold_lock(folder, patience=_PATIENCE):
        meta.check_no_entry(folder, name, key)
        if os.path.lexists(path) and not os.path.lexists(f"{path}/{META}"):
            raise SaveError(
                f"entry {joined(key)!r}: {path!r} exists and is not a save: remove it, or choose another name"
            )
        plan_save(value, path, options)()
        root = plan_files(value, path, options).root
        meta.add_entry(folder, name, meta.node_spec(root.class_name, root.is_foreign), key)
    return load_directory(path, LoadOptions(mode="r+"))


def _count_own_frames() -> int:
    """Return the `stacklevel` of the first caller outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
