"""Groups of processes that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


@pytest.fixture(params=["two", "four"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Of two processes, and of four."""
    found: Ranks = request.getfixturevalue(request.param)
    return found
