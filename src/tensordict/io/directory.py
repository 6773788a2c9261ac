"""Writing the directory format: a folder per container, a file per tensor, and `meta.json` last."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensordict import ragged
from tensordict.contract import Contract
from tensordict.errors import SaveError, UnsupportedEntryError
from tensordict.io import files
from tensordict.io.meta import BEHIND_FACE, TYPES, face_meta, leaf_spec, node_meta, node_spec, ragged_spec, write_meta
from tensordict.io.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name, folder_name
from tensordict.keys import Path, joined
from tensordict.memmap import (
    FileSource,
    MemoryMappedTensor,
    PathLike,
    SharedBlock,
    check_storable,
    is_whole_file,
    map_file,
    nested,
)

# A leaf larger than this is written by several threads, each its own range.
_SPLIT = 64 << 20
# Anonymous leaves smaller than this share one block (each block costs two descriptors, of 1,024 by default) ...
_OWN_BLOCK = 1 << 20
# ... in which each begins at a multiple of this.
_ALIGN = 64

_CPU = torch.device("cpu")


@dataclass(slots=True)
class SaveOptions:
    """How to save; see `TensorDict.memmap`."""

    copy_existing: bool = False
    existsok: bool = True
    num_threads: int = 0
    robust: bool = True
    like: bool = False
    inplace: bool = False
    # Ragged leaves of the same lengths have the same offsets in the saved container.
    share: ragged.SharedOffsets = field(default_factory=ragged.SharedOffsets)


@dataclass(slots=True)
class _Leaf:
    """A tensor on its way to `path`."""

    name: str
    key: Path
    tensor: Tensor
    path: str
    spec: dict[str, Any]
    # A memory-mapped tensor that stays as it is.
    result: MemoryMappedTensor | None = None
    # Where it is written: `path`, or beside it when a file is there already.
    target: str = ""
    # Whether the content is saved even by `memmap_like`.
    always: bool = False

    def entry(self) -> Any:
        """What the container holds once the leaf is saved."""
        return self.result


@dataclass(slots=True, kw_only=True)
class _Ragged(_Leaf):
    """A ragged tensor on its way: `tensor` has its elements, one row behind the other, and `table` their sizes."""

    table: _Leaf
    row: tuple[int, ...] | None
    share: ragged.SharedOffsets

    def entry(self) -> Any:
        """The ragged tensor over the saved elements."""
        assert self.result is not None
        if self.row is None:
            return nested(self.result, self.table.tensor)
        flat = self.result.detach().as_subclass(Tensor)
        return ragged.from_row_order(flat, self.table.tensor, self.row.index(-1) + 1, self.row, self.share)


@dataclass(slots=True)
class _Node:
    """A container on its way to `folder` (to anonymous memory when that is empty)."""

    container: Contract
    key: Path
    folder: str
    class_name: str
    entries: dict[str, _Leaf | _Node] = field(default_factory=dict)


def plan_save(container: Contract, prefix: PathLike | None, options: SaveOptions) -> Callable[[], Any]:
    """Check everything that can be checked before a byte is written; what is returned does the rest.

    Raises:
        SaveError: when an entry cannot be saved, lies in another file, or (without `existsok`) is there already.
    """
    folder = "" if prefix is None else os.path.abspath(os.fspath(prefix))
    leaves: list[_Leaf] = []
    nodes: list[_Node] = []
    root = _plan_node(container, (), folder, options, leaves, nodes)
    if not folder:
        return partial(_save_anonymous, root, leaves, options)
    return partial(_save_directory, root, pathlib.Path(os.fspath(prefix or "")), leaves, nodes, options)


def check_container(value: Contract, key: Path) -> str:
    """The class name under which a container is saved; an `UnsupportedEntryError` when it cannot be yet."""
    name = getattr(value, "_stored_as", type(value).__name__)
    if name not in TYPES:
        entry = f"entry {joined(key)!r}: " if key else ""
        hint = "" if value._paired(value) is None else "; save its dense form, densify() or to_tensordict()"
        raise UnsupportedEntryError(f"{entry}a {name} cannot be saved in the directory format yet{hint}")
    return name


# --- planning ---------------------------------------------------------------------------------------------------------


def _plan_node(
    container: Contract, key: Path, folder: str, options: SaveOptions, leaves: list[_Leaf], nodes: list[_Node]
) -> _Node:
    inner = container._bare()
    node = _Node(container, key, folder, type(container).__name__ if inner is not container else "")
    nodes.append(node)
    present = _present(folder, key)
    if META in present and not options.existsok:
        raise SaveError(f"{folder!r} holds a save already; pass existsok=True to replace it")
    if inner is not container:
        below = f"{folder}/{BEHIND_FACE}" if folder else ""
        node.entries[BEHIND_FACE] = _plan_node(inner, key, below, options, leaves, nodes)
        return node
    node.class_name = check_container(container, key)
    leaf_files: dict[str, str] = {}
    children: list[tuple[str, Contract]] = []
    for name, value in container._entries.items():
        if isinstance(value, Contract):
            children.append((name, value))
            node.entries[name] = node  # Keeps the place in the order; replaced below.
            continue
        leaf = _plan_leaf(name, value, (*key, name), folder, options, present)
        node.entries[name] = leaf
        for part in (leaf, leaf.table) if isinstance(leaf, _Ragged) else (leaf,):
            leaves.append(part)
            other = leaf_files.setdefault(part.path.rpartition("/")[2], name)
            if folder and other != name:
                raise SaveError(
                    f"entries {joined((*key, other))!r} and {joined((*key, name))!r} would both be saved as "
                    f"{part.path!r}; rename one of them"
                )
    for name, child in children:
        inner = f"{folder}/{folder_name(name, options.robust, leaf_files)}" if folder else ""
        node.entries[name] = _plan_node(child, (*key, name), inner, options, leaves, nodes)
    return node


def _present(folder: str, key: Path) -> Container[str]:
    if not folder:
        return ()
    try:
        return frozenset(os.listdir(folder))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise files.named_os_error(error, "save into the folder", folder, key) from error


def _plan_leaf(name: str, value: Any, key: Path, folder: str, options: SaveOptions, present: Container[str]) -> _Leaf:
    if not isinstance(value, Tensor):
        raise UnsupportedEntryError(
            f"entry {joined(key)!r}: a {type(value).__name__} cannot be saved in the directory format yet"
        )
    if value.is_nested:
        return _plan_ragged(name, value, key, folder, options, present)
    try:
        check_storable(value)
        spec = leaf_spec(value.dtype, tuple(value.shape))
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(key)!r}: {error}") from None
    if value.is_meta and not options.like:
        raise SaveError(f"entry {joined(key)!r} is on the meta device and has no content; see memmap_like")
    if not folder:
        return _Leaf(name, key, value, "", spec, value if isinstance(value, MemoryMappedTensor) else None)
    file = file_name(name, options.robust) + LEAF_SUFFIX
    path = f"{folder}/{file}"
    leaf = _Leaf(name, key, value, path, spec, target=path)
    if isinstance(value, MemoryMappedTensor) and isinstance(value._source, FileSource):
        leaf.result = _mapped_there(value, value._source, path, file in present)
        if leaf.result is not None:
            return leaf
        if not options.copy_existing and not _was_replaced(value, value._source, path):
            raise SaveError(
                f"entry {joined(key)!r} is memory-mapped from {value._source.path!r} already; pass "
                f"copy_existing=True to copy it to {path!r}"
            )
    _make_way(leaf, folder, options, present)
    return leaf


def _make_way(leaf: _Leaf, folder: str, options: SaveOptions, present: Container[str]) -> None:
    """Have a leaf written beside its path when a file is there already."""
    if leaf.path.rpartition("/")[2] in present:
        if not options.existsok:
            raise SaveError(
                f"entry {joined(leaf.key)!r}: {leaf.path!r} exists already; pass existsok=True to replace it"
            )
        leaf.target = files.temporary_name(folder)


def _plan_ragged(
    name: str, value: Any, key: Path, folder: str, options: SaveOptions, present: Container[str]
) -> _Ragged:
    if value.is_meta:
        raise SaveError(f"entry {joined(key)!r} is ragged and on the meta device, without rows that could be saved")
    sizes = ragged.row_sizes(value)
    row = ragged.row_form(value)
    try:
        spec = ragged_spec(value.dtype, tuple(sizes.shape), row)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(key)!r}: {error}") from None
    source = getattr(value, "_source", None)
    file = f"{folder}/{file_name(name, options.robust)}" if folder else ""
    path, path_of_table = (file + LEAF_SUFFIX, file + TABLE_SUFFIX) if folder else ("", "")
    if folder and isinstance(source, FileSource) and not options.copy_existing and source.path != path:
        raise SaveError(
            f"entry {joined(key)!r} is memory-mapped from {source.path!r} already; pass copy_existing=True to copy it "
            f"to {path!r}"
        )
    table = _Leaf(name, key, sizes, path_of_table, {}, target=path_of_table, always=True)
    content = ragged.in_row_order(value.detach())
    leaf = _Ragged(name, key, content, path, spec, target=path, table=table, row=row, share=options.share)
    if folder:
        _make_way(leaf, folder, options, present)
        _make_way(table, folder, options, present)
    return leaf


def _mapped_there(
    tensor: MemoryMappedTensor, source: FileSource, path: str, present: bool
) -> MemoryMappedTensor | None:
    """The tensor itself when it maps all of the very file that `path` is: then there is nothing to write."""
    if present and source.shared and is_whole_file(tensor) and source.is_file(os.stat(path)):
        return tensor
    return None


def _was_replaced(tensor: MemoryMappedTensor, source: FileSource, path: str) -> bool:
    """Whether the tensor maps all of a file that stood at `path` until another save replaced it."""
    return source.path == path and source.shared and is_whole_file(tensor)


# --- anonymous memory -------------------------------------------------------------------------------------------------


def _save_anonymous(root: _Node, leaves: list[_Leaf], options: SaveOptions) -> Any:
    """Copy all leaves into shared anonymous memory."""
    jobs: list[Callable[[], None]] = []
    small: list[tuple[_Leaf, int]] = []
    end = 0
    for leaf in leaves:
        if leaf.result is not None:
            continue
        nbytes = leaf.tensor.numel() * leaf.tensor.element_size()
        if nbytes >= _OWN_BLOCK:
            _place(leaf, SharedBlock(nbytes), 0, options, jobs)
        elif nbytes:
            small.append((leaf, end))
            end += -(-nbytes // _ALIGN) * _ALIGN
        else:
            leaf.result = MemoryMappedTensor.empty(leaf.tensor.shape, dtype=leaf.tensor.dtype)
    if small:
        block = SharedBlock(end)
        for leaf, offset in small:
            _place(leaf, block, offset, options, jobs)
    files.run_all(jobs, options.num_threads)
    return _finish(root, None, options)


def _place(leaf: _Leaf, block: SharedBlock, offset: int, options: SaveOptions, jobs: list[Callable[[], None]]) -> None:
    leaf.result = block.tensor(leaf.tensor.dtype, leaf.tensor.shape, offset)
    if leaf.always or not options.like:
        jobs.append(partial(files.write_tensor, block.fd, leaf.tensor, offset))


# --- files ------------------------------------------------------------------------------------------------------------


class _Created:
    """The files and folders that a save has made, so that a failing one can take them away again."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.folders: list[str] = []

    def folder(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self.folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            self.folders.append(path)
            return
        if not os.path.isdir(path):
            raise NotADirectoryError(20, "there is a file where the folder should be", path)

    def remove(self) -> None:
        for path in self.files:
            with contextlib.suppress(OSError):
                os.unlink(path)
        for path in reversed(self.folders):
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _save_directory(
    root: _Node, prefix: pathlib.Path, leaves: list[_Leaf], nodes: list[_Node], options: SaveOptions
) -> Any:
    """Write everything new, map it, and only then put it in the place of what was there."""
    created = _Created()
    try:
        for node in nodes:
            try:
                created.folder(node.folder)
            except OSError as error:
                raise files.named_os_error(error, "create the folder", node.folder, node.key) from error
        pending = [leaf for leaf in leaves if leaf.result is None]
        jobs: list[Callable[[], None]] = []
        for leaf in pending:
            jobs += _leaf_jobs(leaf, options, created)
        files.run_all(jobs, options.num_threads)
        for leaf in pending:
            leaf.result = map_file(leaf.target, leaf.tensor.dtype, tuple(leaf.tensor.shape), leaf.key)
        for leaf in pending:
            if leaf.target != leaf.path:
                _replace(leaf)
        for node in reversed(nodes):
            _write_node_meta(node)
    except BaseException:
        created.remove()
        raise
    return _finish(root, prefix, options)


def _replace(leaf: _Leaf) -> None:
    try:
        os.replace(leaf.target, leaf.path)
    except OSError as error:
        raise files.named_os_error(error, "replace the file", leaf.path, leaf.key) from error
    assert leaf.result is not None
    assert isinstance(leaf.result._source, FileSource)
    leaf.result._source.path = leaf.path


def _write_node_meta(node: _Node) -> None:
    specs = {
        name: entry.spec if isinstance(entry, _Leaf) else node_spec(entry.class_name)
        for name, entry in node.entries.items()
    }
    container = node.container
    if container._bare() is container:
        meta = node_meta(node.class_name, tuple(container._batch_size), container._names, specs)
    else:
        meta = face_meta(type(container), container._entries)
    try:
        write_meta(node.folder, meta)
    except OSError as error:
        raise files.named_os_error(error, "write the file", f"{node.folder}/{META}", node.key) from error


def _leaf_jobs(leaf: _Leaf, options: SaveOptions, created: _Created) -> list[Callable[[], None]]:
    """The pieces of work that write one leaf, which may run in any order."""
    nbytes = leaf.tensor.numel() * leaf.tensor.element_size()
    like = options.like and not leaf.always
    if options.num_threads <= 1 or nbytes <= _SPLIT or like or not files.is_direct(leaf.tensor):
        return [partial(_write_leaf, leaf, like, created)]
    _create(leaf, created, lambda fd: None)
    pieces = math.ceil(nbytes / _SPLIT)
    step = -(-nbytes // pieces // 4096) * 4096
    return [partial(_write_piece, leaf, start, min(start + step, nbytes)) for start in range(0, nbytes, step)]


def _write_leaf(leaf: _Leaf, like: bool, created: _Created) -> None:
    if like:
        nbytes = leaf.tensor.numel() * leaf.tensor.element_size()
        _create(leaf, created, lambda fd: files.allocate(fd, nbytes))
    else:
        _create(leaf, created, lambda fd: _write_content(fd, leaf.tensor))


def _create(leaf: _Leaf, created: _Created, fill: Callable[[int], None]) -> None:
    try:
        fd = files.create(leaf.target)
        created.files.append(leaf.target)
        try:
            fill(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise files.named_os_error(error, "write the file", leaf.path, leaf.key) from error


def _write_piece(leaf: _Leaf, start: int, stop: int) -> None:
    try:
        fd = os.open(leaf.target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            files.write_range(fd, leaf.tensor, start, stop, start)
        finally:
            os.close(fd)
    except OSError as error:
        raise files.named_os_error(error, "write the file", leaf.path, leaf.key) from error


def _write_content(fd: int, tensor: Tensor) -> None:
    if isinstance(tensor, MemoryMappedTensor) and isinstance(tensor._source, FileSource):
        source = tensor._source
        if source.shared and is_whole_file(tensor) and tensor.numel() and _copy_from(source, fd, tensor.nbytes):
            return
    files.write_tensor(fd, tensor)


def _copy_from(source: FileSource, fd: int, nbytes: int) -> bool:
    """Copy file to file; `False` when the path of the source no longer is the file that is mapped."""
    try:
        opened = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not source.is_file(os.fstat(opened)):
            return False
        files.copy_file(opened, fd, nbytes)
    finally:
        os.close(opened)
    return True


# --- the container afterwards -----------------------------------------------------------------------------------------


def _finish(root: _Node, prefix: pathlib.Path | None, options: SaveOptions) -> Any:
    """The memory-mapped, locked container: the planned one itself when saving in place, else a new one."""
    container = _in_place(root, prefix) if options.inplace else _rebuilt(root, prefix)
    if not container._locked:
        container._lock_tree()
    return container


def _rebuilt(node: _Node, prefix: pathlib.Path | None) -> Any:
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        if isinstance(entry, _Leaf):
            entries[name] = entry.entry()
        else:
            entries[name] = _rebuilt(entry, _inner(prefix, entry))
    old = node.container
    if old._bare() is not old:
        return old._faced(entries[BEHIND_FACE])
    names = None if old._names is None else list(old._names)
    container = old._build(entries, old._batch_size, _CPU, names)
    container._is_memmap = True
    container._memmap_prefix = prefix
    return container


def _in_place(node: _Node, prefix: pathlib.Path | None) -> Any:
    container = node.container
    for name, entry in node.entries.items():
        if isinstance(entry, _Leaf):
            container._entries[name] = entry.entry()
        else:
            _in_place(entry, _inner(prefix, entry))
    if container._bare() is not container:
        return container
    container._device = _CPU
    container._is_memmap = True
    container._memmap_prefix = prefix
    return container


def _inner(prefix: pathlib.Path | None, node: _Node) -> pathlib.Path | None:
    return None if prefix is None else prefix / node.folder.rpartition("/")[2]
