"""Writing the directory format: a folder per container, a file per tensor, and `meta.json` last."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pathlib
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io.formats.loading import LoadOptions, load_directory
from tensordict.io.formats.meta import (
    CHECKSUM,
    ENTRIES,
    LABEL,
    TABLE_CHECKSUM,
    as_json,
    is_foreign,
    keep_described,
    leaf_spec,
    node_meta,
    node_spec,
    ragged_spec,
    read_there,
)
from tensordict.io.formats.stack_columns import Column, file_of, is_ragged, ragged_leaf, taken
from tensordict.io.formats.value_files import Place, ValueFiles, files_of_value, read_value_files, unpickle
from tensordict.io.saving import commit, reopening
from tensordict.io.saving.comparing import Difference
from tensordict.io.saving.leaf_writer import LeafFile, SaveOptions, WriteOptions
from tensordict.io.saving.progress import progress_bar
from tensordict.io.saving.source import FOLDERS
from tensordict.io.saving.transaction import FolderTransaction, OwnFolderTransaction, Transaction
from tensordict.io.specification import (
    DICT,
    LAZY,
    UNBATCHED,
    WRAPPED,
    Specification,
    check_levels,
    specification_of,
    to_container,
)
from tensordict.memory import files
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import (
    MemoryMappedTensor,
    PathLike,
    SharedBlock,
    is_whole_file,
    map_file,
)
from tensordict.memory.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name, folder_name, local_path
from tensordict.memory.reserving import Preallocate, reserves
from tensordict.memory.storable import check_storable

# Where a file system refuses a hard link, or there is nothing to link to any more.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT}
# Anonymous leaves smaller than this share one block (each block costs two descriptors, of 1,024 by default) ...
_OWN_BLOCK = 1 << 20
# ... in which each begins at a multiple of this.
_ALIGN = 64

_CPU = torch.device("cpu")
_SCALAR = torch.Size(())


@dataclass(slots=True)
class FolderOptions(SaveOptions):
    """How to save to a folder, or an archive of its files."""

    copy_existing: bool = False
    existsok: bool = True
    robust: bool = True
    like: bool = False
    inplace: bool = False
    # Whether the disk keeps room for tensors without content.
    preallocate: Preallocate = "auto"
    # Whether values that JSON cannot hold may be pickled.
    allow_pickle: bool = False
    # Whether values that are no tensors are followed by all who have them.
    share_values: bool = False
    # A list of JSON that the outermost meta.json holds beside its entries.
    label: list[Any] | None = None
    # Whether what is planned goes into an archive, which is always a new file: what lies at its path does not count.
    # `None` leaves it to the suffix of the path.
    archive: bool | None = None
    # How the tensors of an archive are compressed.
    compression: str | int | None = None
    # Gather `DTensor` leaves; save in a thread of its own.
    full_tensor: bool = False
    return_early: bool = False
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
    # Whether it is the column of a lazy stack.
    column: bool
    share: ragged.SharedOffsets

    def entry(self) -> Any:
        """The ragged tensor, or the column, over the saved elements."""
        assert self.result is not None
        return ragged_leaf(self.result, self.table.tensor, self.row, self.column, self.share)


@dataclass(slots=True)
class _Node:
    """A container on its way to `folder` (to anonymous memory when that is empty)."""

    container: Any
    key: Path
    folder: str
    form: Specification
    entries: dict[str, _Leaf | _Node] = field(default_factory=dict)
    # The files of a value that is no tensor, which has no entries; `None` where nobody else is to see it.
    value: ValueFiles | None = None
    # See `FolderOptions.label`.
    label: list[Any] | None = None
    # The content of the meta.json of the node where it gains entries, which it keeps.
    there: dict[str, Any] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """How the node is called in the `meta.json` of the one it is in."""
        return self.form.kind.rpartition(".")[2]

    @property
    def is_foreign(self) -> bool:
        """Whether it is a value that the reference cannot read."""
        return self.value is not None and not self.value.pickle_file and is_foreign(self.value.meta)


@dataclass(slots=True)
class FolderPlan:
    """All files of a save: those of the leaves, and the `meta.json` of every node (see `meta_of`), parents first."""

    root: _Node
    leaves: list[_Leaf]
    nodes: list[_Node]


def plan_save(container: Contract, prefix: PathLike | None, options: FolderOptions) -> Callable[[], Any]:
    """Check everything that can be checked before a byte is written; what is returned does the rest.

    Raises:
        SaveError: when an entry cannot be saved, lies in another file, or (without `existsok`) is there already.
    """
    folder = "" if prefix is None else local_path(prefix)
    plan = plan_files(container, folder, options)
    if not folder:
        return partial(_save_anonymous, plan.root, plan.leaves, options)
    return partial(_save_directory, plan.root, pathlib.Path(os.fspath(prefix or "")), plan.leaves, plan.nodes, options)


def plan_files(container: Contract, folder: str, options: FolderOptions) -> FolderPlan:
    """What the folders and files of a save under the absolute path `folder` are; nothing is written.

    Raises:
        SaveError: as `plan_save`.
    """
    leaves: list[_Leaf] = []
    nodes: list[_Node] = []
    if folder:
        check_levels(container)
    root = _plan_node(container, (), folder, options, leaves, nodes)
    labelled = root
    # The reference refuses keys that it does not know in the meta.json of a tensorclass.
    while isinstance(inner := labelled.entries.get(WRAPPED), _Node) and labelled.form.is_tensorclass:
        labelled = inner
    labelled.label = options.label
    return FolderPlan(root, leaves, nodes)


# --- planning ---------------------------------------------------------------------------------------------------------


def _plan_node(
    container: object,
    key: Path,
    folder: str,
    options: FolderOptions,
    leaves: list[_Leaf],
    nodes: list[_Node],
    outer: torch.Size = _SCALAR,
) -> _Node:
    """Plan a container; `outer` is the batch size of the one that it is an entry of."""
    form = specification_of(container, key, unread=True, ragged_columns=not options.share_values)
    node = _Node(container, key, folder, form)
    nodes.append(node)
    present = _present(folder, key) if not options.archive else ()
    if META in present and not options.existsok:
        raise _exists(folder, options)
    if form.is_value:
        if folder or options.share_values:
            node.value = files_of_value(form, outer, key, options.allow_pickle, options.share_values)
            if options.share_values:
                node.value.alone(key)
            for at, tensor in enumerate(node.value.tensors):
                name, spec = node.value.meta[ENTRIES][at]
                path = f"{folder}/{name}{LEAF_SUFFIX}"
                leaves.append(_Leaf(name, (*key, name), tensor, path, spec, always=True))
        return node
    leaf_files: dict[str, str] = {}
    children: list[tuple[str, Contract | Specification]] = []
    # What is behind a tensorclass, or is an `UnbatchedTensor`, has the nested key of its folder.
    is_same = form.is_tensorclass or form.kind == UNBATCHED
    for name, value in form.entries.items():
        if isinstance(value, (Contract, Specification)):
            children.append((name, value))
            node.entries[name] = node  # Keeps the place in the order; replaced below.
            continue
        leaf = _plan_leaf(name, value, key if is_same else (*key, name), folder, options, present)
        node.entries[name] = leaf
        for part in (leaf, leaf.table) if isinstance(leaf, _Ragged) else (leaf,):
            leaves.append(part)
            other = leaf_files.setdefault(part.path.rpartition("/")[2], name)
            if folder and other != name:
                raise SaveError(
                    f"entries {joined((*key, other))!r} and {joined((*key, name))!r} would both be saved as "
                    f"{part.path!r}; rename one of them"
                )
    size = form.batch_size if form.kind == DICT else _SCALAR
    for name, child in children:
        inner = f"{folder}/{folder_name(name, options.robust, leaf_files)}" if folder else ""
        below = key if is_same else (*key, name)
        node.entries[name] = _plan_node(child, below, inner, options, leaves, nodes, size)
    return node


def _present(folder: str, key: Path) -> Container[str]:
    if not folder:
        return ()
    try:
        return frozenset(os.listdir(folder))
    except FileNotFoundError:
        return ()
    except NotADirectoryError as error:
        what = "cannot save into the folder: this is a file (a save to one file is an archive, named *.tdz)"
        raise NotADirectoryError(error.errno, f"{entry_of(key)}{what}", folder) from error
    except OSError as error:
        raise files.named_os_error(error, "save into the folder", folder, key) from error


def _plan_leaf(
    name: str, value: object, key: Path, folder: str, options: FolderOptions, present: Container[str]
) -> _Leaf:
    if is_ragged(value):
        return _plan_ragged(name, value, key, folder, options, present)
    if not isinstance(value, Tensor):
        raise UnsupportedEntryError(
            f"entry {joined(key)!r}: a {type(value).__name__} cannot be saved in the directory format yet"
        )
    try:
        check_storable(value)
        spec = leaf_spec(value.dtype, tuple(value.shape))
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(key)!r}: {error}") from None
    if value.is_meta and not options.like:
        raise SaveError(f"entry {joined(key)!r} is on the meta device and has no content; see memmap_like")
    if not folder:
        there = value if isinstance(value, MemoryMappedTensor) and not options.like else None
        return _Leaf(name, key, value, "", spec, there)
    file = file_name(name, options.robust) + LEAF_SUFFIX
    path = f"{folder}/{file}"
    leaf = _Leaf(name, key, value, path, spec)
    copies = options.archive or options.like
    if isinstance(value, MemoryMappedTensor) and isinstance(value._source, FileSource) and not copies:
        leaf.result = _mapped_there(value, value._source, path, file in present)
        if leaf.result is not None:
            return leaf
        if not options.copy_existing and not _was_replaced(value, value._source, path):
            raise SaveError(
                f"entry {joined(key)!r} is memory-mapped from {value._source.path!r} already; pass "
                f"copy_existing=True to copy it to {path!r}"
            )
    elif not (copies or options.copy_existing):
        _refuse_mapped(value, path, key)
    _check_way(leaf, options, present)
    return leaf


def _check_way(leaf: _Leaf, options: FolderOptions, present: Container[str]) -> None:
    if not options.existsok and leaf.path.rpartition("/")[2] in present:
        raise SaveError(f"entry {joined(leaf.key)!r}: {leaf.path!r} already exists; pass existsok=True to replace it")


def _plan_ragged(
    name: str, value: Any, key: Path, folder: str, options: FolderOptions, present: Container[str]
) -> _Ragged:
    if isinstance(value, Tensor) and value.is_meta:
        raise SaveError(f"entry {joined(key)!r} is ragged and on the meta device, without rows that could be saved")
    content, sizes, row = taken(value)
    try:
        spec = ragged_spec(value.dtype, tuple(sizes.shape), row)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(key)!r}: {error}") from None
    file = f"{folder}/{file_name(name, options.robust)}" if folder else ""
    path, path_of_table = (file + LEAF_SUFFIX, file + TABLE_SUFFIX) if folder else ("", "")
    copies = options.copy_existing or options.archive or options.like
    if folder and not copies:
        _refuse_mapped(value, path, key)
    table = _Leaf(name, key, sizes, path_of_table, spec, always=True)
    column = isinstance(value, Column)
    leaf = _Ragged(name, key, content, path, spec, table=table, row=row, column=column, share=options.share)
    if folder:
        _check_way(leaf, options, present)
        _check_way(table, options, present)
    return leaf


def _refuse_mapped(value: object, path: str, key: Path) -> None:
    """Refuse what is mapped from another file than the one it is to be saved to."""
    source = file_of(value)
    if source is not None and source != path:
        raise SaveError(
            f"entry {joined(key)!r} is memory-mapped from {source!r} already; pass copy_existing=True to copy it to "
            f"{path!r}"
        )


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


def _save_anonymous(root: _Node, leaves: list[_Leaf], options: FolderOptions) -> Any:
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


def _place(
    leaf: _Leaf, block: SharedBlock, offset: int, options: FolderOptions, jobs: list[Callable[[], None]]
) -> None:
    leaf.result = block.tensor(leaf.tensor.dtype, leaf.tensor.shape, offset)
    if leaf.always or not options.like:
        jobs.append(partial(files.write_tensor, block.fd, leaf.tensor, offset))


# --- files ------------------------------------------------------------------------------------------------------------


def _save_directory(
    root: _Node, prefix: pathlib.Path, leaves: list[_Leaf], nodes: list[_Node], options: FolderOptions
) -> Any:
    """Write everything new, map it, and only then put it in the place of what was there."""
    if not options.checksum and not options.durable and _is_saved(leaves, nodes):
        return _finish(root, prefix, options)
    there = _reopened(root, prefix, options)
    if there is not None and not there[1]:
        return reopening.merge_and_lock(root.container, there[0])
    start = len(root.folder) + 1
    kept = {leaf.path[start:] for leaf in leaves if leaf.result is not None}
    paths = list(files_of(FolderPlan(root, leaves, nodes)))
    with contextlib.ExitStack() as stack:
        # `_plan_adding` checks what is in the way of entries that are added.
        adding = there is not None
        save = stack.enter_context(
            FolderTransaction(root.folder, paths, options.durable, kept, options.overwrite or adding)
        )
        if save.is_replacing:
            _check_what_is_there(root.folder, leaves, nodes, options)
            # Another process may have made or changed it since.
            if (there := _reopened(root, prefix, options)) is not None:
                saved, missing = there
                if not missing:
                    return reopening.merge_and_lock(root.container, saved)
                plan = _plan_adding(root, saved, missing, options)
                root, leaves, nodes = plan.root, plan.leaves, plan.nodes
            elif adding:
                raise SaveError(f"the save in {root.folder!r} was removed while entries were to be added to it")
        for node in nodes:
            save.make_folder(node.folder, node.key)
        for leaf in leaves:
            if leaf.result is not None and not _link(leaf, leaf.result, save.at(leaf.path)):
                leaf.result = None
        moving = _write_into(save, root, leaves, nodes, options)
        for leaf in moving:
            _note_path(leaf.result, leaf.path)
    return _finish(root, prefix, options)


def _write_into(
    save: Transaction, root: _Node, leaves: list[_Leaf], nodes: list[_Node], options: FolderOptions
) -> list[_Leaf]:
    """Write all leaves that are not there, and every `meta.json`, and commit; gives the leaves that were written."""
    nbytes = sum([leaf.tensor.numel() * leaf.tensor.element_size() for leaf in leaves if leaf.result is None])
    moving: list[_Leaf] = []
    with progress_bar(options.progress, "saving", nbytes) as shown:
        writing = WriteOptions(save, options.num_threads, options.checksum, shown)
        if options.like:
            stage = os.path.dirname(save.at(f"{root.folder}/{META}"))
            writing.reserve = reserves(options.preallocate, stage, nbytes, root.folder)
        written = [
            LeafFile(
                leaf.key, leaf.tensor, leaf.path, writing, options.like and not leaf.always, leaf.result is not None
            )
            for leaf in leaves
        ]
        # A file that several threads write is written no faster on most file systems, so it is not cut unasked.
        threads = files.threads(options.num_threads, nbytes)
        files.run_all([job for file in written for job in file.jobs()], threads)
        for leaf, file in zip(leaves, written, strict=True):
            if not file.is_staged:
                leaf.result = map_file(save.at(leaf.path), leaf.tensor.dtype, tuple(leaf.tensor.shape), leaf.key)
                moving.append(leaf)
            if options.checksum and not file.zero:
                is_table = leaf.always and leaf.spec["is_nested"]
                leaf.spec[TABLE_CHECKSUM if is_table else CHECKSUM] = file.checksum()
        for node in reversed(nodes):
            if node.value is not None and node.value.pickle_file:
                save.write(f"{node.folder}/{node.value.pickle_file}", node.value.pickled, node.key)
            if node is not root:
                save.write(f"{node.folder}/{META}", as_json(meta_of(node)), node.key)
        save.commit(as_json(meta_of(root)))
    return moving


class GrowingFolder:
    """A save in a folder whose tensors are written row by row, before it is known how many there will be.

    Args:
        folder: its absolute path, where nothing is, and which nobody else uses.
        form: a container of the same entries, with any number of rows.
        growing: the nested keys of the tensors that are written by `write`; the others come with `commit`.
        options: how to save.

    Raises:
        SaveError: an entry cannot be saved.
        OSError: the folder or a file cannot be made.
    """

    def __init__(self, folder: str, form: Contract, growing: Collection[Path], options: FolderOptions) -> None:
        self._folder, self._options = folder, options
        plan = plan_files(form, folder, options)
        self._rows = {leaf.key: leaf for leaf in plan.leaves if leaf.key in growing}
        self._save = OwnFolderTransaction(folder, options.durable)
        self._fds: dict[Path, int] = {}
        self._save.__enter__()
        try:
            for node in plan.nodes:
                self._save.make_folder(node.folder, node.key)
            for key, leaf in self._rows.items():
                with files.naming("write the file", leaf.path, key):
                    self._fds[key] = self._save.create(leaf.path)
        except BaseException:
            self.close()
            raise

    def write(self, key: Path, rows: Tensor, offset: int) -> None:
        """Write rows of an entry at a byte of its file."""
        try:
            files.write_tensor(self._fds[key], rows, offset)
        except OSError as error:
            raise files.named_os_error(error, "write the file", self._rows[key].path, key) from error

    def written(self, key: Path, count: int) -> MemoryMappedTensor:
        """The first rows of an entry, which become all that its file has."""
        leaf = self._rows[key]
        shape = (count, *leaf.tensor.shape[1:])
        with files.naming("write the file", leaf.path, key):
            os.ftruncate(self._fds[key], math.prod(shape) * leaf.tensor.itemsize)
        return map_file(leaf.path, leaf.tensor.dtype, shape, key)

    def commit(self, container: Contract) -> None:
        """Make the save visible; `container` has what `written` gives, and the other entries. May be tried again."""
        plan = plan_files(container, self._folder, self._options)
        with self._save.attempt():
            _write_into(self._save, plan.root, plan.leaves, plan.nodes, self._options)

    def close(self) -> None:
        """Close all files; without a commit, what was written is taken away."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
        self._save.__exit__()


