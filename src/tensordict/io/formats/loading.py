"""Reading the directory format: files are mapped, and nothing is touched until it is used."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of, joined, path_of
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.meta import FolderSpecification, Leaf, read_node
from tensordict.io.formats.stack_columns import Column, elements_of_rows, ragged_leaf, stacked_size
from tensordict.io.formats.value_files import Place, Unpickle, refuse_pickle, regular_size
from tensordict.io.saving.commit import read_consistently
from tensordict.io.saving.progress import Progress
from tensordict.io.saving.source import FOLDERS, Folders, Save, Source
from tensordict.io.specification import (
    DICT,
    LAZY,
    VALUE_STACK,
    WRAPPED,
    Specification,
    check,
    check_level,
    tensorclass_over,
    to_container,
)
from tensordict.memory import files
from tensordict.memory.mapped import MemoryMappedTensor, PathLike
from tensordict.memory.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name, folder_name, local_path


@dataclass(slots=True)
class LoadOptions:
    """How to load; see `TensorDict.load_memmap`."""

    device: torch.device | None = None
    non_blocking: bool = False
    robust: bool = True
    # Ragged leaves of the same lengths get the same offsets, so that they can be computed with each other.
    share: ragged.SharedOffsets = field(default_factory=ragged.SharedOffsets)
    # Every file of the save is read through this.
    source: Source = FOLDERS
    # Gives the value in a pickle file; see `value_files.unpickle`.
    unpickle: Unpickle = refuse_pickle
    # The nested container to load: its nested key, or names joined with "/".
    subpath: object = None
    # The nested keys of the entries to load; `None` for all.
    keys: object = None
    # Of an archive or a store: "r+" writes to the file.
    mode: str = "r"
    # So many threads inflate what is compressed.
    num_threads: int = 0
    # The container that is to take over the loaded entries, in the place of a new one.
    out: Any = None
    # Whether to show a bar, and what is told of the bytes of every tensor for it.
    shows: bool | None = None
    progress: Progress | None = None
    # Is given what is wrong with an entry, and gives what stands in its place, `None` to leave it out; of use when the
    # save is only read. Without it, the error is raised.
    complain: Callable[[OSError], Any] | None = None

    @property
    def mapped(self) -> bool:
        """Whether the tensors stay in their files."""
        return self.device is None or self.device.type == "cpu"


T = TypeVar("T")

# What is to be loaded of a container: the names of its entries, and what is to be loaded of these; `None` for all.
Wanted = dict[str, Any]


# What stands around a container that is in no other one.
_NOWHERE = Specification(DICT, torch.Size(()))


def load_directory(prefix: PathLike, options: LoadOptions) -> Any:
    """The container saved in the folder `prefix`, or the part of it that the options name.

    Raises:
        FileNotFoundError: when a file is missing.
        KeyError: when there is no entry at one of the keys.
        SaveError: when the files do not add up.
        UnsupportedEntryError: when an entry is of a kind that this version cannot load.
    """
    path, wanted = _subpath(options.subpath), _wanted(options.keys)

    def load(shown: pathlib.Path, options: LoadOptions) -> Any:
        node, below = _read(shown, options, path, wanted)
        container = to_container(node, path[: len(path) - len(below)])
        return _member(container, path, below, wanted, os.fspath(prefix)) if below else container

    container = _consistently(prefix, options, load)
    device = options.device
    if device is not None and device.type not in ("cpu", "meta") and not options.non_blocking:
        torch.accelerator.synchronize(device)
    return container


def read_directory(prefix: PathLike, options: LoadOptions) -> Specification:
    """The specification of what `load_directory` loads, and of the containers in it; fails as loading it does, but for
    tensorclasses that this program does not know."""
    path, wanted = _subpath(options.subpath), _wanted(options.keys)
    return _consistently(prefix, options, lambda shown, options: _read(shown, options, path, wanted)[0])


def _consistently(prefix: PathLike, options: LoadOptions, read: Callable[[pathlib.Path, LoadOptions], T]) -> T:
    root, shown = local_path(prefix), pathlib.Path(os.fspath(prefix))
    if options.source is not FOLDERS:
        return read(shown, options)
    return read_consistently(root, lambda: read(shown, replace(options, source=Save(root))))


def _read(shown: pathlib.Path, options: LoadOptions, path: Path, wanted: Wanted | None) -> tuple[Specification, Path]:
    """What is saved at a path; where that leads into a stack by columns, the stack and the rest of the path."""
    folder = os.path.abspath(shown)
    around = _NOWHERE
    below: Path = ()
    for count in range(len(path)):
        inner, around = _nested_folder(folder, path[:count], path[count], options, os.fspath(shown))
        if not inner:
            # What is below has no folder of its own.
            path, below = path[:count], path[count:]
            break
        folder = f"{folder}/{inner}"
        shown = shown / inner
    try:
        return _read_container(folder, shown, path, options, None if below else wanted, around), below
    except RecursionError as error:
        raise SaveError(f"the save in {folder!r} is nested too deeply") from error


def _member(stack: Any, path: Path, below: Path, wanted: Wanted | None, prefix: str) -> Any:
    """The container at the end of a path, of which `below` begins with the number of a member of a lazy stack."""
    member = stack._wrapped_container()._members()[int(below[0])]
    member = stack._rewrap(member)
    for name in below[1:]:
        inner = member._node(name)
        if inner is None:
            raise SaveError(f"no container at subpath {joined(path)!r} of the lazy stack in {prefix!r}")
        member = inner
    return member if wanted is None else member.select(*_paths(wanted))


def _subpath(subpath: object) -> Path:
    if subpath is None:
        return ()
    if isinstance(subpath, str):
        return tuple(name for name in subpath.split("/") if name)
    return path_of(subpath)


def _wanted(keys: Any) -> Wanted | None:
    """The tree of the entries at these nested keys."""
    if keys is None:
        return None
    tree: Wanted = {}
    for key in [keys] if isinstance(keys, (str, tuple)) else keys:
        *above, last = path_of(key)
        node: Wanted | None = tree
        for name in above:
            # Below an entry that is wanted as a whole, nothing is to be added.
            node = None if node is None else node.setdefault(name, {})
        if node is not None:
            node[last] = None
    return tree


def _paths(wanted: Wanted) -> list[Path]:
    """The nested keys that a tree was made of."""
    found: list[Path] = []
    for name, below in wanted.items():
        found += [(name,)] if below is None else [(name, *path) for path in _paths(below)]
    return found


def _nested_folder(folder: str, key: Path, name: str, options: LoadOptions, prefix: str) -> tuple[str, Specification]:
    node = read_node(folder, key, options.source)
    if node.is_tensorclass:
        inner, around = _nested_folder(f"{folder}/{WRAPPED}", key, name, options, prefix)
        return f"{WRAPPED}/{inner}", around
    if node.kind == LAZY:
        known = re.fullmatch("0|[1-9][0-9]*", name) and (node.count is None or int(name) < node.count)
        if known and node.columns:
            return "", _NOWHERE
        if known and options.source.is_folder(f"{folder}/{name}"):
            return name, _NOWHERE
        raise SaveError(
            f"no container at subpath {joined((*key, name))!r} in {prefix!r}: that is a lazy stack, with members "
            "called 0, 1, ..."
        )
    if node.listed.get(name) is not None:
        raise SaveError(f"subpath {joined((*key, name))!r} is a tensor in {prefix!r}; subpath loads nested containers")
    if name not in node.listed:
        raise SaveError(
            f"no container at subpath {joined((*key, name))!r} in {prefix!r}; "
            f"there are {[name for name, entry in node.listed.items() if entry is None]}"
        )
    inner = _folder_of(folder, name, _leaf_files(node, options.robust), options)
    node.device = options.device or node.device
    return inner, node


def _read_container(
    folder: str, shown: pathlib.Path, key: Path, options: LoadOptions, wanted: Wanted | None, around: Specification
) -> Specification:
    check_level(key)
    node = read_node(folder, key, options.source)
    node.device = options.device or node.device
    if node.columns:
        node.entries = _read_entries(node, folder, shown, key, options, None)
        if wanted is not None:
            # What the other entries say of the members is needed to make them, and mapping reads nothing.
            _refuse_missing(wanted, node, key, folder)
    elif node.is_value:
        _fill_value(node, folder, key, options, around)
        _refuse_missing(wanted or (), node, key, folder)
    elif node.kind == LAZY:
        node.entries = _read_members(node, folder, shown, key, options, wanted)
        _fill_stack(node)
    elif node.is_tensorclass:
        if not options.source.is_folder(f"{folder}/{WRAPPED}"):
            raise UnsupportedEntryError(
                f"{entry_of(key)}{folder}/{META} is of a {node.kind}, which is neither a container that this version "
                f"can load nor, without a folder {WRAPPED!r}, a tensorclass"
            )
        inner = _read_container(f"{folder}/{WRAPPED}", shown / WRAPPED, key, options, wanted, around)
        return check(tensorclass_over(node.kind, inner), key)
    else:
        node.entries = _read_entries(node, folder, shown, key, options, wanted)
    prefix = shown if options.mapped and isinstance(options.source, Folders) else None
    node.finish = partial(_finished, folder, prefix, wanted)
    return check(node, key)


def _finished(
    folder: str, prefix: pathlib.Path | None, wanted: Wanted | None, node: FolderSpecification, container: Any
) -> Any:
    """A container that has been made, knowing where it is saved; of a stack by columns, what is wanted only."""
    if node.columns and wanted is not None:
        container = container.select(*_paths(wanted))
    if prefix is not None:
        container._memmap_prefix = prefix
        if node.is_value:
            container._put_at(Place.of(folder), node.shared)
    return container


def _read_entries(
    node: FolderSpecification, folder: str, shown: pathlib.Path, key: Path, options: LoadOptions, wanted: Wanted | None
) -> dict[str, Any]:
    """The entries of a dict of tensors."""
    device = options.device
    # In FakeTensorMode a new tensor is a fake one.
    unread = (device is not None and device.type == "meta") or type(torch.empty((), device="cpu")) is not Tensor
    leaf_files: frozenset[str] | None = None
    if wanted is not None:
        _refuse_missing(wanted, node, key, folder)
    entries: dict[str, Any] = {}
    for name, entry in node.listed.items():
        if wanted is not None and name not in wanted:
            continue
        try:
            if entry is None:
                if leaf_files is None:
                    leaf_files = _leaf_files(node, options.robust)
                inner = _folder_of(folder, name, leaf_files, options)
                some = None if wanted is None else wanted[name]
                entries[name] = _read_container(f"{folder}/{inner}", shown / inner, (*key, name), options, some, node)
            elif not unread:
                entries[name] = _load_tensor(folder, name, entry, key, options, node.columns)
            elif not entry.ragged:
                entries[name] = torch.empty(entry.shape, dtype=entry.dtype, device=device or "cpu")
            elif node.columns:
                sizes, count = _load_sizes(folder, name, entry, key, options)
                entries[name] = Column(torch.empty(count, dtype=entry.dtype, device=device or "cpu"), sizes)
            else:
                raise UnsupportedEntryError(
                    f"entry {joined((*key, name))!r} is ragged: it has no form without content, as on the meta device"
                )
        except OSError as error:
            if options.complain is None:
                raise
            if (found := options.complain(error)) is not None:
                entries[name] = found
    return entries


def _refuse_missing(wanted: Iterable[str], node: FolderSpecification, key: Path, folder: str) -> None:
    """Raise unless a folder has these entries, and something below those of which only a part is wanted."""
    for name in wanted:
        path = joined((*key, name))
        if name not in node.listed:
            raise KeyError(f"there is no entry {path!r} in {folder!r}; there are {list(node.listed)}")
        if isinstance(wanted, dict) and wanted[name] is not None and node.listed[name] is not None:
            below = next(iter(wanted[name]))
            raise KeyError(f"the entry {path!r} in {folder!r} is a tensor, which has no entry {below!r}")


def _read_members(
    node: FolderSpecification, folder: str, shown: pathlib.Path, key: Path, options: LoadOptions, wanted: Wanted | None
) -> dict[str, Specification]:
    """The members of a lazy stack; where their number is not written down, those whose folders are there."""
    members: dict[str, Specification] = {}
    position = 0
    while position < node.count if node.count is not None else options.source.is_folder(f"{folder}/{position}"):
        name = str(position)
        members[name] = _read_container(f"{folder}/{name}", shown / name, (*key, name), options, wanted, _NOWHERE)
        position += 1
    return members


def _fill_stack(node: FolderSpecification) -> None:
    """Give a lazy stack the batch size and names that follow from its members."""
    dim = node.stack_dim or 0
    if node.entries:
        node.batch_size = stacked_size(list(node.entries.values()), dim)
    if node.dim_name is not None and dim < len(node.batch_size):
        names: list[str | None] = [None] * len(node.batch_size)
        names[dim] = node.dim_name
        node.names = names


def _fill_value(node: FolderSpecification, folder: str, key: Path, options: LoadOptions, around: Specification) -> None:
    """Give a value what its meta.json leaves open."""
    node.device = options.device or around.device
    stack = node.kind == VALUE_STACK
    if node.listed:
        node.entries = _read_parts(node, folder, key, options)
        node.listed = {}
        try:
            node.fill(list(node.entries.values()))
        except ValueError as error:
            raise SaveError(f"{entry_of(key)}{folder}/{META}: {error}") from error
    if node.pickled:
        node.value = options.unpickle(options.source, f"{folder}/{node.pickled}", key, stack)
    if not node.sized:
        outer = around.batch_size
        node.batch_size = regular_size(node.value, max(len(outer), (node.stack_dim or 0) + 1)) if stack else outer


def _read_parts(node: FolderSpecification, folder: str, key: Path, options: LoadOptions) -> dict[str, Any]:
    """The tensors in a value, which writes to them leave as they are saved."""
    source = options.source
    if list(node.listed) != [str(at) for at in range(len(node.listed))] or None in node.listed.values():
        raise SaveError(f"{entry_of(key)}{folder}/{META} is broken: its tensors are {list(node.listed)!r:.80}")
    if isinstance(source, Save):
        source = source.private()
    found = _read_entries(node, folder, pathlib.Path(), key, replace(options, source=source, complain=None), None)
    shares = isinstance(source, Archive) and source.writable
    for name, tensor in found.items():
        if isinstance(tensor, Tensor):
            found[name] = tensor.clone() if shares else tensor.as_subclass(Tensor)
    return found


def _load_tensor(folder: str, name: str, entry: Leaf, key: Path, options: LoadOptions, column: bool) -> Tensor | Column:
    """A tensor, or the rows of one that is a column of a lazy stack."""
    sizes, shape = None, entry.shape
    if entry.ragged:
        sizes, count = _load_sizes(folder, name, entry, key, options)
        shape = (count,)
    flat = _mapped(folder, name, LEAF_SUFFIX, entry.dtype, shape, key, options)
    is_moved = not options.mapped
    if is_moved and (column or sizes is None):
        flat = flat.to(options.device, non_blocking=True)
    leaf = flat if sizes is None else ragged_leaf(flat, sizes, entry.row, column, options.share)
    if is_moved and isinstance(leaf, Tensor) and sizes is not None:
        leaf = leaf.to(options.device, non_blocking=True)
    if options.progress is not None:
        options.progress.add(flat.nbytes)
    return leaf


def _load_sizes(folder: str, name: str, leaf: Leaf, key: Path, options: LoadOptions) -> tuple[Tensor, int]:
    """The table of the sizes of the rows of a ragged tensor, and how many elements they have."""
    table = _mapped(folder, name, TABLE_SUFFIX, torch.int64, leaf.shape, key, options)
    sizes = table.clone().as_subclass(Tensor)
    try:
        return sizes, elements_of_rows(sizes, leaf.row)
    except ValueError as error:
        raise SaveError(f"entry {joined((*key, name))!r}, in {folder}: {error}") from None


def _mapped(
    folder: str, name: str, suffix: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path, options: LoadOptions
) -> Tensor:
    """One file of the entry `name`, mapped."""
    file = file_name(name, options.robust)
    path = f"{folder}/{file}{suffix}"
    try:
        return options.source.map(path, dtype, shape, (*key, name))
    except FileNotFoundError as error:
        if file != name and "/" not in name and "\0" not in name:
            # Saved with robust_key=False, or before names were encoded.
            plain = f"{folder}/{name}{suffix}"
            if options.source.exists(plain):
                return options.source.map(plain, dtype, shape, (*key, name))
        if 0 in shape:
            # The reference writes no file for a tensor without elements.
            return MemoryMappedTensor.empty(shape, dtype=dtype)
        raise files.named_os_error(error, "open the file", path, (*key, name)) from None
    except OSError as error:
        raise files.named_os_error(error, "map the file", path, (*key, name)) from error


def _leaf_files(node: FolderSpecification, robust: bool) -> frozenset[str]:
    found: set[str] = set()
    for name, entry in node.listed.items():
        if entry is not None:
            file = file_name(name, robust)
            found.add(file + LEAF_SUFFIX)
            if entry.ragged:
                found.add(file + TABLE_SUFFIX)
    return frozenset(found)


def _folder_of(folder: str, name: str, leaf_files: frozenset[str], options: LoadOptions) -> str:
    inner = folder_name(name, options.robust, leaf_files)
    if (
        inner != name
        and name not in ("", ".", "..", META)
        and "/" not in name
        and "\0" not in name
        and not options.source.is_folder(f"{folder}/{inner}")
        and options.source.is_folder(f"{folder}/{name}")
    ):
        # Saved with robust_key=False, or before names were encoded.
        return name
    return inner
