"""Values that JSON lacks, and tensors in them, come back unchanged from every format, without pickle."""

from __future__ import annotations

import json
import pathlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensordict
from reference import Reference
from tensordict import (
    DatasetWriter,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    load,
    open_dataset,
    verify,
)
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.values import NotJson, decode, encode


def to_consolidated(td: TensorDict, path: str) -> Any:
    td.consolidate(path)
    return TensorDict.from_consolidated(path)


def to_redis(td: TensorDict, path: str) -> Any:
    pytest.importorskip("redis")
    from redis_server import shared_socket
    from tensordict.store import TensorDictStore

    where = {"unix_socket_path": shared_socket()}
    return TensorDictStore.from_store(td_id=td.to_store(**where).td_id, **where)


def saved_as(name: str) -> Callable[[TensorDict, str], Any]:
    def run(td: TensorDict, path: str) -> Any:
        if name.endswith("zarr"):
            pytest.importorskip("zarr", reason="zarr 3 needs Python 3.11")
        tensordict.save(td, path + name)
        assert verify(path + name).ok
        return load(path + name)

    return run


FORMATS: dict[str, Callable[[TensorDict, str], Any]] = {
    **{name: saved_as(name) for name in ("/folder", ".tdz", ".safetensors", ".h5", ".zarr")},
    "consolidated": to_consolidated,
    "redis": to_redis,
}
formats = pytest.mark.parametrize("through", FORMATS.values(), ids=FORMATS)


def same(one: Any, other: Any) -> None:
    """Compare two values in type and content."""
    assert type(one) is type(other)
    if isinstance(one, (Tensor, np.ndarray, np.generic)):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one == other).all() or not np.isfinite(one).all()
    elif isinstance(one, dict):
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other]
        for key in one:
            same(one[key], other[key])
        assert getattr(one, "_metadata", None) == getattr(other, "_metadata", None)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs)
    else:
        assert one == other or one != one