def _reopened(root: _Node, prefix: pathlib.Path, options: FolderOptions) -> tuple[Any, list[Difference]] | None:
    """Open the save that is there, for a save without content, which keeps it; `None` when there is none.

    Returns:
        The save, and the entries that it lacks.
    """
    if not options.like or options.overwrite or not os.path.lexists(f"{root.folder}/{META}"):
        return None
    loading = LoadOptions(robust=options.robust)
    if options.allow_pickle:
        loading.unpickle = unpickle
    return reopening.open_part(root.container, root.folder, lambda: load_directory(prefix, loading))


def _plan_adding(root: _Node, saved: Any, missing: list[Difference], options: FolderOptions) -> FolderPlan:
    """Plan a save of all that is saved in a folder, as hard links, and of the entries that it lacks.

    The folder is locked.

    Raises:
        SaveError: an entry has no place in the save, or its file or folder is there and belongs to no save.
    """
    plan = plan_files(reopening.merge(root.container, saved), root.folder, options)
    keys = dict.fromkeys(difference.key for difference in missing)

    def is_new(key: Path) -> bool:
        return any(key[: count + 1] in keys for count in range(len(key)))

    for node in plan.nodes:
        if is_new(node.key):
            _refuse_there(node.key, f"{node.folder}/{META}")
            if node.value is not None and node.value.pickle_file:
                _refuse_there(node.key, f"{node.folder}/{node.value.pickle_file}")
        else:
            _keep_description(node, keys)
    owned: dict[str, Collection[str]] = {}
    for leaf in plan.leaves:
        if is_new(leaf.key):
            _refuse_there(leaf.key, leaf.path)
            continue
        leaf.always = True
        folder, _, name = leaf.path.rpartition("/")
        if folder not in owned:
            owned[folder] = commit.list_own_names(folder)[0]
        if name in owned[folder] and os.path.exists(leaf.path):
            leaf.result = map_file(leaf.path, leaf.tensor.dtype, tuple(leaf.tensor.shape), leaf.key)
    return plan


