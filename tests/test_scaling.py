"""The cost of an operation grows linearly with the number of leaves."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from tensordict import TensorDict, TensorDictParams, lazy_stack, merge_tensordicts, pad

MASK, INDEX = torch.tensor([True, False, True, True]), torch.zeros(2, dtype=torch.long)


def flat(count: int) -> TensorDict:
    return TensorDict({f"k{i}": torch.zeros(4) for i in range(count)}, [4])


def nested(count: int) -> TensorDict:
    return TensorDict({f"n{i}": {f"k{j}": torch.zeros(4) for j in range(5)} for i in range(count // 5)}, [4])


def deep(count: int) -> TensorDict:
    td = TensorDict(x=torch.zeros(4), batch_size=[4])
    for _ in range(count - 1):
        td = TensorDict(x=torch.zeros(4), n=td, batch_size=[4])
    return td


def each(visit: Callable[[Any, Any], object]) -> Callable[[Any], object]:
    """A call for each leaf of a copy."""

    def run(td: Any) -> None:
        copy = td.clone()
        for key in list(copy.keys(True, True)):
            visit(copy, key)

    return run


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "construct": lambda td: TensorDict(dict(td.items()), [4]),
    "from_dict": lambda td: TensorDict.from_dict(td.to_dict()),
    "clone": lambda td: td.clone(),
    "td[0]": lambda td: td[0],
    "td[mask]": lambda td: td[MASK],
    "td[0] = td[1]": lambda td: td.clone().__setitem__(0, td[1]),
    "reshape": lambda td: td.reshape(2, 2),
    "expand": lambda td: td.expand(3, 4),
    "split": lambda td: td.split(2),
    "unbind": lambda td: td.unbind(0),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "lazy_stack": lambda td: lazy_stack([td, td])[:, 0],
    "items of a lazy stack": lambda td: list(lazy_stack([td, td]).items(True, True)),
    "update": lambda td: td.update(td.clone()),
    "update_": lambda td: td.update_(td.clone()),
    "apply": lambda td: td.apply(torch.abs),
    "td + td": lambda td: td + td,
    "==": lambda td: (td == td).all(),
    "mean": lambda td: td.mean(0),
    "to": lambda td: td.to(torch.float64),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "unflatten_keys": lambda td: td.flatten_keys(".").unflatten_keys("."),
    "keys": lambda td: list(td.keys(True, True, sort=True)),
    "items": lambda td: list(td.items(True, True)),
    "select": lambda td: td.select(*td.keys(True, True)),
    "exclude": lambda td: td.exclude(*list(td.keys(True, True))[1:]),
    "split_keys": lambda td: td.split_keys(list(td.keys(True, True))),
    "lock_": lambda td: td.clone().lock_().unlock_(),
    "batch_size": lambda td: setattr(td.clone(), "batch_size", []),
    "auto_batch_size_": lambda td: td.clone().auto_batch_size_(),
    "repr": repr,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "consolidate": lambda td: td.consolidate(),
    "state_dict": lambda td: td.clone().load_state_dict(td.state_dict()),
    "tree_map": lambda td: torch.utils._pytree.tree_map(torch.abs, td),
    "where": lambda td: td.where(MASK, td),
    "gather": lambda td: td.gather(0, INDEX),
    "merge": lambda td: merge_tensordicts(td, td.clone()),
    "pad": lambda td: pad(td, [0, 1]),
    "TensorDictParams": TensorDictParams,
    "describe": lambda td: td.describe(),
    "get": each(lambda td, key: td[key]),
    "set": each(lambda td, key: td.set(key, td[key])),
    "pop": each(lambda td, key: td.pop(key)),
    "in": each(lambda td, key: key in td.keys(True)),
    "rename_key_": each(lambda td, key: td.rename_key_(key, key)),
}

# A nested key is as long as the entry is deep: what spells it out for every leaf cannot be linear in the depth.
SPELLED_OUT = {
    "unflatten_keys",
    "select",
    "exclude",
    "split_keys",
    "state_dict",
    "get",
    "set",
    "pop",
    "in",
    "rename_key_",
}


def steps(run: Callable[[], object]) -> int:
    """How many instructions of Python a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


SHAPES = [(flat, 20), (nested, 20), (deep, 5)]


@pytest.mark.parametrize(
    ("name", "make", "least"),
    [(name, *shape) for name in OPERATIONS for shape in SHAPES if shape[0] is not deep or name not in SPELLED_OUT],
)
def test_cost_of_a_leaf_does_not_grow(name: str, make: Callable[[int], TensorDict], least: int) -> None:
    few, more, many = (make(count) for count in (least, 2 * least, 4 * least))
    run = OPERATIONS[name]
    # The first call fills the caches.
    run(few), run(more), run(many)
    costs = [steps(lambda td=td: run(td)) for td in (few, more, many)]
    # A quadratic part would double: 1.3 leaves room for dicts that grow.
    assert costs[2] - costs[1] <= 1.3 * 2 * (costs[1] - costs[0]) + 200, costs


def test_steps_are_counted() -> None:
    numbers = list(range(40))
    one, two, four = (steps(lambda n=n: [i for i in numbers[:n] for _ in numbers[:n]]) for n in (10, 20, 40))
    assert four - two > 1.3 * 2 * (two - one) + 200
