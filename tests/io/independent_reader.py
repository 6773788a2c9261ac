"""Reads every format as docs/design/formats.md specifies it, by json, struct, zipfile, NumPy and (for HDF5) h5py alone.

Nothing here knows the package or torch. `test_formats_page.py` compares what this reads with what the package reads.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

DICT, LAZY, UNBATCHED = "TensorDict", "LazyStackedTensorDict", "UnbatchedTensor"
HOLDERS, VALUE_STACK = ("NonTensorData", "MetaData"), "NonTensorStack"
KINDS = (DICT, LAZY, UNBATCHED, *HOLDERS, VALUE_STACK)


@dataclass
class Leaf:
    """A tensor: the name of its dtype in torch, and its elements as little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def row(self, at: int) -> Leaf:
        """One row along the first dim."""
        size = len(self.content) // max(self.shape[0], 1)
        return Leaf(self.dtype, self.shape[1:], self.content[at * size : (at + 1) * size])


@dataclass
class Rows:
    """A ragged tensor."""

    rows: list[Leaf]

    def row(self, at: int) -> Leaf:
        """One row."""
        return self.rows[at]


@dataclass
class Value:
    """Read a value; a stack of values gives nested lists."""

    kind: str
    size: tuple[int, ...]
    value: Any

    def row(self, at: int) -> Value:
        """The value of one row along the first batch dim."""
        if self.kind in HOLDERS:
            return replace(self, size=self.size[1:])
        one = self.value[at]
        return Value(VALUE_STACK if len(self.size) > 1 else HOLDERS[0], self.size[1:], one)


@dataclass
class Node:
    """A container; the entries of a lazy stack are its members."""

    kind: str
    size: tuple[int, ...]
    names: list[str | None] | None = None
    entries: dict[str, Any] = field(default_factory=dict)
    stack_dim: int | None = None

    def row(self, at: int) -> Node:
        """One row along the first batch dim; the member of a lazy stack."""
        if self.stack_dim is not None:
            assert self.stack_dim == 0
            found: Node = self.entries[str(at)]
            return found
        names = None if self.names is None else self.names[1:]
        return Node(self.kind, self.size[1:], names, {name: entry.row(at) for name, entry in self.entries.items()})


Entry = Leaf | Rows | Value | Node


# --- what the formats have in common ----------------------------------------------------------------------------------


@dataclass
class Array:
    """A NumPy array in a value."""

    leaf: Leaf


def restored(form: Any, tensors: Sequence[Leaf] = ()) -> Any:
    """A value of its exact form in JSON, and the tensors in it."""

    def one(form: Any) -> Any:
        if isinstance(form, list):
            return [one(item) for item in form]
        if not isinstance(form, dict):
            return form
        if "%tuple" in form:
            return tuple(one(item) for item in form["%tuple"])
        if "%float" in form:
            return float(form["%float"])
        if "%items" in form:
            return {one(key): one(item) for key, item in form["%items"]}
        if "%ordered" in form:
            made = OrderedDict((one(key), one(item)) for key, item in form["%ordered"])
            vars(made).update({"_metadata": one(form["_metadata"])} if "_metadata" in form else {})
            return made
        if "%counter" in form:
            return Counter({one(key): one(item) for key, item in form["%counter"]})
        if "%int" in form:
            return int(form["%int"], 16)
        if "%type" in form:
            return {"dict": dict, "list": list, "tuple": tuple, "OrderedDict": OrderedDict}[form["%type"]]
        if "%scalar" in form:
            return np.frombuffer(bytes.fromhex(form["%scalar"][1]), np.dtype(form["%scalar"][0]).newbyteorder("<"))[0]
        if "%size" in form:
            return tuple(form["%size"])
        if "%dtype" in form or "%device" in form:
            return form.get("%dtype", form.get("%device"))
        if "%tensor" in form:
            return tensors[form["%tensor"]]
        if "%array" in form:
            return Array(tensors[form["%array"]])
        return {key: one(item) for key, item in form.get("%dict", form).items()}

    return one(form)


def numbered(entries: Mapping[str, Any]) -> list[Leaf]:
    """The tensors in a value, which are called by their numbers."""
    return [entries[str(at)] for at in range(len(entries))]