def _refuse_there(key: Path, path: str) -> None:
    if os.path.lexists(path) and os.lstat(path).st_size:
        raise SaveError(
            f"entry {joined(key)!r}: {path!r} is there and is no part of the save that the entry is added to: remove "
            "it, or give the entry another name (overwrite=True replaces the whole save)"
        )


def _keep_description(node: _Node, added: Collection[Path]) -> None:
    """Have a node that is saved already keep its value, and what its `meta.json` says, such as checksums."""
    if node.form.columns:
        for key in added:
            if key[: len(node.key)] == node.key:
                raise SaveError(
                    f"entry {joined(key)!r}: the members of a ragged lazy stack have no files of their own for a new "
                    "entry: load the stack, set the entry in all members, and save it elsewhere"
                )
    if node.value is None:
        node.there = read_there(node.folder)
    elif (value := read_value_files(node.folder, node.key)) is not None:
        node.value = value


def _exists(folder: str, options: FolderOptions) -> SaveError:
    doing = "open" if options.like else "replace"
    return SaveError(f"{folder!r} holds a save already; pass existsok=True to {doing} it")


def _is_saved(leaves: list[_Leaf], nodes: list[_Node]) -> bool:
    """Whether all that would be written is there already."""
    if any(leaf.result is None for leaf in leaves) or any(node.value and node.value.pickle_file for node in nodes):
        return False
    try:
        return all(FOLDERS.read(f"{node.folder}/{META}") == as_json(meta_of(node)) for node in nodes)
    except OSError:
        return False


