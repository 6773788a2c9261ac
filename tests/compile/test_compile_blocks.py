"""`with td.view(-1) as flat:` and its kin do in compiled code what they do in eager code, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cases import mark_slow
from tensordict import TensorClass, TensorDict, lazy_stack

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "view": lambda td: td.view(-1),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "squeeze": lambda td: td.squeeze(1),
    "transpose": lambda td: td.transpose(0, 1),
    "permute": lambda td: td.permute(2, 0, 1),
    "flatten": lambda td: td.flatten(0, 1),
    "unflatten": lambda td: td.unflatten(0, (1, 2)),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "unflatten_keys": lambda td: td.unflatten_keys("_"),
}


class Rows(TensorClass):
    a: torch.Tensor
    n: TensorDict
    z: torch.Tensor | None = None


def make_content() -> dict[str, Any]:
    return {"a": torch.arange(24.0).reshape(2, 1, 3, 4), "n": TensorDict({"b": torch.ones(2, 1, 3)}, [2, 1, 3])}


KINDS: dict[str, Callable[[], Any]] = {
    "nested": lambda: TensorDict(make_content(), [2, 1, 3]),
    # Neither can be viewed in another form, so `reshape` copies.
    "strided": lambda: TensorDict({"a": torch.arange(24.0).reshape(3, 1, 2, 4).transpose(0, 2)}, [2, 1, 3]),
    "tensorclass": lambda: Rows(**make_content(), batch_size=[2, 1, 3]),
    "lazy stack": lambda: lazy_stack(
        [TensorDict({"a": torch.arange(12.0).reshape(1, 3, 4) + i}, [1, 3]) for i in (0, 1)]
    ),
}


def add_entry(td: Any) -> None:
    td["z"] = td.get("a").sum(-1) if td.get("a").dim() > td.batch_dims else torch.ones(td.batch_size)


def write_in_place(td: Any) -> None:
    td.get("a").mul_(3)


def replace_entry(td: Any) -> None:
    td["a"] = td.get("a") + 1


def write_part(td: Any) -> None:
    td.get("a")[0] = -1.0


def swap_halves(td: Any) -> None:
    """Another view of the same memory, of the same form, takes the place of the entry."""
    both = torch.arange(2.0 * td.get("a").numel()).reshape(2, *td.get("a").shape)
    td["a"] = both[0]
    td["z"] = both[1]


WRITES = [add_entry, write_in_place, replace_entry, write_part, swap_halves]


def summarize(td: Any) -> dict[Any, Any]:
    return {key: td.get(key) for key in sorted(td.keys(True, True), key=str) if td.get(key) is not None}


def run_block(operation: Callable[[Any], Any], write: Callable[[Any], None]) -> Callable[[Any], Any]:
    def block(td: Any) -> Any:
        with operation(td) as other:
            write(other)
        return td

    return block


def check_block(kind: str, operation: str, *writes: Callable[[Any], None]) -> None:
    """Run a block for each write, all of them in one compiled function."""
    if kind == "strided" and operation == "view":
        pytest.skip("torch cannot view it")
    blocks = [run_block(OPERATIONS[operation], write) for write in writes]

    def run_all(tds: list[Any]) -> list[Any]:
        return [block(td) for block, td in zip(blocks, tds)]

    expected, given = [KINDS[kind]() for _ in writes], [KINDS[kind]() for _ in writes]
    run_all(expected)
    torch._dynamo.reset()
    results = torch.compile(run_all, backend="eager", fullgraph=True)(given)
    for write, *tds, right in zip(writes, given, results, expected):
        for td in tds:
            assert td.batch_size == right.batch_size
            assert summarize(td).keys() == summarize(right).keys(), write.__name__
            for key, value in summarize(right).items():
                torch.testing.assert_close(summarize(td)[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_block_writes_back(operation: str) -> None:
    check_block("nested", operation, *WRITES)


@pytest.mark.parametrize("operation", mark_slow(["view", "unsqueeze", "flatten"], keep=["view"]))
@pytest.mark.parametrize("kind", ["strided", "tensorclass", "lazy stack"])
def test_a_block_over_other_kinds_writes_back(kind: str, operation: str) -> None:
    check_block(kind, operation, *WRITES)


def test_a_view_that_was_replaced_before_the_block_is_written_back() -> None:
    def block(td: Any, both: torch.Tensor) -> Any:
        flat = td.view(-1)
        flat["a"] = both[1].view(-1)
        with flat:
            pass
        return td

    both = torch.arange(12.0).reshape(2, 2, 3)
    results = []
    for fn in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        td = TensorDict({"a": both[0]}, [2, 3])
        results.append(fn(td, both)["a"].clone())
    assert torch.equal(results[0], both[1]) and torch.equal(results[1], both[1])


@pytest.mark.parametrize("operation", ["view", "unsqueeze", "flatten"])
def test_members_of_a_lazy_stack_keep_the_leaves_that_the_block_left_alone(operation: str) -> None:
    def call(td: Any) -> None:
        with OPERATIONS[operation](td) as other:
            other["z"] = other.get("a").sum(-1)

    td = KINDS["lazy stack"]()
    leaves = [member["a"] for member in td.tensordicts]
    torch.compile(call, fullgraph=True, backend="eager")(td)
    assert all(member["a"] is leaf for member, leaf in zip(td.tensordicts, leaves, strict=True))
    torch.testing.assert_close(td["z"], td["a"].sum(-1))
