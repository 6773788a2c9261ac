"""`meta.json`: what a folder of the directory format says about its entries, written and read with suspicion."""

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
from tensordict.io.saving.source import FOLDERS, Folders, Source
from tensordict.io.specification import DICT, KINDS, LAZY, UNBATCHED, VALUE_STACK, VALUES, Specification
from tensordict.io.values import NotJson, decode, encode, encode_plainly
from tensordict.memory import files
from tensordict.memory.names import META

# The dtypes that the reference reads.
_PLAIN = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
)
# It fails on a whole folder for one leaf of these: such a leaf stands as bytes, its dtype beside it in "_dtype".
_AS_BYTES = (
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn_x2",
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in range(1, 8)),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
)
_STORED_AS = {getattr(torch, name): f"torch.{name}" for name in _PLAIN}
DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in (*_PLAIN, *_AS_BYTES)}

# Keys of meta.json that describe the node. An entry of one of these names is listed in "_entries" instead, which the
# reference passes over (and whose own saves silently lose such entries).
_ROW = "_row"
# In the spec of a leaf: the checksum of its file, and, of a ragged one, that of the table of its sizes.
CHECKSUM, TABLE_CHECKSUM = "_checksum", "_table_checksum"
_SHAPE, _DEVICE, _TYPE, _NAMES, ENTRIES = "shape", "device", "_type", "_names", "_entries"
# Of a lazy stack by columns, which the reference takes for a container of ragged tensors: its stack dim, its batch size
# (-1 for the dims in which the members differ) and its names, in a list, which it passes over.
_STACK = "_stack"
# What the outermost node says of the save as a whole: a list, which the reference passes over.
LABEL = "_shard"
_RESERVED = {_SHAPE, _DEVICE, _TYPE, _NAMES, ENTRIES, _STACK, LABEL, "_format_version", "_class"}

# What the reference calls the class of a node, by its kind; it has no folders of the last one, and passes over those.
_TYPES = {
    DICT: "<class 'tensordict._td.TensorDict'>",
    LAZY: "<class 'tensordict._lazy.LazyStackedTensorDict'>",
    "NonTensorData": "<class 'tensordict.tensorclass.NonTensorData'>",
    "MetaData": "<class 'tensordict.tensorclass.MetaData'>",
    VALUE_STACK: "<class 'tensordict.tensorclass.NonTensorStack'>",
    UNBATCHED: "<class 'tensordict.UnbatchedTensor'>",
}
# What only we keep of a value. Of a holder this stands in its "_metadata": the reference refuses other keys there.
_OWN_SIZE, _EXACT, _SHARED, _METADATA, _DATA = "_shape", "_exact", "_shared", "_metadata", "data"
# Of a lazy stack: how many members it has, so that leftovers are none of them, and the name that older writers keep.
_COUNT, _DIM, _DIM_NAME = "_count", "stack_dim", "stack_dim_name"
_SCALAR = torch.Size(())
_TYPE_FORM = re.compile(r"<class '([\w.<>]+)'>")
# The file beside meta.json when JSON cannot hold a value: of a holder, a pickled dict with the value at "data"; of a
# stack, the pickled nested list of the values.
HOLDER_PICKLE, STACK_PICKLE = "other.pickle", "pickle.pkl"


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
class FolderSpecification(Specification):
    """A container as the meta.json in its folder describes it: the loader has yet to find its entries.

    listed: what is said of the entries; `None` for a nested folder. The members of a lazy stack, folders too, are not
        among them. Of a value, what is said of the tensors in it, which `fill` takes.
    sized: whether the batch size is written down. Else it is that of the container around (values), or follows from
        the members (lazy stacks).
    count: how many members a lazy stack has, where that is written down; `dim_name` is the name of its dim.
    pickled: the file beside meta.json that the value of a holder or a stack of them is in.
    shared: whether the value is followed by all who load it.
    """

    listed: dict[str, Leaf | None] = field(default_factory=dict)
    sized: bool = False
    count: int | None = None
    dim_name: str | None = None
    pickled: str = ""
    shared: bool = False

    def fill(self, tensors: Sequence[Tensor] = ()) -> None:
        """Make the value of its form and the tensors in it; a `ValueError` when they make none."""
        try:
            self.value = decode(self.form, tensors)
        except ValueError as error:
            raise ValueError(f"its value is broken: {error}") from error


