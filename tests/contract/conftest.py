"""Fixtures of the contract suite: each test runs once for every kind."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from contract.kinds import KINDS, Kind
from contract.model import Plain


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def build(kind: Kind, tmp_path: pathlib.Path) -> Callable[[], Any]:
    """Makes one more container of the kind, with the same content."""
    made = iter(range(1000))

    def make() -> Any:
        folder = tmp_path / str(next(made))
        folder.mkdir()
        return kind.build(kind.plain(), kind, folder)

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
