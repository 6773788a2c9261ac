"""repr in the format of the documents, and its form for notebooks."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contract.kinds import Kind
from contract.model import Plain, leaves
from tensordict import LazyStackedTensorDict, LazyView, TensorClass, TensorDict, TensorDictParams


def rendered(td: Any, indent: str = "    ") -> str:
    """Build the documented text from the properties of the container."""
    if isinstance(td, LazyView):
        source = rendered(td.to_tensordict().transpose(0, 1), indent + "    ")
        return f"LazyView(\n{indent}source={source},\n{indent}op=transpose(0, 1))"
    if isinstance(td, TensorDictParams):
        return f"TensorDictParams(params={rendered(td.select(*td.keys()), indent)})"
    declared = isinstance(td, TensorClass)
    margin, sign = (indent, "=") if declared else (indent + "    ", ": ")
    rows = []
    for name in sorted(td.keys()):
        value = td.get(name)
        text = row(value) if isinstance(value, torch.Tensor) else rendered(value, margin + "    ")
        rows.append(f"{margin}{name}{sign}{text}")
    own = [f"batch_size={td.batch_size}", f"device={td.device}", f"is_shared={td.is_shared()}"]
    if declared:
        rows += [f"{margin}{f.name}=None" for f in td.fields() if f.name not in td.keys()]
        return f"{type(td).__name__}(\n" + ",\n".join(rows + [indent + fact for fact in own]) + ")"
    if isinstance(td, LazyStackedTensorDict):
        own = [f"exclusive_fields={{\n{indent}}}", *own, f"stack_dim={td.stack_dim}"]
    fields = ",\n".join(rows) + "}" if rows else f"{indent}}}"
    return f"{type(td).__name__}(\n" + ",\n".join(indent + part for part in [f"fields={{\n{fields}", *own]) + ")"


def row(leaf: torch.Tensor) -> str:
    return (
        f"{type(leaf).__name__}(shape={leaf.shape}, device={leaf.device}, dtype={leaf.dtype}, "
        f"is_shared={leaf.is_shared()})"
    )


def test_repr(td: Any, plain: Plain) -> None:
    text = repr(td)
    assert text == str(td) == rendered(td)
    for path, leaf in leaves(plain).items():
        assert re.search(
            rf" {path[-1]}[:=] ?{type(td[path]).__name__}\(shape=[^)]*\), device=cpu, dtype={leaf.dtype}", text
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


class Watch(TorchDispatchMode):
    """Notes what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# The text shows tensors in files, views and the dtype of a stack.
NOTHING = {"empty", "expand", "transpose", "promote_types"}


def test_showing_reads_and_stacks_nothing(td: Any) -> None:
    with Watch() as watch:
        repr(td)
    assert watch.seen <= NOTHING


def test_html_reads_nothing_of_a_store_and_stacks_nothing(td: Any, kind: Kind) -> None:
    with Watch() as watch:
        text = td._repr_html_()
    if kind.in_memory:
        # First elements, and all of small ones one behind the other.
        seen = {"detach", "alias", "slice", "select", "view", "_unsafe_view", "reshape", "cat", "clone"}
        assert watch.seen <= NOTHING | seen
        assert 'class="td-values"' in text
    else:
        assert watch.seen <= NOTHING
        assert 'class="td-values"' not in text and "to_tensordict()" in text


def test_html_shows_the_figures_of_leaves(td: Any, plain: Plain, kind: Kind) -> None:
    text = td._repr_html_()
    for path, leaf in leaves(plain).items():
        if kind.in_memory and leaf.dtype is torch.int64:
            shown = text[text.index(f'"td-key">{path[-1]}<') :]
            found = re.findall(r'"td-name">(\w+)</span><span class="td-values">([^<]*)<', shown)[:3]
            assert found == [("min", "0"), ("mean", f"{leaf.double().mean():.5g}"), ("max", str(int(leaf.max())))]


def test_html_runs_and_loads_nothing(td: Any) -> None:
    text = td._repr_html_()
    assert not re.search(r"<(script|link|iframe|object|embed)|\bon\w+=|javascript:|@import", text)
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(?!data:)", text)


def test_html_and_repr_show_the_same_entries(td: Any) -> None:
    shown = re.findall(r'"td-key">(\w+)<', td._repr_html_())
    text = repr(td).replace(" source=", "").replace(" op=", "")
    assert sorted(shown) == sorted(re.findall(r"^ *(\w+)(?:: |=)\w+\(", text, re.MULTILINE))


def test_html_escapes_keys() -> None:
    text = TensorDict({"<script>": 1})._repr_html_()
    assert "<script>" not in text and "&lt;script&gt;" in text


@pytest.mark.parametrize("key", ["with space", "clé", "a.b", "{brace}", "%s"])
def test_odd_keys_are_printed_as_they_are(kind: Kind, key: str) -> None:
    td = TensorDict({key: torch.zeros(kind.batch_size)}, kind.batch_size)
    assert f"        {key}: Tensor(shape=" in repr(td)
