"""An `UnbatchedTensor`, alone and as an entry, does in compiled code what it does in eager code, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensordict import TensorClass, TensorDict, UnbatchedTensor, is_tensor_collection, lazy_stack

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


class Rows(TensorClass):
    a: torch.Tensor
    u: torch.Tensor
    n: TensorDict


def make_dense() -> TensorDict:
    nested = TensorDict(v=UnbatchedTensor(torch.arange(7.0)), batch_size=[2, 3])
    return TensorDict(
        a=torch.arange(24.0).view(2, 3, 4), u=UnbatchedTensor(torch.arange(5.0)), n=nested, batch_size=[2, 3]
    )


CONTAINERS: dict[str, Callable[[], Any]] = {
    "dense": make_dense,
    "lazy stack": lambda: lazy_stack([make_dense()[0], make_dense()[1]]),
    "tensorclass": lambda: Rows.from_tensordict(make_dense()),
}

# Calls of a tensor as well as of a container.
COMMON: dict[str, Callable[[Any], Any]] = {
    "clone": lambda x: x.clone(),
    "copy": lambda x: x.copy(),
    "add": lambda x: x + 1,
    "add_": lambda x: x.add_(1),
    "multiply": lambda x: 2 * x * x,
    "integer index": lambda x: x[0],
    "slice": lambda x: x[:1],
    "reshape": lambda x: x.reshape(-1),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, x]),
    "unbind": lambda x: x.unbind(0),
    "to a dtype": lambda x: x.to(torch.float64),
    "to a device": lambda x: x.to("cpu"),
    "to meta": lambda x: x.to("meta"),
    "expand": lambda x: x.expand(3, *x.shape),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "zeros_like": lambda x: torch.zeros_like(x),
    "equal": lambda x: x == x,
}

OF_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "entry": lambda td: td.get("u"),
    "product with an entry": lambda td: td.get("a").sum() * td.get("u"),
    "batch size of an entry": lambda td: tuple(td[0].get("u").batch_size),
    "permute": lambda td: td.permute(1, 0),
    "split": lambda td: td.split(1),
    "lazy stack": lambda td: lazy_stack([td, td]),
    "maybe_dense_stack": lambda td: TensorDict.maybe_dense_stack([td, td]),
    "apply": lambda td: td.apply(lambda x: x * 2),
    "set": lambda td: td.set("u", UnbatchedTensor(torch.ones(3))),
    "update": lambda td: td.update(td.clone()),
    "update_": lambda td: td.update_(td.clone() + 1),
    "to_dict": lambda td: td.to_dict(),
    "write a part": lambda td: td.__setitem__(0, td[1].clone()),
    "gather": lambda td: td.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "repeat": lambda td: td.repeat(2, 1),
}


def describe(value: Any) -> Any:
    """Return the parts of a result, for comparison."""
    if isinstance(value, torch.Tensor):
        size = tuple(value.batch_size) if isinstance(value, UnbatchedTensor) else None
        content = None if value.device.type == "meta" else value.tolist()
        return type(value).__name__, size, tuple(value.shape), value.dtype, content
    if is_tensor_collection(value):
        entries = {key: describe(value.get(key)) for key in sorted(value.keys())}
        return type(value).__name__, tuple(value.batch_size), entries
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    return [describe(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_alike(call: Callable[[Any], Any], makers: list[Callable[[], Any]]) -> None:
    """Compare results, and arguments after the call, of all makers in one compiled function."""

    def run_all(arguments: list[Any]) -> list[Any]:
        return [call(argument) for argument in arguments]

    expected, given = [make() for make in makers], [make() for make in makers]
    right = run_all(expected)
    torch._dynamo.reset()
    results = torch.compile(run_all, backend="eager", fullgraph=True)(given)
    for values in zip(results, right, given, expected, strict=True):
        described = [describe(value) for value in values]
        assert described[0] == described[1]
        assert described[2] == described[3]


@pytest.mark.parametrize("name", COMMON)
def test_calls_of_the_tensor_and_of_containers(name: str) -> None:
    makers = [lambda: make_dense().get("u"), *CONTAINERS.values()]
    check_alike(COMMON[name], makers)


@pytest.mark.parametrize("name", OF_CONTAINERS)
def test_calls_of_containers(name: str) -> None:
    check_alike(OF_CONTAINERS[name], list(CONTAINERS.values()))


def test_construction() -> None:
    def build(x: torch.Tensor) -> Any:
        td = TensorDict(u=UnbatchedTensor(x), a=torch.zeros(2, 3), batch_size=[2, 3])
        return UnbatchedTensor(x), UnbatchedTensor(x, batch_size=[2]), UnbatchedTensor([1.0, 2.0]), td, td[0], td + 1

    check_alike(build, [lambda: torch.arange(5.0)])


def test_gradients_flow() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        td = TensorDict(u=UnbatchedTensor(x), batch_size=[2]).reshape(1, 2) * 3
        return td["u"].pow(2).sum()

    torch._dynamo.reset()
    results = []
    for fn in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = torch.arange(3.0, requires_grad=True)
        fn(x).backward()
        results.append(x.grad)
    torch.testing.assert_close(results[0], results[1])


def test_what_torch_makes_of_it_alone_keeps_the_batch_size() -> None:
    u = make_dense().get("u")
    for result in (
        u + 1,
        u[0],
        u.reshape(-1),
        u.unbind(0)[0],
        u.to(torch.float64),
        u.max(0).values,
        torch.stack([u, u]),
    ):
        assert type(result) is UnbatchedTensor and result.batch_size == (2, 3)
    assert u.add_(1) is u and u.contiguous() is u and u.to("cpu") is u
