"""Files and Redis content follow docs/design/formats.md: a reader that knows only that page reads them."""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import independent_reader as reader
import numpy as np
import pytest
import torch

from tensordict import (
    DatasetWriter,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    load,
    open_dataset,
)
from tensordict.datasets import compact

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "tests" / "data" / "format"


class Step(TensorClass):
    """A tensorclass of the test."""

    obs: torch.Tensor
    extra: torch.Tensor | None = None


# --- the containers ---------------------------------------------------------------------------------------------------


def plain() -> TensorDict:
    """Every dtype that all formats have, nested containers, values, odd names."""
    numbers = torch.arange(6).view(2, 3)
    dtypes = (torch.uint8, torch.int16, torch.int64, torch.uint32, torch.float16, torch.float64, torch.complex64)
    return TensorDict(
        {
            **{str(dtype).partition(".")[2]: numbers.to(dtype) for dtype in dtypes},
            "flag": torch.tensor([True, False]),
            "half": torch.tensor([1.5, -2.0]).bfloat16(),
            "quarter": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
            "empty": torch.zeros(2, 0),
            "a/b": torch.arange(2),
            "dot.ted": torch.arange(2),
            "spaced key": {"deep": {"x": torch.arange(8.0).view(2, 2, 2)}, "none": {}},
            "label": "cat",
            "each": ["u", "v"],
            "meta": MetaData({"size": ("S", float("inf")), "%odd": None}),
            "step": Step(obs=torch.ones(2, 2), batch_size=[2]),
            "shape": torch.ones(2),
        },
        batch_size=[2],
        names=["time"],
    )


def ragged() -> TensorDict:
    """Ragged leaves of both layouts, an unbatched one, short lazy stacks."""
    rows = [torch.arange(2.0), torch.arange(3.0)]
    return TensorDict(
        {
            "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "matrices": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
            "strided": torch.nested.nested_tensor([torch.ones(1, 2), torch.zeros(3, 1)]),
            "few": lazy_stack([TensorDict(y=torch.ones(n), name=str(n)) for n in (1, 2)]),
            "even": lazy_stack([TensorDict(y=torch.ones(2), s=Step(obs=torch.ones(1))) for _ in range(2)]),
            "scale": UnbatchedTensor(torch.arange(3)),
        },
        batch_size=[2],
    )


def many() -> Any:
    """A lazy stack that is stored by columns."""
    made = [
        TensorDict(
            y=torch.arange(float(n)),
            k=torch.tensor(n),
            name=f"row {n}",
            inner={"z": torch.full((n, 2), n), "step": Step(obs=torch.zeros(n))},
        )
        for n in (1, 2, 3, 4, 0)
    ]
    return lazy_stack(made)


def matrix_stack() -> Any:
    """One along the second dim, with names."""
    made = [TensorDict(y=torch.ones(2, n), batch_size=[2], names=["time"]) for n in (1, 2, 3, 4)]
    return lazy_stack(made, 1)


def values() -> TensorDict:
    """Values that JSON does not have, with tensors in them."""
    module = torch.nn.Linear(2, 2)
    parts = {("step", 1): torch.tensor(2.0), None: torch.tensor([1.5, -2.0]).bfloat16(), True: np.arange(3), 0.5: []}
    return TensorDict(
        {
            "x": torch.ones(2),
            "state": NonTensorData({0: parts, "%": np.float32(1.5), "module": module.state_dict()}, batch_size=[2]),
            "keys": NonTensorData({1: OrderedDict(b=(1, float("inf")), a=None)}, batch_size=[2]),
            "each": NonTensorStack({"t": torch.ones(2, 0)}, {"t": torch.arange(3)}),
            "meta": MetaData({"t": torch.tensor([True])}),
        },
        batch_size=[2],
    )


CONTAINERS = {"plain": plain, "values": values, "ragged": ragged, "many": many, "matrix stack": matrix_stack}


# --- what the package has in them, in the reader's terms --------------------------------------------------------------


def shown(entry: Any) -> Any:
    """A container or a leaf of the package as the reader would give it."""
    if isinstance(entry, UnbatchedTensor):
        data = leaf(torch.Tensor(entry) if entry.dtype.is_floating_point else entry.as_subclass(torch.Tensor))
        return reader.Node("UnbatchedTensor", tuple(entry.batch_size), None, {"data": data})
    if isinstance(entry, torch.Tensor):
        return reader.Rows([leaf(row) for row in entry.unbind()]) if entry.is_nested else leaf(entry)
    kind = type(entry).__name__
    if kind in reader.HOLDERS:
        return reader.Value(kind, tuple(entry.batch_size), shown_value(entry.data))
    if kind == reader.VALUE_STACK:
        return reader.Value(kind, tuple(entry.batch_size), shown_value(entry.tolist()))
    if isinstance(entry, TensorClass):
        inner = shown(entry._tensordict)
        inner.kind = f"{type(entry).__module__}.{type(entry).__qualname__}"
        return inner
    names = None if not any(entry.names) else list(entry.names)
    size = tuple(entry.batch_size)
    if kind == reader.LAZY:
        found = {str(at): shown(member) for at, member in enumerate(entry.tensordicts)}
        return reader.Node(kind, size, names, found, entry.stack_dim)
    return reader.Node(reader.DICT, size, names, {name: shown(entry.get(name)) for name in entry.keys()})


