"""The compact form of `repr`, which `set_printoptions(compact=True)` selects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict import (
    MetaData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    get_printoptions,
    lazy_stack,
    set_printoptions,
)


class Row(TensorClass):
    x: torch.Tensor
    y: str = "q"
    z: Any = None


@pytest.fixture(autouse=True)
def compact() -> Iterator[None]:
    with set_printoptions(compact=True):
        yield


def test_entries_are_dtypes_and_feature_dims() -> None:
    assert repr(TensorDict()) == "TensorDict(batch_size=[], fields={})"
    td = TensorDict(b=torch.ones(2, 3), a=torch.zeros(2, dtype=torch.bool), batch_size=[2], device="cpu")
    assert repr(td) == str(td) == "TensorDict(batch_size=[2], device=cpu, fields={a: bool[], b: f32[3]})"
    meta = TensorDict(a=torch.ones(2, device="meta"), n=TensorDict(b=torch.ones(1, device="meta"), device="meta"))
    assert repr(meta) == "TensorDict(batch_size=[], fields={a: f32[2]@meta, n: {b: f32[1]}})"


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float16, "f16"),
        (torch.bfloat16, "bf16"),
        (torch.float8_e5m2, "f8_e5m2"),
        (torch.int8, "i8"),
        (torch.uint64, "u64"),
        (torch.complex128, "c128"),
    ],
)
def test_short_dtypes(dtype: torch.dtype, text: str) -> None:
    assert repr(TensorDict(a=torch.zeros(2, dtype=dtype))) == f"TensorDict(batch_size=[], fields={{a: {text}[2]}})"


def test_nested_containers_and_values() -> None:
    inner = TensorDict(b=torch.ones(2, 3, 4), batch_size=[2, 3])
    td = TensorDict(n=inner, m={"c": torch.ones(2)}, e={}, batch_size=[2])
    assert repr(td) == "TensorDict(batch_size=[2], fields={e: {}, m: {c: f32[]}, n: [3]{b: f32[4]}})"
    values = TensorDict(a="text", e=NonTensorStack("a", "b"), m=MetaData("q"), batch_size=[2])
    assert repr(values) == "TensorDict(batch_size=[2], fields={a: str, e: NonTensorStack, m: MetaData})"
    assert repr(TensorDict(u=UnbatchedTensor(torch.ones(5)), batch_size=[2])).endswith("{u: f32[5]})")
    row = Row(torch.ones(2, 3), batch_size=[2])
    assert repr(row) == "Row(batch_size=[2], fields={x: f32[3], y: str, z: None})"
    assert repr(TensorDict(r=row)) == "TensorDict(batch_size=[], fields={r: Row[2]{x: f32[3], y: str, z: None}})"
    assert repr(TensorDictParams(TensorDict(a=torch.ones(2)))).startswith(
        "TensorDictParams(params=TensorDict(batch_size=[], fields={a: f32[2]})"
    )


def test_lazy_stacks_show_what_differs() -> None:
    stack = lazy_stack([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3), b=1)])
    assert repr(stack) == (
        "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={\n"
        "    a: f32[-1]}, exclusive_fields={1: {b: i64[]}})"
    )
    ranks = lazy_stack([TensorDict(a=torch.ones(())), TensorDict(a=torch.ones(2))])
    assert repr(ranks) == "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={a: f32[-1]})"


def test_long_texts_have_a_line_for_each_entry() -> None:
    for length in range(40, 50):
        td = TensorDict({"k" * length: 1.0})
        one_line = len(f"TensorDict(batch_size=[], fields={{{'k' * length}: f32[]}})") <= 80
        assert ("\n" not in repr(td)) is one_line
    td = TensorDict(n={"deep": {f"key_{i}": torch.ones(i, 1, 1) for i in range(6)}, "z": 1.0}, m={"a": 1})
    lines = ",\n".join(f"            key_{i}: f32[{i},1,1]" for i in range(6))
    assert repr(td) == (
        "TensorDict(batch_size=[], fields={\n"
        "    m: {a: i64[]},\n"
        "    n: {\n"
        "        deep: {\n"
        f"{lines}}},\n"
        "        z: f32[]}})"
    )


def test_options_of_the_compact_form() -> None:
    td = TensorDict(b=torch.ones(2), aa=1, device="cpu")
    with set_printoptions(show_batch_size=False, show_device=False, show_dtype=False):
        assert repr(td) == "TensorDict(fields={aa: [], b: [2]})"
    with set_printoptions(sort_keys="insertion"):
        assert repr(td).endswith("fields={b: f32[2], aa: i64[]})")
    with set_printoptions(sort_keys=len):
        assert repr(td).endswith("fields={b: f32[2], aa: i64[]})")
    with set_printoptions(show_grad=True):  # an option of the detailed form selects it
        assert not get_printoptions()["compact"] and "requires_grad=False" in repr(td)
    with set_printoptions(show_grad=True, compact=True):
        assert repr(td).endswith("fields={aa: i64[], b: f32[2]})")
    assert get_printoptions()["compact"]
    assert td._repr_html_() is not None
    with set_printoptions(html=False):
        assert td._repr_html_() is None


def test_stored_containers(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    stored = TensorDict(a=torch.ones(2, 3), batch_size=[2]).to_h5(tmp_path / "x.h5")
    assert repr(stored) == "PersistentTensorDict(batch_size=[2], fields={a: f32[3]})"


def test_the_detailed_form_is_the_default() -> None:
    with set_printoptions(compact=False):
        assert repr(TensorDict(a=1)).startswith("TensorDict(\n    fields={\n")
