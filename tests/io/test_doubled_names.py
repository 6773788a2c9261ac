"""A name that is in a save twice is an error in every format: no reader chooses one of the two."""

from __future__ import annotations

import json
import pathlib
import struct
import zipfile
from typing import Any

import pytest
import torch

from redis_server import shared_socket
from tensordict import NonTensorData, TensorDict, lazy_stack, load, load_memmap, unpack_memmap, verify
from tensordict.core.exceptions import SaveError, TransferError
from tensordict.core.json_text import parse_json
from tensordict.parallel.wire import Header
from tensordict.store import TensorDictStore

h5py = pytest.importorskip("h5py")
LEAF = '{"device":"cpu","shape":[2],"dtype":"torch.float32","is_nested":false}'
# More than a quadratic search could look through while anybody waits.
MANY = 400_000


def make() -> TensorDict:
    return TensorDict(
        {"a": torch.ones(2), "n": {"b": torch.zeros(2)}, "v": NonTensorData({"one": 1, "two": 2}, [2])}, [2]
    )


def double(content: bytes, name: str) -> bytes:
    """Return a JSON text whose first object with names repeats its first name in front, with the value 7."""
    at = content.index(f'"{name}"'.encode())
    return content[:at] + f'"{name}": 7, '.encode() + content[at:]


# --- parse_json -------------------------------------------------------------------------------------------------------


def test_parse_json_reads_what_json_reads() -> None:
    for value in (None, True, 1, -2.5, "é", [], [1, [2]], {}, {"a": {"b": [{"c": None}]}, "": "x"}):
        text = json.dumps(value)
        assert parse_json(text) == parse_json(text.encode()) == parse_json(text.encode("utf-16")) == value
    assert str(parse_json("[NaN, Infinity]")) == "[nan, inf]"
    with pytest.raises(ValueError, match="NaN is no JSON"):
        parse_json("[NaN]", constants=False)
    for broken in ("", "{", "[1,]", "{} {}", b"\xff", "\ufeff{}"):
        with pytest.raises(ValueError, match=r"line 1|char|codec"):
            parse_json(broken)
    for opened in ("[", '{"a":'):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(opened * 100_000)


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]', r'{"\u0061": 1, "a": 2}', '{"a": {}, "a": null}']
)
def test_parse_json_refuses_a_name_that_is_there_twice(text: str) -> None:
    for constants in (True, False):
        with pytest.raises(ValueError, match="an object has the name 'a' twice"):
            parse_json(text, constants)


def test_parse_json_finds_a_doubled_name_in_linear_time() -> None:
    """A search for each name would take hours."""
    names = [f'"{number}": 0' for number in range(MANY)]
    with pytest.raises(ValueError, match=f"'{MANY - 1}' twice"):
        parse_json("{" + ", ".join([*names, names[-1]]) + "}")
    with pytest.raises(ValueError, match="'a' twice"):
        parse_json("{" + ", ".join(['"a": 0'] * MANY) + "}")


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("meta.json", "a"),
        ("meta.json", "shape"),
        ("meta.json", "dtype"),
        ("meta.json", "_type"),
        ("n/meta.json", "b"),
        ("v/meta.json", "data"),
        ("v/meta.json", "two"),
    ],
)
def test_meta_json(file: str, name: str, tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "saved")
    path = tmp_path / "saved" / file
    path.write_bytes(double(path.read_bytes(), name))
    for read in (load_memmap, load, lambda where: verify(where, raises=True)):
        with pytest.raises(SaveError, match=rf"meta\.json.*has the name '{name}' twice"):
            read(tmp_path / "saved")
    problems = verify(tmp_path / "saved", raises=False).problems
    assert problems and f"'{name}' twice" in problems[0]