def files_of(plan: FolderPlan) -> Iterator[str]:
    """Yield the paths of all files of a save, below its folder."""
    start = len(plan.root.folder) + 1
    for leaf in plan.leaves:
        yield leaf.path[start:]
    for node in plan.nodes:
        yield f"{node.folder}/{META}"[start:]
        if node.value is not None and node.value.pickle_file:
            yield f"{node.folder}/{node.value.pickle_file}"[start:]


def _check_what_is_there(root: str, leaves: list[_Leaf], nodes: list[_Node], options: FolderOptions) -> None:
    """Refuse what cannot be replaced, before anything is written."""
    if not options.existsok and os.path.lexists(f"{root}/{META}"):
        raise _exists(root, options)
    for node in nodes:
        if os.path.lexists(node.folder) and not os.path.isdir(node.folder):
            error: OSError = NotADirectoryError(errno.ENOTDIR, "there is a file")
            raise files.named_os_error(error, "create the folder", node.folder, node.key)
    for leaf in leaves:
        if os.path.isdir(leaf.path):
            error = IsADirectoryError(errno.EISDIR, "there is a folder")
            raise files.named_os_error(error, "replace the file", leaf.path, leaf.key)


def _link(leaf: _Leaf, tensor: MemoryMappedTensor, staged: str) -> bool:
    """Have the new save share the file of a leaf that stays; `False` when it must be copied."""
    try:
        os.link(leaf.path, staged, follow_symlinks=False)
        status = os.stat(staged)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise files.named_os_error(error, "link the file", leaf.path, leaf.key) from error
    if isinstance(tensor._source, FileSource) and tensor._source.is_file(status):
        return True
    # Another save has replaced the file since this one was planned.
    os.unlink(staged)
    return False


