"""Settings that hold for a block, a function, a thread or the rest of the program."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import tensordict.utils
from tensordict import TensorDict, get_defaults_to_none, lazy_legacy, set_get_defaults_to_none, set_lazy_legacy
from tensordict.core import settings


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Each test leaves nobody who asks for lazy results."""
    yield
    left = lazy_legacy(), settings.lazy_legacy_possible
    set_lazy_legacy(False).set()
    assert left == (False, False)


def in_another_thread() -> bool | None:
    """`lazy_legacy()` as a new thread sees it."""
    seen: list[bool | None] = []
    thread = threading.Thread(target=lambda: seen.append(lazy_legacy()))
    thread.start()
    thread.join()
    return seen[0]


def test_off_until_chosen() -> None:
    assert lazy_legacy() is False
    set_lazy_legacy(True)  # An object that nobody entered or set.
    assert lazy_legacy() is False and not settings.lazy_legacy_possible


def test_a_block() -> None:
    with set_lazy_legacy(True):
        assert lazy_legacy() is True
        with set_lazy_legacy(False):
            assert lazy_legacy() is False
            with set_lazy_legacy(True):
                assert lazy_legacy() is True
            assert lazy_legacy() is False
        assert lazy_legacy() is True
    assert lazy_legacy() is False


def test_one_object_twice() -> None:
    twice = set_lazy_legacy(True)
    with twice:
        with twice:
            assert lazy_legacy()
        assert lazy_legacy()
    assert not lazy_legacy()


def test_a_block_that_raises() -> None:
    with pytest.raises(ValueError, match="inner"), set_lazy_legacy(True), set_lazy_legacy(False):
        raise ValueError("inner")
    assert lazy_legacy() is False


def test_a_function_and_a_generator() -> None:
    @set_lazy_legacy(True)
    def inside(depth: int = 0) -> bool | None:
        return lazy_legacy() and (depth == 3 or inside(depth + 1))

    @set_lazy_legacy(True)
    def steps() -> Iterator[bool | None]:
        yield lazy_legacy()
        yield lazy_legacy()

    assert inside() is True and inside() is True
    generator = steps()
    assert next(generator) is True
    assert lazy_legacy() is False
    assert next(generator) is True
    generator.close()


def test_for_the_rest_of_the_program() -> None:
    set_lazy_legacy(True).set()
    assert lazy_legacy() and in_another_thread()
    with set_lazy_legacy(False):
        assert not lazy_legacy() and in_another_thread()
    assert lazy_legacy()
    set_lazy_legacy(False).set()
    assert not lazy_legacy() and not in_another_thread()


def test_set_inside_a_block_ends_with_it() -> None:
    with set_lazy_legacy(False):
        set_lazy_legacy(True).set()
        assert lazy_legacy() and not in_another_thread()
        set_lazy_legacy(True).set()
    assert not lazy_legacy()
    with set_lazy_legacy(True):
        set_lazy_legacy(False).set()
        assert not lazy_legacy() and not settings.lazy_legacy_possible
    assert not lazy_legacy()


def test_a_block_is_that_of_its_thread() -> None:
    td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
    inside, done = threading.Event(), threading.Event()
    kinds: list[type] = []

    def other() -> None:
        with set_lazy_legacy(True):
            inside.set()
            assert done.wait(10)
            kinds.append(type(td.view(-1)))

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    try:
        assert settings.lazy_legacy_possible and lazy_legacy() is False
        assert type(td.view(-1)) is TensorDict
        with set_lazy_legacy(True):
            pass
        assert settings.lazy_legacy_possible  # The other thread is still in its block.
    finally:
        done.set()
        thread.join()
    assert kinds == [tensordict.LazyView]


def test_who_has_chosen() -> None:
    with set_lazy_legacy(False):
        assert lazy_legacy(allow_none=True) is False
    set_lazy_legacy(False).set()
    assert lazy_legacy(True) is False


def test_the_initial_state() -> None:
    code = "from tensordict import lazy_legacy; print(lazy_legacy(True), lazy_legacy())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["None", "False"]


@pytest.mark.parametrize("mode", [None, 1, "on"])
def test_what_is_no_mode(mode: object) -> None:
    with pytest.raises(TypeError, match=type(mode).__name__):
        set_lazy_legacy(mode)  # type: ignore[arg-type]


def test_public_places() -> None:
    for name in ("lazy_legacy", "set_lazy_legacy", "get_printoptions", "set_printoptions", "parse_tensor_dict_string"):
        assert getattr(tensordict.utils, name) is getattr(tensordict, name)


def test_compiled_while_off() -> None:
    """In one graph; a choice made later is seen, since torch guards what was read."""

    def shaped(x: torch.Tensor) -> torch.Tensor:
        td = TensorDict({"a": x}, [2, 3])
        td = td.view(-1).unsqueeze(0).transpose(0, 1).squeeze(1).view(2, 3).permute(1, 0)
        return torch.stack([td, td])["a"]

    torch._dynamo.reset()
    compiled = torch.compile(shaped, fullgraph=True, backend="eager")
    x = torch.arange(24.0).view(2, 3, 4)
    expected = shaped(x)
    torch.testing.assert_close(compiled(x), expected)
    with set_lazy_legacy(True):
        torch.testing.assert_close(shaped(x), expected)
    torch.testing.assert_close(compiled(x), expected)


def test_get_defaults_to_none() -> None:
    assert get_defaults_to_none()
    assert TensorDict().get("missing") is None
    set_get_defaults_to_none(False)
    try:
        assert not get_defaults_to_none()
        with pytest.raises(KeyError, match="missing"):
            TensorDict().get("missing")
        assert TensorDict().get("missing", None) is None
    finally:
        set_get_defaults_to_none(True)
