"""`append_memmap`: rows that are added to a save in a folder, without copying the rows that it has.

The new rows are written behind the old ones, into the same files. The old `meta.json` files describe the old rows only,
so readers do not see the new bytes. Then a folder with hard links to these files, and with new `meta.json` files,
replaces the old one, as for every save: see `io/saving/transaction.py`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.equality import same_value
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io.formats.directory import (
    FolderOptions,
    FolderPlan,
    link_file,
    list_files,
    plan_files,
    write_and_commit,
)
from tensordict.io.formats.loading import LoadOptions, read_directory
from tensordict.io.formats.meta import CHECKSUM, read_old_meta
from tensordict.io.formats.stack_columns import is_ragged_leaf
from tensordict.io.formats.value_files import choose_unpickle
from tensordict.io.remote.urls import is_url
from tensordict.io.saving.transaction import FolderTransaction
from tensordict.io.specification import DICT, UNBATCHED, VALUE_STACK, VALUES, WRAPPED, Specification, specification_of
from tensordict.memory import files, system
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor, PathLike, map_file
from tensordict.memory.names import META, local_path


@dataclass(frozen=True, slots=True)
class _Growth:
    """A leaf that grows: its saved rows and the new ones."""

    old: Tensor
    new: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape with the new rows."""
        return (self.old.shape[0] + self.new.shape[0], *self.old.shape[1:])


def append_rows(prefix: PathLike, rows: Contract, *, allow_pickle: bool = False, durable: bool = False) -> None:
    """Append rows to the save in the folder `prefix`; see the function `append_memmap`.

    Raises:
        SaveError: there is no save in a folder, or the rows do not fit it. Nothing has been written.
        OSError: a file cannot be written. The save is unchanged.
    """
    if is_url(prefix) or not os.path.lexists(f"{local_path(prefix)}/{META}"):
        raise SaveError(f"there is no save in a folder at {os.fspath(prefix)!r}: append_memmap adds rows to one")
    options = FolderOptions(durable=durable, allow_pickle=allow_pickle, copy_existing=True)
    paths = set(list_files(_plan(prefix, rows, options)[0]))
    with FolderTransaction(local_path(prefix), paths, durable) as save:
        # Another process may have changed the save before it was locked.
        plan, growing = _plan(prefix, rows, options)
        if set(list_files(plan)) != paths:
            raise SaveError(f"the save in {os.fspath(prefix)!r} has been replaced meanwhile: append the rows again")
        for node in plan.nodes:
            save.make_folder(node.folder, node.key)
        with contextlib.ExitStack() as written:
            for leaf in plan.leaves:
                if (growth := growing.get(leaf.key)) is None:
                    if leaf.result is not None and not link_file(leaf, leaf.result, save.staged):
                        leaf.result = None
                    continue
                if _may_grow(growth.old, leaf.path) and link_file(leaf, growth.old, save.staged):
                    written.enter_context(_appended(leaf.path, growth, leaf.key, save, durable))
                    leaf.tensor = leaf.result = map_file(leaf.path, growth.old.dtype, growth.shape, leaf.key)
                else:
                    leaf.tensor = leaf.result = _write_both(save, leaf.path, growth, leaf.key)
            write_and_commit(save, plan, options)


def _plan(prefix: PathLike, rows: Contract, options: FolderOptions) -> tuple[FolderPlan, dict[Path, _Growth]]:
    """Read the save, and plan the files of the save with the new rows. Returns the plan and the leaves that grow."""
    loading = LoadOptions(unpickle=choose_unpickle(options.allow_pickle))
    saved = read_directory(prefix, loading)
    if not saved.batch_size:
        raise SaveError(f"the save in {os.fspath(prefix)!r} has no batch dims, so it has no rows to append to")
    growing: dict[Path, _Growth] = {}
    form = _join(saved, rows, (), growing)
    plan = plan_files(form, local_path(prefix), options)
    options.checksum = _find_algorithm(plan)
    return plan, growing


def _find_algorithm(plan: FolderPlan) -> str:
    """Return the algorithm of the checksums in the old save; empty if it has none."""
    for node in plan.nodes:
        for spec in read_old_meta(node.folder, node.key).values():
            if isinstance(spec, dict) and isinstance(spec.get(CHECKSUM), str):
                return str(spec[CHECKSUM]).partition(":")[0]
    return ""


# --- the new container ------------------------------------------------------------------------------------------------