def _note_path(tensor: MemoryMappedTensor | None, path: str) -> None:
    """Have a tensor that maps a file in the stage name the path that the file has after the commit."""
    assert tensor is not None and isinstance(tensor._source, FileSource)
    tensor._source.path = path


def meta_of(node: _Node) -> dict[str, Any]:
    """The content of the `meta.json` of a planned node; a value may have a pickle beside it too, see `node.value`."""
    if node.value is not None:
        return node.value.meta
    specs = {
        name: entry.spec if isinstance(entry, _Leaf) else node_spec(entry.class_name, entry.is_foreign)
        for name, entry in node.entries.items()
    }
    meta = node_meta(node.form, specs)
    if node.there:
        meta = keep_described(meta, node.there)
    return meta if node.label is None else {**meta, LABEL: node.label}


# --- the container afterwards -----------------------------------------------------------------------------------------


def _finish(root: _Node, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    """The memory-mapped, locked container: the planned one itself when saving in place, else a new one."""
    container = (_in_place if options.inplace else _rebuilt)(root, prefix, options)
    if not container._locked:
        container._lock_tree()
    return container


def _rebuilt(node: _Node, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        if isinstance(entry, _Leaf):
            entries[name] = entry.entry()
        else:
            entries[name] = _rebuilt(entry, _inner(prefix, entry), options)
    old, form = node.container, node.form
    if form.is_tensorclass and isinstance(old, Contract):
        return old._rewrap(entries[WRAPPED])
    if form.kind == DICT:
        names = None if old._names is None else list(old._names)
        container = old._build(entries, old._batch_size, _CPU, names)
    else:
        # That a value is saved does not bring it to a device.
        device = form.device if form.is_value else _CPU
        container = to_container(replace(form, device=device, entries=entries), node.key)
    if form.columns:
        container._mark(memmap=True)
    container = _memmapped(container, node, prefix, options)
    viewed = form.kind == LAZY and isinstance(old, Contract) and old._wrapped_container() is not old
    return old._rewrap(container) if viewed else container  # a typed view of a stack, stored as the stack


def _in_place(node: _Node, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    container = node.container
    if node.form.kind == UNBATCHED:
        # A tensor cannot change its memory: the entry is replaced.
        return _rebuilt(node, prefix, options)
    if node.form.columns:
        for member, saved in zip(container._members(), _rebuilt(node, prefix, options)._members(), strict=True):
            _adopt(member._wrapped_container(), saved._wrapped_container())
        container._mark(memmap=True)
        return _memmapped(container, node, prefix, options)
    for name, entry in node.entries.items():
        if isinstance(entry, _Leaf):
            container._entries[name] = entry.entry()
            continue
        inner = _in_place(entry, _inner(prefix, entry), options)
        if inner is not entry.container:
            container._entries[name] = inner
    if node.form.is_tensorclass:
        return container
    if not node.form.is_value:
        container._device = _CPU
    return _memmapped(container, node, prefix, options)


def _adopt(container: Contract, saved: Any) -> None:
    """Exchange the leaves of a container for those of a saved one of the same structure."""
    for name, value in saved._entries.items():
        if isinstance(value, Contract) and not value._is_non_tensor:
            _adopt(container._entries[name]._wrapped_container(), value._wrapped_container())
        else:
            container._entries[name] = value
    container._device = _CPU


def _memmapped(container: Any, node: _Node, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    container._is_memmap = True
    container._memmap_prefix = prefix
    if node.value is not None and (prefix is not None or options.share_values):
        container._put_at(None if prefix is None else Place.of(node.folder), options.share_values)
    return container


def _inner(prefix: pathlib.Path | None, node: _Node) -> pathlib.Path | None:
    return None if prefix is None else prefix / node.folder.rpartition("/")[2]
