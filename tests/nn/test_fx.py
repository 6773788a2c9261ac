"""Graphs of `torch.fx` of modules over containers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx, nn

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from tensordict.prototype import symbolic_trace, tensorclass
from tensordict.prototype.fx import TDGraphModule


class Custom(TensorDictModuleBase):
    in_keys = ["a"]
    out_keys = ["z"]

    def forward(self, tensordict):
        return tensordict.set("z", tensordict["a"] + 1)


def linear(in_key, out_key, inputs=4):
    return TensorDictModule(nn.Linear(inputs, 4), in_keys=[in_key], out_keys=[out_key])


def split(x, y):
    return x + y, x - y


def nested():
    last = TensorDictModule(split, in_keys=["h", ("n", "q")], out_keys=["s", "_"])
    return TensorDictSequential(linear("a", "h", 3), TensorDictSequential(linear("h", ("n", "q")), last))


def test_a_sequence_is_one_graph_of_its_steps():
    net, td = nested(), TensorDict(a=torch.randn(5, 3), batch_size=[5])
    graph = symbolic_trace(net)
    assert isinstance(graph, TDGraphModule) and isinstance(graph._gm, fx.GraphModule)
    reads = [node.args[1] for node in graph.graph.nodes if "getitem" in node.name]
    calls = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert reads == ["a"] and calls == ["0.module", "1.module.0.module"]
    assert (graph.in_keys, graph.out_keys) == (["a"], ["h", ("n", "q"), "s"]) and "add" in graph.code
    expected = net(td.copy())
    result = graph(td)
    assert result is td and set(td.keys(True, True)) == {"a", "h", ("n", "q"), "s"}
    for key in graph.out_keys:
        torch.testing.assert_close(result[key], expected[key])
    assert next(graph.parameters()) is net[0].module.weight
    other = TensorDict()
    assert graph(TensorDict(a=td["a"]), tensordict_out=other) is other and "a" not in other
    torch.testing.assert_close(graph(td["a"])[2], expected["s"])
    for same in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(same(TensorDict(a=td["a"]))["s"], expected["s"])


@pytest.mark.parametrize(
    "module",
    [
        linear("a", "b", 3),
        TensorDictModule(lambda x, y: x - y, in_keys={"y": "a", "x": ("n", "a")}, out_keys=["b"]),
        TensorDictModule(lambda a: {"c": a + 1, "b": a}, in_keys=["a"], out_keys=["b", "c"]),
        TensorDictModule(nn.GRU(3, 4), in_keys=["a"], out_keys=["b", "c"], inplace=False),
        TensorDictModule(nn.Linear(3, 3), in_keys=["a"], out_keys=["b"], method="forward", inplace=False),
        TensorDictSequential(linear("a", "b", 3), linear("b", "b"), linear("b", "c"), selected_out_keys=["c"]),
        TensorDictSequential({"x": linear("a", "b", 3), "y": linear("b", "b")}, inplace="empty"),
        TensorDictSequential(
            TensorDictModule(lambda a: {"p": a, "q": 2 * a}, in_keys=["a"], out_keys=["d"]),
            TensorDictModule(torch.neg, in_keys=[("d", "q")], out_keys=["b"]),
        ).select_out_keys("b"),
    ],
)
def test_a_graph_does_what_the_module_does(module):
    td = TensorDict(a=torch.randn(5, 3), n={"a": torch.randn(5, 3)}, batch_size=[5])
    result, expected = symbolic_trace(module)(td.copy()), module(td.copy())
    assert result.batch_size == expected.batch_size
    assert set(result.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(result[key], expected[key])


def test_what_cannot_be_traced():
    with pytest.raises(TypeError, match="Linear cannot be traced"):
        symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Custom cannot be traced"):
        symbolic_trace(TensorDictSequential(linear("a", "b"), Custom()))
    with pytest.raises(TypeError, match="partial_tolerant"):
        symbolic_trace(TensorDictSequential(linear("a", "b"), partial_tolerant=True))
    with pytest.raises(fx.proxy.TraceError):
        symbolic_trace(TensorDictModule(lambda x: x + 1 if x.sum() > 0 else x, in_keys=["a"], out_keys=["b"]))
    reads_all = TensorDictModule(lambda n: n["b"], in_keys=["n"], out_keys=["c"])
    with pytest.raises(ValueError, match=r"reads the container 'n', into which an earlier one writes \('n', 'b'\)"):
        symbolic_trace(TensorDictSequential(linear("a", ("n", "b")), reads_all))
    with pytest.raises(KeyError, match='"a"'):
        symbolic_trace(linear("a", "b"))(TensorDict(z=torch.zeros(2)))
    graph = symbolic_trace(nested())
    td = TensorDict(a=torch.zeros(2, 3), batch_size=[2])
    with pytest.raises(RuntimeError, match="returned 3 values for 2 out_keys"):
        TDGraphModule(graph._gm, ["x", "y"])(td)
    assert set(td.keys()) == {"a"}
    with pytest.raises(AttributeError, match="nowhere"):
        _ = symbolic_trace(linear("a", "b")).nowhere


def test_names_of_the_package():
    from tensordict import prototype

    assert prototype.tensorclass is tensorclass and prototype.symbolic_trace is symbolic_trace
