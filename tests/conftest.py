"""Settings that all tests share: hypothesis profiles and the marker of tests that need a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every run, so that CI cannot turn red by chance; HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile(
    "ci", derandomize=True, max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs wherever torch finds one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device on this machine"))