def test_meta_json_that_lists_an_entry_twice(tmp_path: pathlib.Path) -> None:
    TensorDict({"a": torch.ones(2), "shape": torch.ones(2)}, [2]).memmap(tmp_path / "saved")
    path = tmp_path / "saved" / "meta.json"
    meta = json.loads(path.read_text())
    for twice in ("shape", "a"):
        listed = [*meta["_entries"], [twice, json.loads(LEAF)]]
        path.write_text(json.dumps({**meta, "_entries": listed}))
        with pytest.raises(SaveError, match=f"the entry '{twice}' is there twice"):
            load_memmap(tmp_path / "saved")


def test_a_save_in_the_place_of_one_with_a_doubled_name_needs_overwrite(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "saved")
    path = tmp_path / "saved" / "meta.json"
    path.write_bytes(double(path.read_bytes(), "a"))
    with pytest.raises(SaveError, match="overwrite=True"):
        make().memmap(tmp_path / "saved")
    make().memmap(tmp_path / "saved", overwrite=True)
    assert verify(tmp_path / "saved").ok


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["meta.json", "n/meta.json", "v/meta.json"])
def test_archives(name: str, tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "sound.tdz")
    with zipfile.ZipFile(tmp_path / "sound.tdz") as old, zipfile.ZipFile(tmp_path / "x.tdz", "w") as new:
        for entry in old.namelist():
            content = old.read(entry)
            new.writestr(entry, double(content, "_type") if entry == name else content)
    with pytest.raises(SaveError, match="has the name '_type' twice"):
        load_memmap(tmp_path / "x.tdz")
    assert not verify(tmp_path / "x.tdz", raises=False).ok
    # Unpacking copies files: whoever loads them is told.
    unpack_memmap(tmp_path / "x.tdz", tmp_path / "folder")
    with pytest.raises(SaveError, match="has the name '_type' twice"):
        load_memmap(tmp_path / "folder")


