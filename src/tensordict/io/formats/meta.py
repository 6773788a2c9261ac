"""`meta.json`, which describes the container in a folder of the directory format: writing, and checked reading."""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, find_duplicate, joined
from tensordict.io import checks
from tensordict.io.saving.source import FILE_SYSTEM, FileSystem, Source
from tensordict.io.specification import DICT, KINDS, LAZY, UNBATCHED, VALUE_KINDS, VALUE_STACK, Specification
from tensordict.io.values import NotJson, decode, encode, encode_plainly
from tensordict.memory import files
from tensordict.memory.names import META

# The dtypes that the reference can read.
_PLAIN = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
)
# The reference cannot load a folder with a leaf of these dtypes. So such a leaf is stored as bytes, with its dtype in
# "_dtype".
_AS_BYTES = (
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in range(1, 8)),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
)
_STORED_AS = {getattr(torch, name): f"torch.{name}" for name in _PLAIN}
DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in (*_PLAIN, *_AS_BYTES)}

# In the spec of a ragged leaf: the shape of every row.
_ROW = "_row"
# In the spec of a leaf: the checksum of its file, and the checksum of the table of its sizes, if it is ragged.
CHECKSUM, TABLE_CHECKSUM = "_checksum", "_table_checksum"
_SHAPE, _DEVICE, _TYPE, _NAMES, ENTRIES = "shape", "device", "_type", "_names", "_entries"
# For a lazy stack of columns: a list of its stack dim, its batch size (-1 for sizes that differ between the members)
# and its names. The reference skips this list, and reads the folder as a container of ragged tensors.
_STACK = "_stack"
# In the root node: a list that describes the save as a shard. The reference skips it.
LABEL = "_shard"
# The keys of meta.json that describe the node. An entry with such a name is listed in "_entries" instead, which the
# reference skips. (A save of the reference silently loses such an entry.)
_RESERVED = {_SHAPE, _DEVICE, _TYPE, _NAMES, ENTRIES, _STACK, LABEL, "_format_version", "_class"}

# The names of the kinds in folders of the reference. It does not know the last one, and skips such folders.
_TYPES = {
    DICT: "<class 'tensordict._td.TensorDict'>",
    LAZY: "<class 'tensordict._lazy.LazyStackedTensorDict'>",
    "NonTensorData": "<class 'tensordict.tensorclass.NonTensorData'>",
    "MetaData": "<class 'tensordict.tensorclass.MetaData'>",
    VALUE_STACK: "<class 'tensordict.tensorclass.NonTensorStack'>",
    UNBATCHED: "<class 'tensordict.UnbatchedTensor'>",
}
# Fields of a value that only this package writes. For a holder they are in "_metadata", because the reference refuses
# other keys.
_OWN_SIZE, _EXACT, _SHARED, _METADATA, _DATA = "_shape", "_exact", "_shared", "_metadata", "data"
# For a lazy stack: the number of members, so that leftover folders are not read as members, the stack dim, and the name
# of the stack dim, which older readers use.
_COUNT, _DIM, _DIM_NAME = "_count", "stack_dim", "stack_dim_name"
_SCALAR = torch.Size(())
_TYPE_FORM = re.compile(r"<class '([\w.<>]+)'>")
# The files beside meta.json for values that JSON cannot store: for a holder, a pickled dict with the value at "data";
# for a stack, the pickled nested list of its values.
HOLDER_PICKLE, STACK_PICKLE = "other.pickle", "pickle.pkl"


@dataclass(slots=True)
class LeafMeta:
    """The description of a tensor in meta.json."""

    dtype: torch.dtype
    # For a ragged tensor, the shape of the table of the sizes of its rows.
    shape: tuple[int, ...]
    ragged: bool = False
    # For the jagged layout, the shape of every row, with -1 for the ragged dim.
    row: tuple[int, ...] | None = None


