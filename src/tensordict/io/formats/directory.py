"""The writer of the directory format: a folder for each container, a file for each tensor, and `meta.json` last."""

from __future__ import annotations

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
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io.formats.loading import LoadOptions, load_directory
from tensordict.io.formats.meta import (
    CHECKSUM,
    ENTRIES,
    LABEL,
    TABLE_CHECKSUM,
    encode_meta,
    is_foreign,
    leaf_spec,
    merge_old_meta,
    node_meta,
    node_spec,
    ragged_spec,
    read_old_meta,
)
from tensordict.io.formats.stack_columns import Column, find_file, join_ragged, split_ragged
from tensordict.io.formats.value_files import Place, ValueFiles, plan_value_files, read_value_files, unpickle
from tensordict.io.saving import commit, reopening
from tensordict.io.saving.comparing import Difference
from tensordict.io.saving.leaf_writer import LeafWriter, PlannedLeaf, SaveOptions
from tensordict.io.saving.progress import progress_bar
from tensordict.io.saving.source import FILE_SYSTEM
from tensordict.io.saving.transaction import FolderTransaction, OwnFolderTransaction, Transaction
from tensordict.io.specification import (
    DICT,
    LAZY,
    UNBATCHED,
    VALUE_KINDS,
    WRAPPED,
    Specification,
    check_level,
    specification_of,
    to_container,
)
from tensordict.memory import files
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor, PathLike, is_whole_file, map_block, map_file
from tensordict.memory.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name, folder_name, local_path
from tensordict.memory.reserving import Preallocate, reserves
from tensordict.memory.shared_block import SharedBlock
from tensordict.memory.storable import check_storable

# The file system does not support hard links, or the file is gone.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT}
# Anonymous leaves smaller than this share one block, because each block takes two descriptors, of 1,024 by default.
_OWN_BLOCK = 1 << 20
# The alignment of the leaves in a shared block.
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
    # Reserve room on the disk for tensors without content.
    preallocate: Preallocate = "auto"
    # Pickle values that JSON cannot store.
    allow_pickle: bool = False
    # Let all who load a non-tensor value see later changes of it.
    share_values: bool = False
    # A list of JSON that the root meta.json stores beside its entries.
    label: list[Any] | None = None
    # Write an archive; `None` chooses by the suffix of the path. An archive is a new file, so files in a folder at its
    # path are not checked.
    archive: bool | None = None
    # The compression of the tensors in an archive.
    compression: str | int | None = None
    # Gather the shards of `DTensor` leaves from all processes.
    full_tensor: bool = False
    # Return before the save is complete; another thread saves.
    return_early: bool = False
    # Return nothing, without the time to load an archive: a third of a save of thousands of small tensors.
    returns_nothing: bool = False
    # Gives ragged leaves of equal lengths the same offsets.
    share: ragged.SharedOffsets = field(default_factory=ragged.SharedOffsets)


@dataclass(slots=True, kw_only=True)
class _PlannedRagged(PlannedLeaf):
    """A ragged tensor or a column: `tensor` has the elements of all rows, and `table` the sizes of the rows."""

    table: PlannedLeaf
    row: tuple[int, ...] | None
    # True for a column of a lazy stack.
    column: bool
    share: ragged.SharedOffsets

    def build_entry(self) -> Any:
        """Return the ragged tensor, or the column, over the saved elements."""
        assert self.result is not None
        return join_ragged(self.result, self.table.tensor, self.row, self.column, self.share)


@dataclass(slots=True)
class _PlannedNode:
    """A container that will be saved in `folder`, or in anonymous memory if `folder` is empty."""

    container: Any
    key: Path
    folder: str
    form: Specification
    entries: dict[str, PlannedLeaf | _PlannedNode] = field(default_factory=dict)
    # The files of a non-tensor value; `None` in anonymous memory, unless the value is shared.
    value: ValueFiles | None = None
    # See `FolderOptions.label`.
    label: list[Any] | None = None
    # The old meta.json of a node that gains entries.
    old_meta: dict[str, Any] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """The name of the class in the `meta.json` of the parent."""
        return self.form.kind.rpartition(".")[2]

    @property
    def is_foreign(self) -> bool:
        """True for a value that the reference cannot read."""
        return self.value is not None and not self.value.pickle_file and is_foreign(self.value.meta)


