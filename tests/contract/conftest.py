"""Fixtures of the contract suite: each test runs once for every kind."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.kinds import KINDS, Kind
from contract.model import Plain


def _marks(kind: Kind) -> Iterator[pytest.MarkDecorator]:
    if kind.slow:
        yield pytest.mark.slow
    if kind.reason_to_skip:
        yield pytest.mark.skip(reason=kind.reason_to_skip)


_MARKED = [pytest.param(kind, marks=[*_marks(kind)], id=kind.name) for kind in KINDS]


@pytest.fixture(params=_MARKED)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Where the kinds that lie in files have them: in memory where there is such a file system, as they are many."""
    memory = pathlib.Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("contract")
        return
    with tempfile.TemporaryDirectory(prefix="tensordict-contract-", dir=memory) as folder:
        yield pathlib.Path(folder)


class Folder:
    """An empty folder, made when something is put into it: most kinds put nothing there, and making it takes time."""

    _numbers = itertools.count()

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    @functools.cached_property
    def path(self) -> pathlib.Path:
        path: pathlib.Path = self._request.getfixturevalue("folders") / str(next(self._numbers))
        path.mkdir()
        self._request.addfinalizer(lambda: shutil.rmtree(path))
        return path

    def __truediv__(self, name: str) -> pathlib.Path:
        return self.path / name


@pytest.fixture
def build(kind: Kind, request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes one more container of the kind, with the same content."""

    def make() -> Any:
        return kind.build(kind.plain(), kind, Folder(request))  # type: ignore[arg-type]

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