@dataclass(slots=True)
class FolderSpecification(Specification):
    """The description of a container in a meta.json. The loader adds the entries.

    listed: the descriptions of the entries; `None` for a nested folder. For a value, the descriptions of the tensors in
        it, which `decode_value` takes. The members of a lazy stack are not listed.
    has_size: True if meta.json has the batch size. Otherwise a value has the batch size of the container around it, and
        the batch size of a lazy stack follows from its members.
    count: the number of members of a lazy stack, if meta.json has it.
    dim_name: the name of the stack dim.
    pickled: the name of the pickle file with the value of a holder or a stack of values; empty if there is none.
    shared: True if later changes of the value are seen by all who loaded it.
    """

    listed: dict[str, LeafMeta | None] = field(default_factory=dict)
    has_size: bool = False
    count: int | None = None
    dim_name: str | None = None
    pickled: str = ""
    shared: bool = False

    def decode_value(self, tensors: Sequence[Tensor] = ()) -> None:
        """Decode the value from its form and its tensors. Raises a `ValueError` for a broken form."""
        try:
            self.value = decode(self.form, tensors)
        except ValueError as error:
            raise ValueError(f"its value is broken: {error}") from error


def leaf_spec(dtype: torch.dtype, shape: tuple[int, ...], key: Path = ()) -> dict[str, Any]:
    """Return the description of a leaf for meta.json.

    Raises:
        UnsupportedEntryError: readers do not know the dtype.
    """
    stored = _STORED_AS.get(dtype)
    if stored is not None:
        return {"device": "cpu", "shape": list(shape), "dtype": stored, "is_nested": False}
    if str(dtype) not in DTYPES:
        raise UnsupportedEntryError(f"{entry_of(key)}tensors of {dtype} cannot be saved; known are {', '.join(DTYPES)}")
    stored = f"torch.uint{8 * dtype.itemsize}"
    return {"device": "cpu", "shape": list(shape), "dtype": stored, "is_nested": False, "_dtype": str(dtype)}


def ragged_spec(
    dtype: torch.dtype, table: tuple[int, ...], row: tuple[int, ...] | None, key: Path = ()
) -> dict[str, Any]:
    """Return the description of a ragged leaf for meta.json; `row` as in `LeafMeta`. The reference skips the row.

    Raises:
        UnsupportedEntryError: the reference cannot read the dtype.
    """
    if dtype not in _STORED_AS:
        known = ", ".join(_PLAIN)
        raise UnsupportedEntryError(f"{entry_of(key)}ragged tensors of {dtype} cannot be saved; known are {known}")
    spec = {"device": "cpu", "shape": list(table), "dtype": _STORED_AS[dtype], "is_nested": True}
    return spec if row is None else {**spec, _ROW: list(row)}


def node_spec(class_name: str, is_foreign: bool = False) -> dict[str, Any]:
    """Return the description of a nested folder for meta.json; `is_foreign` if the reference cannot read the folder."""
    return {"type": class_name, **({_EXACT: True} if is_foreign else {})}


def is_foreign(meta: dict[str, Any]) -> bool:
    """Return True for the meta.json of a value that the reference cannot read, because it is not plain JSON."""
    return _DATA not in meta and _EXACT in (meta.get(_METADATA) or meta)


