"""Construction, and the batch size that it fixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, assert_matches, nodes
from tensordict import TensorDict, make_tensordict


def test_holds_its_content(td: Any, plain: Plain, kind: Kind) -> None:
    assert_matches(td, plain, kind.batch_size, kind.extra)
    assert td.is_locked == kind.locked
    assert td.device == (None if kind.device is None else torch.device(kind.device))
    assert td.names == ([None] * len(kind.batch_size) if kind.names is None else list(kind.names))


def test_shape_properties(td: Any, kind: Kind) -> None:
    model = torch.empty(kind.batch_size)
    assert td.shape == td.batch_size == model.shape
    assert td.ndim == td.batch_dims == td.ndimension() == td.dim() == model.ndim
    assert td.numel() == model.numel()
    assert td.size() == model.size()
    assert [td.size(dim) for dim in range(model.ndim)] == list(model.shape)


def test_from_plain_dict_and_back(td: Any, plain: Plain, kind: Kind) -> None:
    made = TensorDict(plain, batch_size=kind.batch_size)
    assert_matches(made, plain, kind.batch_size, {})
    assert_matches(TensorDict(td, batch_size=kind.batch_size), plain, kind.batch_size, kind.extra)
    assert_matches(
        TensorDict.from_dict(td.to_dict(retain_none=False), batch_size=kind.batch_size), plain, kind.batch_size, {}
    )


def test_nested_container_is_kept(td: Any, kind: Kind) -> None:
    assert TensorDict({"inner": td}, batch_size=kind.batch_size)["inner"] is td
    assert TensorDict({"inner": td})["inner"] is td
    assert td.batch_size == torch.Size(kind.batch_size)


def test_nested_batch_size_must_begin_with_the_parents(td: Any, kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="inner|a|mask"):
        TensorDict({"inner": td}, batch_size=(*kind.batch_size, 7))


def test_batch_size_setter(writable: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("no batch dimension to drop")
    if not kind.resizes:
        pytest.skip("the batch size of this kind is fixed")
    writable.batch_size = kind.batch_size[:-1]
    assert writable.batch_size == torch.Size(kind.batch_size[:-1])
    for path in nodes(plain):
        assert writable[path].batch_size == torch.Size((*kind.batch_size, *kind.extra.get(path, ())))
    writable.batch_size = list(kind.batch_size)
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_rejected_batch_size_names_the_key_and_changes_nothing(writable: Any, plain: Plain, kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="a|mask"):
        writable.batch_size = [*kind.batch_size, 2, 2]
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_rejected_batch_size_names_the_nested_key() -> None:
    td = TensorDict({"outer": {"inner": TensorDict({"leaf": torch.zeros(3, 4)}, [])}})
    with pytest.raises(RuntimeError, match="outer.*inner"):
        td.batch_size = [5]
    assert td.batch_size == td["outer"].batch_size == td["outer", "inner"].batch_size == torch.Size([])


def test_auto_batch_size(writable: Any, kind: Kind) -> None:
    if not kind.resizes:
        pytest.skip("the batch size of this kind is fixed")
    assert writable.auto_batch_size_(1) is writable
    assert writable.batch_size == torch.Size(kind.batch_size[:1])
    writable.auto_batch_size_()
    assert writable.batch_size[: len(kind.batch_size)] == torch.Size(kind.batch_size)


@pytest.mark.parametrize("batch_size", [3, [3], (3,), torch.Size([3])])
def test_forms_of_batch_size(batch_size: Any) -> None:
    assert TensorDict({"a": torch.zeros(3, 4)}, batch_size).batch_size == torch.Size([3])
    assert TensorDict({"a": torch.zeros(3, 4)}, batch_size=batch_size).batch_size == torch.Size([3])


def test_batch_size_defaults_to_empty() -> None:
    assert TensorDict({"a": torch.zeros(3, 4)}).batch_size == torch.Size([])
    assert TensorDict({"a": torch.zeros(3, 4)}, None).batch_size == torch.Size([])
    assert TensorDict().batch_size == torch.Size([])
    assert TensorDict(batch_size=[2]).batch_size == torch.Size([2])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, torch.tensor(1)),
        (1.5, torch.tensor(1.5)),
        (True, torch.tensor(True)),
        ([1, 2], torch.tensor([1, 2])),
        ((1.0, 2.0), torch.tensor([1.0, 2.0], dtype=torch.float64)),
        (((1, 2.5), [1, 2]), torch.tensor([[1, 2.5], [1, 2]], dtype=torch.float64)),
        ([1.0, 2.0], torch.tensor([1.0, 2.0])),
        ([[1], [2]], torch.tensor([[1], [2]])),
        (np.arange(3), torch.arange(3)),
        (np.ones((2, 3)), torch.ones(2, 3, dtype=torch.float64)),
        (np.float32(3), torch.tensor(3.0)),
        (np.int16(3), torch.tensor(3, dtype=torch.int16)),
        (np.bool_(True), torch.tensor(True)),
    ],
)
def test_values_become_tensors(value: Any, expected: torch.Tensor) -> None:
    for made in (TensorDict({"x": value}), TensorDict(x=value), TensorDict().set("x", value)):
        assert_matches(made, {"x": expected}, ())
    assert_matches(TensorDict({"n": {"x": value}}), {"n": {"x": expected}}, (), {})


def test_tuple_keys_make_nested_containers() -> None:
    made = TensorDict({("a", "b"): torch.zeros(2), ("a", ("c", "d")): torch.ones(2)}, [2])
    assert_matches(made, {"a": {"b": torch.zeros(2), "c": {"d": torch.ones(2)}}}, (2,), {})


def test_keywords_and_source_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="keyword|kwargs|both"):
        TensorDict({"a": 1}, b=2)


def test_options() -> None:
    made = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["x", "y"], device="cpu", lock=True, non_blocking=False)
    assert made.is_locked and made.device == torch.device("cpu") and made.names == ["x", "y"]
    assert TensorDict(a=1, device="cpu").device == torch.device("cpu")
    assert TensorDict({"n": {"a": 1}}, lock=True)["n"].is_locked


@pytest.mark.parametrize("names", [["x"], ["x", "y", "z"], ["x", "x"]])
def test_bad_names(names: list[str]) -> None:
    with pytest.raises(ValueError, match="name"):
        TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=names)


@pytest.mark.parametrize("source", [[1], "text", 3, torch.zeros(2)])
def test_bad_source(source: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        TensorDict(source)


@pytest.mark.parametrize("key", [1, (), ("a", 1), None, ("a", ())])
def test_bad_keys(key: Any) -> None:
    with pytest.raises(TypeError):
        TensorDict({key: torch.zeros(2)})


@pytest.mark.parametrize(
    ("entries", "batch_size", "key"),
    [
        ({"fine": torch.zeros(3), "wrong": torch.zeros(2)}, [3], "wrong"),
        ({"outer": {"wrong": torch.zeros(2)}}, [3], "outer.*wrong"),
        ({"wrong": 1}, [3], "wrong"),
        ({"outer": TensorDict({"x": torch.zeros(2)}, [2])}, [3], "outer"),
    ],
)
def test_wrong_shapes_name_the_key(entries: Plain, batch_size: list[int], key: str) -> None:
    with pytest.raises(RuntimeError, match=key):
        TensorDict(entries, batch_size)


def test_smaller_nested_batch_size_grows_to_the_parents() -> None:
    inner = TensorDict({"x": torch.zeros(3, 4)}, [])
    made = TensorDict({"n": inner}, [3])
    assert made["n"].batch_size == torch.Size([3])


def test_fromkeys() -> None:
    made = TensorDict.fromkeys(["a", ("b", "c")], 2)
    assert_matches(made, {"a": torch.tensor(2), "b": {"c": torch.tensor(2)}}, (), {})
    assert_matches(TensorDict.fromkeys(["a"]), {"a": torch.tensor(0)}, ())


def test_from_dict_and_make_tensordict() -> None:
    source = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3, 5)}}
    assert TensorDict.from_dict(source).batch_size == torch.Size([])
    automatic = TensorDict.from_dict(source, auto_batch_size=True)
    assert automatic.batch_size == torch.Size([3]) and automatic["b"].batch_size == torch.Size([3, 5])
    assert TensorDict.from_dict(source, batch_size=[3])["b"].batch_size == torch.Size([3])
    assert make_tensordict(a=torch.zeros(3)).batch_size == torch.Size([])
    assert make_tensordict({"a": torch.zeros(3)}, batch_size=[3]).batch_size == torch.Size([3])
    assert make_tensordict({"a": torch.zeros(3)}, auto_batch_size=True).batch_size == torch.Size([3])