@dataclass(slots=True)
class FolderPlan:
    """All files of a save: the files of leaves, and the `meta.json` of every node (see `build_meta`), parents first."""

    root: _PlannedNode
    leaves: list[PlannedLeaf]
    nodes: list[_PlannedNode]


def plan_save(container: Contract, prefix: PathLike | None, options: FolderOptions) -> Callable[[], Any]:
    """Check a save, and return a function that runs it. The checks come before the first byte is written.

    Raises:
        SaveError: an entry cannot be saved, is mapped from another file, or exists already without `existsok`.
    """
    folder = "" if prefix is None else local_path(prefix)
    plan = plan_files(container, folder, options)
    if prefix is None:
        return partial(_save_anonymous, plan, options)
    given = pathlib.Path(os.fspath(prefix))
    saved_path = given if os.path.abspath(given) == folder else pathlib.Path(folder)  # not a URL `file:///...`
    return partial(_save_directory, plan, saved_path, options)


def plan_files(container: Contract | Specification, folder: str, options: FolderOptions) -> FolderPlan:
    """Plan the folders and files of a save at the absolute path `folder`, without writing.

    Raises:
        SaveError: as `plan_save`.
    """
    leaves: list[PlannedLeaf] = []
    nodes: list[_PlannedNode] = []
    root = _plan_node(container, (), folder, options, leaves, nodes)
    for leaf in leaves:
        leaf.file = leaf.path[len(folder) + 1 :]
    # The reference refuses unknown keys in the meta.json of a tensorclass, so the wrapped container gets the label.
    label_node = root
    while isinstance(inner := label_node.entries.get(WRAPPED), _PlannedNode) and label_node.form.is_tensorclass:
        label_node = inner
    label_node.label = options.label
    return FolderPlan(root, leaves, nodes)


# --- planning ---------------------------------------------------------------------------------------------------------


def _plan_node(
    container: object,
    key: Path,
    folder: str,
    options: FolderOptions,
    leaves: list[PlannedLeaf],
    nodes: list[_PlannedNode],
    outer: torch.Size = _SCALAR,
) -> _PlannedNode:
    """Plan a container; `outer` is the batch size of its parent."""
    if folder:
        check_level(key)
    form = specification_of(container, key, unread=True, ragged_columns=not options.share_values)
    node = _PlannedNode(container, key, folder, form)
    nodes.append(node)
    present = _list_folder(folder, key) if not options.archive else ()
    if META in present and not options.existsok:
        raise _exists_error(folder, options)
    if form.kind in VALUE_KINDS:
        if folder or options.share_values:
            shared = options.share_values or getattr(form, "shared", False)
            node.value = plan_value_files(form, outer, key, options.allow_pickle, shared)
            if options.share_values:
                node.value.meta_without_tensors(key)
            for at, tensor in enumerate(node.value.tensors):
                name, spec = node.value.meta[ENTRIES][at]
                path = f"{folder}/{name}{LEAF_SUFFIX}"
                leaves.append(PlannedLeaf(name, (*key, name), tensor, path, spec, always=True))
        return node
    leaf_files: dict[str, str] = {}
    children: list[tuple[str, Contract | Specification]] = []
    # The container in a tensorclass, and the tensor in an `UnbatchedTensor`, have the nested key of their parent.
    has_same_key = form.kind not in (DICT, LAZY)
    for name, value in form.entries.items():
        if isinstance(value, (Contract, Specification)):
            children.append((name, value))
            node.entries[name] = node  # Any value: it keeps the order of the entries, and is replaced below.
            continue
        leaf = _plan_leaf(name, value, key if has_same_key else (*key, name), folder, options, present)
        node.entries[name] = leaf
        for part in (leaf, leaf.table) if isinstance(leaf, _PlannedRagged) else (leaf,):
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
        child_key = key if has_same_key else (*key, name)
        node.entries[name] = _plan_node(child, child_key, inner, options, leaves, nodes, size)
    return node


