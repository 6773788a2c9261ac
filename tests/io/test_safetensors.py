"""The safetensors format: both ways with its own library, all kinds of containers, broken and hostile files."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import struct
import tempfile
from typing import Any

import pytest
import safetensors.torch as library
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    assert_close,
    from_safetensors,
    lazy_stack,
    to_safetensors,
    verify,
)
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.memory import files

IN_SPEC = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
]
AS_BYTES = ["complex128", "float4_e2m1fn_x2"]


class Frame(TensorClass):
    image: torch.Tensor
    label: str = "none"
    next: Frame | None = None


def content(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.arange(count).reshape(shape) % 2 == 0
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).remainder(100).to(torch.uint8)
    return raw.view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else []


def many_kinds() -> TensorDict:
    td = TensorDict(
        {
            "a": torch.arange(6.0).reshape(3, 2),
            "b": {"c": torch.ones(3), "empty": {}},
            "text": "hello",
            "meta": MetaData({"k": [1, None]}),
            "unbatched": UnbatchedTensor(torch.ones(4)),
            "values": NonTensorStack("a", ("b",), float("inf")),
            "none": torch.zeros(3, 0),
        },
        [3],
        names=["t"],
        device="cpu",
    )
    td["even"] = lazy_stack([TensorDict({"x": torch.full((2,), float(i))}) for i in range(3)])
    td["odd"] = lazy_stack([TensorDict({"x": torch.zeros(i + 1), "n": i}) for i in range(3)])
    td["frame"] = Frame(torch.zeros(3, 2), "cat", Frame(torch.ones(3, 1), batch_size=[3]), batch_size=[3])
    td["rows"] = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3), torch.ones(1)], layout=torch.jagged)
    return td


# --- both ways --------------------------------------------------------------------------------------------------------


def test_every_kind_comes_back(tmp_path: pathlib.Path) -> None:
    td = many_kinds()
    assert td.to_safetensors(tmp_path / "x") is None
    again = TensorDict.from_safetensors(tmp_path / "x")
    assert list(again.keys()) == list(td.keys())
    assert (again.batch_size, again.names, again.device) == (td.batch_size, ["t"], torch.device("cpu"))
    assert_close(again.exclude("rows"), td.exclude("rows"))
    assert (again["text"], again["values"]) == ("hello", ["a", ("b",), float("inf")])
    assert type(again.get("meta")) is MetaData and again["meta"] == {"k": [1, None]}
    assert isinstance(again["unbatched"], UnbatchedTensor) and again["b", "empty"].batch_size == (3,)
    assert isinstance(again["even"], LazyStackedTensorDict) and again["odd"][2]["x"].shape == (3,)
    assert again["odd"][1]["n"] == 1
    assert isinstance(again["frame"], Frame)
    assert (again["frame"].label, again["frame"].next.image.shape) == ("cat", (3, 1))
    assert [row.tolist() for row in again["rows"].unbind()] == [[0, 0], [1, 1, 1], [1]]


@pytest.mark.parametrize(
    "root",
    [
        TensorDict(batch_size=[2]),
        NonTensorData("x", batch_size=[2]),
        NonTensorStack("x", "y"),
        lazy_stack([TensorDict({"x": torch.zeros(i)}) for i in (1, 2)]),
        lazy_stack([Frame(torch.zeros(i)) for i in (1, 2)]),
        Frame(torch.zeros(2), batch_size=[2]),
    ],
    ids=lambda root: type(root).__name__,
)
def test_roots_of_every_kind(root: Any, tmp_path: pathlib.Path) -> None:
    root.to_safetensors(tmp_path / "x")
    again = from_safetensors(tmp_path / "x")
    assert type(again) is type(root) and again.batch_size == root.batch_size
    if not again._is_non_tensor:
        assert_close(again, root)
    else:
        assert again.tolist() == root.tolist()


def test_the_library_reads_ours(tmp_path: pathlib.Path) -> None:
    entries = {name: content(getattr(torch, name), (2, 3)) for name in IN_SPEC}
    entries["turned"] = torch.arange(6).reshape(3, 2).t()
    entries["conj"] = torch.tensor([1 + 2j, 3j]).conj()
    td = TensorDict({"inner": entries, "empty": torch.zeros(2, 0), "point": torch.tensor(3.0)})
    td.to_safetensors(tmp_path / "x")
    found = library.load_file(tmp_path / "x")
    assert set(found) == {"empty", "point", *(f"inner.{name}" for name in entries)}
    for name, value in entries.items():
        assert found[f"inner.{name}"].dtype is value.dtype and found[f"inner.{name}"].shape == value.shape
        assert raw(found[f"inner.{name}"]) == raw(value.resolve_conj())
    with library.safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata()["format"] == "pt"


def test_we_read_the_library(tmp_path: pathlib.Path) -> None:
    entries = {f"0.{name}.weight": content(getattr(torch, name), (2, 3)) for name in IN_SPEC}
    entries |= {"0": torch.ones(2), "whole": torch.tensor(2.0), "a..b": torch.ones(1), "é.\n": torch.zeros(2, 0)}
    library.save_file(entries, tmp_path / "x", metadata={"who": "else"})
    td = from_safetensors(tmp_path / "x")
    assert td.batch_size == () and td.device is None
    # A tensor has the name of the container that the others would be in.
    assert td["0"].shape == (2,)
    assert td["0.bfloat16.weight"].dtype is torch.bfloat16
    assert td["a", "", "b"].shape == (1,) and td["é", "\n"].shape == (2, 0)
    for name in IN_SPEC:
        assert raw(td[f"0.{name}.weight"]) == raw(entries[f"0.{name}.weight"])
    flat = from_safetensors(tmp_path / "x", separator=None)
    assert set(flat.keys()) == set(entries)
    del entries["0"]
    library.save_file(entries, tmp_path / "x")
    assert from_safetensors(tmp_path / "x")["0", "int8", "weight"].dtype is torch.int8


def test_a_module_loads_a_saved_container(tmp_path: pathlib.Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    state = module.state_dict()
    TensorDict({tuple(name.split(".")): value for name, value in state.items()}).to_safetensors(tmp_path / "x")
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    library.load_model(other, tmp_path / "x")
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("name", AS_BYTES)
def test_dtypes_that_the_format_lacks_stand_as_bytes(name: str, tmp_path: pathlib.Path) -> None:
    dtype = getattr(torch, name)
    td = TensorDict({"a": content(dtype, (2, 3)), "b": content(dtype, ())})
    td.to_safetensors(tmp_path / "x")
    again = from_safetensors(tmp_path / "x")
    assert again["a"].dtype is dtype and again["a"].shape == (2, 3) and again["b"].shape == ()
    assert again["a"].view(torch.uint8).tolist() == td["a"].view(torch.uint8).tolist()
    if name == "complex128":  # The library has no tensors of four bits, which it takes the bytes for.
        assert library.load_file(tmp_path / "x")["a"].shape == (2, 3, 16)


@given(
    st.dictionaries(
        st.tuples(st.text(max_size=4), st.text(max_size=4)).map(lambda pair: pair if pair[1] else pair[:1]),
        st.tuples(st.sampled_from(IN_SPEC), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_any_structure_comes_back(entries: dict[tuple[str, ...], Any]) -> None:
    td = TensorDict()
    for key, (name, shape) in entries.items():
        if key[0] not in td.keys() or (len(key) > 1 and isinstance(td.get(key[0]), TensorDict)):
            td[key] = content(getattr(torch, name), tuple(shape))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x"
        try:
            td.to_safetensors(path, separator="\0\0\0\0\0")
        except SaveError as error:
            assert "would both be stored" in str(error)  # noqa: PT017
            return
        again = from_safetensors(path)
    assert list(again.keys(True, True)) == list(td.keys(True, True))
    for key, value in td.items(True, True):
        assert again[key].dtype is value.dtype and again[key].shape == value.shape and raw(again[key]) == raw(value)


# --- loading ----------------------------------------------------------------------------------------------------------


def test_loading_maps_and_leaves_the_file_alone(tmp_path: pathlib.Path) -> None:
    td = TensorDict({f"k{i}": torch.ones(1 << 20) for i in range(32)})
    td.to_safetensors(tmp_path / "x", num_threads=2)
    before = resident()
    again = from_safetensors(tmp_path / "x")
    assert resident() - before < 16 << 20, "loading has read what nobody has asked for"
    assert again["k31"].sum() == 1 << 20
    again["k0"].zero_()
    assert from_safetensors(tmp_path / "x")["k0"].sum() == 1 << 20
    assert type(again["k0"]) is torch.Tensor and not again.is_memmap()
    assert again["k1"].data_ptr() % 4 == 0


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_devices(tmp_path: pathlib.Path) -> None:
    many_kinds().exclude("rows").to_safetensors(tmp_path / "x")
    meta = from_safetensors(tmp_path / "x", device="meta")
    assert meta.device == torch.device("meta") and meta["b", "c"].is_meta and meta["frame"].image.is_meta
    assert from_safetensors(tmp_path / "x", device="cpu")["a"].tolist() == [[0, 1], [2, 3], [4, 5]]
    many_kinds().to_safetensors(tmp_path / "x")
    with pytest.raises(UnsupportedEntryError, match="'rows': .*meta device"):
        from_safetensors(tmp_path / "x", device="meta")
    with torch._subclasses.FakeTensorMode():
        fake = from_safetensors_without_rows(tmp_path)
    assert type(fake["a"]).__name__ == "FakeTensor"


def from_safetensors_without_rows(folder: pathlib.Path) -> Any:
    file = folder / "fake"
    file.write_bytes(one_file({"a": ("F32", [2], 8)}))
    return from_safetensors(file)


@pytest.mark.gpu
def test_a_gpu_both_ways(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.arange(5000, device="cuda"), "b": torch.ones(3, 4, device="cuda").t()}, device="cuda")
    td.to_safetensors(tmp_path / "x")
    assert from_safetensors(tmp_path / "x")["a"].tolist() == list(range(5000))
    again = from_safetensors(tmp_path / "x", device="cuda")
    assert again["b"].is_cuda and again.device.type == "cuda" and torch.equal(again["b"], td["b"])


def test_a_replaced_file_stays_as_it_was_for_who_has_it(tmp_path: pathlib.Path) -> None:
    TensorDict({"a": torch.ones(1000)}).to_safetensors(tmp_path / "x", durable=True)
    old = from_safetensors(tmp_path / "x")
    TensorDict({"a": torch.zeros(1000)}).to_safetensors(tmp_path / "x")
    assert (old["a"] == 1).all() and (from_safetensors(tmp_path / "x")["a"] == 0).all()
    old.to_safetensors(tmp_path / "x")  # Onto the file that is mapped.
    assert (from_safetensors(tmp_path / "x")["a"] == 1).all()


# --- what cannot be saved ---------------------------------------------------------------------------------------------


def test_refusals_leave_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    TensorDict({"a": torch.ones(1)}).to_safetensors(path)
    before = path.read_bytes()
    refused: list[tuple[TensorDict, str]] = [
        (TensorDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}), "'a.b'.*another separator"),
        (TensorDict({"n": {"s": torch.eye(2).to_sparse()}}), r"\('n', 's'\).*sparse"),
        (TensorDict({"m": torch.empty(2, device="meta")}), "'m'.*meta device"),
        (TensorDict({"o": object()}), "'o'.*object.*JSON"),
        (TensorDict({"__metadata__": torch.ones(1)}), "__metadata__.*rename"),
        (TensorDict({"\ud800": torch.ones(1)}), "surrogates"),
    ]
    for td, message in refused:
        with pytest.raises(SaveError, match=message):
            td.to_safetensors(path)
        assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]
    refused[0][0].to_safetensors(path, separator="/")
    assert from_safetensors(path)["a.b"].shape == (1,)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        to_safetensors(TensorDict(), tmp_path / "nowhere" / "x")


def test_a_full_disk_leaves_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    TensorDict({"a": torch.ones(1)}).to_safetensors(path)
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_row", full)
    with pytest.raises(OSError, match=f"No space.*{path}") as caught:
        TensorDict({"a": torch.zeros(1)}).to_safetensors(path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x"]


def test_short_writes_are_completed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwritev, []

    def short(fd: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        whole = b"".join(bytes(buffer) for buffer in buffers)
        return os.pwrite(fd, whole[: len(whole) * 2 // 3], offset)

    td = TensorDict({f"k{i}": torch.full((i,), i) for i in range(2500)})
    monkeypatch.setattr(os, "pwritev", short)
    td.to_safetensors(tmp_path / "x")
    monkeypatch.setattr(os, "pwritev", real)
    assert len(calls) == 3
    assert (from_safetensors(tmp_path / "x") == td).all()


# --- broken and hostile files ----------------------------------------------------------------------------------------


def one_file(entries: dict[str, Any], metadata: Any = None, data: int | None = None) -> bytes:
    """A file of these (dtype, shape, size in bytes), or of raw JSON values."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, entry in entries.items():
        if isinstance(entry, tuple):
            dtype, shape, size = entry
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        else:
            header[name] = entry
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end if data is None else data)


