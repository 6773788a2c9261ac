"""Settings of the tests of modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributions import Distribution


@pytest.fixture(autouse=True)
def validated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Distributions check their arguments, as in a new process; torch turns it off for good when it compiles."""
    before = Distribution._validate_args
    if "slow" not in request.keywords:
        Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)