def leaf_spec(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    """What meta.json says about a leaf.

    Raises:
        UnsupportedEntryError: when no reader knows the dtype.
    """
    if str(dtype) not in DTYPES:
        raise UnsupportedEntryError(f"tensors of {dtype} cannot be saved; known are {', '.join(DTYPES)}")
    stored = _STORED_AS.get(dtype, f"torch.uint{8 * dtype.itemsize}")
    spec = {"device": "cpu", "shape": list(shape), "dtype": stored, "is_nested": False}
    return spec if dtype in _STORED_AS else {**spec, "_dtype": str(dtype)}


def ragged_spec(dtype: torch.dtype, table: tuple[int, ...], row: tuple[int, ...] | None) -> dict[str, Any]:
    """What meta.json says about a ragged leaf; `row` as in `Leaf`, which the reference passes over.

    Raises:
        UnsupportedEntryError: when the reference could not read the dtype.
    """
    if dtype not in _STORED_AS:
        raise UnsupportedEntryError(f"ragged tensors of {dtype} cannot be saved; known are {', '.join(_PLAIN)}")
    spec = {"device": "cpu", "shape": list(table), "dtype": _STORED_AS[dtype], "is_nested": True}
    return spec if row is None else {**spec, _ROW: list(row)}


def node_spec(class_name: str, is_foreign: bool = False) -> dict[str, Any]:
    """What meta.json says about a nested folder; `is_foreign` if the reference cannot read that."""
    return {"type": class_name, **({_EXACT: True} if is_foreign else {})}


def is_foreign(meta: dict[str, Any]) -> bool:
    """Whether this meta.json is of a value that the reference cannot read: JSON alone does not hold it."""
    return _DATA not in meta and _EXACT in (meta.get(_METADATA) or meta)


def node_meta(form: Specification, entries: dict[str, Any]) -> dict[str, Any]:
    """The content of meta.json of a container that is no value, `entries` being the specs of the entries."""
    if form.is_tensorclass:
        return {_TYPE: f"<class '{form.kind}'>", **dict.fromkeys(form.missing)}
    if form.kind == LAZY and not form.columns:
        meta: dict[str, Any] = {_TYPE: _TYPES[LAZY], _DIM: form.stack_dim, _COUNT: len(entries)}
        if not entries:
            meta[_OWN_SIZE] = list(form.batch_size)
        _with_names(meta, form)
        if _NAMES in meta and (name := meta[_NAMES][form.stack_dim]) is not None:
            meta[_DIM_NAME] = name
        return meta
    meta, odd = {}, []
    for name, spec in entries.items():
        # The reference has another meaning for the name, or does not know the kind: the entry is listed apart.
        if name in _RESERVED or spec.get("type") == UNBATCHED or _EXACT in spec:
            odd.append([name, spec])
        else:
            meta[name] = spec
    meta[_SHAPE] = [form.batch_size[form.stack_dim or 0]] if form.columns else list(form.batch_size)
    meta[_DEVICE] = "cpu"
    meta[_TYPE] = _TYPES[DICT if form.columns else form.kind]
    if odd:
        meta[ENTRIES] = odd
    if form.columns:
        return {**meta, _STACK: [form.stack_dim, list(form.batch_size), form.names]}
    return _with_names(meta, form)


def value_meta(
    form: Specification, outer: tuple[int, ...], shared: bool = False, pickled: str = ""
) -> tuple[dict[str, Any], list[Tensor]]:
    """The content of meta.json of a value, and the tensors in the value, which are files beside it.

    Args:
        form: of a holder, or of a stack of them.
        outer: the batch size that a reader takes for that of a holder unless it is written down.
        shared: whether those who load it follow it.
        pickled: the file beside meta.json that holds the value, when JSON does not.

    Raises:
        NotJson: the value has no form.
        UnsupportedEntryError: a tensor in it has a dtype that no reader knows.
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
    own = _with_names(own, form)
    if tensors:
        data[ENTRIES] = [[str(at), leaf_spec(part.dtype, tuple(part.shape))] for at, part in enumerate(tensors)]
    if stack:
        return {**meta, _DIM: form.stack_dim, _DEVICE: None, **data, **own}, tensors
    return {**meta, **data, "_is_non_tensor": True, _METADATA: own or None}, tensors


def _with_names(meta: dict[str, Any], form: Specification) -> dict[str, Any]:
    if form.names is not None and any(name is not None for name in form.names):
        meta[_NAMES] = list(form.names)
    return meta


def add_entry(folder: str, name: str, spec: dict[str, Any], key: Path) -> None:
    """Add one entry to the meta.json that is on disk, whose folder is locked."""
    meta = _read_json(folder, key, FOLDERS)
    if name in _RESERVED:
        meta.setdefault(ENTRIES, []).append([name, spec])
    else:
        meta[name] = spec
    write_meta(folder, meta)


def refuse_entry(folder: str, name: str, key: Path) -> None:
    """Raise when the meta.json that is on disk has an entry of this name.

    Raises:
        SaveError: it has: another container over the same folder made it.
    """
    meta = _read_json(folder, key, FOLDERS)
    if name in dict(listed_apart(meta)) or (name in meta and name not in _RESERVED):
        raise SaveError(
            f"entry {joined(key)!r} is in {folder!r} already, where another process or container has made it: "
            "memmap_refresh_() takes it over"
        )


def read_there(folder: str, key: Path = ()) -> dict[str, Any]:
    """Read the meta.json in a folder; an empty dict when there is none."""
    return _read_json(folder, key, FOLDERS) if FOLDERS.exists(f"{folder}/{META}") else {}


def keep_described(meta: dict[str, Any], there: dict[str, Any]) -> dict[str, Any]:
    """Put what the meta.json of a container said before it gained entries in the place of a description of all of it.

    A meta.json of a tensorclass, of a lazy stack, or of another layout describes no entries that could be kept.
    """
    if _SHAPE not in meta or any(there.get(name) != meta.get(name) for name in (_TYPE, _STACK)):
        return meta
    apart = dict(listed_apart(meta)) | dict(listed_apart(there))
    kept = meta | there
    return kept | {ENTRIES: [list(pair) for pair in apart.items()]} if apart else kept


def is_meta(content: object) -> bool:
    """Whether this is the content of the meta.json of a save, rather than of another program: it names its class."""
    if not isinstance(content, dict):
        return False
    written = content.get(_TYPE)
    return bool(_TYPE_FORM.fullmatch(written)) if isinstance(written, str) else isinstance(content.get("_class"), str)


def listed_apart(meta: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names and descriptions of the entries that stand in a list of their own, as far as that is whole."""
    listed = meta.get(ENTRIES)
    pairs = [pair for pair in listed if isinstance(pair, list) and len(pair) == 2] if isinstance(listed, list) else []
    return [(name, spec) for name, spec in pairs if isinstance(name, str)]


def write_meta(folder: str, meta: dict[str, Any], modified: int | None = None) -> None:
    """Put meta.json in its folder in one step; `modified` is its time of modification in ns, now when `None`."""
    files.write_file(f"{folder}/{META}", as_json(meta), modified)


def as_json(meta: dict[str, Any]) -> bytes:
    """The content of a meta.json as bytes."""
    return json.dumps(meta, separators=(",", ":")).encode()


def read_node(folder: str, key: Path, source: Source = FOLDERS) -> FolderSpecification:
    """What the meta.json in `folder` says; `key` is the nested key of the folder, for errors.

    Raises:
        FileNotFoundError: when there is no meta.json.
        SaveError: when it is not one of this format.
    """
    meta = _read_json(folder, key, source)
    try:
        node, entries = _node(meta)
    except ValueError as error:
        raise _broken(folder, key, error) from error
    outer = (
        _SCALAR
        if node.kind == UNBATCHED or node.is_value
        else torch.Size((node.count or 0,))
        if node.columns
        else node.batch_size
    )
    for name, spec in entries:
        try:
            _read_entry(node, name, spec, outer)
        except ValueError as error:
            raise _broken(folder, (*key, name), error) from error
    return node


def _node(meta: dict[str, Any]) -> tuple[FolderSpecification, list[tuple[str, Any]]]:
    """What a meta.json says about its container, and the names and descriptions of the entries."""
    kind = _kind(meta)
    if kind in VALUES or kind == VALUE_STACK:
        return _value_node(kind, meta), [*listed_apart(meta)]
    if kind == LAZY:
        return _lazy_node(meta), []
    if kind not in KINDS:
        return FolderSpecification(kind, _SCALAR), []
    batch_size = checks.sizes(meta.get(_SHAPE), "the batch size")
    node = FolderSpecification(kind, batch_size, checks.device(meta.get(_DEVICE)), sized=True)
    if isinstance(meta.get(_STACK), list):
        _read_columns(node, meta[_STACK])
    else:
        node.names = _names_in(meta, len(batch_size))
    entries = [
        (name, spec)
        for name, spec in meta.items()
        if name not in _RESERVED or (name in (_NAMES, ENTRIES, _STACK) and isinstance(spec, dict))
    ]
    listed = meta.get(ENTRIES)
    if isinstance(listed, list):
        if len(apart := listed_apart(meta)) != len(listed):
            raise ValueError(f"{ENTRIES!r} is not a list of names and descriptions")
        entries += apart
        if (twice := find_duplicate(name for name, _ in entries)) is not None:
            raise ValueError(f"the entry {twice!r:.200} is there twice, and {ENTRIES!r} lists one of the two")
    return node, entries


def _names_in(meta: dict[str, Any], ndim: int | None) -> list[str | None] | None:
    names = meta.get(_NAMES)
    return checks.names(names, ndim) if isinstance(names, list) else None


def _read_columns(node: FolderSpecification, stack: list[Any]) -> None:
    """Make the node that of a lazy stack by columns."""
    if len(stack) != 3:
        raise ValueError(f"{_STACK!r} is {stack!r:.80} and not a stack dim, a batch size and names")
    size = checks.sizes(stack[1], "the batch size of the stack", -1)
    dim = checks.dim(stack[0], len(size))
    if (size[dim],) != node.batch_size:
        raise ValueError(f"its stack dim is {dim}, of the batch size {list(size)}, for {node.batch_size} members")
    node.kind, node.batch_size, node.stack_dim, node.columns, node.count = LAZY, size, dim, True, size[dim]
    node.names = checks.names(stack[2], len(size))


def _lazy_node(meta: dict[str, Any]) -> FolderSpecification:
    node = FolderSpecification(LAZY, _SCALAR, stack_dim=checks.dim(meta.get(_DIM)))
    if _COUNT in meta:
        (node.count,) = checks.sizes([meta[_COUNT]], "the number of members")
    if _OWN_SIZE in meta:
        node.batch_size, node.sized = checks.sizes(meta[_OWN_SIZE], "the batch size"), True
    node.names = _names_in(meta, None)
    if node.names is None and isinstance(meta.get(_DIM_NAME), str):
        node.dim_name = meta[_DIM_NAME]
    return node


def _value_node(kind: str, meta: dict[str, Any]) -> FolderSpecification:
    stack = kind == VALUE_STACK
    own = meta if stack else meta.get(_METADATA)
    if not isinstance(own, dict):
        own = {}
    dim = checks.dim(meta.get(_DIM)) if stack else None
    node = FolderSpecification(kind, _SCALAR, stack_dim=dim, shared=own.get(_SHARED) is True)
    if _OWN_SIZE in own:
        node.batch_size, node.sized = checks.sizes(own[_OWN_SIZE], "the batch size"), True
        node.names = _names_in(own, len(node.batch_size))
    if stack and meta.get(_DATA) == STACK_PICKLE:
        node.pickled = STACK_PICKLE
    elif _EXACT in own:
        node.form = own[_EXACT]
        if not listed_apart(meta):
            node.fill()
    elif _DATA in meta:
        node.value = meta[_DATA]
    elif stack:
        raise ValueError("it has no values")
    else:
        node.pickled = HOLDER_PICKLE
    if stack and not node.pickled and type(node.form or node.value) is not list:
        raise ValueError(f"its values are {node.form or node.value!r:.80} and not a list")
    return node


def _broken(folder: str, key: Path, what: object) -> SaveError:
    return SaveError(f"{entry_of(key)}{folder}/{META} is broken or of another format: {what}")


def _read_json(folder: str, key: Path, source: Source) -> dict[str, Any]:
    path = f"{folder}/{META}"
    try:
        content = source.read(path)
    except SaveError as error:
        raise SaveError(f"{entry_of(key)}{error}") from None
    except OSError as error:
        if error.errno == errno.ENOENT and not key:
            where = folder if isinstance(source, Folders) and not source.exists(folder) else path
            what = "no meta.json" if where is path else "nothing of this name"
            raise FileNotFoundError(error.errno, f"no saved container here: there is {what}", where) from None
        raise files.named_os_error(error, "read the file", path, key) from error
    try:
        meta = parse_json(content)
    except ValueError as error:
        raise _broken(folder, key, f"it is not JSON ({error})") from error
    if not isinstance(meta, dict):
        raise _broken(folder, key, f"it holds a {type(meta).__name__} and not an object")
    return meta


def _kind(meta: dict[str, Any]) -> str:
    """The kind of a class of this package, the full name of any other."""
    written = meta.get(_TYPE)
    if isinstance(written, str):
        match = _TYPE_FORM.fullmatch(written)
        if match is None:
            raise ValueError(f"its class {written!r} has not the form \"<class '...'>\"")
        module, _, name = match[1].rpartition(".")
    elif isinstance(meta.get("_class"), str):
        module, _, name = meta["_class"].rpartition(":")
    else:
        raise ValueError(f"it names no class ({_TYPE!r})")
    return name if module.partition(".")[0] == "tensordict" and name in KINDS else f"{module}.{name}"


def _read_entry(node: FolderSpecification, name: str, spec: object, batch_size: torch.Size) -> None:
    if not isinstance(spec, dict):
        if name.startswith("_"):
            return
        raise ValueError(f"its description is {spec!r}")
    dtype_name = spec.get("_dtype", spec.get("dtype"))
    if dtype_name is None:
        if isinstance(spec.get("type"), str):
            node.listed[name] = None
        elif not name.startswith("_"):
            raise ValueError(f"its description {spec!r} is of neither a tensor nor a nested container")
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
    node.listed[name] = Leaf(dtype, shape, ragged, rows)
