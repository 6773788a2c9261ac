"""The tables of the pages of operations agree with calls whose result is known."""

from __future__ import annotations

import inspect
import pathlib

import pytest
from behaviour import KINDS, Seen, observe, operation, rows
from public_names import MODULES, home, members_of, names_of, operations

from tensordict import LazyStackedTensorDict, MemmapTensor, MemoryMappedTensor, TensorDict, TensorDictBase

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        ("td[0]", "TensorDict", Seen("view")),
        ("td[[0, 2]]", "TensorDict", Seen("copy")),
        ("td.clone()", "TensorDict", Seen("copy")),
        ("td.expand(2, 3, 4)", "TensorDict", Seen("view")),
        ("td.add_(1)", "TensorDict", Seen("in place")),
        ("td.lock_()", "TensorDict", Seen("in place")),
        ("td.squeeze()", "TensorDict", Seen("itself")),
        ("td.pop('a')", "TensorDict", Seen("in place", "gives Tensor")),
        ("td.numel()", "TensorDict", Seen("value", "int")),
        ("td.to_json(path)", "TensorDict", Seen("copy", "on disk")),
        ("td.set('x', torch.ones(3, 4))", "memory-mapped", Seen("refused", "LockedError")),
        ("td.select('a')", "lazy stack", Seen("lazy view")),
        ("td.get('a')", "lazy stack", Seen("copy", "Tensor")),
        ("td[0]", "lazy stack", Seen("view", "TensorDict")),
        ("td.reshape(12)", "HDF5", Seen("copy", "TensorDict")),
        ("td.zero_()", "HDF5", Seen("in place")),
        ("td.get('b')", "HDF5", Seen("lazy view")),
        ("td.transpose(0, 1)", "tensorclass", Seen("view")),
    ],
)
def test_what_is_seen(call: str, kind: str, expected: Seen) -> None:
    assert observe(call, kind) == expected


def test_other_errors_end_the_build() -> None:
    with pytest.raises(NameError):
        observe("td.apply(unknown)", "TensorDict")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("td.view(12)", "view"),
        ("td.shape", "shape"),
        ("td[0].to_arrow()", "to_arrow"),
        ("td.where(torch.ones(3, 4, dtype=torch.bool), other.clone())", "where"),
        ("TensorDict.stack([td, td])", "stack"),
        ("td[torch.ones(3)]", None),
    ],
)
def test_the_operation_of_a_call(call: str, name: str | None) -> None:
    assert operation(call) == name


def test_every_kind_is_one_container_of_the_same_content() -> None:
    assert {observe("td.numel()", kind) for kind in KINDS} == {Seen("value", "int")}
    assert {observe("td.zero_()", kind) for kind in KINDS} == {Seen("in place")}


def test_the_constructor_names_the_types_of_its_arguments() -> None:
    parameters = inspect.signature(TensorDict).parameters
    assert [name for name, parameter in parameters.items() if parameter.annotation == "Any"] == []


def test_every_operation_has_a_family() -> None:
    names = [name for names in operations().values() for name in names]
    assert sorted(names) == sorted(name for name in dir(TensorDictBase) if not name.startswith("_"))
    assert any("td[0]" in rows(family) for family in operations())


def test_every_family_has_a_page_and_every_name_is_in_a_list() -> None:
    """As the test of the site says in minutes."""
    pages = "".join(page.read_text() for page in DOCS.glob("operations/*.rst"))
    assert [family for family in operations() if f".. family:: {family}\n" not in pages] == []
    lists = "".join(page.read_text() for page in DOCS.glob("reference/*.rst"))
    assert [f"{module}.{name}" for module in MODULES for name in names_of(module) if f"   {name}\n" not in lists] == []


def test_where_names_are_documented() -> None:
    assert home("tensordict.nn.TensorDictParams") == "tensordict.TensorDictParams"
    assert MemmapTensor is MemoryMappedTensor and home("tensordict.MemmapTensor") == "tensordict.MemoryMappedTensor"
    members = members_of(LazyStackedTensorDict)
    assert "append" in members and "reshape" not in members