def _list_folder(folder: str, key: Path) -> Container[str]:
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
    name: str, value: Tensor | Column, key: Path, folder: str, options: FolderOptions, present: Container[str]
) -> PlannedLeaf:
    if isinstance(value, Column) or value.is_nested:
        return _plan_ragged_leaf(name, value, key, folder, options, present)
    check_storable(value, key)
    spec = leaf_spec(value.dtype, tuple(value.shape), key)
    if value.is_meta and not options.like:
        raise SaveError(f"entry {joined(key)!r} is on the meta device and has no content; see memmap_like")
    if not folder:
        result = value if isinstance(value, MemoryMappedTensor) and not options.like else None
        return PlannedLeaf(name, key, value, "", spec, result)
    file = file_name(name, options.robust) + LEAF_SUFFIX
    path = f"{folder}/{file}"
    leaf = PlannedLeaf(name, key, value, path, spec)
    copies = options.archive or options.like
    if isinstance(value, MemoryMappedTensor) and isinstance(value._source, FileSource) and not copies:
        source, is_whole = value._source, value._source.shared and is_whole_file(value)
        if file in present and is_whole and source.is_file(os.stat(path)):
            leaf.result = value
            return leaf
        # A tensor may map the file that was at `path` until another save replaced it.
        if not options.copy_existing and not (is_whole and source.path == path):
            raise _mapped_error(source.path, path, key)
    elif type(value) is not Tensor and not (copies or options.copy_existing):
        _check_source(value, path, key)
    if not options.existsok:
        _check_no_file(leaf, present)
    return leaf


def _check_no_file(leaf: PlannedLeaf, present: Container[str]) -> None:
    if leaf.path.rpartition("/")[2] in present:
        raise SaveError(f"entry {joined(leaf.key)!r}: {leaf.path!r} already exists; pass existsok=True to replace it")


def _plan_ragged_leaf(
    name: str, value: Any, key: Path, folder: str, options: FolderOptions, present: Container[str]
) -> _PlannedRagged:
    if isinstance(value, Tensor) and value.is_meta:
        raise SaveError(f"entry {joined(key)!r} is ragged and on the meta device, and has no rows to save")
    content, sizes, row = split_ragged(value)
    spec = ragged_spec(value.dtype, tuple(sizes.shape), row, key)
    file = f"{folder}/{file_name(name, options.robust)}" if folder else ""
    path, path_of_table = (file + LEAF_SUFFIX, file + TABLE_SUFFIX) if folder else ("", "")
    copies = options.copy_existing or options.archive or options.like
    if folder and not copies:
        _check_source(value, path, key)
    table = PlannedLeaf(name, key, sizes, path_of_table, spec, always=True)
    column = isinstance(value, Column)
    leaf = _PlannedRagged(name, key, content, path, spec, table=table, row=row, column=column, share=options.share)
    if folder and not options.existsok:
        _check_no_file(leaf, present)
        _check_no_file(table, present)
    return leaf


def _check_source(value: object, path: str, key: Path) -> None:
    """Raise an error for a leaf that is mapped from another file than the one at `path`."""
    source = find_file(value)
    if source is not None and source != path:
        raise _mapped_error(source, path, key)


def _mapped_error(source: str, path: str, key: Path) -> SaveError:
    advice = f"pass copy_existing=True to copy it to {path!r}"
    return SaveError(f"entry {joined(key)!r} is memory-mapped from {source!r} already; {advice}")


# --- anonymous memory -------------------------------------------------------------------------------------------------