def raw_file(text: bytes, data: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def structure(root: Any, **changes: Any) -> dict[str, str]:
    value = {"version": 1, "separator": ".", "root": root, **changes}
    return {"tensordict_structure": json.dumps(value)}


def node(entries: Any, **changes: Any) -> dict[str, Any]:
    return {"kind": "TensorDict", "batch_size": [], "entries": entries, **changes}


BROKEN = {
    "nothing": b"",
    "too short": b"\0" * 7,
    "no header": b"\0" * 8,
    "longer than the file": struct.pack("<Q", 100) + b"{}",
    "overflowing": struct.pack("<Q", 2**64 - 1) + b"{}",
    "huge header": struct.pack("<Q", 100_000_001) + b"{}",
    "no object": raw_file(b"[]  "),
    "no JSON": raw_file(b"{nope}"),
    "no text": raw_file(b'{"\xff\xfe": 1}'),
    "deep": raw_file(b'{"a":' * 100_000),
    "nan": raw_file(b'{"a": NaN}'),
    "twice": raw_file(b'{"a": %b, "a": %b}' % (2 * (json.dumps(entry()).encode(),)), 8),
    "two shapes": raw_file(b'{"a": {"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', 8),
    "number": one_file({"a": 3}),
    "no dtype": one_file({"a": {"shape": [], "data_offsets": [0, 0]}}),
    "dtype is a list": one_file({"a": entry(dtype=[])}, data=8),
    "shape is a number": one_file({"a": entry(shape=2)}, data=8),
    "shape is true": one_file({"a": entry(shape=[True, 2])}, data=8),
    "shape is a float": one_file({"a": entry(shape=[2.0])}, data=8),
    "negative shape": one_file({"a": entry(shape=[-2])}, data=8),
    "shape overflows": one_file({"a": entry(shape=[2**62, 4], data_offsets=[0, 0])}),
    "shape of zeros overflows": one_file({"a": entry(shape=[0, 2**62, 2**62], data_offsets=[0, 0])}),
    "many dims": one_file({"a": entry(shape=[1] * 100, data_offsets=[0, 4])}, data=4),
    "offsets of three": one_file({"a": entry(data_offsets=[0, 8, 9])}, data=8),
    "offsets turned": one_file({"a": entry(data_offsets=[8, 0])}, data=8),
    "negative offsets": one_file({"a": entry(data_offsets=[-8, 0])}, data=8),
    "beyond the end": one_file({"a": entry(data_offsets=[2**40, 2**40 + 8])}, data=8),
    "other size": one_file({"a": entry(shape=[3])}, data=8),
    "hole in front": one_file({"a": entry(data_offsets=[4, 12])}, data=12),
    "hole": one_file({"a": entry(), "b": entry(data_offsets=[12, 20])}, data=20),
    "overlap": one_file({"a": entry(), "b": entry(data_offsets=[4, 12])}, data=12),
    "too long": one_file({"a": entry()}, data=9),
    "cut off": one_file({"a": entry()}, data=7),
    "metadata of numbers": one_file({"a": entry()}, metadata={"a": 1}, data=8),
    "metadata is a list": one_file({}, metadata=[]),
    "structure is no JSON": one_file({}, metadata={"tensordict_structure": "{"}),
    "structure is a list": one_file({}, metadata={"tensordict_structure": "[]"}),
    "structure is deep": one_file({}, metadata={"tensordict_structure": "[" * 100_000}),
    "no root": one_file({}, metadata={"tensordict_structure": '{"version": 1, "separator": "."}'}),
    "other version": one_file({}, metadata=structure(node({}), version=2)),
    "missing tensor": one_file({}, metadata=structure(node({"a": {}}))),
    "unknown tensor": one_file({"a": entry()}, metadata=structure(node({})), data=8),
    "entries are a list": one_file({}, metadata=structure(node([]))),
    "entry is a number": one_file({}, metadata=structure(node({"a": 1}))),
    "kind": one_file({}, metadata=structure(node({}, kind="os"))),
    "kind is a list": one_file({}, metadata=structure(node({}, kind=[]))),
    "class": one_file({}, metadata=structure(node({}, **{"class": "os.system"}))),
    "class is a number": one_file({}, metadata=structure(node({}, **{"class": 1}))),
    "batch size": one_file({"a": entry()}, metadata=structure(node({"a": {}}, batch_size=[3])), data=8),
    "negative batch size": one_file({}, metadata=structure(node({}, batch_size=[-1]))),
    "names": one_file({}, metadata=structure(node({}, names=["a"]))),
    "device": one_file({}, metadata=structure(node({}, device="nowhere"))),
    "device is a number": one_file({}, metadata=structure(node({}, device=0))),
    "stack dim": one_file({}, metadata=structure(node({}, kind="LazyStackedTensorDict", stack_dim=0))),
    "member": one_file(
        {"a": entry()},
        data=8,
        metadata=structure(node({"a": {}}, kind="LazyStackedTensorDict", batch_size=[1], stack_dim=0)),
    ),
    "tensor as member": one_file(
        {"0": entry()},
        data=8,
        metadata=structure(node({"0": {}}, kind="LazyStackedTensorDict", batch_size=[1], stack_dim=0)),
    ),
    "no value": one_file({}, metadata=structure({"kind": "NonTensorData", "batch_size": []})),
    "value": one_file({}, metadata=structure({"kind": "NonTensorData", "batch_size": [], "value": {"%tuple": 1}})),
    "values": one_file(
        {}, metadata=structure({"kind": "NonTensorStack", "batch_size": [2], "stack_dim": 0, "value": ["a"]})
    ),
    "no rows": one_file({"a": entry()}, metadata=structure(node({"a": {"ragged": None}})), data=8),
    "rows": one_file(
        {"a": entry(), "a%sizes": entry(dtype="I64", shape=[1, 1], data_offsets=[8, 16])},
        metadata=structure(node({"a": {"ragged": None}})),
        data=16,
    ),
    "form of the rows": one_file(
        {"a": ("F32", [0], 0), "a%sizes": ("I64", [1, 1], 8)}, metadata=structure(node({"a": {"ragged": [3]}}))
    ),
    "unbatched": one_file({}, metadata=structure({"kind": "UnbatchedTensor", "batch_size": [], "entries": {}})),
    "deep structure": one_file(
        {},
        metadata={
            "tensordict_structure": '{"version":1,"separator":".","root":'
            + '{"kind":"TensorDict","batch_size":[],"entries":{"a":' * 900
            + "1"
            + "}}" * 900
            + "}"
        },
    ),
    "bytes of no dtype": one_file({"a": entry()}, metadata={"tensordict_dtypes": '{"a": "os"}'}, data=8),
    "bytes of nothing": one_file({}, metadata={"tensordict_dtypes": '{"a": "torch.complex128"}'}),
    "bytes of another size": one_file(
        {"a": ("U8", [8], 8)}, metadata={"tensordict_dtypes": '{"a": "torch.complex128"}'}
    ),
    "deep name": one_file({"." * 5000: entry()}, data=8),
    "half a byte": one_file({"a": ("F4", [3], 2)}),
    "six bits": one_file({"a": ("F6_E2M3", [4], 3)}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(BROKEN[name])
    with pytest.raises(SaveError) as caught:
        from_safetensors(path)
    assert str(path) in str(caught.value) or "entry" in str(caught.value)


def test_files_that_are_none(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        from_safetensors(tmp_path / "missing")
    with pytest.raises(SaveError, match="regular file"):
        from_safetensors(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SaveError, match="regular file"):
        from_safetensors(tmp_path / "pipe")


def test_odd_but_sound_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(raw_file(b"{}"))
    assert from_safetensors(path).is_empty()
    # The data of other programs may begin anywhere: what cannot be mapped is copied.
    header = b'{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8 + 1)
    path.write_bytes(raw_file(header) + struct.pack("<q", 7))
    assert from_safetensors(path)["a"].tolist() == [7]
    path.write_bytes(one_file({"a": ("F4", [4], 2)}))
    assert from_safetensors(path)["a"].shape == (2,)


def test_verify_and_describe(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    many_kinds().to_safetensors(path)
    report = verify(path)
    assert report.ok and report.format == "safetensors" and report.leaves == len(list(many_kinds()._leaves()))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SaveError, match="cut off"):
        verify(path)


@given(st.data())
def test_no_mutation_crashes(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x")
        many_kinds().to_safetensors(path)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, len(content) - 1))
            change = data.draw(st.sampled_from(["byte", "cut", "insert"]))
            if change == "byte":
                content[position] = data.draw(st.integers(0, 255))
            elif change == "cut":
                del content[position : position + data.draw(st.integers(1, 9))]
            else:
                content[position:position] = data.draw(st.binary(max_size=9))
            if not content:
                break
        path.write_bytes(bytes(content))
        try:
            found = from_safetensors(path)
        except SaveError:
            return
        repr(found)
        if not found._is_non_tensor:
            found.clone()
