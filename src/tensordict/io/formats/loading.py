"""The loader of the directory format, also inside archives: it maps the files, and reads them only on use."""

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
from tensordict.io.formats.meta import FolderSpecification, LeafMeta, read_node
from tensordict.io.formats.stack_columns import Column, count_elements, join_ragged, stacked_size
from tensordict.io.formats.value_files import Place, Unpickle, refuse_pickle, regular_size
from tensordict.io.saving.commit import read_consistently
from tensordict.io.saving.progress import NO_BAR, Progress
from tensordict.io.saving.source import FILE_SYSTEM, FileSystem, SaveFolder, Source
from tensordict.io.specification import (
    DICT,
    LAZY,
    UNBATCHED,
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
    # Gives ragged leaves of equal lengths the same offsets, so that operations can combine them.
    share: ragged.SharedOffsets = field(default_factory=ragged.SharedOffsets)
    # Reads every file of the save.
    source: Source = FILE_SYSTEM
    # Reads the value in a pickle file; see `value_files.unpickle`.
    unpickle: Unpickle = refuse_pickle
    # The nested container to load: its nested key, or names joined with "/".
    subpath: object = None
    # The nested keys of the entries to load; `None` for all.
    keys: object = None
    # How to map the files; for a store, how to open it. `None` means "r" for all formats but folders.
    mode: str | None = None
    # The number of threads that decompress.
    num_threads: int = 0
    # The container that receives the loaded entries, instead of a new one.
    out: Any = None
    # The argument `progress=`, and the bar that it gives, which counts the bytes of the tensors.
    shows: bool | None = None
    progress: Progress = NO_BAR
    # A callback for broken entries, for callers that only inspect a save: takes the error, and returns the entry that
    # stands for the broken one, or `None` to leave it out. By default the error is raised.
    complain: Callable[[OSError], Any] | None = None

    @property
    def mapped(self) -> bool:
        """True if the tensors stay in their files."""
        return self.device is None or self.device.type == "cpu"


T = TypeVar("T")

# The entries to load of a container: their names, each with the tree of its own entries, or `None` for all of them.
KeyTree = dict[str, Any]


# Stands for the parent of a root.
_NO_PARENT = Specification(DICT, torch.Size(()))


def load_directory(prefix: PathLike, options: LoadOptions) -> Any:
    """Load the save in the folder `prefix`, or the part of it that the options select.

    Raises:
        FileNotFoundError: a file is missing.
        KeyError: the save has no entry at one of the keys.
        SaveError: the save is broken.
        UnsupportedEntryError: this version cannot load an entry.
    """
    path, wanted = _parse_subpath(options.subpath), _parse_keys(options.keys)

    def load(shown: pathlib.Path, options: LoadOptions) -> Any:
        node, rest = _read_subpath(shown, options, path, wanted)
        container = to_container(node, path[: len(path) - len(rest)])
        return _find_member(container, path, rest, wanted, os.fspath(prefix)) if rest else container

    container = _read_from_source(prefix, options, load)
    device = options.device
    if device is not None and device.type not in ("cpu", "meta") and not options.non_blocking:
        torch.accelerator.synchronize(device)
    return container


def read_directory(prefix: PathLike, options: LoadOptions) -> Specification:
    """Read the specification of the container that `load_directory` would load.

    The errors are the same, but tensorclasses need not be imported.
    """
    path, wanted = _parse_subpath(options.subpath), _parse_keys(options.keys)
    return _read_from_source(prefix, options, lambda shown, options: _read_subpath(shown, options, path, wanted)[0])


def _read_from_source(prefix: PathLike, options: LoadOptions, read: Callable[[pathlib.Path, LoadOptions], T]) -> T:
    """Call `read`. For a folder, repeat it if another save replaced the folder meanwhile."""
    root, shown = local_path(prefix), pathlib.Path(os.fspath(prefix))
    if options.source is not FILE_SYSTEM:
        return read(shown, options)
    return read_consistently(root, lambda: read(shown, replace(options, source=SaveFolder(root, options.mode))))


def _read_subpath(
    shown: pathlib.Path, options: LoadOptions, path: Path, wanted: KeyTree | None
) -> tuple[Specification, Path]:
    """Read the container at a path, and return an empty path.

    If the path leads into a stack of columns, return the stack and the rest of the path.
    """
    folder = os.path.abspath(shown)
    parent = _NO_PARENT
    rest: Path = ()
    for count in range(len(path)):
        inner, parent = _find_nested_folder(folder, path[:count], path[count], options, os.fspath(shown))
        if not inner:
            # The members of a stack of columns have no folders.
            path, rest = path[:count], path[count:]
            break
        folder = f"{folder}/{inner}"
        shown = shown / inner
    try:
        return _read_container(folder, shown, path, options, None if rest else wanted, parent), rest
    except RecursionError as error:
        raise SaveError(f"the save in {folder!r} is nested too deeply") from error


def _find_member(stack: Any, path: Path, rest: Path, wanted: KeyTree | None, prefix: str) -> Any:
    """Return the container in a lazy stack at the rest of a path, which begins with the number of a member."""
    member = stack._wrapped_container()._members()[int(rest[0])]
    member = stack._rewrap(member)
    for name in rest[1:]:
        inner = member._node(name)
        if inner is None:
            raise SaveError(f"no container at subpath {joined(path)!r} of the lazy stack in {prefix!r}")
        member = inner
    return member if wanted is None else member.select(*_list_paths(wanted))


def _parse_subpath(subpath: object) -> Path:
    if subpath is None:
        return ()
    if isinstance(subpath, str):
        return tuple(name for name in subpath.split("/") if name)
    return path_of(subpath)


def _parse_keys(keys: Any) -> KeyTree | None:
    """Return the tree of the entries at these nested keys."""
    if keys is None:
        return None
    tree: KeyTree = {}
    for key in [keys] if isinstance(keys, (str, tuple)) else keys:
        *parents, last = path_of(key)
        node: KeyTree | None = tree
        for name in parents:
            # A tree is `None` if all of its entries are loaded, so this key adds nothing.
            node = None if node is None else node.setdefault(name, {})
        if node is not None:
            node[last] = None
    return tree


def _list_paths(wanted: KeyTree) -> list[Path]:
    """Return the nested keys of a tree."""
    found: list[Path] = []
    for name, tree in wanted.items():
        found += [(name,)] if tree is None else [(name, *path) for path in _list_paths(tree)]
    return found


def _find_nested_folder(
    folder: str, key: Path, name: str, options: LoadOptions, prefix: str
) -> tuple[str, Specification]:
    """Return the folder of a nested container, relative to `folder`, and the specification of its parent.

    The folder is empty for a member of a stack of columns.
    """
    node = read_node(folder, key, options.source)
    if node.is_tensorclass:
        inner, parent = _find_nested_folder(f"{folder}/{WRAPPED}", key, name, options, prefix)
        return f"{WRAPPED}/{inner}", parent
    if node.kind == LAZY:
        is_member = re.fullmatch("0|[1-9][0-9]*", name) and (node.count is None or int(name) < node.count)
        if is_member and node.columns:
            return "", _NO_PARENT
        if is_member and options.source.is_folder(f"{folder}/{name}"):
            return name, _NO_PARENT
        raise SaveError(
            f"no container at subpath {joined((*key, name))!r} in {prefix!r}: the parent is a lazy stack, whose "
            "members are named 0, 1, ..."
        )
    if node.listed.get(name) is not None:
        raise SaveError(f"subpath {joined((*key, name))!r} is a tensor in {prefix!r}; subpath loads nested containers")
    if name not in node.listed:
        raise SaveError(
            f"no container at subpath {joined((*key, name))!r} in {prefix!r}; "
            f"the containers there are {[name for name, entry in node.listed.items() if entry is None]}"
        )
    inner = _find_folder(folder, name, _list_leaf_files(node, options.robust), options)
    node.device = options.device or node.device
    return inner, node


def _read_container(
    folder: str, shown: pathlib.Path, key: Path, options: LoadOptions, wanted: KeyTree | None, parent: Specification
) -> Specification:
    check_level(key)
    node = read_node(folder, key, options.source)
    node.device = options.device or node.device
    if node.columns:
        node.entries = _read_entries(node, folder, shown, key, options, None)
        if wanted is not None:
            # Building the members needs all entries, and mapping does not read them. `_finish` selects the wanted ones.
            _check_keys(wanted, node, key, folder)
    elif node.kind in (DICT, UNBATCHED):
        node.entries = _read_entries(node, folder, shown, key, options, wanted)
    elif node.kind == LAZY:
        node.entries = _read_members(node, folder, shown, key, options, wanted)
        _complete_stack(node)
    elif node.is_value:
        _complete_value(node, folder, key, options, parent)
        _check_keys(wanted or (), node, key, folder)
    else:
        if not options.source.is_folder(f"{folder}/{WRAPPED}"):
            raise UnsupportedEntryError(
                f"{entry_of(key)}{folder}/{META} is of a {node.kind}, which is neither a container that this version "
                f"can load nor, without a folder {WRAPPED!r}, a tensorclass"
            )
        inner = _read_container(f"{folder}/{WRAPPED}", shown / WRAPPED, key, options, wanted, parent)
        return check(tensorclass_over(node.kind, inner), key)
    is_folder = isinstance(options.source, FileSystem)
    # With mode="r", new values of the container stay in memory, as its tensors do.
    prefix = shown if options.mapped and is_folder and options.mode != "r" else None
    node.finish = partial(_finish, folder, prefix, wanted)
    return check(node, key)


def _finish(
    folder: str, prefix: pathlib.Path | None, wanted: KeyTree | None, node: FolderSpecification, container: Any
) -> Any:
    """Record the place of the save in a loaded container, and select the wanted entries of a stack of columns."""
    if node.columns and wanted is not None:
        container = container.select(*_list_paths(wanted))
    if prefix is not None:
        container._memmap_prefix = prefix
        if node.is_value:
            container._put_at(Place.of(folder), node.shared)
    return container


def _read_entries(
    node: FolderSpecification, folder: str, shown: pathlib.Path, key: Path, options: LoadOptions, wanted: KeyTree | None
) -> dict[str, Any]:
    """Read the entries of a dict of tensors, or the columns of a stack."""
    device = options.device
    # On the meta device, and in FakeTensorMode, where new tensors are fake.
    skips_content = (device is not None and device.type == "meta") or type(torch.empty((), device="cpu")) is not Tensor
    leaf_files: frozenset[str] | None = None
    if wanted is not None:
        _check_keys(wanted, node, key, folder)
    entries: dict[str, Any] = {}
    for name, entry in node.listed.items():
        if wanted is not None and name not in wanted:
            continue
        try:
            if entry is None:
                if leaf_files is None:
                    leaf_files = _list_leaf_files(node, options.robust)
                inner = _find_folder(folder, name, leaf_files, options)
                tree = None if wanted is None else wanted[name]
                entries[name] = _read_container(f"{folder}/{inner}", shown / inner, (*key, name), options, tree, node)
            elif not skips_content:
                entries[name] = _load_tensor(folder, name, entry, key, options, node.columns)
            elif not entry.ragged:
                entries[name] = torch.empty(entry.shape, dtype=entry.dtype, device=device or "cpu")
            elif node.columns:
                sizes, count = _load_sizes(folder, name, entry, key, options)
                entries[name] = Column(torch.empty(count, dtype=entry.dtype, device=device or "cpu"), sizes)
            else:
                raise UnsupportedEntryError(
                    f"entry {joined((*key, name))!r} is ragged: it cannot be without content, as on the meta device"
                )
        except OSError as error:
            if options.complain is None:
                raise
            if (found := options.complain(error)) is not None:
                entries[name] = found
    return entries


def _check_keys(wanted: Iterable[str], node: FolderSpecification, key: Path, folder: str) -> None:
    """Check that a folder has the wanted entries, and that longer keys lead into containers."""
    for name in wanted:
        path = joined((*key, name))
        if name not in node.listed:
            raise KeyError(f"there is no entry {path!r} in {folder!r}; there are {list(node.listed)}")
        if isinstance(wanted, dict) and wanted[name] is not None and node.listed[name] is not None:
            inner = next(iter(wanted[name]))
            raise KeyError(f"the entry {path!r} in {folder!r} is a tensor, which has no entry {inner!r}")


def _read_members(
    node: FolderSpecification, folder: str, shown: pathlib.Path, key: Path, options: LoadOptions, wanted: KeyTree | None
) -> dict[str, Specification]:
    """Read the members of a lazy stack. If meta.json lacks their number, read folders until one is missing."""
    members: dict[str, Specification] = {}
    position = 0
    while position < node.count if node.count is not None else options.source.is_folder(f"{folder}/{position}"):
        name = str(position)
        members[name] = _read_container(f"{folder}/{name}", shown / name, (*key, name), options, wanted, _NO_PARENT)
        position += 1
    return members


def _complete_stack(node: FolderSpecification) -> None:
    """Set the batch size and the names of a lazy stack, which follow from its members."""
    dim = node.stack_dim or 0
    if node.entries:
        node.batch_size = stacked_size(list(node.entries.values()), dim)
    if node.dim_name is not None and dim < len(node.batch_size):
        names: list[str | None] = [None] * len(node.batch_size)
        names[dim] = node.dim_name
        node.names = names


def _complete_value(
    node: FolderSpecification, folder: str, key: Path, options: LoadOptions, parent: Specification
) -> None:
    """Set the parts of a value that its meta.json lacks: the device, tensors, a pickled value and the batch size."""
    node.device = options.device or parent.device
    stack = node.kind == VALUE_STACK
    if node.listed:
        node.entries = _read_parts(node, folder, key, options)
        node.listed = {}
        try:
            node.decode_value(list(node.entries.values()))
        except ValueError as error:
            raise SaveError(f"{entry_of(key)}{folder}/{META}: {error}") from error
    if node.pickled:
        node.value = options.unpickle(options.source, f"{folder}/{node.pickled}", key, stack)
    if not node.has_size:
        outer = parent.batch_size
        node.batch_size = regular_size(node.value, max(len(outer), (node.stack_dim or 0) + 1)) if stack else outer


def _read_parts(node: FolderSpecification, folder: str, key: Path, options: LoadOptions) -> dict[str, Any]:
    """Read the tensors in a value, mapped or copied so that writing to them does not change the save."""
    source = options.source
    if list(node.listed) != [str(at) for at in range(len(node.listed))] or None in node.listed.values():
        raise SaveError(f"{entry_of(key)}{folder}/{META} is broken: its tensors are {list(node.listed)!r:.80}")
    if isinstance(source, SaveFolder):
        source = source.private()
    found = _read_entries(node, folder, pathlib.Path(), key, replace(options, source=source, complain=None), None)
    shares = isinstance(source, Archive) and source.writable
    for name, tensor in found.items():
        if isinstance(tensor, Tensor):
            found[name] = tensor.clone() if shares else tensor.as_subclass(Tensor)
    return found


def _load_tensor(
    folder: str, name: str, entry: LeafMeta, key: Path, options: LoadOptions, column: bool
) -> Tensor | Column:
    """Load a tensor, or a column of a lazy stack."""
    sizes, shape = None, entry.shape
    if entry.ragged:
        sizes, count = _load_sizes(folder, name, entry, key, options)
        shape = (count,)
    flat = _map_file(folder, name, LEAF_SUFFIX, entry.dtype, shape, key, options, entry.ragged)
    device = options.device
    is_moved = device is not None and not options.mapped
    if is_moved and (column or sizes is None):
        flat = flat.to(device, non_blocking=True)
    leaf = flat if sizes is None else join_ragged(flat, sizes, entry.row, column, options.share)
    if is_moved and isinstance(leaf, Tensor) and sizes is not None:
        leaf = leaf.to(device, non_blocking=True)
    if options.progress.is_shown:
        options.progress.add(flat.nbytes)
    return leaf


def _load_sizes(folder: str, name: str, leaf: LeafMeta, key: Path, options: LoadOptions) -> tuple[Tensor, int]:
    """Load the table of the sizes of the rows of a ragged tensor. Returns it, and the number of elements."""
    table = _map_file(folder, name, TABLE_SUFFIX, torch.int64, leaf.shape, key, options, True)
    sizes = table.clone().as_subclass(Tensor)
    try:
        return sizes, count_elements(sizes, leaf.row)
    except ValueError as error:
        raise SaveError(f"entry {joined((*key, name))!r}, in {folder}: {error}") from None


def _map_file(
    folder: str,
    name: str,
    suffix: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    key: Path,
    options: LoadOptions,
    ragged: bool,
) -> Tensor:
    """Map one file of the entry `name`, which is ragged or not."""
    map_path = options.source.map_ragged_file if ragged else options.source.map
    file = file_name(name, options.robust)
    path = f"{folder}/{file}{suffix}"
    try:
        return map_path(path, dtype, shape, (*key, name))
    except FileNotFoundError as error:
        if file != name and "/" not in name and "\0" not in name:
            # `robust_key=False` and old releases do not encode names.
            plain = f"{folder}/{name}{suffix}"
            if options.source.exists(plain):
                return map_path(plain, dtype, shape, (*key, name))
        if 0 in shape:
            # The reference does not write files for tensors without elements.
            return MemoryMappedTensor.empty(shape, dtype=dtype)
        raise files.named_os_error(error, "open the file", path, (*key, name)) from None
    except OSError as error:
        raise files.named_os_error(error, "map the file", path, (*key, name)) from error


def _list_leaf_files(node: FolderSpecification, robust: bool) -> frozenset[str]:
    found: set[str] = set()
    for name, entry in node.listed.items():
        if entry is not None:
            file = file_name(name, robust)
            found.add(file + LEAF_SUFFIX)
            if entry.ragged:
                found.add(file + TABLE_SUFFIX)
    return frozenset(found)


def _find_folder(folder: str, name: str, leaf_files: frozenset[str], options: LoadOptions) -> str:
    inner = folder_name(name, options.robust, leaf_files)
    if (
        inner != name
        and name not in ("", ".", "..", META)
        and "/" not in name
        and "\0" not in name
        and not options.source.is_folder(f"{folder}/{inner}")
        and options.source.is_folder(f"{folder}/{name}")
    ):
        # `robust_key=False` and old releases do not encode names.
        return name
    return inner