def shown_value(value: Any) -> Any:
    """A value as the reader gives it."""
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, np.ndarray):
        return reader.Array(leaf(torch.from_numpy(value)))
    if isinstance(value, dict):
        made = type(value)((key, shown_value(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):
            made._metadata = value._metadata
        return made
    return type(value)(map(shown_value, value)) if isinstance(value, (list, tuple)) else value


def leaf(tensor: torch.Tensor) -> reader.Leaf:
    """A tensor as the reader gives it."""
    content = bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())
    return reader.Leaf(str(tensor.dtype), tuple(tensor.shape), content)


def same(found: Any, expected: Any) -> None:
    """Compare what was read with what should have been."""
    assert type(found) is type(expected)
    if isinstance(expected, reader.Node):
        assert (found.kind, tuple(found.size), found.stack_dim) == (expected.kind, expected.size, expected.stack_dim)
        assert (found.names or None) == expected.names
        assert list(found.entries) == list(expected.entries)
        for name, entry in expected.entries.items():
            same(found.entries[name], entry)
    else:
        assert found == expected and repr(found) == repr(expected)


# --- the formats ------------------------------------------------------------------------------------------------------

FILES: dict[str, tuple[Callable[[Any, Path], object], Callable[[Path], Any]]] = {
    "folder": (lambda td, path: td.memmap(path, checksum=True), lambda path: reader.read_folder(reader.Folder(path))),
    "folder without checksums": (
        lambda td, path: td.memmap(path),
        lambda path: reader.read_folder(reader.Folder(path)),
    ),
    "archive": (lambda td, path: td.save(path), lambda path: reader.read_folder(reader.Archive(path))),
    "deflated": (
        lambda td, path: td.save(path, compression="deflate"),
        lambda path: reader.read_folder(reader.Archive(path)),
    ),
    "consolidated": (lambda td, path: td.consolidate(path, checksum=True), reader.read_consolidated),
    "safetensors": (lambda td, path: td.to_safetensors(path, separator="\t", checksum=True), reader.read_safetensors),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", FILES)
def test_files(name: str, container: str, tmp_path: Path) -> None:
    td = CONTAINERS[container]()
    save, read = FILES[name]
    path = tmp_path / ("saved" if "folder" in name else "saved.tdz")
    save(td, path)
    same(read(path), shown(td))


def test_consolidated_as_the_reference_reads_it(tmp_path: Path) -> None:
    rows = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)
    stack = lazy_stack([TensorDict(y=torch.ones(n)) for n in (1, 2)])
    td = TensorDict({"text": "a", "x": torch.ones(2, 3), "n": {"b": torch.zeros(2)}, "r": rows, "s": stack}, [2])
    td.consolidate(tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[-8:], "little")
    found = reader.of_reference(json.loads(content[-8 - length : -8]), content)
    expected = shown(td)
    found.entries = {name: found.entries[name] for name in expected.entries}
    same(found, expected)


def test_stored_entries_of_archives_are_aligned(tmp_path: Path) -> None:
    plain().save(tmp_path / "x.tdz")
    content = (tmp_path / "x.tdz").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.tdz") as archive:
        names = [entry.filename for entry in archive.infolist()]
        for entry in archive.infolist():
            name, extra = (int.from_bytes(content[entry.header_offset + at :][:2], "little") for at in (26, 28))
            start = entry.header_offset + 30 + name + extra
            assert content[start : start + entry.file_size] == archive.read(entry)
            assert entry.filename.endswith("meta.json") or start % 64 == 0
    # The descriptions stand together at the beginning.
    assert [name.endswith("meta.json") for name in names] == sorted(
        (n.endswith("meta.json") for n in names), reverse=True
    )


def without_ragged_stacks(td: TensorDict) -> TensorDict:
    """Content that array stores can hold."""
    return td.exclude("few", "even", "scale")


@pytest.mark.parametrize("td", [plain(), values()], ids=["plain", "values"])
def test_hdf5(td: TensorDict, tmp_path: Path) -> None:
    td.to_h5(tmp_path / "x.h5").close()
    same(reader.read_hdf5(tmp_path / "x.h5"), shown(td))


def test_zarr(tmp_path: Path) -> None:
    pytest.importorskip("zarr", reason="zarr 3 needs Python 3.11")
    td = plain().update(without_ragged_stacks(ragged())).update(values().select("state", "keys", "meta"))
    td.to_zarr(tmp_path / "x.zarr").close()
    same(reader.read_zarr(tmp_path / "x.zarr"), shown(td))
    frames = TensorDict(image=torch.arange(70.0).view(7, 10), zero=torch.zeros(7), batch_size=[7])
    frames.to_zarr(tmp_path / "y.zarr", chunks={"image": (3, 4), "zero": 2}).close()
    same(reader.read_zarr(tmp_path / "y.zarr"), shown(frames))


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_data_sets(form: str, tmp_path: Path) -> None:
    rows = torch.nested.nested_tensor([torch.arange(float(n)) for n in (2, 1, 3)], layout=torch.jagged)
    batch = TensorDict({"x": torch.arange(3), "t": ["a", "b", "c"], "r": rows, "n": {"k": torch.ones(3, 2)}}, [3])
    folder = tmp_path / "steps"
    for writer in range(2):
        with DatasetWriter(folder, rows_per_shard=2, format=form) as one:
            for _ in range(2):
                one.extend(batch.clone().apply(lambda leaf, writer=writer: leaf + writer))
    for _ in range(2):
        data = open_dataset(folder)
        found = reader.read_dataset(folder)
        assert len(found) == len(data) == 12
        for row, expected in zip(found, data, strict=True):
            same(row, shown(expected))
        assert compact(folder)[0] > 1 or _ == 1
    with open(next((folder / "writers").glob("*.jsonl")), "ab") as file:
        file.write(b"00000000 [")
    assert len(reader.read_dataset(folder)) == 12


def test_redis() -> None:
    redis = pytest.importorskip("redis")
    from redis_server import shared_socket

    where = {"unix_socket_path": shared_socket()}
    client = redis.Redis(**where)
    members = [TensorDict(y=torch.ones(n), k=torch.tensor(n), n={"z": torch.ones(n)}) for n in (1, 2, 3)]
    sized = [TensorDict(y=torch.ones(n), n=TensorDict(z=torch.ones(n), batch_size=[n]), batch_size=[n]) for n in (1, 2)]
    for td in (plain(), lazy_stack(members), lazy_stack(sized), values()):
        store = td.to_store(**where)
        same(reader.read_redis(client, "tensordict", store.td_id), shown(td))
        store.clear_redis()


# --- what the reference wrote -----------------------------------------------------------------------------------------

EXPECTED = json.loads((SAMPLES / "expected.json").read_text())
READERS = {".tdz": lambda path: reader.read_folder(reader.Archive(path)), ".consolidated": reader.read_consolidated}
# The page does not cover pickled values and HDF5 without attributes.
READABLE = [name for name in EXPECTED if name not in ("pickled", "simple.h5") and (SAMPLES / "samples" / name).exists()]


@pytest.mark.parametrize("name", READABLE)
def test_samples_of_the_reference(name: str) -> None:
    path = SAMPLES / "samples" / name
    found = READERS.get(path.suffix, lambda path: reader.read_folder(reader.Folder(path)))(path)
    if name != "tensorclass":  # whose class this program does not know
        same(found, shown(load(path)))
    leaves = [(json.loads(key), leaf) for key, leaf in EXPECTED[name].get("leaves", {}).items() if "bits" in leaf]
    for key, expected in leaves:
        one: Any = found
        for part in [key] if isinstance(key, str) else key:
            one = one.entries[part]
        assert [*one.content] == expected["bits"] and one.dtype == expected["dtype"]
    assert leaves or name in ("lazy", "nontensor", "strided_nested", "tensorclass")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_reader_knows_nothing_of_the_package() -> None:
    tree = ast.parse(Path(reader.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.split(".")[0] in ("tensordict", "torch", "safetensors", "zarr")}


def test_the_page_names_what_the_reader_looks_for() -> None:
    page = (ROOT / "docs" / "design" / "formats.md").read_text()
    tree = ast.parse(Path(reader.__file__).read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    keys = {word for word in words if re.fullmatch(r"_[a-z_]+|__\w+__|%\w+|<NJT_\w+>|[a-z]+_[a-z_]+|\w+\.json", word)}
    keys -= {"__main__"}
    assert len(keys) > 40
    missing = [key for key in keys if key not in page and not key.startswith("float8")]
    assert not missing, sorted(missing)
