"""Settings of the tests of modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributions import Distribution


@pytest.fixture(autouse=True)
def validated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Distributions check their arguments as in a new process or, where tests compile, as torch leaves it then."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args("seconds" not in request.keywords)
    yield
    Distribution.set_default_validate_args(before)