VALUES = {
    "keys": {1: "int", 2.5: None, None: (), ("a", (1, False)): [], "text": {True: 1, 0: False}},
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "tensors": {
        "bf": torch.tensor([1.5]).bfloat16(),
        "none": torch.zeros(0, 3),
        "0-d": torch.tensor(3),
        "f": (True, 1),
    },
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3).T, np.array(2.0), np.zeros((0, 2), bool)],
    "scalars": [np.float32("nan"), np.int64(-3), np.bool_(True), np.complex128(1 + 2j)],
    "module": torch.nn.BatchNorm1d(2).state_dict(),
    "torch": {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda", 1)},
    "state": TensorDict({"a": torch.ones(2, 3), "n": {"b": torch.zeros(2)}}, [2], device="cpu").state_dict(),
    "counter": {"milestones": Counter({30: 1, 80: 2}), "texts": Counter("abca")},
    "ints": [2**63 - 1, 2**63, -(2**127) - 1],
    "types": [dict, list, tuple, OrderedDict],
    "odd": {"%tensor": 0, "n": float("nan"), "i": (-float("inf"),)},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@formats
def test_values_come_back(through: Callable[[TensorDict, str], Any], value: Any, tmp_path: pathlib.Path) -> None:
    td = TensorDict({"x": torch.zeros(2, 1), "n": {"v": NonTensorData(value, batch_size=[2])}}, [2])
    result = through(td, str(tmp_path / "saved"))
    same(result["n", "v"], value)
    assert result.get(("n", "v")).batch_size == (2,) and result["x"].shape == (2, 1)


@formats
def test_optimizers_continue(through: Callable[[TensorDict, str], Any], tmp_path: pathlib.Path) -> None:
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        lambda weights: torch.optim.Adam(weights, lr=0.1),
        lambda weights: torch.optim.AdamW(weights, lr=0.1, amsgrad=True),
    ]

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = (module(torch.arange(6.0).view(2, 3)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for at, make in enumerate(kinds):
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        optimizer = make(module.parameters())
        for _ in range(2):
            step(module, optimizer)
        td = TensorDict(opt=NonTensorData(optimizer.state_dict()), module=NonTensorData(module.state_dict()))
        result = through(td, str(tmp_path / f"saved{at}"))
        other = torch.nn.Linear(3, 2)
        other.load_state_dict(result["module"])
        resumed = make(other.parameters())
        resumed.load_state_dict(result["opt"])
        assert [step(other, resumed) for _ in range(3)] == [step(module, optimizer) for _ in range(3)]
        # The optimizer wrote to its own tensors, and the save did not change.
        again = through(td, str(tmp_path / f"again{at}"))
        same(again["module"], td["module"])


def test_what_is_loaded_is_written_to_in_memory(tmp_path: pathlib.Path) -> None:
    for name in ("x", "x.tdz", "x.safetensors"):
        for options in ({}, {"mode": "r+"}) if name == "x.tdz" else ({},):
            path = tmp_path / name
            tensordict.save(TensorDict(v=NonTensorData({"t": torch.zeros(3), "a": np.zeros(2)})), path, overwrite=True)
            loaded = TensorDict.load_memmap(path, **options)["v"] if options else load(path)["v"]
            loaded["t"].add_(1)
            loaded["a"] += 1
            same(load(path)["v"], {"t": torch.zeros(3), "a": np.zeros(2)})


def test_shared_tensors_stay_one_and_parameters_become_tensors(tmp_path: pathlib.Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    TensorDict(v=NonTensorData({"a": weight, "b": [weight]})).memmap(tmp_path)
    found = load(tmp_path)["v"]
    assert found["a"] is found["b"][0] and type(found["a"]) is Tensor and not found["a"].requires_grad
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == ["0.memmap", "meta.json"]


@formats
def test_stacks_of_values(through: Callable[[TensorDict, str], Any], tmp_path: pathlib.Path) -> None:
    stack = NonTensorStack({"t": torch.ones(1)}, {"t": torch.zeros(2), 1: 2}, "x")
    result = through(TensorDict({"s": stack}, [3]), str(tmp_path / "saved"))
    same(list(result.get("s").tolist()), [{"t": torch.ones(1)}, {"t": torch.zeros(2), 1: 2}, "x"])


def test_lazy_stacks_by_columns_and_data_sets(tmp_path: pathlib.Path) -> None:
    rows = [TensorDict(x=torch.ones(n), v=NonTensorData({"t": torch.full((n,), n), n: n})) for n in range(1, 6)]
    for name in ("x", "x.tdz", "x.safetensors"):
        tensordict.save(lazy_stack(rows), tmp_path / name)
        for row, expected in zip(load(tmp_path / name), rows, strict=True):
            same(row["v"], expected["v"])
    with DatasetWriter(tmp_path / "set") as writer:
        writer.extend(lazy_stack(rows))
    for row, expected in zip(open_dataset(tmp_path / "set"), rows, strict=True):
        same(row["v"], expected["v"])


# --- what is refused --------------------------------------------------------------------------------------------------

cycle: dict[str, Any] = {"a": [1]}
cycle["a"].append(cycle)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (cycle, r"dict at \['a'\]\[1\] is nested in itself"),
        ({"a": [threading.Lock()]}, r"lock at \['a'\]\[0\]"),
        ({"a": {b"x": 1}}, r"key b'x' at \['a'\]"),
        ({"t": torch.eye(2).to_sparse()}, r"Tensor at \['t'\].*sparse"),
        ({"t": torch.ones(2, device="meta")}, r"Tensor at \['t'\].*meta"),
        ({"a": np.array(["x"])}, r"ndarray at \['a'\]"),
        ({"a": np.zeros(2, ">i4")}, r"ndarray at \['a'\]"),
        ({"a": {1, 2}}, r"set at \['a'\]"),
    ],
)
@formats
def test_what_cannot_be_stored(
    through: Callable[[TensorDict, str], Any], value: Any, reason: str, tmp_path: pathlib.Path
) -> None:
    td = TensorDict(x=torch.zeros(2), n={"v": NonTensorData(value)})
    with pytest.raises(UnsupportedEntryError, match=rf"(?s)\('n', 'v'\).*{reason}"):
        through(td, str(tmp_path / "saved"))
    assert not list(tmp_path.iterdir())


def test_values_with_tensors_are_not_written_through(tmp_path: pathlib.Path) -> None:
    td = TensorDict(v=NonTensorData({"t": torch.ones(2)})).memmap_(tmp_path)
    with pytest.raises(UnsupportedEntryError, match="'v'.*holds tensors.*save the container again"):
        td.update_({"v": NonTensorData({"t": torch.zeros(2)})})
    same(load(tmp_path)["v"], {"t": torch.ones(2)})
    td.update_({"v": {1: 2}})
    assert load(tmp_path)["v"] == {1: 2} and not (tmp_path / "v" / "0.memmap").exists()
    with pytest.raises(UnsupportedEntryError, match="'v'.*shared between processes"):
        TensorDict(v=NonTensorData(torch.ones(2))).memmap(tmp_path / "other", share_non_tensor=True)
    assert not (tmp_path / "other").exists()


HOSTILE: list[Any] = [
    {"%tensor": 1},
    {"%tensor": -1},
    {"%tensor": True},
    {"%tensor": "0"},
    {"%array": {}},
    {"%items": [[1]]},
    {"%items": [[1, 2], [True, 3]]},
    {"%items": [[[1], 2]]},
    {"%items": [[{"%tensor": 0}, 2]]},
    {"%items": {"a": 1}},
    {"%ordered": [], "items": 1},
    {"%ordered": 3},
    {"%scalar": ["object", "00"]},
    {"%scalar": ["int64", "00"]},
    {"%scalar": ["int8", "zz"]},
    {"%scalar": 1},
    {"%size": 1},
    {"%size": [1.0]},
    {"%size": [True]},
    {"%dtype": "torch.nn"},
    {"%dtype": "float99"},
    {"%dtype": 1},
    {"%device": "nowhere"},
    {"%device": 0},
    {"%float": [1]},
    {"%counter": {"a": 1}},
    {"%int": 1},
    {"%int": "0x_1"},
    {"%type": "object"},
    {"%type": ["dict"]},
    {"%new": 1},
    {"%tuple": [], "a": 1},
]


@pytest.mark.parametrize("form", HOSTILE, ids=str)
def test_forms_that_nobody_wrote(form: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"no form of a value|no key of a dict|hexadecimal|no device"):
        decode(form, [torch.ones(1)])
    TensorDict(n={"v": NonTensorData({"t": torch.ones(1)})}).memmap(tmp_path)
    path = tmp_path / "n" / "v" / "meta.json"
    meta = json.loads(path.read_text())
    meta["_metadata"]["_exact"] = form
    path.write_text(json.dumps(meta))
    with pytest.raises(SaveError, match=r"\('n', 'v'\).*its value is broken"):
        load(tmp_path)
    assert not verify(tmp_path, raises=False).ok


@pytest.mark.parametrize("name", ["../x", "1", ""])
def test_files_of_tensors_have_no_other_names(name: str, tmp_path: pathlib.Path) -> None:
    TensorDict(v=NonTensorData({"t": torch.ones(1)})).memmap(tmp_path)
    path = tmp_path / "v" / "meta.json"
    meta = json.loads(path.read_text())
    meta["_entries"][0][0] = name
    path.write_text(json.dumps(meta))
    with pytest.raises(SaveError, match="'v'.*its tensors are"):
        load(tmp_path)


def test_a_tensor_that_was_cut_off(tmp_path: pathlib.Path) -> None:
    TensorDict(v=NonTensorData({"t": torch.ones(1000)})).memmap(tmp_path)
    with open(tmp_path / "v" / "0.memmap", "r+b") as file:
        file.truncate(100)
    with pytest.raises(SaveError, match=r"\('v', '0'\).*100 bytes"):
        load(tmp_path)


def test_deep_values() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotJson, match="nested too deeply"):
        encode(deep)


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.reference
def test_the_reference_reads_what_is_beside(tmp_path: pathlib.Path, behaviour: Reference) -> None:
    """It passes over the values that it cannot read; with `allow_pickle=True` it reads them."""
    value = {1: 2, "t": torch.ones(2)}
    td = TensorDict(x=torch.zeros(3), v=NonTensorData(value), o=NonTensorData(OrderedDict(a=1)))
    td.memmap(tmp_path / "folder")
    td.consolidate(tmp_path / "file")
    td.memmap(tmp_path / "pickled", allow_pickle=True)
    program = """
import sys, warnings
warnings.simplefilter("ignore")
from tensordict import TensorDict
folder = TensorDict.load_memmap(sys.argv[1] + "/folder")
file = TensorDict.from_consolidated(sys.argv[1] + "/file")
pickled = TensorDict.load_memmap(sys.argv[1] + "/pickled")
print(sorted(folder.keys()), sorted(file.keys()), folder["o"], file["x"].tolist(), sorted(map(str, pickled["v"])))
"""
    expected = "['o', 'x'] ['o', 'x'] {'a': 1} [0.0, 0.0, 0.0] ['1', 't']"
    assert behaviour.run(program, tmp_path).strip() == expected
