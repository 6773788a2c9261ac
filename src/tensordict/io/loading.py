"""Reading the directory format: files are mapped, and nothing is touched until it is used."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensordict import ragged, registry
from tensordict.contract import Contract
from tensordict.errors import SaveError, UnsupportedEntryError
from tensordict.io import files
from tensordict.io.meta import BEHIND_FACE, Leaf, Node, read_node
from tensordict.io.names import LEAF_SUFFIX, META, TABLE_SUFFIX, file_name, folder_name
from tensordict.keys import Path, joined, path_of
from tensordict.memmap import MemoryMappedTensor, PathLike, map_file, nested


@dataclass(slots=True)
class LoadOptions:
    """How to load; see `TensorDict.load_memmap`."""

    device: torch.device | None = None
    non_blocking: bool = False
    robust: bool = True
    # Ragged leaves of the same lengths get the same offsets, so that they can be computed with each other.
    share: ragged.SharedOffsets = field(default_factory=ragged.SharedOffsets)


def load_directory(prefix: PathLike, options: LoadOptions, subpath: Any = None) -> Any:
    """The container saved in the folder `prefix`, or the nested one at `subpath` in it.

    Raises:
        FileNotFoundError: when a file is missing.
        SaveError: when the files do not add up.
        UnsupportedEntryError: when an entry is of a kind that this version cannot load.
    """
    shown = pathlib.Path(os.fspath(prefix))
    folder = os.path.abspath(shown)
    path = _subpath(subpath)
    for count in range(len(path)):
        inner = _nested_folder(folder, path[:count], path[count], options.robust, os.fspath(shown))
        folder = f"{folder}/{inner}"
        shown = shown / inner
    try:
        container = _load_node(folder, shown, path, options)
    except RecursionError as error:
        raise SaveError(f"the save in {folder!r} is nested too deeply") from error
    device = options.device
    if device is not None and device.type not in ("cpu", "meta") and not options.non_blocking:
        torch.accelerator.synchronize(device)
    return container


def _subpath(subpath: Any) -> Path:
    if subpath is None:
        return ()
    if isinstance(subpath, str):
        return tuple(name for name in subpath.split("/") if name)
    return path_of(subpath)


def _nested_folder(folder: str, key: Path, name: str, robust: bool, prefix: str) -> str:
    node = read_node(folder, key)
    if node.class_name not in LOADERS and os.path.isdir(f"{folder}/{BEHIND_FACE}"):
        return f"{BEHIND_FACE}/{_nested_folder(f'{folder}/{BEHIND_FACE}', key, name, robust, prefix)}"
    if _entry_of(node, name) is not None:
        raise SaveError(f"subpath {joined((*key, name))!r} is a tensor in {prefix!r}; subpath loads nested containers")
    if name not in node.entries:
        raise SaveError(
            f"no container at subpath {joined((*key, name))!r} in {prefix!r}; "
            f"there are {[name for name, entry in node.entries.items() if entry is None]}"
        )
    return _folder_of(folder, name, _leaf_files(node, robust), robust)


def _entry_of(node: Node, name: str) -> Leaf | None:
    return node.entries.get(name)


def _load_node(folder: str, shown: pathlib.Path, key: Path, options: LoadOptions) -> Any:
    node = read_node(folder, key)
    loader = LOADERS.get(node.class_name)
    if loader is None and os.path.isdir(f"{folder}/{BEHIND_FACE}"):
        loader = _load_face
    if loader is None:
        entry = f"entry {joined(key)!r}: " if key else ""
        raise UnsupportedEntryError(
            f"{entry}{folder}/{META} is of a {node.class_name}, which this version cannot load yet; "
            f"it loads {sorted(LOADERS)}"
        )
    return loader(node, folder, shown, key, options)


def _load_tensordict(node: Node, folder: str, shown: pathlib.Path, key: Path, options: LoadOptions) -> Any:
    device = options.device
    # In FakeTensorMode a new tensor is a fake one.
    unread = (device is not None and device.type == "meta") or type(torch.empty((), device="cpu")) is not Tensor
    leaf_files: frozenset[str] | None = None
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        if entry is None:
            if leaf_files is None:
                leaf_files = _leaf_files(node, options.robust)
            inner = _folder_of(folder, name, leaf_files, options.robust)
            child = _load_node(f"{folder}/{inner}", shown / inner, (*key, name), options)
            if child._batch_size[: len(node.batch_size)] != node.batch_size:
                raise SaveError(
                    f"entry {joined((*key, name))!r}: the batch size {list(child._batch_size)} in {folder}/{inner} "
                    f"does not begin with that of its parent, {list(node.batch_size)}"
                )
            entries[name] = child
        elif unread and entry.ragged:
            raise UnsupportedEntryError(
                f"entry {joined((*key, name))!r} is ragged: it has no form without content, as on the meta device"
            )
        elif unread:
            entries[name] = torch.empty(entry.shape, dtype=entry.dtype, device=device or "cpu")
        else:
            load = _load_ragged if entry.ragged else _load_leaf
            leaf = load(folder, name, entry, key, options)
            if device is not None and device.type != "cpu":
                leaf = leaf.to(device, non_blocking=True)
            entries[name] = leaf
    empty: Contract = registry.lookup(node.class_name)()
    container = empty._build(entries, torch.Size(node.batch_size), device or node.device, node.names)
    if device is None or device.type == "cpu":
        container._memmap_prefix = shown
    return container


def _load_face(node: Node, folder: str, shown: pathlib.Path, key: Path, options: LoadOptions) -> Any:
    cls = registry.declared(node.class_name)
    if cls is None:
        entry = f"entry {joined(key)!r}: " if key else ""
        raise UnsupportedEntryError(
            f"{entry}{folder}/{META} is of the tensorclass {node.class_name!r}, which this program does not have: "
            "import the module that defines it before loading. Loading imports nothing by itself"
        )
    container = _load_node(f"{folder}/{BEHIND_FACE}", shown / BEHIND_FACE, key, options)
    if unknown := sorted(container._entries.keys() - cls.__expected_keys__):
        raise SaveError(f"{folder}/{BEHIND_FACE} has entries {unknown}, which are no fields of {node.class_name}")
    return cls._over(container)


# Where the classes that have their own layout (lazy stacks, tensorclasses, non-tensor data) come in.
LOADERS: dict[str, Callable[[Node, str, pathlib.Path, Path, LoadOptions], Any]] = {
    "TensorDict": _load_tensordict,
}


def _load_leaf(folder: str, name: str, leaf: Leaf, key: Path, options: LoadOptions) -> MemoryMappedTensor:
    return _mapped(folder, name, LEAF_SUFFIX, leaf.dtype, leaf.shape, key, options.robust)


def _load_ragged(folder: str, name: str, leaf: Leaf, key: Path, options: LoadOptions) -> Tensor:
    table = _mapped(folder, name, TABLE_SUFFIX, torch.int64, leaf.shape, key, options.robust)
    sizes = table.clone().as_subclass(Tensor)
    # As floating point numbers first: sizes that are made up may have products that no int64 holds.
    count = float(sizes.double().prod(-1).sum())
    fits = bool((sizes >= 0).all()) and count < 2**53
    if leaf.row is not None:
        fits = fits and all(bool((sizes[:, dim] == size).all()) for dim, size in enumerate(leaf.row) if size != -1)
    if not fits:
        raise SaveError(f"entry {joined((*key, name))!r}: the sizes of its rows, in {folder}, are broken")
    flat = _mapped(folder, name, LEAF_SUFFIX, leaf.dtype, (int(count),), key, options.robust)
    if leaf.row is None:
        return nested(flat, sizes)
    plain = flat.detach().as_subclass(Tensor)
    return ragged.from_row_order(plain, sizes, leaf.row.index(-1) + 1, leaf.row, options.share)


def _mapped(
    folder: str, name: str, suffix: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path, robust: bool
) -> MemoryMappedTensor:
    """One file of the entry `name`, mapped."""
    file = file_name(name, robust)
    path = f"{folder}/{file}{suffix}"
    try:
        return map_file(path, dtype, shape, (*key, name))
    except FileNotFoundError as error:
        if file != name and "/" not in name and "\0" not in name:
            # Saved with robust_key=False, or before names were encoded.
            plain = f"{folder}/{name}{suffix}"
            if os.path.exists(plain):
                return map_file(plain, dtype, shape, (*key, name))
        if 0 in shape:
            # The reference writes no file for a tensor without elements.
            return MemoryMappedTensor.empty(shape, dtype=dtype)
        raise files.named_os_error(error, "open the file", path, (*key, name)) from None
    except OSError as error:
        raise files.named_os_error(error, "map the file", path, (*key, name)) from error


def _leaf_files(node: Node, robust: bool) -> frozenset[str]:
    found: set[str] = set()
    for name, entry in node.entries.items():
        if entry is not None:
            file = file_name(name, robust)
            found.add(file + LEAF_SUFFIX)
            if entry.ragged:
                found.add(file + TABLE_SUFFIX)
    return frozenset(found)


def _folder_of(folder: str, name: str, leaf_files: frozenset[str], robust: bool) -> str:
    inner = folder_name(name, robust, leaf_files)
    if (
        inner != name
        and name not in ("", ".", "..", META)
        and "/" not in name
        and "\0" not in name
        and not os.path.isdir(f"{folder}/{inner}")
        and os.path.isdir(f"{folder}/{name}")
    ):
        # Saved with robust_key=False, or before names were encoded.
        return name
    return inner
