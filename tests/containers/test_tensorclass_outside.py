"""Tensorclasses where other programs meet them: run-time type checkers, loaders, processes, torch's machinery."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Optional

import beartype
import pytest
import torch
import torch._dynamo.testing
import typeguard
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from tensordict import TensorClass, TensorDict, lazy_stack, tensorclass


class Inner(TensorClass):
    w: Tensor
    note: str = "inner"


class Data(TensorClass):
    x: Tensor
    inner: Inner | None = None
    label: str = "none"
    anything: Any = None

    def doubled(self) -> Data:
        return self * 2


@tensorclass
class DecoratedInner:
    w: Tensor
    note: str = "inner"


@tensorclass
class Decorated:
    x: Tensor
    inner: Optional[DecoratedInner] = None  # noqa: UP045 (both ways to write it)
    label: str = "none"
    anything: Any = None

    def doubled(self) -> Decorated:
        return self * 2  # type: ignore[operator, no-any-return]


INNER: dict[Any, Any] = {Data: Inner, Decorated: DecoratedInner}


@pytest.fixture(params=[Data, Decorated], ids=["subclass", "decorator"])
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


def made(cls: Any, n: int = 4) -> Any:
    inner = INNER[cls](torch.ones(n), batch_size=[n])
    return cls(torch.arange(2.0 * n).view(n, 2), inner, label="cat", anything={"k": 1}, batch_size=[n])


# --- checkers of types at run time ------------------------------------------------------------------------------------


def through(item: Data, field: Tensor, base: TensorClass, label: str) -> Data:
    return item


def through_decorated(item: Decorated, field: Tensor, base: TensorClass, label: str) -> Decorated:
    return item


class Checked(TensorClass):
    x: Tensor

    @beartype.beartype
    def by_beartype(self, by: float) -> Checked:
        return self * by

    @typeguard.typechecked
    def by_typeguard(self, by: float) -> Checked:
        return self * by


CHECKERS = pytest.mark.parametrize("check", [beartype.beartype, typeguard.typechecked], ids=["beartype", "typeguard"])
REFUSALS = (beartype.roar.BeartypeCallHintViolation, typeguard.TypeCheckError)


@CHECKERS
def test_annotated_instances_are_accepted(cls: Any, check: Any) -> None:
    checked = check(through if cls is Data else through_decorated)
    for item in (made(cls), made(cls)[0], lazy_stack([made(cls), made(cls)]), made(cls).lock_(), made(cls).clone()):
        label = item.label if isinstance(item.label, str) else "cat"
        assert checked(item, item.x, item, label) is item
    with pytest.raises(REFUSALS, match=cls.__name__):
        checked(TensorDict(x=torch.zeros(1)), torch.zeros(1), made(cls), "a")
    with pytest.raises(REFUSALS, match="Tensor"):
        checked(made(cls), "x", made(cls), "a")


@pytest.mark.parametrize("method", ["by_beartype", "by_typeguard"])
def test_methods_are_checked(method: str) -> None:
    assert getattr(Checked(torch.ones(2)), method)(2.0).x.tolist() == [2, 2]
    with pytest.raises(REFUSALS, match="float"):
        getattr(Checked(torch.ones(2)), method)("a")


@CHECKERS
def test_constructors_are_checked(check: Any) -> None:
    def build(make: type[Checked], x: Tensor) -> Checked:
        return make(x)

    assert check(build)(Checked, torch.ones(2)).x.sum() == 2


# --- loaders and processes --------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    """The items of a tensorclass one by one."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Batches(Items):
    """As `Items`, for loaders that ask for a whole batch at once."""

    def __getitems__(self, index: list[int]) -> Any:
        return self.items[torch.tensor(index)]


def as_it_is(items: Any) -> Any:
    return items


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("form", "collate"), [(Items, torch.stack), (Batches, as_it_is)])
def test_data_loaders(cls: Any, workers: int, form: Any, collate: Any) -> None:
    loader = DataLoader(form(made(cls, 6)), batch_size=2, num_workers=workers, collate_fn=collate)
    batches = list(loader)
    assert [type(batch) for batch in batches] == [cls] * 3
    for start, batch in zip((0, 2, 4), batches, strict=True):
        assert batch.batch_size == (2,) and batch.label in ("cat", ["cat", "cat"])
        assert torch.equal(batch.x, made(cls, 6).x[start : start + 2]) and type(batch.inner) is INNER[cls]


def worker(take: Any, give: Any) -> None:
    item = take.get()
    item.x.add_(1)
    give.put((type(item).__qualname__, item.label, item.inner.note, item.anything, item.doubled()))
    take.get()


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_queues_between_processes(cls: Any, start: str) -> None:
    context = torch.multiprocessing.get_context(start)
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=worker, args=(there, back))
    process.start()
    try:
        item = made(cls)
        there.put(item)
        name, label, note, anything, doubled = back.get(timeout=60)
        assert (name, label, note, anything) == (cls.__qualname__, "cat", "inner", {"k": 1})
        assert type(doubled) is cls and torch.equal(doubled.x, item.x * 2)
        assert item.x[0, 0] == 1, "the other process wrote into the shared memory"
    finally:
        there.put(None)
        process.join(60)
    assert process.exitcode == 0


# --- copies -----------------------------------------------------------------------------------------------------------


