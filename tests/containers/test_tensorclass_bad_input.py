"""Errors of tensorclasses name class and field and say what would work; nothing has changed."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensordict import TensorClass, TensorDict, lazy_stack, tensorclass


class Inner(TensorClass):
    w: Tensor


class Data(TensorClass):
    x: Tensor
    inner: Inner | None = None
    label: str = "none"


@tensorclass
class Decorated:
    x: Tensor
    inner: Inner | None = None
    label: str = "none"


class Cast(TensorClass["autocast"]):
    x: Tensor
    n: int = 0
    inner: Inner | None = None
    parts: list[int] = dataclasses.field(default_factory=list)


@tensorclass(autocast=True)
class DecoratedCast:
    x: Tensor
    n: int = 0
    inner: Inner | None = None
    parts: list[int] = dataclasses.field(default_factory=list)


class Only(TensorClass["tensor_only"]):
    x: Tensor
    y: Tensor | None = None


@tensorclass(tensor_only=True)
class DecoratedOnly:
    x: Tensor
    y: Tensor | None = None


class Frozen(TensorClass["frozen"]):
    x: Tensor
    inner: Inner | None = None
    label: str = "none"


@tensorclass(frozen=True)
class DecoratedFrozen:
    x: Tensor
    inner: Inner | None = None
    label: str = "none"


BOTH = pytest.mark.parametrize("cls", [Data, Decorated])


def made(cls: Any) -> Any:
    return cls(torch.zeros(3, 2), Inner(torch.ones(3), batch_size=[3]), batch_size=[3])


def unchanged(item: Any) -> bool:
    same = torch.equal(item.x, torch.zeros(3, 2)) and torch.equal(item.inner.w, torch.ones(3))
    return same and item.label == "none" and item.batch_size == (3,) and set(item.keys()) == {"x", "inner", "label"}


@BOTH
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda cls: cls(), r"\(\) is missing 'x'"),
        (lambda cls: cls(batch_size=[3]), r"\(\) is missing 'x'"),
        (lambda cls: cls(torch.zeros(3), y=1), r"\(\) got 'y', which is no field.*'inner', 'label', 'x'"),
        (lambda cls: cls(torch.zeros(3), None, "a", 4), r"\(\) takes 3 fields by position \(x, inner, label\), got 4"),
        (lambda cls: cls(torch.zeros(3), x=1), r"\.__init__\(\) got multiple values for argument 'x'"),
    ],
)
def test_missing_and_unknown_fields(cls: Any, make: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(TypeError, match=cls.__name__ + match):
        make(cls)


WRITES: list[Callable[[Any], Any]] = [
    lambda item: setattr(item, "unknown", torch.zeros(3)),
    lambda item: item.set("unknown", torch.zeros(3)),
    lambda item: item.set(("unknown", "deep"), torch.zeros(3)),
    lambda item: item.update({"x": torch.ones(3, 2), "unknown": torch.zeros(3)}),
    lambda item: item.update(TensorDict({"x": torch.ones(3, 2), "unknown": torch.zeros(3)}, [3])),
    lambda item: item.__setitem__("unknown", torch.zeros(3)),
    lambda item: item.__setitem__(0, TensorDict(x=torch.ones(2), unknown=torch.zeros(()))),
    lambda item: item.set_non_tensor("unknown", "text"),
    lambda item: item.rename_key_("x", "unknown"),
    lambda item: item.replace(unknown=1),
    lambda item: item.create_nested("unknown"),
    lambda item: item.setdefault("unknown", torch.zeros(3)),
    lambda item: TensorDict(item=item).rename_key_(("item", "x"), ("item", "unknown")),
    lambda item: torch.cat([TensorDict(unknown=torch.zeros(1), batch_size=[1])] * 3, out=item),
]


@BOTH
@pytest.mark.parametrize("write", WRITES, ids=range(len(WRITES)))
def test_writes_to_unknown_fields(cls: Any, write: Callable[[Any], Any]) -> None:
    item = made(cls)
    with pytest.raises((TypeError, AttributeError), match=rf"'unknown'.*no field of {cls.__name__}; its fields are"):
        write(item)
    assert unchanged(item)


@BOTH
def test_sources_with_unknown_fields(cls: Any) -> None:
    for make in (cls.from_tensordict, cls.from_dict, cls.from_any):
        with pytest.raises(ValueError, match=rf"'unknown'.*no field of {cls.__name__}"):
            make(TensorDict(x=torch.zeros(3), unknown=torch.zeros(3)))
    with pytest.raises(TypeError, match=rf"{cls.__name__}.from_tensordict needs a container, got dict.*from_dict"):
        cls.from_tensordict({"x": torch.zeros(3)})
    with pytest.raises(AttributeError, match=rf"{cls.__name__} has no attribute 'unknown'; its fields are"):
        _ = made(cls).unknown


@BOTH
def test_batch_sizes_that_do_not_fit(cls: Any) -> None:
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}: entry 'x' has shape \[3\].*batch size \[4\]"):
        cls(torch.zeros(3), batch_size=[4])
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}: entry 'inner'"):
        cls(torch.zeros(4), Inner(torch.ones(3)), batch_size=[4])
    item = made(cls)
    writes: list[Callable[[], Any]] = [
        lambda: setattr(item, "x", torch.zeros(2)),
        lambda: item.set("x", torch.zeros(2)),
        lambda: item.update({"x": torch.zeros(2)}),
        lambda: setattr(item, "batch_size", [4]),
        lambda: setattr(item, "batch_size", [3, 3]),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="'x'"):
            write()
        assert unchanged(item)
    with pytest.raises(RuntimeError, match=r"w'"):
        item.inner.batch_size = [5]
    assert unchanged(item)


@pytest.mark.parametrize("cls", [Cast, DecoratedCast])
def test_autocast_refuses(cls: Any) -> None:
    item = cls([1.0, 2.0], n="3")
    assert item.x.tolist() == [1, 2] and item.n == 3
    for field, value, kind in (("n", "three", "int"), ("x", object(), "Tensor"), ("x", "text", "Tensor")):
        match = rf"{cls.__name__}.{field} cannot be cast: it is annotated .*{kind} and got a {type(value).__name__}"
        with pytest.raises(TypeError, match=match):
            cls(**{"x": torch.zeros(2), field: value})
        with pytest.raises(TypeError, match=match):
            setattr(item, field, value)
        with pytest.raises(TypeError, match=match):
            item.set(field, value)
        with pytest.raises(TypeError, match=match):
            item.update({field: value})
        assert item.x.tolist() == [1, 2] and item.n == 3
    with pytest.raises((TypeError, ValueError), match=rf"{cls.__name__}.inner.*'unknown'"):
        item.inner = {"w": torch.zeros(2), "unknown": 1}
    assert item.inner is None


@pytest.mark.parametrize("cls", [Only, DecoratedOnly])
def test_tensor_only_refuses(cls: Any) -> None:
    assert cls([1, 2]).x.tolist() == [1, 2]
    item = cls(torch.zeros(2))
    for value in ("text", {"k": 1}, object()):
        with pytest.raises(TypeError, match=rf"{cls.__name__}.x is a field of a tensor_only class, got a"):
            cls(value)
        for write in (lambda: setattr(item, "x", value), lambda: item.set("x", value)):  # noqa: B023
            with pytest.raises(TypeError, match=rf"{cls.__name__}.x is a field of a tensor_only"):
                write()
    assert item.x.tolist() == [0, 0]
    with pytest.raises(TypeError, match="Wrong is tensor_only, but its field 'label' is annotated 'str'"):

        @tensorclass(tensor_only=True)
        class Wrong:
            label: str


FROZEN_WRITES: list[Callable[[Any], Any]] = [
    lambda item: setattr(item, "x", torch.ones(3, 2)),
    lambda item: setattr(item, "label", "dog"),
    lambda item: delattr(item, "x"),
    lambda item: item.set("x", torch.ones(3, 2)),
    lambda item: item.set("label", "dog"),
    lambda item: item.update({"x": torch.ones(3, 2)}),
    lambda item: item.set_non_tensor("label", "dog"),
    lambda item: item.del_("x"),
    lambda item: item.pop("x"),
    lambda item: item.rename_key_("x", "label"),
    lambda item: setattr(item.inner, "w", torch.zeros(3)),
    lambda item: item.inner.set("w", torch.zeros(3)),
    lambda item: item.clear(),
]


@pytest.mark.parametrize("cls", [Frozen, DecoratedFrozen])
@pytest.mark.parametrize("write", FROZEN_WRITES, ids=range(len(FROZEN_WRITES)))
def test_frozen_instances_are_not_written(cls: Any, write: Callable[[Any], Any]) -> None:
    item = made(cls)
    with pytest.raises((dataclasses.FrozenInstanceError, RuntimeError), match="frozen|locked"):
        write(item)
    assert unchanged(item)


@pytest.mark.parametrize("cls", [Frozen, DecoratedFrozen])
def test_frozen_says_class_and_field(cls: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match=rf"'x' of the frozen {cls.__name__}"):
        made(cls).x = torch.ones(3, 2)
    assert hash(made(cls)) != hash(made(cls))
    assert torch.equal(made(cls).replace(label="dog").x, torch.zeros(3, 2))


@BOTH
def test_stacks_of_what_does_not_fit(cls: Any) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"\[3\] at position 0 and \[2\] at position 1"):
        torch.stack([made(cls), cls(torch.zeros(2, 2), batch_size=[2])])
    stack = lazy_stack([made(cls), made(cls)])
    with pytest.raises((RuntimeError, TypeError), match="TensorDict|class|field"):
        stack.append(TensorDict(unknown=torch.zeros(3), batch_size=[3]))
    assert stack.batch_size == (2, 3)


@BOTH
def test_classes_that_are_not_imported(cls: Any, tmp_path: pathlib.Path) -> None:
    made(cls).memmap(tmp_path)
    meta = tmp_path / "meta.json"
    text = meta.read_text()
    name = f"{cls.__module__}.{cls.__qualname__}"
    assert name in text
    meta.write_text(text.replace(name, "some.module.Gone"))
    for load in (TensorDict.load_memmap, cls.load_memmap):
        with pytest.raises(RuntimeError, match=r"some\.module\.Gone.*import the module that defines it"):
            load(tmp_path)
    meta.write_text(text)
    assert type(TensorDict.load_memmap(tmp_path)) is cls


def test_pickles_of_classes_that_cannot_be_found() -> None:
    @tensorclass
    class Local:
        x: Tensor

    with pytest.raises((pickle.PicklingError, AttributeError), match="Local"):
        pickle.dumps(Local(torch.zeros(2)))  # type: ignore[call-arg]