def node_meta(form: Specification, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the meta.json of a container that is not a value. `entries` has the descriptions of its entries."""
    if form.kind not in _TYPES:
        return {_TYPE: f"<class '{form.kind}'>", **dict.fromkeys(form.missing)}
    if form.kind == LAZY and not form.columns:
        meta: dict[str, Any] = {_TYPE: _TYPES[LAZY], _DIM: form.stack_dim, _COUNT: len(entries)}
        if not entries:
            meta[_OWN_SIZE] = list(form.batch_size)
        _add_names(meta, form)
        if _NAMES in meta and (name := meta[_NAMES][form.stack_dim]) is not None:
            meta[_DIM_NAME] = name
        return meta
    meta, special = {}, []
    for name, spec in entries.items():
        # The reference uses this name otherwise, or does not know this kind, so the entry goes to "_entries".
        if name in _RESERVED or spec.get("type") == UNBATCHED or _EXACT in spec:
            special.append([name, spec])
        else:
            meta[name] = spec
    meta[_SHAPE] = [form.batch_size[form.stack_dim or 0]] if form.columns else list(form.batch_size)
    meta[_DEVICE] = "cpu"
    meta[_TYPE] = _TYPES[DICT if form.columns else form.kind]
    if special:
        meta[ENTRIES] = special
    if form.columns:
        return {**meta, _STACK: [form.stack_dim, list(form.batch_size), form.names]}
    return _add_names(meta, form)


def value_meta(
    form: Specification, outer: tuple[int, ...], shared: bool = False, pickled: str = ""
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the meta.json of a value, and the tensors in the value, which become files beside it.

    Args:
        form: the specification of a holder or a stack of values.
        outer: the batch size of the container around it, which a reader assumes if meta.json has no batch size.
        shared: show later changes of the value to all processes that have loaded it.
        pickled: the name of the pickle file with the value; empty to encode the value as JSON.

    Raises:
        NotJson: the value cannot be encoded.
        UnsupportedEntryError: readers do not know the dtype of a tensor in it.
    """
    meta: dict[str, Any] = {_TYPE: _TYPES[form.kind]}
    stack = form.kind == VALUE_STACK
    own: dict[str, Any] = {}
    tensors: list[Tensor] = []
    data: dict[str, Any] = {_DATA: pickled} if pickled and stack else {}
    if not pickled:
        precise, tensors = encode(form.value)
        with contextlib.suppress(NotJson):
            data[_DATA] = encode_plainly(form.value)
        if not data or precise != data[_DATA]:
            own[_EXACT] = precise
    if stack or form.names is not None or form.batch_size != outer:
        own[_OWN_SIZE] = list(form.batch_size)
    if shared:
        own[_SHARED] = True
    own = _add_names(own, form)
    if tensors:
        data[ENTRIES] = [[str(at), leaf_spec(part.dtype, tuple(part.shape))] for at, part in enumerate(tensors)]
    if stack:
        return {**meta, _DIM: form.stack_dim, _DEVICE: None, **data, **own}, tensors
    return {**meta, **data, "_is_non_tensor": True, _METADATA: own or None}, tensors


def _add_names(meta: dict[str, Any], form: Specification) -> dict[str, Any]:
    if form.names is not None and any(name is not None for name in form.names):
        meta[_NAMES] = list(form.names)
    return meta


def add_entry(folder: str, name: str, spec: dict[str, Any], key: Path) -> None:
    """Add one entry to the meta.json of a folder, which the caller has locked."""
    meta = _read_json(folder, key, FILE_SYSTEM)
    if name in _RESERVED:
        meta.setdefault(ENTRIES, []).append([name, spec])
    else:
        meta[name] = spec
    write_meta(folder, meta)


def check_no_entry(folder: str, name: str, key: Path) -> None:
    """Check that the meta.json of a folder has no entry of this name.

    Raises:
        SaveError: it has one, from another container over the same folder.
    """
    meta = _read_json(folder, key, FILE_SYSTEM)
    if name in dict(special_entries(meta)) or (name in meta and name not in _RESERVED):
        raise SaveError(
            f"entry {joined(key)!r} is in {folder!r} already, made by another process or container: call "
            "memmap_refresh_() to take it over"
        )


def read_old_meta(folder: str, key: Path = ()) -> dict[str, Any]:
    """Return the meta.json of a folder; an empty dict for a missing one."""
    return _read_json(folder, key, FILE_SYSTEM) if FILE_SYSTEM.exists(f"{folder}/{META}") else {}


def merge_old_meta(meta: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Merge the new meta.json of a container that gained entries with the old one, whose descriptions stay.

    For a tensorclass, a lazy stack or a changed layout, the old one has no descriptions to keep.
    """
    if _SHAPE not in meta or any(old.get(name) != meta.get(name) for name in (_TYPE, _STACK)):
        return meta
    special = dict(special_entries(meta)) | dict(special_entries(old))
    merged = meta | old
    return merged | {ENTRIES: [list(pair) for pair in special.items()]} if special else merged


def is_meta(content: object) -> bool:
    """Return True for the meta.json of a save, which names its class, and False for a file of another program."""
    if not isinstance(content, dict):
        return False
    written = content.get(_TYPE)
    return bool(_TYPE_FORM.fullmatch(written)) if isinstance(written, str) else isinstance(content.get("_class"), str)


def special_entries(meta: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and descriptions of the entries in the list "_entries", without broken items."""
    listed = meta.get(ENTRIES)
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2] if isinstance(listed, list) else []
    return [(name, spec) for name, spec in pairs if isinstance(name, str)]


def write_meta(folder: str, meta: dict[str, Any], modified: int | None = None) -> None:
    """Write or replace a meta.json in one step; `modified` is its time of modification in ns, `None` for now."""
    files.write_file(f"{folder}/{META}", encode_meta(meta), modified)


def encode_meta(meta: dict[str, Any]) -> bytes:
    """Return the bytes of a meta.json."""
    return json.dumps(meta, separators=(",", ":")).encode()


def read_node(folder: str, key: Path, source: Source = FILE_SYSTEM) -> FolderSpecification:
    """Read the description of the container in a folder; `key` is its nested key, for errors.

    Raises:
        FileNotFoundError: the folder has no meta.json.
        SaveError: the meta.json is broken or of another format.
    """
    meta = _read_json(folder, key, source)
    try:
        node, entries = _parse_node(meta)
    except ValueError as error:
        raise _meta_error(folder, key, error) from error
    outer = node.batch_size if node.kind == DICT else torch.Size((node.count or 0,)) if node.columns else _SCALAR
    for name, spec in entries:
        try:
            _parse_entry(node, name, spec, outer)
        except ValueError as error:
            raise _meta_error(folder, (*key, name), error) from error
    return node


def _parse_node(meta: dict[str, Any]) -> tuple[FolderSpecification, list[tuple[str, Any]]]:
    """Parse a meta.json. Returns the specification, and the names and descriptions of the entries."""
    kind = _parse_kind(meta)
    if kind in VALUE_KINDS:
        return _parse_value(kind, meta), [*special_entries(meta)]
    if kind == LAZY:
        return _parse_lazy_stack(meta), []
    if kind not in KINDS:
        return FolderSpecification(kind, _SCALAR), []
    batch_size = checks.sizes(meta.get(_SHAPE), "the batch size")
    node = FolderSpecification(kind, batch_size, checks.device(meta.get(_DEVICE)), has_size=True)
    if isinstance(meta.get(_STACK), list):
        _parse_columns(node, meta[_STACK])
    else:
        node.names = _parse_names(meta, len(batch_size))
    entries = [
        (name, spec)
        for name, spec in meta.items()
        if name not in _RESERVED or (name in (_NAMES, ENTRIES, _STACK) and isinstance(spec, dict))
    ]
    listed = meta.get(ENTRIES)
    if isinstance(listed, list):
        if len(special := special_entries(meta)) != len(listed):
            raise ValueError(f"{ENTRIES!r} is not a list of names and descriptions")
        entries += special
        if (twice := find_duplicate(name for name, _ in entries)) is not None:
            raise ValueError(f"the entry {twice!r:.200} is there twice, and {ENTRIES!r} lists one of the two")
    return node, entries


def _parse_names(meta: dict[str, Any], ndim: int | None) -> list[str | None] | None:
    names = meta.get(_NAMES)
    return checks.names(names, ndim) if isinstance(names, list) else None


def _parse_columns(node: FolderSpecification, stack: list[Any]) -> None:
    """Change the node to a lazy stack of columns."""
    if len(stack) != 3:
        raise ValueError(f"{_STACK!r} is {stack!r:.80} and not a stack dim, a batch size and names")
    size = checks.sizes(stack[1], "the batch size of the stack", -1)
    dim = checks.dim(stack[0], len(size))
    if (size[dim],) != node.batch_size:
        raise ValueError(f"its stack dim is {dim}, of the batch size {list(size)}, for {node.batch_size} members")
    node.kind, node.batch_size, node.stack_dim, node.columns, node.count = LAZY, size, dim, True, size[dim]
    node.names = checks.names(stack[2], len(size))


def _parse_lazy_stack(meta: dict[str, Any]) -> FolderSpecification:
    node = FolderSpecification(LAZY, _SCALAR, stack_dim=checks.dim(meta.get(_DIM)))
    if _COUNT in meta:
        (node.count,) = checks.sizes([meta[_COUNT]], "the number of members")
    if _OWN_SIZE in meta:
        node.batch_size, node.has_size = checks.sizes(meta[_OWN_SIZE], "the batch size"), True
    node.names = _parse_names(meta, None)
    if node.names is None and isinstance(meta.get(_DIM_NAME), str):
        node.dim_name = meta[_DIM_NAME]
    return node


def _parse_value(kind: str, meta: dict[str, Any]) -> FolderSpecification:
    stack = kind == VALUE_STACK
    own = meta if stack else meta.get(_METADATA)
    if not isinstance(own, dict):
        own = {}
    dim = checks.dim(meta.get(_DIM)) if stack else None
    node = FolderSpecification(kind, _SCALAR, stack_dim=dim, shared=own.get(_SHARED) is True)
    if _OWN_SIZE in own:
        node.batch_size, node.has_size = checks.sizes(own[_OWN_SIZE], "the batch size"), True
        node.names = _parse_names(own, len(node.batch_size))
    if stack and meta.get(_DATA) == STACK_PICKLE:
        node.pickled = STACK_PICKLE
    elif _EXACT in own:
        node.form = own[_EXACT]
        if not special_entries(meta):
            node.decode_value()
    elif _DATA in meta:
        node.value = meta[_DATA]
    elif stack:
        raise ValueError("it has no values")
    else:
        node.pickled = HOLDER_PICKLE
    if stack and not node.pickled and type(node.form or node.value) is not list:
        raise ValueError(f"its values are {node.form or node.value!r:.80} and not a list")
    return node


def _meta_error(folder: str, key: Path, what: object) -> SaveError:
    return SaveError(f"{entry_of(key)}{folder}/{META} is broken or of another format: {what}")


def _read_json(folder: str, key: Path, source: Source) -> dict[str, Any]:
    path = f"{folder}/{META}"
    try:
        content = source.read(path)
    except SaveError as error:
        raise SaveError(f"{entry_of(key)}{error}") from None
    except OSError as error:
        if error.errno == errno.ENOENT and not key:
            where = folder if isinstance(source, FileSystem) and not source.exists(folder) else path
            what = "no meta.json" if where is path else "nothing of this name"
            raise FileNotFoundError(error.errno, f"no saved container here: there is {what}", where) from None
        raise files.named_os_error(error, "read the file", path, key) from error
    try:
        meta = parse_json(content)
    except ValueError as error:
        raise _meta_error(folder, key, f"it is not JSON ({error})") from error
    if not isinstance(meta, dict):
        raise _meta_error(folder, key, f"it holds a {type(meta).__name__} and not an object")
    return meta


def _parse_kind(meta: dict[str, Any]) -> str:
    """Return the kind of a class of this package, or the full name of another class."""
    written = meta.get(_TYPE)
    if isinstance(written, str):
        match = _TYPE_FORM.fullmatch(written)
        if match is None:
            raise ValueError(f"its class {written!r} does not have the form \"<class '...'>\"")
        module, _, name = match[1].rpartition(".")
    elif isinstance(meta.get("_class"), str):
        module, _, name = meta["_class"].rpartition(":")
    else:
        raise ValueError(f"it names no class ({_TYPE!r})")
    return name if module.partition(".")[0] == "tensordict" and name in KINDS else f"{module}.{name}"


def _parse_entry(node: FolderSpecification, name: str, spec: object, batch_size: torch.Size) -> None:
    if not isinstance(spec, dict):
        if name.startswith("_"):
            return
        raise ValueError(f"its description is {spec!r}")
    dtype_name = spec.get("_dtype", spec.get("dtype"))
    if dtype_name is None:
        if isinstance(spec.get("type"), str):
            node.listed[name] = None
        elif not name.startswith("_"):
            raise ValueError(f"its description {spec!r} is neither that of a tensor nor that of a nested container")
        return
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ValueError(f"its dtype {dtype_name!r} is unknown")
    shape = checks.shape(spec.get("shape"))
    ragged, row = bool(spec.get("is_nested")), spec.get(_ROW)
    if ragged and (len(shape) != 2 or shape[: min(1, len(batch_size))] != batch_size[:1]):
        raise ValueError(f"its table of sizes has shape {list(shape)}, in a batch of size {list(batch_size)}")
    if not ragged and shape[: len(batch_size)] != batch_size:
        raise ValueError(f"its shape {list(shape)} does not begin with the batch size {list(batch_size)}")
    rows = checks.sizes(row, "the shape of its rows", -1) if ragged and row is not None else None
    if rows is not None and (len(rows) != shape[1] or rows.count(-1) != 1):
        raise ValueError(f"the shape of its rows is {row!r:.80}, and not {shape[1]} ints of which one is -1")
    node.listed[name] = LeafMeta(dtype, shape, ragged, rows)
