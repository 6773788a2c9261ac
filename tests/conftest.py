"""Settings that all tests share: hypothesis profiles and the marker of tests that need a GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from reference import ENVIRONMENTS, Reference

# The same examples on every run, so that CI cannot turn red by chance; HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile(
    "ci", derandomize=True, max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs wherever torch finds one")
    # A command that a shell runs in the background ignores it, and so would its tests of interruptions.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device on this machine"))


def pytest_collection_finish() -> None:
    # The 60,000 tests live until the end: without them, a collection of garbage takes 0.1 s in place of 2.
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Freeze what a file of tests leaves behind: caches of torch and of other libraries.

    Looking through them took half of the time of some files: a collection took 0.5 s.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Under `make test-fast`, which has torch alone, skip a test that needs another library."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        ours = (error.name or "").partition(".")[0] == "tensordict"
        if "TENSORDICT_TORCH_ALONE" not in os.environ or ours:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def references() -> Iterator[dict[str, Reference]]:
    """The reference in each of its environments."""
    yield (found := {environment: Reference(environment) for environment in ENVIRONMENTS})
    for reference in found.values():
        reference.close()


@pytest.fixture(params=ENVIRONMENTS)
def reference(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Reference:
    """The reference, of both versions in turn."""
    return references[request.param]


@pytest.fixture
def behaviour(references: dict[str, Reference]) -> Reference:
    """The reference of the version whose behaviour is ours (0.14.3)."""
    return references[".venv-behaviour"]
