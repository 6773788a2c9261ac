"""Containers in compiled and exported code: one graph, no break, no second one for the same or for other sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _pytree

from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictParams, lazy_stack

# What torch says of itself while it compiles and exports.
pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


class Pair(TensorClass):
    x: torch.Tensor
    y: torch.Tensor
    name: str = "pair"


NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make(count: int = 4) -> TensorDict:
    return TensorDict(a=torch.randn(count, 3), b={"c": torch.randn(count)}, batch_size=[count])


def copied(td, write):
    td = td.copy()
    write(td)
    return td


def pair(td):
    return Pair(x=td["a"], y=td["b", "c"], batch_size=td.batch_size)


def unlocked_inside(td):
    td = td.copy().lock_()
    with td.unlock_():
        td["q"] = td["a"] * 2
    return td


# Those that work for any batch size in one graph.
ANY_SIZE = {
    "construct": lambda td: TensorDict({"x": td["a"] + 1, "n": {"y": td["b", "c"]}}, batch_size=td.batch_size),
    "get": lambda td: td.get("a") + td["b", "c"].unsqueeze(-1),
    "get default": lambda td: td.get("absent", td["a"]) * 2,
    "set": lambda td: td.copy().set("z", td["a"] * 2),
    "set nested": lambda td: copied(td, lambda td: td.set(("new", "z"), td["a"] * 2)),
    "setitem": lambda td: copied(td, lambda td: td.__setitem__("z", td["a"] * 2)),
    "pop": lambda td: td.copy().pop("a") + 1,
    "update": lambda td: td.copy().update({"a": td["a"] * 2}),
    "select": lambda td: td.select("a"),
    "exclude": lambda td: td.exclude("a"),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "keys": lambda td: [td[key] * 2 for key in td.keys(True, True)],
    "int index": lambda td: td[0],
    "slice": lambda td: td[1:3],
    "slice from behind": lambda td: td[-2:],
    "steps": lambda td: td[::2],
    "assign": lambda td: copied(td.clone(), lambda td: td.__setitem__(0, td[1])),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "lazy_stack": lambda td: lazy_stack([td, td])["a"],
    "reshape": lambda td: td.reshape(2, -1),
    "view": lambda td: td.view(-1),
    "unsqueeze": lambda td: td.unsqueeze(0).permute(1, 0),
    "expand": lambda td: td.expand(2, *td.batch_size),
    "number": lambda td: td * 2 + 1,
    "container": lambda td: td + td,
    "in place": lambda td: td.clone().mul_(2),
    "zero_": lambda td: td.clone().zero_(),
    "update_": lambda td: td.clone().update_(td * 2),
    "assign a number": lambda td: copied(td.clone(), lambda td: td.__setitem__(0, 2)),
    "tensor": lambda td: td.mul(td["b", "c"]),
    "compare": lambda td: td == td,
    "compare with a tensor": lambda td: (td > td["b", "c"]).all() & (td["b", "c"] <= td).any(),
    "from_dict and back": lambda td: TensorDict.from_dict({"x": td["a"] * 2}, auto_batch_size=True).to_dict(),
    "sum": lambda td: td.sum(),
    "mean over a dim": lambda td: td.mean(dim=0),
    "sum to one tensor": lambda td: td.sum(reduce=True),
    "apply": lambda td: td.apply(lambda leaf: leaf + 1),
    "lock": lambda td: td.copy().lock_(),
    "unlock": lambda td: td.copy().lock_().unlock_(),
    "unlock in a block": unlocked_inside,
    "clone": lambda td: td.clone(),
    "dtype": lambda td: td.to(torch.float64),
    "device": lambda td: td.to("cpu"),
    "names": lambda td: TensorDict(a=td["a"], batch_size=td.batch_size, names=["time"])[0:2],
    "tensorclass": pair,
    "field": lambda td: pair(td).x + 1,
    "tensorclass index": lambda td: pair(td)[1:].y,
    "tensorclass arithmetic": lambda td: pair(td) * 2,
    "value": lambda td: td.copy().set_non_tensor("k", "v"),
    "read a value": lambda td: td["a"] * len(TensorDict(k="four")["k"]),
}
# Where the structure of the result depends on the size.
ONE_SIZE = {
    "split": lambda td: td.split(2),
    "unbind": lambda td: td.unbind(0),
    "index tensor": lambda td: td[torch.tensor([0, 2])],
    "gather": lambda td: td.gather(0, torch.tensor([0, 1])),
    "where": lambda td: td.where(torch.tensor([True, False, True, False]), td * 2),
    "masked_fill": lambda td: td.masked_fill(torch.tensor([True, False, True, False]), 0.0),
    "masked_fill_": lambda td: td.clone().masked_fill_(torch.tensor([True, False, True, False]), 0.0),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def assert_same(result, expected):
    assert type(result) is type(expected)
    if isinstance(expected, (TensorDict, TensorClass, LazyStackedTensorDict)):
        assert result.batch_size == expected.batch_size and result.is_locked == expected.is_locked
        assert set(result.keys(True)) == set(expected.keys(True))
    torch.testing.assert_close(_pytree.tree_leaves(result), _pytree.tree_leaves(expected))


def run(function, compiled, count):
    td = make(count)
    assert_same(compiled(td), function(td))
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ANY_SIZE)
def test_graphs_for_any_size(name):
    """One for all calls with a size; the second size has torch take it for one that varies, and then there is no other.

    Code that only moves tensors about needs no graph at all.
    """
    function = ANY_SIZE[name]
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert [run(function, compiled, 4) for _ in range(2)][-1] <= 1
    assert [run(function, compiled, count) for count in (6, 8, 10)][-1] <= 2


@pytest.mark.parametrize("name", ONE_SIZE)
def test_one_graph(name):
    function = ONE_SIZE[name]
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert [run(function, compiled, 4) for _ in range(2)] == [1, 1]


def test_parameters_as_an_argument():
    def call(params, x):
        with params.to_module(NET):
            return NET(x)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for scale in (0.5, 2.0):
        params, x = TensorDict.from_module(NET).data * scale, torch.randn(5, 3)
        torch.testing.assert_close(compiled(params, x), call(params, x))
    assert counters["stats"]["unique_graphs"] == 1
    assert all(isinstance(parameter, nn.Parameter) for parameter in NET.parameters())


def test_parameters_of_a_module_taken_out_inside():
    def call(x):
        params = TensorDict.from_module(NET)
        with (params.data * 2).to_module(NET):
            y = NET(x)
        return y + params["0", "weight"].sum()

    compiled, x = torch.compile(call, fullgraph=True, backend="eager"), torch.randn(5, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), call(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_gradients_of_parameters_by_a_transform():
    def loss(params, x):
        with params.to_module(NET):
            return NET(x).pow(2).mean()

    compiled = torch.compile(torch.func.grad(loss), fullgraph=True, backend="eager")
    params, x = TensorDict.from_module(NET).data, torch.randn(5, 3)
    assert_same(compiled(params, x), torch.func.grad(loss)(params, x))


def test_operators_with_a_tensor_say_what_to_write():
    """Dynamo calls the same function for `td + tensor`, `tensor + td` and `td += tensor`, so that none can be right."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"as methods: td\.add\(tensor\)"):
        torch.compile(lambda td: td + td["b", "c"], fullgraph=True, backend="eager")(make())


def test_a_module_that_holds_parameters():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = TensorDictParams(TensorDict(scale=torch.ones(3)))

        def forward(self, td):
            return td.copy().set("y", td["a"] * self.params["scale"])

    net, td = Scaled(), make()
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    assert_same(compiled(td), net(td))


def test_gradients_through_compiled_code():
    compiled = torch.compile(lambda td: (td * 2).sum(reduce=True), fullgraph=True, backend="aot_eager")
    leaf = torch.ones(4, 3, requires_grad=True)
    compiled(TensorDict(a=leaf, batch_size=[4])).backward()
    assert (leaf.grad == 2).all()


class Exported(nn.Module):
    """Takes a container and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)

    def forward(self, td):
        return td.copy().set("y", self.net(td["a"])).select("y", "b")


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    net, td = Exported(), make()
    program = torch.export.export(net, (td,), strict=strict)
    result = program.module()(td)
    assert_same(result, net(td))
