"""`meta.json`: what a folder of the directory format says about its entries, written and read with suspicion."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch

from tensordict.errors import SaveError, UnsupportedEntryError
from tensordict.io import files
from tensordict.io.names import META
from tensordict.keys import Path, joined

# The dtypes that the reference reads.
_PLAIN = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
)
# It fails on a whole folder for one leaf of these: such a leaf stands as bytes, its dtype beside it in "_dtype".
_AS_BYTES = (
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
)
_STORED_AS = {getattr(torch, name): f"torch.{name}" for name in _PLAIN}
DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in (*_PLAIN, *_AS_BYTES)}

# Keys of meta.json that describe the node. An entry of one of these names is listed in "_entries" instead, which the
# reference passes over (and whose own saves silently lose such entries).
_ROW = "_row"
_SHAPE, _DEVICE, _TYPE, _NAMES, _ENTRIES = "shape", "device", "_type", "_names", "_entries"
_RESERVED = {_SHAPE, _DEVICE, _TYPE, _NAMES, _ENTRIES, "_format_version", "_class"}

# What the reference calls the class of a node, by class name.
TYPES = {"TensorDict": "<class 'tensordict._td.TensorDict'>"}
# Where the container behind a tensorclass is saved, in the folder of the tensorclass.
BEHIND_FACE = "_tensordict"
_TYPE_FORM = re.compile(r"<class '([\w.<>]+)'>")
_MAX_DIMS = 64


@dataclass(slots=True)
class Leaf:
    """A tensor as meta.json describes it."""

    dtype: torch.dtype
    # That of a ragged tensor is the shape of the table of the sizes of its rows.
    shape: tuple[int, ...]
    ragged: bool = False
    # In the jagged layout: the shape of every row, with -1 for the ragged dim.
    row: tuple[int, ...] | None = None


@dataclass(slots=True)
class Node:
    """A folder as its meta.json describes it; an entry that is `None` is a nested folder."""

    class_name: str
    batch_size: tuple[int, ...]
    device: torch.device | None
    names: list[str | None] | None
    entries: dict[str, Leaf | None] = field(default_factory=dict)


def leaf_spec(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    """What meta.json says about a leaf.

    Raises:
        UnsupportedEntryError: when no reader knows the dtype.
    """
    stored = _STORED_AS.get(dtype)
    if stored is not None:
        return {"device": "cpu", "shape": list(shape), "dtype": stored, "is_nested": False}
    if str(dtype) not in DTYPES:
        raise UnsupportedEntryError(f"tensors of {dtype} cannot be saved; known are {', '.join(DTYPES)}")
    return {
        "device": "cpu",
        "shape": list(shape),
        "dtype": "torch.uint8",
        "is_nested": False,
        "_dtype": str(dtype),
    }


def ragged_spec(dtype: torch.dtype, table: tuple[int, ...], row: tuple[int, ...] | None) -> dict[str, Any]:
    """What meta.json says about a ragged leaf; `row` as in `Leaf`, which the reference passes over.

    Raises:
        UnsupportedEntryError: when the reference could not read the dtype.
    """
    if dtype not in _STORED_AS:
        raise UnsupportedEntryError(f"ragged tensors of {dtype} cannot be saved; known are {', '.join(_PLAIN)}")
    spec = {"device": "cpu", "shape": list(table), "dtype": _STORED_AS[dtype], "is_nested": True}
    return spec if row is None else {**spec, _ROW: list(row)}


def node_spec(class_name: str) -> dict[str, str]:
    """What meta.json says about a nested folder."""
    return {"type": class_name}


def node_meta(
    class_name: str, batch_size: tuple[int, ...], names: list[str | None] | None, entries: dict[str, Any]
) -> dict[str, Any]:
    """The content of meta.json, `entries` being the specs of the entries."""
    meta = {name: spec for name, spec in entries.items() if name not in _RESERVED}
    meta[_SHAPE] = list(batch_size)
    meta[_DEVICE] = "cpu"
    meta[_TYPE] = TYPES[class_name]
    if names is not None and any(name is not None for name in names):
        meta[_NAMES] = names
    odd = [[name, spec] for name, spec in entries.items() if name in _RESERVED]
    if odd:
        meta[_ENTRIES] = odd
    return meta


def face_meta(cls: Any, entries: Container[str]) -> dict[str, Any]:
    """The content of meta.json for a tensorclass: the class, and the fields that are `None`."""
    return {_TYPE: str(cls), **{name: None for name in cls.__expected_keys__ if name not in entries}}


def add_entry(folder: str, name: str, spec: dict[str, Any], key: Path) -> None:
    """Add one entry to the meta.json that is on disk."""
    meta = _read_json(folder, key)
    if name in _RESERVED:
        meta.setdefault(_ENTRIES, []).append([name, spec])
    else:
        meta[name] = spec
    write_meta(folder, meta)


def write_meta(folder: str, meta: dict[str, Any]) -> None:
    """Put meta.json in its folder in one step."""
    files.write_file(f"{folder}/{META}", json.dumps(meta, separators=(",", ":")).encode())


def read_node(folder: str, key: Path) -> Node:
    """What the meta.json in `folder` says; `key` is the nested key of the folder, for errors.

    Raises:
        FileNotFoundError: when there is no meta.json.
        SaveError: when it is not one of this format.
        UnsupportedEntryError: when it is of a kind that this version cannot load.
    """
    meta = _read_json(folder, key)
    bad = _Complaint(folder, key)
    class_name = _class_name(meta, bad)
    if class_name not in TYPES:
        # Other classes lay out their folder in their own way; the caller refuses them.
        return Node(class_name, (), None, None)
    batch_size = _shape(meta.get(_SHAPE), "the batch size", bad)
    names = meta.get(_NAMES)
    node = Node(class_name, batch_size, _device(meta.get(_DEVICE), bad), None)
    if isinstance(names, list):
        node.names = _dim_names(names, len(batch_size), bad)
    listed = meta.get(_ENTRIES)
    count = len(batch_size)
    for name, spec in meta.items():
        if name in _RESERVED and not (name in (_NAMES, _ENTRIES) and isinstance(spec, dict)):
            continue
        _read_entry(node, name, spec, batch_size, count, bad)
    if isinstance(listed, list):
        for pair in listed:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
                raise bad(f"{_ENTRIES!r} is not a list of names and descriptions")
            _read_entry(node, pair[0], pair[1], batch_size, count, bad)
    return node


class _Complaint:
    """Makes the errors about one meta.json."""

    def __init__(self, folder: str, key: Path) -> None:
        self.folder = folder
        self.key = key

    def __call__(self, what: str, name: str | None = None) -> SaveError:
        path = self.key if name is None else (*self.key, name)
        entry = f"entry {joined(path)!r}: " if path else ""
        return SaveError(f"{entry}{self.folder}/{META} is broken or of another format: {what}")


def _read_json(folder: str, key: Path) -> dict[str, Any]:
    path = f"{folder}/{META}"
    try:
        # Not blocking, so that a pipe of that name cannot hang the loader.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            content = file.read() if regular else b""
    except OSError as error:
        if error.errno == errno.ENOENT and not key:
            raise FileNotFoundError(error.errno, "no saved container here: there is no meta.json", path) from None
        raise files.named_os_error(error, "read the file", path, key) from error
    bad = _Complaint(folder, key)
    if not regular:
        raise bad("it is not a regular file")
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise bad(f"it is not JSON ({error})") from error
    if not isinstance(meta, dict):
        raise bad(f"it holds a {type(meta).__name__} and not an object")
    return meta


def _class_name(meta: dict[str, Any], bad: _Complaint) -> str:
    """The bare class name for a class of this package, the full one for any other."""
    written = meta.get(_TYPE)
    if isinstance(written, str):
        match = _TYPE_FORM.fullmatch(written)
        if match is None:
            raise bad(f"its class {written!r} has not the form \"<class '...'>\"")
        module, _, name = match[1].rpartition(".")
    elif isinstance(meta.get("_class"), str):
        module, _, name = meta["_class"].rpartition(":")
    else:
        raise bad(f"it names no class ({_TYPE!r})")
    return name if module.partition(".")[0] == "tensordict" else f"{module}.{name}"


def _read_entry(node: Node, name: str, spec: Any, batch_size: tuple[int, ...], count: int, bad: _Complaint) -> None:
    if not isinstance(spec, dict):
        if name.startswith("_"):
            return
        raise bad(f"its description is {spec!r}", name)
    dtype_name = spec.get("_dtype", spec.get("dtype"))
    if dtype_name is None:
        if isinstance(spec.get("type"), str):
            node.entries[name] = None
        elif not name.startswith("_"):
            raise bad(f"its description {spec!r} is of neither a tensor nor a nested container", name)
        return
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise bad(f"its dtype {dtype_name!r} is unknown", name)
    shape = _shape(spec.get("shape"), "the shape", bad, name)
    if spec.get("is_nested"):
        if len(shape) != 2 or shape[:count] != batch_size[:1]:
            raise bad(f"its table of sizes has shape {list(shape)}, in a batch of size {list(batch_size)}", name)
        node.entries[name] = Leaf(dtype, shape, True, _row(spec.get(_ROW), shape[1], bad, name))
        return
    if shape[:count] != batch_size:
        raise bad(f"its shape {list(shape)} does not begin with the batch size {list(batch_size)}", name)
    node.entries[name] = Leaf(dtype, shape)


def _shape(value: Any, what: str, bad: _Complaint, name: str | None = None) -> tuple[int, ...]:
    if type(value) is not list or len(value) > _MAX_DIMS:
        raise bad(f"{what} is {value!r:.80} and not a list of ints", name)
    for size in value:
        if type(size) is not int or not 0 <= size < 2**63:
            raise bad(f"{what} is {value!r:.80} and not a list of non-negative ints", name)
    return tuple(value)


def _row(value: Any, ndim: int, bad: _Complaint, name: str) -> tuple[int, ...] | None:
    """The shape of the rows of a ragged tensor of the jagged layout; `None` for the strided one."""
    if value is None:
        return None
    if type(value) is not list or len(value) != ndim or value.count(-1) != 1:
        raise bad(f"the shape of its rows is {value!r:.80}, and not {ndim} ints of which one is -1", name)
    _shape([0 if size == -1 else size for size in value], "the shape of its rows", bad, name)
    return tuple(value)


def _device(value: Any, bad: _Complaint) -> torch.device | None:
    """The device of the loaded container: files are mapped on the CPU, whatever device they came from."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise bad(f"its device is {value!r}")
    try:
        torch.device(value)
    except RuntimeError as error:
        raise bad(f"its device {value!r} is unknown") from error
    return torch.device("cpu")


def _dim_names(names: list[Any], count: int, bad: _Complaint) -> list[str | None]:
    if len(names) != count or not all(name is None or isinstance(name, str) for name in names):
        raise bad(f"its dim names {names!r:.80} do not fit {count} batch dims")
    return names