def _join(saved: Any, rows: Any, key: Path, growing: dict[Path, _Growth]) -> Specification:
    """Describe a saved container with the new rows. Its growing leaves have the new shape and no content."""
    old, new = specification_of(saved, key, unread=True), specification_of(rows, key, unread=True)
    if old.is_value and new.is_value:
        return _join_values(old, new, key)
    if old.kind != new.kind:
        raise SaveError(f"{entry_of(key)}the save has a {_kind(old)}, and the rows have a {_kind(new)}")
    if old.kind == UNBATCHED:
        (mine,), (theirs,) = old.entries.values(), new.entries.values()
        if not (isinstance(theirs, Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs.cpu())):
            raise SaveError(f"{entry_of(key)}an UnbatchedTensor has no rows, and the rows have another one")
        return replace(old, batch_size=_join_size(old, new, key))
    if not old.is_tensorclass and old.kind != DICT:
        raise SaveError(f"{entry_of(key)}a saved {_kind(old)} cannot grow: load it, and save the longer one")
    size = _join_size(old, new, key)
    missing, unknown = sorted(old.entries.keys() - new.entries.keys()), sorted(new.entries.keys() - old.entries.keys())
    if missing or unknown:
        raise SaveError(f"{entry_of(key)}the rows lack the entries {missing}, and have {unknown}, which the save lacks")
    entries: dict[str, Any] = {}
    for name, mine in old.entries.items():
        theirs, inner = new.entries[name], key if old.is_tensorclass and name == WRAPPED else (*key, name)
        if isinstance(mine, Tensor) and not isinstance(theirs, (Contract, Specification)):
            growing[inner] = _join_leaves(mine, theirs, inner)
            entries[name] = torch.empty((), dtype=mine.dtype, device="cpu").expand(growing[inner].shape)
        elif isinstance(mine, Tensor) or not isinstance(theirs, (Contract, Specification)):
            raise SaveError(f"{entry_of(inner)}the save or the rows have a tensor there, and the other one has none")
        else:
            entries[name] = _join(mine, theirs, inner, growing)
    return replace(old, batch_size=size, entries=entries, missing=new.missing)


def _join_size(old: Specification, new: Specification, key: Path) -> torch.Size:
    """Return the batch size with the new rows."""
    mine, theirs = old.batch_size, new.batch_size
    if len(mine) != len(theirs) or mine[1:] != theirs[1:]:
        raise SaveError(
            f"{entry_of(key)}rows of the batch size {list(theirs)} do not fit a save of the batch size {list(mine)}: "
            "they may differ in the first dim only"
        )
    return torch.Size([mine[0] + theirs[0], *mine[1:]])


def _join_leaves(old: Tensor, new: Any, key: Path) -> _Growth:
    """Check that a leaf can take the new rows."""
    if is_ragged_leaf(old) or is_ragged_leaf(new):
        raise SaveError(f"entry {joined(key)!r} is ragged, and cannot grow: load the save, and save the longer one")
    if old.dtype != new.dtype or old.shape[1:] != new.shape[1:]:
        raise SaveError(
            f"entry {joined(key)!r}: rows of {new.dtype} of shape {list(new.shape[1:])} do not fit the saved ones, of "
            f"{old.dtype} of shape {list(old.shape[1:])}"
        )
    if new.is_meta:
        raise SaveError(f"entry {joined(key)!r}: the new rows are on the meta device and have no content")
    return _Growth(old, new)


def _join_values(old: Specification, new: Specification, key: Path) -> Specification:
    """Describe a saved value, which stays, or a saved stack of values with the new ones."""
    size = _join_size(old, new, key)
    if old.kind == VALUE_STACK and not old.stack_dim:
        more = new.value if new.kind == VALUE_STACK else _repeat(new.value, new.batch_size)
        return replace(old, batch_size=size, value=[*old.value, *more], form=None, entries={})
    values = list(_flatten(new.value, len(new.batch_size))) if new.kind == VALUE_STACK else [new.value]
    if old.kind not in VALUES or not all(same_value(old.value, value) for value in values):
        raise SaveError(f"{entry_of(key)}the rows have another value than the save, whose rows share one")
    return replace(old, batch_size=size)


def _repeat(value: object, size: tuple[int, ...]) -> Any:
    return [_repeat(value, size[1:]) for _ in range(size[0])] if size else value


def _flatten(values: Any, depth: int) -> Iterator[object]:
    if not depth:
        yield values
        return
    for value in values:
        yield from _flatten(value, depth - 1)


def _kind(form: Specification) -> str:
    return form.kind.rpartition(".")[2]


# --- the files --------------------------------------------------------------------------------------------------------


def _may_grow(old: Tensor, path: str) -> TypeGuard[MemoryMappedTensor]:
    """Return True if rows may be written behind the ones in the file at `path`.

    A file with further names belongs to something else too, such as a backup of hard links, and is copied instead.
    """
    source = old._source if isinstance(old, MemoryMappedTensor) else None
    if not isinstance(source, FileSource) or source.path != path:
        return False
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and source.is_file(status)


@contextlib.contextmanager
def _appended(path: str, growth: _Growth, key: Path, save: FolderTransaction, durable: bool) -> Iterator[None]:
    """Write the new rows behind the old ones. If the block fails, cut them off."""
    with (
        files.naming("append to the file", path, key),
        files.closing(os.open(path, os.O_RDWR | system.CLOEXEC | system.NOFOLLOW)) as fd,
    ):
        length = os.fstat(fd).st_size
        try:
            files.write_tensor(fd, growth.new, growth.old.nbytes)
            if durable:
                os.fsync(fd)
            yield
        except BaseException:
            # A reader that has seen the new save would crash if its file became shorter.
            if not save.published:
                os.ftruncate(fd, length)
            raise


def _write_both(save: FolderTransaction, path: str, growth: _Growth, key: Path) -> MemoryMappedTensor:
    """Write the old and the new rows to a new file."""
    with save.new_file(path, key) as fd, files.naming("write the file", path, key):
        files.write_tensor(fd, growth.old)
        files.write_tensor(fd, growth.new, growth.old.nbytes)
    return map_file(save.at(path), growth.old.dtype, growth.shape, key)
