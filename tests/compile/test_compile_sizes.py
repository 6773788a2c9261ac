"""One graph serves all sizes, and all containers of a form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from cases import mark_slow
from tensordict import TensorClass, TensorDict, lazy_stack, merge_tensordicts

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


class Rows(TensorClass):
    a: torch.Tensor
    n: TensorDict


def make_dense(n: int) -> TensorDict:
    nested = TensorDict(c=torch.arange(n * 3.0).view(n, 3), batch_size=[n, 3])
    return TensorDict(a=torch.arange(n * 12.0).view(n, 3, 4), n=nested, batch_size=[n, 3])


KINDS: dict[str, Callable[[int], Any]] = {
    "dense": make_dense,
    "lazy stack": lambda n: lazy_stack([make_dense(n), make_dense(n) + 1], 1),
    "tensorclass": lambda n: Rows.from_tensordict(make_dense(n)),
}


def pick_last(td: Any, inplace: bool = False) -> Any:
    index = torch.zeros(td.batch_size, dtype=torch.int64) + td.shape[0] - 1
    return td.gather(0, index, inplace=inplace)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "gather": pick_last,
    "gather in place": lambda td: pick_last(td, inplace=True),
    "auto_batch_size_": lambda td: td.auto_batch_size_(),
    "pop": lambda td: td.pop("a"),
    "nested pop": lambda td: td.pop(("n", "c")),
    "chunk": lambda td: td.chunk(2),
    "split": lambda td: td.split([2, td.shape[0] - 2]),
    "split by one length": lambda td: td.split(td.shape[0] - 1),
}


def check_sizes(operation: Callable[[Any], Any], make: Callable[[int], Any], dynamic: bool | None) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(operation, backend=counter, fullgraph=True, dynamic=dynamic)
    for n in range(6, 16):
        expected, given = make(n), make(n)
        right, result = operation(expected), compiled(given)
        assert given.batch_size == expected.batch_size and bool((given == expected).all())
        pieces = zip(result, right, strict=True) if isinstance(right, tuple) else [(result, right)]
        for one, other in pieces:
            assert one.shape == other.shape and bool((one == other).all())
    assert counter.frame_count <= (1 if dynamic else 2)


@pytest.mark.parametrize("dynamic", mark_slow([None, True], keep=[None]))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_graphs_over_ten_sizes(name: str, kind: str, dynamic: bool | None) -> None:
    check_sizes(OPERATIONS[name], KINDS[kind], dynamic)


def merge(td: Any) -> Any:
    return merge_tensordicts(td, TensorDict(z=torch.ones(td.batch_size), batch_size=td.batch_size))


def test_merging() -> None:
    check_sizes(merge, make_dense, None)
    check_sizes(merge, make_dense, True)


def test_merging_lazy_stacks_of_one_size() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(merge, backend="eager", fullgraph=True, dynamic=False)
    expected, result = merge(KINDS["lazy stack"](4)), compiled(KINDS["lazy stack"](4))
    assert result.batch_size == expected.batch_size and bool((result == expected).all())