def _save_anonymous(plan: FolderPlan, options: FolderOptions) -> Any:
    """Copy all leaves into shared anonymous memory."""
    jobs: list[Callable[[], None]] = []
    small: list[tuple[PlannedLeaf, int]] = []
    end = 0
    for leaf in plan.leaves:
        if leaf.result is not None:
            continue
        nbytes = leaf.tensor.numel() * leaf.tensor.element_size()
        if nbytes >= _OWN_BLOCK:
            _copy_into(leaf, SharedBlock(nbytes), 0, options, jobs)
        elif nbytes:
            small.append((leaf, end))
            end += -(-nbytes // _ALIGN) * _ALIGN
        else:
            leaf.result = MemoryMappedTensor.empty(leaf.tensor.shape, dtype=leaf.tensor.dtype)
    if small:
        block = SharedBlock(end)
        for leaf, offset in small:
            _copy_into(leaf, block, offset, options, jobs)
    files.run_all(jobs, options.num_threads)
    return _finish(plan.root, None, options)


def _copy_into(
    leaf: PlannedLeaf, block: SharedBlock, offset: int, options: FolderOptions, jobs: list[Callable[[], None]]
) -> None:
    """Give a leaf its place in a block, and add the job that copies its content."""
    leaf.result = map_block(block, leaf.tensor.dtype, leaf.tensor.shape, offset)
    if leaf.always or not options.like:
        jobs.append(partial(files.write_tensor, block.fd, leaf.tensor, offset))


# --- files ------------------------------------------------------------------------------------------------------------


def _save_directory(plan: FolderPlan, prefix: pathlib.Path, options: FolderOptions) -> Any:
    """Write and map the new files, and then replace the old save."""
    root = plan.root
    kept = {leaf.file for leaf in plan.leaves if leaf.result is not None}
    is_unchanged = len(kept) == len(plan.leaves) and not options.checksum and not options.durable
    if is_unchanged and _is_saved_already(plan.nodes):
        return _finish(root, prefix, options)
    existing = _open_existing(root, prefix, options) if options.like else None
    if existing is not None and not existing[1]:
        return reopening.merge_and_lock(root.container, existing[0])
    # `_plan_adding` checks the paths of added entries itself.
    adding = existing is not None
    paths, overwrite = list(list_files(plan)), options.overwrite or adding
    with FolderTransaction(root.folder, paths, options.durable, kept, overwrite) as save:
        if save.is_replacing:
            _check_old_save(plan, options)
            # Open it again under the lock, because another process may have changed it.
            if options.like and (existing := _open_existing(root, prefix, options)) is not None:
                saved, missing = existing
                if not missing:
                    return reopening.merge_and_lock(root.container, saved)
                plan = _plan_adding(root, saved, missing, options)
            elif adding:
                raise SaveError(f"the save in {root.folder!r} was removed while entries were to be added to it")
        for node in plan.nodes[1:]:
            save.make_folder(node.folder, node.key)
        for leaf in plan.leaves:
            if leaf.result is not None and not link_file(leaf, leaf.result, save.staged):
                leaf.result = None
        for leaf in write_and_commit(save, plan, options):
            # The tensor maps the staged file, which has the path of the leaf after the commit.
            assert leaf.result is not None and isinstance(leaf.result._source, FileSource)
            leaf.result._source.path = leaf.path
    return _finish(plan.root, prefix, options)


def write_and_commit(save: Transaction, plan: FolderPlan, options: FolderOptions) -> list[PlannedLeaf]:
    """Write the leaves without a file, and every `meta.json`, and commit. Returns the leaves that were written."""
    root, leaves = plan.root, plan.leaves
    new_leaves = [leaf for leaf in leaves if leaf.result is None]
    nbytes = sum([leaf.tensor.numel() * leaf.tensor.element_size() for leaf in new_leaves])
    with progress_bar(options.progress, "saving", nbytes) as shown:
        writer = LeafWriter(save, options.num_threads, options.checksum, shown, options.like)
        if options.like:
            writer.reserve = reserves(options.preallocate, save.staged, nbytes, root.folder)
        jobs = writer.jobs(leaves)
        # `writer` has the number of threads that the user chose, and not the default one. A file is split only if the
        # user chose a number, because most file systems do not write one file faster with several threads.
        files.run_all(jobs, files.choose_threads(options.num_threads, nbytes))
        for leaf in new_leaves:
            if leaf.result is None:
                leaf.result = map_file(leaf.staged, leaf.tensor.dtype, tuple(leaf.tensor.shape), leaf.key)
        if options.checksum:
            for leaf in leaves:
                if leaf.always or not options.like:
                    is_table = leaf.always and leaf.spec["is_nested"]
                    leaf.spec[TABLE_CHECKSUM if is_table else CHECKSUM] = writer.checksum(leaf.path)
        for node in reversed(plan.nodes):
            if node.value is not None and node.value.pickle_file:
                save.write(f"{node.folder}/{node.value.pickle_file}", node.value.pickled, node.key)
            if node is not root:
                save.write(f"{node.folder}/{META}", encode_meta(build_meta(node)), node.key)
        save.commit(encode_meta(build_meta(root)))
    return new_leaves


class GrowingFolder:
    """A save in a folder whose tensors are written row by row, before the number of rows is known.

    Args:
        folder: the absolute path of a new folder that no other process uses.
        form: a container with the same entries and any number of rows, or its specification.
        growing: the nested keys of the tensors that `write` writes. `commit` writes the others.
        options: how to save.

    Raises:
        SaveError: an entry cannot be saved.
        OSError: the folder or a file cannot be created.
    """

    def __init__(
        self, folder: str, form: Contract | Specification, growing: Collection[Path], options: FolderOptions
    ) -> None:
        self._folder, self._options = folder, options
        plan = plan_files(form, folder, options)
        self._rows = {leaf.key: leaf for leaf in plan.leaves if leaf.key in growing}
        self._save = OwnFolderTransaction(folder, options.durable)
        self._fds: dict[Path, int] = {}
        self._save.__enter__()
        try:
            for node in plan.nodes[1:]:
                self._save.make_folder(node.folder, node.key)
            for key, leaf in self._rows.items():
                with files.naming("write the file", leaf.path, key):
                    self._fds[key] = self._save.create(leaf.path)
        except BaseException:
            self.close()
            raise

    def write(self, key: Path, rows: Tensor, offset: int) -> None:
        """Write rows of an entry at a byte offset of its file."""
        try:
            files.write_tensor(self._fds[key], rows, offset)
        except OSError as error:
            raise files.named_os_error(error, "write the file", self._rows[key].path, key) from error

    def truncate(self, key: Path, count: int) -> MemoryMappedTensor:
        """Cut the file of an entry off after its first `count` rows, and map it."""
        leaf = self._rows[key]
        shape = (count, *leaf.tensor.shape[1:])
        with files.naming("write the file", leaf.path, key):
            os.ftruncate(self._fds[key], math.prod(shape) * leaf.tensor.itemsize)
        return map_file(leaf.path, leaf.tensor.dtype, shape, key)

    def commit(self, container: Contract) -> None:
        """Make the save visible. After an error it may be called again.

        Args:
            container: the container to save, with the tensors that `truncate` returned.
        """
        plan = plan_files(container, self._folder, self._options)
        with self._save.attempt():
            write_and_commit(self._save, plan, self._options)

    def close(self) -> None:
        """Close all files. Without a commit, remove them."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
        self._save.__exit__()


def _open_existing(
    root: _PlannedNode, prefix: pathlib.Path, options: FolderOptions
) -> tuple[Any, list[Difference]] | None:
    """Open an existing save for `memmap_like`, which keeps its content.

    Returns:
        The loaded container, and its missing entries as differences; `None` without a save.
    """
    if options.overwrite or not os.path.lexists(f"{root.folder}/{META}"):
        return None
    loading = LoadOptions(robust=options.robust)
    if options.allow_pickle:
        loading.unpickle = unpickle
    return reopening.open_part(root.container, root.folder, lambda: load_directory(prefix, loading))


def _plan_adding(root: _PlannedNode, saved: Any, missing: list[Difference], options: FolderOptions) -> FolderPlan:
    """Plan a save that keeps the entries of the save in a locked folder, as hard links, and adds the missing ones.

    Raises:
        SaveError: the save cannot take an entry, or a foreign file or folder has its path.
    """
    plan = plan_files(reopening.merge(root.container, saved), root.folder, options)
    keys = dict.fromkeys(difference.key for difference in missing)

    def is_new(key: Path) -> bool:
        return any(key[: count + 1] in keys for count in range(len(key)))

    for node in plan.nodes:
        if is_new(node.key):
            _check_free(node.key, f"{node.folder}/{META}")
            if node.value is not None and node.value.pickle_file:
                _check_free(node.key, f"{node.folder}/{node.value.pickle_file}")
        else:
            _keep_description(node, keys)
    own_names: dict[str, Collection[str]] = {}
    for leaf in plan.leaves:
        if is_new(leaf.key):
            _check_free(leaf.key, leaf.path)
            continue
        leaf.always = True
        folder, _, name = leaf.path.rpartition("/")
        if folder not in own_names:
            own_names[folder] = commit.list_own_names(folder)[0]
        if name in own_names[folder] and os.path.exists(leaf.path):
            leaf.result = map_file(leaf.path, leaf.tensor.dtype, tuple(leaf.tensor.shape), leaf.key)
    return plan


def _check_free(key: Path, path: str) -> None:
    """Check that no file with content exists at the path of a new entry."""
    if os.path.lexists(path) and os.lstat(path).st_size:
        raise SaveError(
            f"entry {joined(key)!r}: {path!r} is there and is no part of the save that the entry is added to: remove "
            "it, or give the entry another name (overwrite=True replaces the whole save)"
        )


def _keep_description(node: _PlannedNode, added: Collection[Path]) -> None:
    """Keep the value of a saved node, and the descriptions in its `meta.json`, such as checksums."""
    if node.form.columns:
        for key in added:
            if key[: len(node.key)] == node.key:
                raise SaveError(
                    f"entry {joined(key)!r}: the members of a ragged lazy stack have no files of their own for a new "
                    "entry: load the stack, set the entry in all members, and save it elsewhere"
                )
    if node.value is None:
        node.old_meta = read_old_meta(node.folder)
    elif (value := read_value_files(node.folder, node.key)) is not None:
        node.value = value


def _exists_error(folder: str, options: FolderOptions) -> SaveError:
    doing = "open" if options.like else "replace"
    return SaveError(f"{folder!r} holds a save already; pass existsok=True to {doing} it")


def _is_saved_already(nodes: list[_PlannedNode]) -> bool:
    """Return True if the folder has every `meta.json` that the save would write."""
    if any(node.value and node.value.pickle_file for node in nodes):
        return False
    try:
        return all(FILE_SYSTEM.read(f"{node.folder}/{META}") == encode_meta(build_meta(node)) for node in nodes)
    except OSError:
        return False


def list_files(plan: FolderPlan) -> Iterator[str]:
    """Yield the paths of all files of a save, relative to its folder."""
    start = len(plan.root.folder) + 1
    for leaf in plan.leaves:
        yield leaf.file
    for node in plan.nodes:
        yield f"{node.folder}/{META}"[start:]
        if node.value is not None and node.value.pickle_file:
            yield f"{node.folder}/{node.value.pickle_file}"[start:]


def _check_old_save(plan: FolderPlan, options: FolderOptions) -> None:
    """Check, before anything is written, that the save can replace the old folder."""
    root = plan.root.folder
    if not options.existsok and os.path.lexists(f"{root}/{META}"):
        raise _exists_error(root, options)
    for node in plan.nodes:
        if os.path.lexists(node.folder) and not os.path.isdir(node.folder):
            error: OSError = NotADirectoryError(errno.ENOTDIR, "there is a file")
            raise files.named_os_error(error, "create the folder", node.folder, node.key)
    for leaf in plan.leaves:
        if os.path.isdir(leaf.path):
            error = IsADirectoryError(errno.EISDIR, "there is a folder")
            raise files.named_os_error(error, "replace the file", leaf.path, leaf.key)


def link_file(leaf: PlannedLeaf, tensor: MemoryMappedTensor, stage: str) -> bool:
    """Link the file of a leaf that stays into the stage. Returns `False` if it must be copied instead."""
    staged = f"{stage}/{leaf.file}"
    try:
        os.link(leaf.path, staged, follow_symlinks=False)
        status = os.stat(staged)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise files.named_os_error(error, "link the file", leaf.path, leaf.key) from error
    if isinstance(tensor._source, FileSource) and tensor._source.is_file(status):
        return True
    # Another save has replaced the file after this save was planned.
    os.unlink(staged)
    return False


def build_meta(node: _PlannedNode) -> dict[str, Any]:
    """Return the `meta.json` of a planned node. A value may also have a pickle file, see `node.value`."""
    if node.value is not None:
        return node.value.meta
    specs = {
        name: entry.spec if isinstance(entry, PlannedLeaf) else node_spec(entry.class_name, entry.is_foreign)
        for name, entry in node.entries.items()
    }
    meta = node_meta(node.form, specs)
    if node.old_meta:
        meta = merge_old_meta(meta, node.old_meta)
    return meta if node.label is None else {**meta, LABEL: node.label}


# --- the saved container ----------------------------------------------------------------------------------------------


def _finish(root: _PlannedNode, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    """Return the memory-mapped, locked container. With `inplace`, this is the given container itself."""
    container = (_update_in_place if options.inplace else _rebuild)(root, prefix, options)
    if not container._locked:
        container._lock_tree()
    return container


def _rebuild(node: _PlannedNode, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    """Build a new container over the saved files."""
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        if isinstance(entry, PlannedLeaf):
            entries[name] = entry.build_entry() if isinstance(entry, _PlannedRagged) else entry.result
        else:
            entries[name] = _rebuild(entry, _prefix_of_nested(prefix, entry), options)
    old, form = node.container, node.form
    if form.kind == DICT:
        container = old._build(entries, old._batch_size, _CPU, old._names)
    elif form.is_tensorclass and isinstance(old, Contract):
        return old._rewrap(entries[WRAPPED])
    else:
        # Saved tensors are on the CPU. A value has no tensors, and keeps its device.
        device = form.device if form.is_value else _CPU
        container = to_container(replace(form, device=device, entries=entries), node.key)
    if form.columns:
        container._mark(memmap=True)
    container = _mark_memmap(container, node, prefix, options)
    # A wrapper of a lazy stack other than a tensorclass, which is stored as the stack.
    is_wrapper = form.kind == LAZY and isinstance(old, Contract) and old._wrapped_container() is not old
    return old._rewrap(container) if is_wrapper else container


def _update_in_place(node: _PlannedNode, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    """Replace the leaves of the given container by the saved ones."""
    container = node.container
    if node.form.kind == UNBATCHED:
        # The memory of a tensor cannot be exchanged, so the caller replaces the entry.
        return _rebuild(node, prefix, options)
    if node.form.columns:
        for member, saved in zip(container._members(), _rebuild(node, prefix, options)._members(), strict=True):
            _replace_leaves(member._wrapped_container(), saved._wrapped_container())
        container._mark(memmap=True)
        return _mark_memmap(container, node, prefix, options)
    for name, entry in node.entries.items():
        if isinstance(entry, PlannedLeaf):
            container._entries[name] = entry.build_entry() if isinstance(entry, _PlannedRagged) else entry.result
            continue
        inner = _update_in_place(entry, _prefix_of_nested(prefix, entry), options)
        if inner is not entry.container:
            container._entries[name] = inner
    if node.form.is_tensorclass:
        return container
    if not node.form.is_value:
        container._device = _CPU
    return _mark_memmap(container, node, prefix, options)


def _replace_leaves(container: Contract, saved: Any) -> None:
    """Replace the leaves of a container by the leaves of a saved one with the same structure."""
    for name, value in saved._entries.items():
        if isinstance(value, Contract) and not value._is_non_tensor:
            _replace_leaves(container._entries[name]._wrapped_container(), value._wrapped_container())
        else:
            container._entries[name] = value
    container._device = _CPU


def _mark_memmap(container: Any, node: _PlannedNode, prefix: pathlib.Path | None, options: FolderOptions) -> Any:
    """Mark a container as memory-mapped, and record the folder of its value."""
    container._backing = container._backing._replace(is_memmap=True, memmap_prefix=prefix)
    if node.value is not None and (prefix is not None or options.share_values):
        container._put_at(None if prefix is None else Place.of(node.folder), options.share_values)
    return container


def _prefix_of_nested(prefix: pathlib.Path | None, node: _PlannedNode) -> pathlib.Path | None:
    """Return the path of the folder of a nested container; `prefix` is the folder of its parent."""
    return None if prefix is None else prefix / node.folder.rpartition("/")[2]
