"""Errors name the key and the likely intention, and keep the phrases that programs match on."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensordict import LazyStackedTensorDict, PersistentTensorDict, TensorClass, TensorDict, lazy_stack


class Data(TensorClass):
    obs: torch.Tensor
    label: str = "none"


def nested() -> TensorDict:
    return TensorDict({"obs": torch.zeros(3), "meta": {"reward": torch.zeros(3)}}, [3])


# --- keys that are not there ------------------------------------------------------------------------------------------


def test_a_wrong_key_among_thousands_shows_the_nearest_and_the_count() -> None:
    td = TensorDict({f"layer.{i}.weight": torch.zeros(1) for i in range(20_000)})
    with pytest.raises(KeyError) as raised:
        td["layer.123.weigth"]
    text = str(raised.value)
    assert len(text) < 400
    assert "'layer.123.weight'" in text and "20000 in all" in text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("osb", "'obs'"),
        ("meta.reward", "('meta', 'reward')"),
        ("meta/reward", "('meta', 'reward')"),
        ("meat", "'meta'"),
    ],
)
def test_a_missing_key_suggests_the_one_that_was_meant(key: str, meant: str) -> None:
    for td in (nested(), lazy_stack([nested(), nested()])):
        text = re.escape(f'key "{key}" not found in {type(td).__name__} with keys')
        for call in (td.__getitem__, td.del_, td.pop, td.select, td.entry_class):
            with pytest.raises(KeyError, match=text) as raised:
                call(key)
            assert str(raised.value).endswith(f"{meant}?")


def test_a_missing_nested_key_names_the_keys_beside_it() -> None:
    with pytest.raises(
        KeyError, match=r"key \('meta', 'rewrad'\) not found .* keys \['reward'\]; did you mean 'reward'\?"
    ):
        nested()["meta", "rewrad"]
    with pytest.raises(KeyError, match=r"with keys \['obs', 'meta'\]$"):
        nested()["nothing", "of", "that"]


def test_the_error_of_a_missing_key_can_be_pickled() -> None:
    with pytest.raises(KeyError) as raised:
        nested()["osb"]
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is type(raised.value) and str(again) == str(raised.value)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_misspelt_options_of_constructors() -> None:
    with pytest.raises(ValueError, match=r"\['bach_size'\].*did you mean 'batch_size'"):
        TensorDict({"a": torch.zeros(3)}, bach_size=[3])
    with pytest.raises(TypeError, match=r"'bach_size'.*did you mean 'batch_size'"):
        Data(torch.zeros(3), bach_size=[3])
    with pytest.raises(TypeError, match=r"'lable'.*did you mean 'label'"):
        Data(torch.zeros(3), lable="a")


@pytest.mark.parametrize("source", [[1, 2], "a", 3])
@pytest.mark.parametrize("call", ["update", "update_"])
def test_updates_from_what_has_no_keys(call: str, source: Any) -> None:
    td = nested()
    with pytest.raises(TypeError, match=f"container, a mapping.*got {type(source).__name__}"):
        getattr(td, call)(source)


@pytest.mark.parametrize("name", ["float32", "torch.float32", "bfloat16"])
def test_the_name_of_a_dtype_is_no_device(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"Invalid device string: '{name}' names a dtype.*use torch\.\w*float"):
        nested().to(name)


@pytest.mark.parametrize("cls", [TensorDict, LazyStackedTensorDict, PersistentTensorDict, Data])
def test_errors_about_arguments_name_no_family(cls: type[Any]) -> None:
    for name in ("memmap", "set_", "view", "select", "lock_", "sum", "apply", "clone", "flatten_keys"):
        with pytest.raises(TypeError) as raised:
            getattr(cls, name)()
        spoken = str(raised.value).partition(".")[0]
        assert spoken in {base.__name__ for base in cls.__mro__}
        assert spoken in ("TensorCollection", "TensorClass", "LazyStackedTensorDict", "PersistentTensorDict")


# --- functions that raise ---------------------------------------------------------------------------------------------


class Own(Exception):
    """Made of two arguments, so that no other message could be put into it."""

    def __init__(self, code: int, more: str) -> None:
        super().__init__(code, more)


APPLIES: dict[str, Callable[[Any, Any], Any]] = {
    "apply": lambda td, fn: td.apply(fn),
    "apply_": lambda td, fn: td.apply_(fn),
    "named_apply": lambda td, fn: td.named_apply(lambda name, leaf: fn(leaf)),
    "lazy": lambda td, fn: lazy_stack([td, td]).apply(fn),
}


@pytest.mark.parametrize("how", APPLIES)
def test_an_exception_inside_apply_names_the_key(how: str) -> None:
    error = Own(3, "as it was")

    def fails(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dtype is torch.int64:
            raise error
        return leaf

    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2, dtype=torch.int64)}}, [2])
    with pytest.raises(Own) as raised:
        APPLIES[how](td, fails)
    assert raised.value is error
    assert error.__notes__ == ["apply: raised by the function for the entry ('n', 'b')"]  # type: ignore[attr-defined]
    assert "('n', 'b')" in "".join(traceback.format_exception(error))


# --- phrases that programs match on -----------------------------------------------------------------------------------

LOCKED = "Cannot modify locked TensorDict"
PHRASES: dict[str, tuple[type[Exception], str, Callable[[TensorDict], Any]]] = {
    "set locked": (RuntimeError, LOCKED, lambda td: td.lock_().set("new", torch.zeros(3))),
    "item locked": (RuntimeError, LOCKED, lambda td: td.lock_().__setitem__("obs", torch.zeros(3))),
    "delete locked": (RuntimeError, LOCKED, lambda td: td.lock_().del_("obs")),
    "rename locked": (RuntimeError, LOCKED, lambda td: td.lock_().rename_key_("obs", "new")),
    "clear locked": (RuntimeError, LOCKED, lambda td: td.lock_().clear()),
    "unlock nested": (
        RuntimeError,
        "Cannot unlock a tensordict that is part of a locked graph",
        lambda td: td.lock_()["meta"].unlock_(),
    ),
    "missing": (KeyError, 'key "q" not found in TensorDict with keys', lambda td: td["q"]),
    "missing in place": (
        KeyError,
        "was not found in the dest tensordict",
        lambda td: td.update_({"q": torch.zeros(3)}),
    ),
    "rename": (KeyError, "already present in TensorDict", lambda td: td.rename_key_("obs", "meta", safe=True)),
    "flatten": (
        KeyError,
        "Flattening keys in tensordict causes keys",
        lambda td: td.set("meta.reward", torch.zeros(3)).flatten_keys("."),
    ),
    "unflatten": (
        KeyError,
        "Unflattening key(s) in tensordict will override an existing",
        lambda td: td.set("meta.reward", torch.zeros(3)).unflatten_keys("."),
    ),
    "set size": (RuntimeError, "batch dimension mismatch", lambda td: td.set("obs", torch.zeros(4))),
    "make size": (RuntimeError, "batch dimension mismatch", lambda td: TensorDict({"a": torch.zeros(3)}, [4])),
    "batch size": (RuntimeError, "incompatible with the batch-size", lambda td: setattr(td, "batch_size", [4])),
    "assign size": (RuntimeError, "differs from the source batch size", lambda td: td.__setitem__(slice(2), td)),
    "stack size": (RuntimeError, "congruent batch sizes", lambda td: torch.stack([td, td[:2]])),
}


@pytest.mark.parametrize("what", PHRASES)
def test_phrases_that_programs_match_on(what: str) -> None:
    kind, phrase, call = PHRASES[what]
    with pytest.raises(kind, match=re.escape(phrase)):
        call(nested())