@pytest.mark.parametrize(
    "name", ["structure", "entries", "kind", "b", "two", "separator", "cls", "leaves", "non_tensors"]
)
def test_consolidated_files(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    make().consolidate(path)
    content = path.read_bytes()
    size = struct.unpack("<q", content[-8:])[0]
    last = content[-8 - size : -8]
    head, magic, _ = content[: -8 - size].rpartition(b"tensdict")
    own_size = struct.unpack("<q", head[-8:])[0]
    own, tensors = head[-8 - own_size : -8], head[: -8 - own_size]
    if name in ("cls", "leaves", "non_tensors"):
        last = double(last, name)
    else:
        own = double(own, name)
    path.write_bytes(tensors + own + struct.pack("<q", len(own)) + magic + last + struct.pack("<q", len(last)))
    with pytest.raises(SaveError, match=f"has the name '{name}' twice"):
        TensorDict.from_consolidated(path)
    assert not verify(path, raises=False).ok


def of_reference(**parts: Any) -> bytes:
    """A consolidated file of the reference, with one tensor of 8 bytes that two descriptions may name."""
    metadata = {"batch_size": [], "names": None, "device": None, "is_locked": False}
    node = {"cls": "TensorDict", "non_tensors": {}, "leaves": {}, "cls_metadata": metadata}
    text = json.dumps({**node, **parts}).encode()
    return bytes(16) + text + struct.pack("<q", len(text))


INNER = {
    "cls": "TensorDict",
    "non_tensors": {},
    "leaves": {},
    "cls_metadata": {"batch_size": [], "names": None, "device": None, "is_locked": False},
}
SPAN = ["torch.float32", [2], 0, 8, 0]
JAGGED = {
    "<NJT_VALUES>a": ["torch.float32", [2], 0, 8, 0],
    "<NJT_OFFSETS>a": ["torch.int64", [1], 8, 16, 0, 1],
}


@pytest.mark.parametrize(
    "parts",
    [
        {"leaves": {"a": SPAN}, "non_tensors": {"a": ["x", [], None]}},
        {"leaves": {"a": SPAN}, "a": INNER},
        {"non_tensors": {"a": ["x", [], None]}, "a": INNER},
        {"leaves": {"a": SPAN, **JAGGED}},
        {"leaves": JAGGED, "a": INNER},
    ],
    ids=["value and tensor", "tensor and node", "value and node", "ragged and tensor", "ragged and node"],
)
def test_consolidated_files_of_the_reference(parts: dict[str, Any], tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_bytes(of_reference(**parts))
    with pytest.raises(SaveError, match="'a'.*two entries have this name"):
        TensorDict.from_consolidated(tmp_path / "x")


@pytest.mark.parametrize("name", ["a", "dtype", "__metadata__", "tensordict_structure"])
def test_safetensors(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    make().to_safetensors(path)
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = double(content[8 : 8 + size], name)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])
    with pytest.raises(SaveError, match=f"has the name '{name}' twice"):
        TensorDict.from_safetensors(path)
    assert not verify(path, raises=False).ok


@pytest.mark.parametrize("name", ["version", "entries", "kind", "two"])
def test_what_safetensors_keep_of_us(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    make().to_safetensors(path)
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    metadata = header["__metadata__"]
    metadata["tensordict_structure"] = double(metadata["tensordict_structure"].encode(), name).decode()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    with pytest.raises(SaveError, match=f"has the name '{name}' twice"):
        TensorDict.from_safetensors(path)


def test_a_safetensors_header_with_one_name_many_times(tmp_path: pathlib.Path) -> None:
    entry = b'"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    header = b"{" + b", ".join([entry] * 100_000) + b"}"
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(SaveError, match="has the name 'a' twice"):
        TensorDict.from_safetensors(tmp_path / "x.safetensors")


# --- stores -----------------------------------------------------------------------------------------------------------


def test_hdf5_has_one_name_in_two_forms(tmp_path: pathlib.Path) -> None:
    make().to_h5(tmp_path / "x.h5").close()
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["_%a"] = [5.0, 6.0]
    with pytest.raises(SaveError, match="the name 'a' is there twice"):
        TensorDict.from_h5(tmp_path / "x.h5").to_tensordict()
    assert not verify(tmp_path / "x.h5", raises=False).ok


def test_zarr_has_one_name_in_two_forms_or_in_a_document(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("zarr")
    for number, change in enumerate((copy_array, double_document)):
        path = tmp_path / f"{number}.zarr"
        make().to_zarr(path)
        expected = change(path)
        with pytest.raises(SaveError, match=expected):
            TensorDict.from_zarr(path).to_tensordict()
        assert not verify(path, raises=False).ok


def copy_array(path: pathlib.Path) -> str:
    (path / "_%a").mkdir()
    (path / "_%a" / "zarr.json").write_bytes((path / "a" / "zarr.json").read_bytes())
    return "the name 'a' is there twice"


def double_document(path: pathlib.Path) -> str:
    document = path / "a" / "zarr.json"
    document.write_bytes(double(document.read_bytes(), "shape"))
    return "has the name 'shape' twice"


@pytest.mark.parametrize("lazy", [False, True])
def test_redis_has_one_name_in_two_forms(lazy: bool) -> None:
    redis = pytest.importorskip("redis")
    td = TensorDict(a=torch.ones(2), batch_size=[2])
    data = (lazy_stack([td, td]) if lazy else td).to_store(unix_socket_path=shared_socket())
    base = f"tensordict:{{{data.td_id}}}:"
    with redis.Redis(unix_socket_path=shared_socket()) as client:
        for kind in "dm":
            assert client.copy(f"{base}{kind}:a", f"{base}{kind}:_%a")
        assert client.sadd(f"{base}__keys__", "_%a")
    with pytest.raises(SaveError, match="the name 'a' is there twice"):
        TensorDictStore.from_store(td_id=data.td_id, unix_socket_path=shared_socket()).to_tensordict()


# --- what another rank sends ------------------------------------------------------------------------------------------


def test_the_description_that_another_rank_sends() -> None:
    text = '{"node": {}, "node": {}, "values": [], "storages": {}}'
    with pytest.raises(TransferError, match="has the name 'node' twice"):
        Header(text.encode())
