"""repr in the format of the documents, and its form for notebooks."""

from __future__ import annotations

import html
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, leaves
from tensordict import TensorDict


def rendered(td: Any, indent: str = "    ") -> str:
    """The documents' format, written out from what the container says of itself."""
    rows = []
    for name in sorted(td.keys()):
        value = td[name]
        if isinstance(value, torch.Tensor):
            rows.append(
                f"{indent}    {name}: {type(value).__name__}(shape={value.shape}, device={value.device}, "
                f"dtype={value.dtype}, is_shared={value.is_shared()})"
            )
        else:
            rows.append(f"{indent}    {name}: {rendered(value, indent + '        ')}")
    fields = ",\n".join(rows) + "}" if rows else f"{indent}}}"
    own = [
        f"fields={{\n{fields}",
        f"batch_size={td.batch_size}",
        f"device={td.device}",
        f"is_shared={td.is_shared()}",
    ]
    return f"{type(td).__name__}(\n" + ",\n".join(indent + row for row in own) + ")"


def test_repr(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.shows_fields:
        pytest.skip("this kind has a form of its own, tested with it")
    text = repr(td)
    lines = text.splitlines()
    assert lines[0] == f"{type(td).__name__}(" and lines[1] == "    fields={"
    assert lines[-3:] == [
        f"    batch_size={td.batch_size},",
        f"    device={td.device},",
        f"    is_shared={td.is_shared()})",
    ]
    assert text == str(td)
    assert text == rendered(td).replace("fields={\n    }", "fields={\n    }")
    for path, leaf in leaves(plain).items():
        indent = "    " * (2 * len(path))
        assert (
            f"{indent}{path[-1]}: {type(td[path]).__name__}(shape={leaf.shape}, device=cpu, dtype={leaf.dtype}" in text
        )


def test_repr_of_nothing() -> None:
    expected = """TensorDict(
    fields={
    },
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)"""
    assert repr(TensorDict()) == expected


def test_repr_of_an_empty_node() -> None:
    expected = """TensorDict(
    fields={
        a: TensorDict(
            fields={
            },
            batch_size=torch.Size([]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)"""
    assert repr(TensorDict({"a": {}})) == expected


def test_repr_sorts_and_names_the_class() -> None:
    td = TensorDict({"z": torch.nn.Parameter(torch.zeros(1)), "a": torch.zeros(2, device="meta")})
    expected = """TensorDict(
    fields={
        a: Tensor(shape=torch.Size([2]), device=meta, dtype=torch.float32, is_shared=False),
        z: Parameter(shape=torch.Size([1]), device=cpu, dtype=torch.float32, is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)"""
    assert repr(td) == expected


def test_html(td: Any, plain: Plain) -> None:
    text = td._repr_html_()
    assert isinstance(text, str) and text.lstrip().startswith("<")
    for path, leaf in leaves(plain).items():
        assert html.escape(path[-1]) in text and str(leaf.dtype).removeprefix("torch.") in text


def test_html_escapes_keys() -> None:
    text = TensorDict({"<script>": 1})._repr_html_()
    assert "<script>" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize("key", ["with space", "clé", "a.b", "{brace}", "%s"])
def test_odd_keys_are_printed_as_they_are(kind: Kind, key: str) -> None:
    td = TensorDict({key: torch.zeros(kind.batch_size)}, kind.batch_size)
    assert f"        {key}: Tensor(shape=" in repr(td)
