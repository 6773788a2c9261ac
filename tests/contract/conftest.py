"""Fixtures of the contract suite: each test runs once for every kind."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from contract.kinds import KINDS, Kind
from contract.model import Plain

_MARKED = [pytest.param(kind, marks=pytest.mark.slow if kind.slow else (), id=kind.name) for kind in KINDS]


# Of Zarr these show only what those of HDF5 show: they read whole entries, and their results are in memory.
_AS_HDF5 = (
    "apply", "casting", "checkpointing", "comparison", "construction", "exchange", "pointwise", "printing", "reducing",
    "shape", "torch_functions",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind = getattr(getattr(item, "callspec", None), "params", {}).get("kind")
        if isinstance(kind, Kind) and kind.name == "zarr" and item.path.stem.removeprefix("test_") in _AS_HDF5:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=_MARKED)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


class Folder:
    """An empty folder, made when something is put into it: most kinds put nothing there, and making it takes time."""

    def __init__(self, request: pytest.FixtureRequest, name: str) -> None:
        self._request = request
        self._name = name

    @functools.cached_property
    def path(self) -> pathlib.Path:
        path: pathlib.Path = self._request.getfixturevalue("tmp_path") / self._name
        path.mkdir()
        return path

    def __truediv__(self, name: str) -> pathlib.Path:
        return self.path / name


@pytest.fixture
def build(kind: Kind, request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes one more container of the kind, with the same content."""
    made = iter(range(1000))

    def make() -> Any:
        return kind.build(kind.plain(), kind, Folder(request, str(next(made))))  # type: ignore[arg-type]

    return make


@pytest.fixture
def td(build: Callable[[], Any]) -> Any:
    """A container of the kind, as it is built."""
    return build()


@pytest.fixture
def writable(td: Any, kind: Kind) -> Any:
    """A container of the kind that takes structural writes."""
    return td.unlock_() if kind.locked else td


@pytest.fixture
def plain(kind: Kind) -> Plain:
    """The content of `td` as a plain nested dict of tensors."""
    return kind.plain()