def test_copies(cls: Any) -> None:
    item = made(cls).refine_names("time")
    for copied in (copy.deepcopy(item), pickle.loads(pickle.dumps(item)), item.clone()):
        assert type(copied) is cls and type(copied.inner) is INNER[cls] and copied.names == ["time"]
        assert copied.x is not item.x and (copied == item).all() and copied.anything == {"k": 1}
        copied.x.zero_()
        copied.label = "dog"
        assert item.x.any() and item.label == "cat"
    shallow = copy.copy(item)
    assert type(shallow) is cls and shallow.x is item.x
    shallow.label = "dog"
    assert item.label == "cat"
    locked = pickle.loads(pickle.dumps(item.lock_()))
    assert locked.is_locked and not copy.deepcopy(made(cls)).is_locked


def test_instances_that_hold_themselves_to_a_lazy_stack(cls: Any) -> None:
    stack = lazy_stack([made(cls, 2), made(cls, 3)], 0)
    for copied in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert type(copied) is cls and copied[1].x.shape == (3, 2)


# --- torch ------------------------------------------------------------------------------------------------------------


def test_pytrees(cls: Any) -> None:
    item = made(cls)
    leaves, spec = tree_flatten(item)
    assert len(leaves) == 2 and leaves[0] is item.x
    again = tree_unflatten(leaves, spec)
    assert type(again) is cls and type(again.inner) is INNER[cls] and again.label == "cat" and again.batch_size == (4,)
    doubled = tree_map(lambda leaf: leaf * 2, {"k": [item]})["k"][0]
    assert type(doubled) is cls and torch.equal(doubled.x, item.x * 2)


FUNCTIONS: list[tuple[str, Callable[[Any], Any]]] = [
    ("stack", lambda a: torch.stack([a, a], 1)),
    ("cat", lambda a: torch.cat([a, a])),
    ("unbind", lambda a: torch.unbind(a)[1]),
    ("split", lambda a: torch.split(a, 2)[1]),
    ("zeros_like", torch.zeros_like),
    ("full_like", lambda a: torch.full_like(a, 2.0)),
    ("clone", torch.clone),
    ("permute", lambda a: torch.permute(a.view(2, 2), (1, 0))),
    ("squeeze", lambda a: torch.squeeze(torch.unsqueeze(a, 0))),
    ("gather", lambda a: torch.gather(a, 0, torch.tensor([0, 3]))),
    ("where", lambda a: torch.where(torch.tensor([True, False, True, True]), a, a + 1)),
    ("lerp", lambda a: a.lerp(a + 2, 0.5)),
]


@pytest.mark.parametrize("function", [fn for _, fn in FUNCTIONS], ids=[name for name, _ in FUNCTIONS])
def test_functions_of_torch_keep_the_class(cls: Any, function: Any) -> None:
    item, plain = made(cls), made(cls).to_tensordict()
    result, expected = function(item), function(plain)
    assert type(result) is cls and type(result.inner) is INNER[cls] and result.batch_size == expected.batch_size
    assert torch.equal(result.x, expected["x"]) and torch.equal(result.inner.w, expected["inner", "w"])


def test_vmap(cls: Any) -> None:
    item = made(cls)
    result = torch.vmap(lambda one: one.doubled())(item)
    assert type(result) is cls and result.label == "cat" and torch.equal(result.x, item.x * 2)
    assert torch.equal(torch.vmap(lambda one, by: one.x * by, (0, None))(item, torch.tensor(3.0)), item.x * 3)
    renamed = torch.vmap(lambda one: one.replace(label="dog"))(item)
    assert renamed.label == "dog" and renamed.batch_size == (4,)
    stack = lazy_stack([item, item])
    assert torch.vmap(lambda one: one + 1, (1,))(stack).batch_size == (4, 2)


def test_gradients_go_through(cls: Any) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    (made(cls) * weight).x.sum().backward()
    assert weight.grad == made(cls).x.sum()
    grad = torch.func.grad(lambda one: one.x.pow(2).sum() + one.inner.w.sum())(made(cls))
    assert type(grad) is cls and torch.equal(grad.x, made(cls).x * 2) and grad.inner.w.eq(1).all()


COMPILED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("read", lambda cls, item: item.x + item.inner.w[:, None]),
    ("read a value", lambda cls, item: item.x + len(item.label)),
    ("construct", lambda cls, item: cls(item.x + 1, label="dog", batch_size=[4])),
    ("construct nested", lambda cls, item: cls(item.x, INNER[cls](item.inner.w + 1, batch_size=[4]), batch_size=[4])),
    ("write", lambda cls, item: item.clone().set("x", item.x * 2)),
    ("index", lambda cls, item: item[1:]),
    ("arithmetic", lambda cls, item: item * 2 + 1),
    ("stack", lambda cls, item: torch.stack([item, item])),
    ("cat", lambda cls, item: torch.cat([item, item])),
    ("reduce", lambda cls, item: item.sum(0)),
    ("reshape", lambda cls, item: item.reshape(2, 2)),
    ("split", lambda cls, item: item.split(2)[1]),
    ("to", lambda cls, item: item.to(torch.float64)),
]


@pytest.mark.parametrize("function", [fn for _, fn in COMPILED], ids=[name for name, _ in COMPILED])
def test_compiled_without_a_break(cls: Any, function: Any) -> None:
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda item: function(cls, item), fullgraph=True, backend=count)
    item = made(cls)
    # The tensors differ and the values are equal. Another dict than the traced one is compiled again.
    for argument in (item, item + 1):
        result, expected = compiled(argument), function(cls, argument)
        assert type(result) is type(expected)
        same = torch.equal(result, expected) if isinstance(result, Tensor) else (result == expected).all()
        assert same and getattr(result, "label", None) == getattr(expected, "label", None)
    assert count.frame_count <= 1, "the second call with the same shapes compiles nothing"