def ragged(dtype: str, elements: bytes, table: bytes, shape: tuple[int, ...], itemsize: int) -> Rows:
    """Return the rows whose sizes are in `table`, int64 of this shape."""
    rows, start = [], 0
    for sizes in np.frombuffer(table, "<i8").reshape(shape).tolist():
        stop = start + math.prod(sizes) * itemsize
        rows.append(Leaf(dtype, tuple(sizes), elements[start:stop]))
        start = stop
    assert start == len(elements)
    return Rows(rows)


def itemsize_of(dtype: str) -> int:
    """The bytes of an element."""
    if dtype == "torch.bool" or dtype.startswith(("torch.float8", "torch.float4")):
        return 1
    bits = re.search(r"(\d+)$", dtype)
    assert bits is not None, dtype
    return max(int(bits[1]) // 8, 1)


def members(stack: Node) -> Node:
    """A lazy stack that is stored by columns, member by member."""
    dim = stack.stack_dim or 0
    own = (*stack.size[:dim], *stack.size[dim + 1 :])
    names = None if stack.names is None else [*stack.names[:dim], *stack.names[dim + 1 :]]
    found: dict[str, Any] = {}
    for at in range(stack.size[dim]):
        entries: dict[str, Any] = {}
        size = own
        for name, column in stack.entries.items():
            if isinstance(column, Value):
                entries[name] = Value(column.kind, own, column.value[at])
                continue
            entries[name] = column.row(at) if isinstance(column, (Leaf, Rows)) else column.entries[str(at)]
            if isinstance(column, Node) and column.kind != LAZY:
                # A tensorclass over a stack: its members are of the class.
                entries[name] = replace(entries[name], kind=column.kind)
            lead = entries[name].size if isinstance(entries[name], Node) else entries[name].shape
            size = lead[: len(own)]
        for name, entry in entries.items():
            if isinstance(entry, Value):
                entries[name] = replace(entry, size=size)
        found[str(at)] = Node(DICT, size, names, entries)
    return replace(stack, entries=found)


# --- folders and archives ---------------------------------------------------------------------------------------------

# Names in meta.json that do not name entries. Three of them do if their value is an object.
OWN = {"shape", "device", "_type", "_class", "_format_version", "_names", "_entries", "_stack"}
SPECIAL = re.compile(r'[\x00-\x20"%*/:<>?\\|\x7f]')


@dataclass
class Folder:
    """The files of a save in a folder."""

    root: Path

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return (self.root / path).read_bytes()

    def has(self, path: str) -> bool:
        """Return whether the file exists."""
        return (self.root / path).is_file()


class Archive(Folder):
    """The files of a save in a zip file."""

    def __init__(self, root: Path) -> None:
        with zipfile.ZipFile(root) as archive:
            assert archive.testzip() is None
            self.files = {name: archive.read(name) for name in archive.namelist()}

    def read(self, path: str) -> bytes:
        return self.files[path]

    def has(self, path: str) -> bool:
        return path in self.files


def encoded(name: str) -> str:
    """The name of the file or folder of an entry."""
    whole = {"": "%", ".": "%2E", "..": "%2E%2E"}
    return whole[name] if name in whole else SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", name)


def read_folder(source: Folder, at: str = "", outer: tuple[int, ...] = ()) -> Node | Value:
    """The container in a folder of a save, in a container of the batch size `outer`."""
    meta = json.loads(source.read(f"{at}meta.json"))
    kind = kind_of(meta)
    if kind in HOLDERS or kind == VALUE_STACK:
        return value_in(meta, kind, outer, numbered(entries_in(source, at, meta.get("_entries", []), ())))
    if kind == LAZY:
        return stack_in(source, at, meta)
    if kind not in (DICT, UNBATCHED):
        inner = read_folder(source, f"{at}_tensordict/", outer)
        return replace(inner, kind=kind)
    size = tuple(meta["shape"])
    specs = [
        (name, spec)
        for name, spec in meta.items()
        if name not in OWN or (name in ("_names", "_entries", "_stack") and isinstance(spec, dict))
    ]
    specs += [(name, spec) for name, spec in meta.get("_entries") or [] if isinstance(meta["_entries"], list)]
    columns = meta.get("_stack") if isinstance(meta.get("_stack"), list) else None
    entries = entries_in(source, at, [pair for pair in specs if isinstance(pair[1], dict)], size)
    if columns is not None:
        dim, whole, names = columns
        return members(Node(LAZY, tuple(whole), names, entries, dim))
    return Node(kind, size, meta["_names"] if isinstance(meta.get("_names"), list) else None, entries)


def kind_of(meta: Mapping[str, Any]) -> str:
    """The kind of a container, or the name of a tensorclass."""
    if "_type" in meta:
        match = re.fullmatch(r"<class '([\w.<>]+)'>", meta["_type"])
        assert match is not None
        module, _, name = match[1].rpartition(".")
    else:
        module, _, name = meta["_class"].rpartition(":")
    return name if module.split(".")[0] == "tensordict" and name in KINDS else f"{module}.{name}"


def entries_in(source: Folder, at: str, specs: list[tuple[str, Any]], size: tuple[int, ...]) -> dict[str, Any]:
    """The entries that are described by `specs`."""
    files = {f"{encoded(name)}.memmap" for name, spec in specs if "dtype" in spec}
    files |= {f"{encoded(name)}.shape.memmap" for name, spec in specs if spec.get("is_nested")}
    entries: dict[str, Any] = {}
    for name, spec in specs:
        if "dtype" not in spec:
            if "type" in spec:
                entries[name] = read_folder(source, f"{at}{folder_of(source, at, name, files)}/", size)
            continue
        dtype, shape = spec.get("_dtype", spec["dtype"]), tuple(spec["shape"])
        path = f"{at}{encoded(name)}"
        if not source.has(f"{path}.memmap") and source.has(f"{at}{name}.memmap"):
            path = f"{at}{name}"
        content = source.read(f"{path}.memmap") if source.has(f"{path}.memmap") or math.prod(shape) else b""
        check_sum(content, spec.get("_checksum"))
        if spec.get("is_nested"):
            table = source.read(f"{path}.shape.memmap")
            check_sum(table, spec.get("_table_checksum"))
            entries[name] = ragged(dtype, content, table, shape, itemsize_of(dtype))
        else:
            assert len(content) == math.prod(shape) * itemsize_of(dtype), path
            entries[name] = Leaf(dtype, shape, content)
    return entries


def folder_of(source: Folder, at: str, name: str, files: set[str]) -> str:
    """The folder of a nested container beside leaves with these files."""
    inner = encoded(name)
    if inner == "meta.json" or inner in files:
        head, _, tail = inner.rpartition(".")
        inner = f"{head}%2E{tail}"
    return inner if source.has(f"{at}{inner}/meta.json") else name


def check_sum(content: bytes, recorded: str | None) -> None:
    """Compare the checksum that is written down."""
    if recorded is not None and recorded.startswith("crc32:"):
        assert f"{zlib.crc32(content):08x}" == recorded.removeprefix("crc32:")


def value_in(meta: Mapping[str, Any], kind: str, outer: tuple[int, ...], tensors: list[Leaf]) -> Value:
    """Read a value."""
    own = (meta if kind == VALUE_STACK else meta.get("_metadata")) or {}
    value = restored(own["_exact"], tensors) if "_exact" in own else meta["data"]
    if "_shape" in own:
        size = tuple(own["_shape"])
    elif kind == VALUE_STACK:
        size, level = (), value
        while isinstance(level, list):
            size, level = (*size, len(level)), level[0] if level else None
    else:
        size = outer
    return Value(kind, size, value)


def stack_in(source: Folder, at: str, meta: Mapping[str, Any]) -> Node:
    """A lazy stack that is stored member by member."""
    found: dict[str, Any] = {}
    while len(found) < meta["_count"] if "_count" in meta else source.has(f"{at}{len(found)}/meta.json"):
        found[str(len(found))] = read_folder(source, f"{at}{len(found)}/")
    dim, names = meta["stack_dim"], meta.get("_names")
    size = tuple(meta["_shape"]) if "_shape" in meta else stacked([one.size for one in found.values()], dim)
    if names is None and meta.get("stack_dim_name") is not None:
        names = [None] * len(size)
        names[dim] = meta["stack_dim_name"]
    return Node(LAZY, size, names, found, dim)


def stacked(sizes: list[tuple[int, ...]], dim: int) -> tuple[int, ...]:
    """The batch size of a lazy stack of members of these batch sizes: -1 where they differ."""
    common = [column[0] if len(set(column)) == 1 else -1 for column in zip(*sizes, strict=True)]
    return (*common[:dim], len(sizes), *common[dim:])


# --- consolidated files and safetensors -------------------------------------------------------------------------------

# Gives the dtype, the shape and the bytes of a tensor by its name.
Take = Callable[[str], Leaf]


def described(spec: Mapping[str, Any], take: Take, separator: str, key: tuple[str, ...] = ()) -> Node | Value:
    """The container that a structure describes."""
    size = tuple(spec["batch_size"])
    if "value" in spec:
        parts = {name: take(separator.join((*key, name))) for name in spec.get("entries", ())}
        return Value(spec["kind"], size, restored(spec["value"], numbered(parts)))
    entries: dict[str, Any] = {}
    for name, item in spec["entries"].items():
        path = key if spec["kind"] == UNBATCHED else (*key, name)
        full = separator.join(path)
        if "kind" in item:
            entries[name] = described(item, take, separator, path)
        elif "ragged" in item:
            flat, table = take(full), take(f"{full}%sizes")
            entries[name] = ragged(flat.dtype, flat.content, table.content, table.shape, itemsize_of(flat.dtype))
        else:
            entries[name] = take(full)
    node = Node(spec["kind"], size, spec.get("names"), entries, spec.get("stack_dim"))
    node = members(node) if spec.get("columns") else node
    return replace(node, kind=spec["class"]) if "class" in spec else node


def read_consolidated(path: Path) -> Node | Value:
    """The container in a consolidated file."""
    content = path.read_bytes()

    def json_before(end: int) -> tuple[Any, int]:
        (length,) = struct.unpack("<q", content[end - 8 : end])
        return json.loads(content[end - 8 - length : end - 8]), end - 8 - length

    foreign, end = json_before(len(content))
    if content[end - 8 : end] != b"tensdict":
        return of_reference(foreign, content)
    own, _ = json_before(end - 8)
    separator = own["separator"]
    spans = {separator.join(key): span for key, span in spans_of(foreign)} | own["tensors"]

    def take(name: str) -> Leaf:
        dtype, shape, start, stop = spans[name]
        part = content[start:stop]
        check_sum(part, own.get("checksums", {}).get(name))
        return Leaf(dtype, tuple(shape), part)

    return described(own["structure"], take, separator)


def spans_of(node: Mapping[str, Any], key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Find the tensors by the JSON that the reference reads."""
    for name, (dtype, shape, start, stop, padding, *_) in node["leaves"].items():
        yield (*key, name), [dtype, shape, start, stop - padding]
    for name, child in node.items():
        if name not in ("cls", "non_tensors", "leaves", "cls_metadata"):
            yield from spans_of(child, (*key, name))


def of_reference(node: Mapping[str, Any], content: bytes) -> Node:
    """The container of a file that has no description but the reference's."""
    spans = {key[0]: span for key, span in spans_of(node) if len(key) == 1}
    entries: dict[str, Any] = {name: Value(HOLDERS[0], tuple(s), v) for name, (v, s, _) in node["non_tensors"].items()}
    for name, (dtype, shape, start, stop) in spans.items():
        if name.startswith("<NJT_VALUES>"):
            entries[name.removeprefix("<NJT_VALUES>")] = jagged(spans, name.removeprefix("<NJT_VALUES>"), content)
        elif not name.startswith("<NJT_"):
            entries[name] = Leaf(dtype, tuple(shape), content[start:stop])
    for name, child in node.items():
        if name not in ("cls", "non_tensors", "leaves", "cls_metadata"):
            entries[name] = of_reference(child, content)
    noted = node["cls_metadata"]
    if node["cls"] == DICT:
        names = noted["names"] if noted["names"] and any(noted["names"]) else None
        return Node(DICT, tuple(noted["batch_size"]), names, entries)
    sizes = [entry.size for entry in entries.values()]
    return Node(node["cls"], stacked(sizes, noted["stack_dim"]), None, entries, noted["stack_dim"])


def jagged(spans: Mapping[str, list[Any]], name: str, content: bytes) -> Rows:
    """The rows of a ragged tensor of the reference, which are rows of its first ragged dim."""
    dtype, shape, start, stop = spans[f"<NJT_VALUES>{name}"]
    values = Leaf(dtype, tuple(shape), content[start:stop])
    _, count, first, last = spans[f"<NJT_OFFSETS>{name}"]
    offsets = np.frombuffer(content[first:last], "<i8").reshape(count).tolist()
    size = len(values.content) // max(shape[0], 1)
    rows = itertools.pairwise(offsets)
    return Rows([Leaf(dtype, (b - a, *shape[1:]), values.content[a * size : b * size]) for a, b in rows])


SAFETENSORS = {
    "BOOL": "bool",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    **{f"{letter}{bits}": f"{kind}int{bits}" for letter, kind in (("U", "u"), ("I", "")) for bits in (8, 16, 32, 64)},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def read_safetensors(path: Path) -> Node | Value:
    """The container in a safetensors file of this package."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert (8 + length) % 64 == 0
    header = json.loads(content[8 : 8 + length])
    noted = header.pop("__metadata__")
    structure, as_bytes = json.loads(noted["tensordict_structure"]), json.loads(noted.get("tensordict_dtypes", "{}"))
    sums = json.loads(noted.get("tensordict_checksums", "{}"))
    assert structure["version"] == 1

    def take(name: str) -> Leaf:
        spec = header[name]
        start, stop = spec["data_offsets"]
        part = content[8 + length + start : 8 + length + stop]
        check_sum(part, sums.get(name))
        if name in as_bytes:
            return Leaf(as_bytes[name], tuple(spec["shape"][:-1]), part)
        return Leaf(f"torch.{SAFETENSORS[spec['dtype']]}", tuple(spec["shape"]), part)

    return described(structure["root"], take, structure["separator"])


# --- HDF5 and Zarr ----------------------------------------------------------------------------------------------------


def decoded(link: str) -> str:
    """Return the name of an entry from the name of its link, folder or part of a path."""
    return unquote(link[2:]) if link.startswith("_%") else link


def as_leaf(array: Any, noted: str | None) -> Leaf:
    """Return an array as a tensor. If `noted` is given, the elements are the bits of that dtype."""
    name = noted or array.dtype.name
    return Leaf(
        f"torch.{name}", array.shape, np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
    )


def noted_value(
    text: str, kind: str | None, is_text: bool, size: Any, outer: tuple[int, ...], tensors: Sequence[Leaf] = ()
) -> Value:
    """A value that stands as a text."""
    value = text if is_text or kind is None else restored(json.loads(text), tensors)
    return Value(kind or HOLDERS[0], outer if size is None else tuple(size), value)


def read_hdf5(path: Path) -> Node:
    """The container in an HDF5 file."""
    import h5py

    def text(holder: Any, name: str) -> str | None:
        return bytes(holder.attrs[name]).decode() if name in holder.attrs else None

    def group(at: Any) -> Node:
        size = tuple(int(number) for number in at.attrs["_batch_size"])
        names = text(at, "_names")
        entries: dict[str, Any] = {}
        for link in at:
            item = at[link]
            if isinstance(item, h5py.Group) and "_kind" in item.attrs:
                parts = {part: as_leaf(item[part][()], text(item[part], "_dtype")) for part in item if part != "form"}
                own, form = tuple(map(int, item.attrs["_batch_size"])), bytes(item["form"][()]).decode()
                entries[decoded(link)] = noted_value(form, text(item, "_kind"), False, own, size, numbered(parts))
            elif isinstance(item, h5py.Group):
                entries[decoded(link)] = group(item)
            elif item.dtype.kind == "S":
                own = item.attrs.get("_batch_size")
                content = bytes(item[()]).decode()
                value = noted_value(content, text(item, "_kind"), "_text" in item.attrs, own, size)
                entries[decoded(link)] = replace(value, size=tuple(map(int, value.size)))
            else:
                entries[decoded(link)] = as_leaf(item[()], text(item, "_dtype"))
        return Node(text(at, "_class") or DICT, size, None if names is None else json.loads(names), entries)

    with h5py.File(path, "r", track_order=True) as file:
        return group(file)


def read_zarr(folder: Path) -> Node:
    """The container in a Zarr group (v3) in a folder, whose chunks are not compressed."""
    document = json.loads((folder / "zarr.json").read_text())
    assert document["zarr_format"] == 3
    noted = document["attributes"]["__tensordict__"]
    size = tuple(noted["batch_size"])
    entries: dict[str, Any] = {}
    for link in noted.get("keys", []):
        below = folder / link
        item = json.loads((below / "zarr.json").read_text())
        own = item["attributes"].get("__tensordict__", {})
        if "ragged" in own:
            flat, table = zarr_array(below / "values"), zarr_array(below / "sizes")
            noted_dtype = own_notes(below / "values").get("dtype")
            leaf = as_leaf(flat, noted_dtype)
            bits = itemsize_of(leaf.dtype)
            entries[decoded(link)] = ragged(leaf.dtype, leaf.content, table.tobytes(), table.shape, bits)
        elif item["node_type"] == "group" and "kind" in own:
            links = [part for part in own["keys"] if part != "form"]
            parts = {part: as_leaf(zarr_array(below / part), own_notes(below / part).get("dtype")) for part in links}
            form = zarr_array(below / "form").tobytes().decode()
            entries[decoded(link)] = noted_value(form, own["kind"], False, own["batch_size"], size, numbered(parts))
        elif item["node_type"] == "group":
            entries[decoded(link)] = read_zarr(below)
        elif "__tensordict_non_tensor__" in item["attributes"]:
            assert item["attributes"]["__tensordict_non_tensor__"]["encoding"] == "json"
            content = zarr_array(below).tobytes().decode()
            value = restored(json.loads(content)) if "kind" in own else json.loads(content)
            entries[decoded(link)] = Value(own.get("kind", HOLDERS[0]), tuple(own.get("batch_size", size)), value)
        else:
            entries[decoded(link)] = as_leaf(zarr_array(below), own.get("dtype"))
    return Node(noted.get("class", DICT), size, noted.get("names"), entries)


def own_notes(folder: Path) -> Mapping[str, Any]:
    """Read the attributes of a node."""
    found: Mapping[str, Any] = json.loads((folder / "zarr.json").read_text())["attributes"].get("__tensordict__", {})
    return found


def zarr_array(folder: Path) -> Any:
    """An array, put together of its chunks."""
    document = json.loads((folder / "zarr.json").read_text())
    assert [codec["name"] for codec in document["codecs"]] == ["bytes"]
    dtype, shape = np.dtype(document["data_type"]).newbyteorder("<"), tuple(document["shape"])
    chunk = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
    fill = document["fill_value"]
    array = np.full(shape, complex(*fill) if isinstance(fill, list) else fill, dtype)
    for at in np.ndindex(*(-(-size // step) for size, step in zip(shape, chunk, strict=True))):
        path = folder.joinpath("c", *map(str, at))
        if path.is_file():
            place = tuple(slice(i * step, (i + 1) * step) for i, step in zip(at, chunk, strict=True))
            part = np.frombuffer(path.read_bytes(), dtype).reshape(chunk)
            array[place] = part[tuple(slice(0, size) for size in array[place].shape)]
    return array


# --- data sets --------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """A shard in a manifest: its file, its rows, and the lines of writers whose rows it has, with their rows."""

    path: Path
    rows: int
    generation: int
    holds: list[tuple[tuple[str, int], int]]


def read_dataset(folder: Path) -> list[Node]:
    """All rows of a data set, in their order."""
    lines: dict[tuple[str, int], Line] = {}
    for path in sorted((folder / "writers").glob("**/*.jsonl")):
        writer = path.stem if path.parent.name == "writers" else path.parent.name
        lines |= {(writer, number): line for number, line in manifest(folder, writer, path)}
    # Find the rows of a line: the merged shard of the highest generation, and the first row in it.
    places = {key: (line, 0, line.rows) for key, line in lines.items() if not line.holds}
    for line in sorted(lines.values(), key=lambda line: (line.generation, str(line.path))):
        start = 0
        for held, rows in line.holds:
            places[held] = line, start, rows
            start += rows
    shards: dict[Path, Any] = {}
    found: list[Node] = []
    for key in sorted(places):
        place, start, rows = places[key]
        if place.path not in shards:
            shards[place.path] = read_folder(Archive(place.path) if place.path.is_file() else Folder(place.path))
        found += [shards[place.path].row(at) for at in range(start, start + rows)]
    return found


def manifest(folder: Path, writer: str, path: Path) -> Iterator[tuple[int, Line]]:
    """The lines of a file of a manifest that are whole, with their numbers."""
    crc = first = 0
    content = path.read_bytes()
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines()):
        crc = zlib.crc32(text[9:], crc)
        assert text[:9] == b"%08x " % crc
        item = json.loads(text[9:])
        if number == 0:
            assert item[:3] == ["tensordict data set", 3, writer]
            first = item[4]
            continue
        name, rows, _, _, generation, holds = item if len(item) == 6 else (*item, 0, [])
        each = [((held, start + at), count) for held, start, counts in holds for at, count in enumerate(counts)]
        yield first + number - 1, Line(folder / "shards" / writer / name, rows, generation, each)


# --- Redis ------------------------------------------------------------------------------------------------------------


def read_redis(client: Any, prefix: str, identifier: str) -> Node:
    """The container of an identifier on a server; `client` has `get`, `hgetall` and `smembers`, which give bytes."""
    base = f"{prefix}:{{{identifier}}}:"
    groups = {path.decode(): json.loads(note) for path, note in client.hgetall(f"{base}__groups__").items()}
    leaves = {path.decode() for path in client.smembers(f"{base}__keys__")}
    metas = {path: {k.decode(): v.decode() for k, v in client.hgetall(f"{base}m:{path}").items()} for path in leaves}
    order = {path: int(meta.get("_order", 0)) for path, meta in metas.items()}
    order |= {path: note.get("_order", 0) for path, note in groups.items() if path}

    def content(path: str) -> bytes:
        return client.get(f"{base}d:{path}") or b""

    if client.get(f"{base}__type__") != b"lazy_stack":
        size = tuple(json.loads(client.get(f"{base}__batch_size__")))
        return redis_node("", size, groups, order, metas, content)
    inner, dim = json.loads(client.get(f"{base}__inner_batch_size__")), int(client.get(f"{base}__stack_dim__"))
    count = int(client.get(f"{base}__count__"))
    found: dict[str, Any] = {}
    for at in range(count):
        here = {path: element(meta, content(path), at) for path, meta in metas.items()}
        notes = {path: note | own_size(note, at) for path, note in groups.items()}
        found[str(at)] = redis_node("", tuple(inner), notes, order, here, content)
    return Node(LAZY, stacked([one.size for one in found.values()], dim), None, found, dim)


def own_size(note: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Return the batch size of an element, if the elements have unequal ones."""
    return {"_batch_size": note["_batch_sizes"][at]} if "_batch_sizes" in note else {}


def element(meta: Mapping[str, str], content: bytes, at: int) -> Any:
    """Return an element of a leaf of a lazy stack."""
    shapes = json.loads(meta["shapes"]) if meta["homogeneous"] == "0" else None
    if shapes is None:
        return Leaf(meta["dtype"], tuple(json.loads(meta["shape"])), content).row(at)
    size = itemsize_of(meta["dtype"])
    start = sum(math.prod(shape) * size for shape in shapes[:at])
    return Leaf(meta["dtype"], tuple(shapes[at]), content[start : start + math.prod(shapes[at]) * size])


def redis_node(
    path: str,
    size: tuple[int, ...],
    groups: Mapping[str, Any],
    order: Mapping[str, int],
    metas: Mapping[str, Any],
    content: Callable[[str], bytes],
) -> Node:
    """The container at a path."""
    noted = groups.get(path, {})
    size = tuple(noted.get("_batch_size", size))
    start = f"{path}." if path else ""
    entries: dict[str, Any] = {}
    for below in sorted(order, key=lambda below: order[below]):
        name = below.removeprefix(start)
        if not below.startswith(start) or "." in name or below == path:
            continue
        meta = metas.get(below)
        if meta is None and groups.get(below, {}).get("_kind"):
            below_it = {path[len(below) + 1 :]: path for path in metas if path.startswith(f"{below}.")}
            form = content(below_it.pop("form"))
            parts = {
                part: Leaf(metas[path]["dtype"], tuple(json.loads(metas[path]["shape"])), content(path))
                for part, path in below_it.items()
            }
            own = groups[below]
            value = restored(json.loads(form), numbered(parts))
            entries[decoded(name)] = Value(own["_kind"], tuple(own["_batch_size"]), value)
        elif meta is None:
            entries[decoded(name)] = redis_node(below, size, groups, order, metas, content)
        elif not isinstance(meta, dict):
            entries[decoded(name)] = meta
        elif "is_non_tensor" in meta:
            form = json.loads(meta["_form"])
            assert form["crc"] == zlib.crc32(content(below))
            value = restored(json.loads(content(below)))
            entries[decoded(name)] = Value(form["_kind"], tuple(form["_batch_size"]), value)
        else:
            entries[decoded(name)] = Leaf(meta["dtype"], tuple(json.loads(meta["shape"])), content(below))
    names = json.loads(noted["_names"]) if noted.get("_names") else None
    return Node(noted.get("_class", DICT), size, names, entries)
