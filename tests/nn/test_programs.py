"""Programs of modules find here what they find on the reference."""

from __future__ import annotations

import json

import pytest

from reference import Reference

PROLOGUE = """
import itertools
import warnings
import torch
from torch import nn
from torch.distributions import Normal
import tensordict
from tensordict import TensorDict, TensorDictParams, lazy_stack
from tensordict.nn import *
from tensordict.nn.probabilistic import interaction_type

torch.manual_seed(0)
found = {}
"""

# Each fills `found` with JSON values.
PROGRAMS = {
    "interaction types that modules of a sequence see": """
class Noise(nn.Module):
    def forward(self, x):
        kind = interaction_type()
        seen.append(str(kind))
        return x if kind is InteractionType.DETERMINISTIC else x + 1, torch.ones_like(x)

def draw(reads, writes, kind):
    return ProbabilisticTensorDictModule(
        {"loc": reads, "scale": "scale"}, [writes], distribution_class=Normal, default_interaction_type=kind
    )

def sequence(kinds, tail, **options):
    modules = []
    for i, kind in enumerate(kinds):
        modules += [TensorDictModule(Noise(), [f"x{i}"], [f"loc{i}", "scale"]), draw(f"loc{i}", f"x{i + 1}", kind)]
    if tail:
        modules.append(TensorDictModule(Noise(), ["x1"], ["y", "scale"]))
    return ProbabilisticTensorDictSequential(*modules, **options)

def data(lazy):
    row = TensorDict(x0=torch.zeros(2), x1=torch.zeros(2), x2=torch.zeros(2))
    return lazy_stack([row, row.clone()]) if lazy else torch.stack([row, row])

KINDS = [["deterministic"], ["random"], ["random", "deterministic"]]
OPTIONS = [{}, {"return_composite": True}, {"return_composite": False}, {"partial_tolerant": True}]
CALLS = {
    "forward": lambda net, td: net(td),
    "entries": lambda net, td: net(td["x0"]),
    "into": lambda net, td: net(td, tensordict_out=TensorDict()),
    "get_dist": lambda net, td: net.get_dist(td),
    "get_dist_params": lambda net, td: net.get_dist_params(td),
    "log_prob": lambda net, td: net.log_prob(td),
}
SETTINGS = [(False, None), (True, None), (False, "mean")]
for kinds, tail, options, (lazy, outer) in itertools.product(KINDS, [False, True], OPTIONS, SETTINGS):
    if tail and options.get("return_composite") is False:
        continue
    net = sequence(kinds, tail, **options)
    for name, call in CALLS.items():
        seen, td = [], data(lazy)
        with set_interaction_type(outer):
            call(net, td)
        loc = td.get("loc0", None)
        found[f"{kinds} {tail} {options} {lazy} {outer} {name}"] = [seen, None if loc is None else loc.tolist()]
""",
    "values that modules before the last one have written": """
class Pair(Normal):
    mean = property(lambda self: (self.loc, self.loc))

    def rsample(self, shape=torch.Size()):
        drawn = super().rsample(shape)
        return drawn, drawn + 1

    def log_prob(self, first, second):
        return super().log_prob(first)

def write(*keys):
    def values(x):
        return tuple(x + 7 if key[-1] == "a" else torch.ones_like(x) for key in keys)
    return TensorDictModule(values, ["x"], list(keys))

def draw(*keys, **options):
    distribution = Normal if len(keys) == 1 else Pair
    return ProbabilisticTensorDictModule(["loc", "scale"], list(keys), distribution_class=distribution, **options)

selected = write("loc", "scale", "a")
selected.select_out_keys("loc", "scale")
NETS = {
    "kept": lambda **o: [write("loc", "scale", "a"), draw("a", **o)],
    "nested key": lambda **o: [write("loc", "scale", ("n", "a")), draw(("n", "a"), **o)],
    "another one": lambda **o: [write("loc", "scale", "b"), draw("a", **o)],
    "one of two": lambda **o: [write("loc", "scale", "a"), draw("a", "b")],
    "both": lambda **o: [write("loc", "scale", "a", "b"), draw("a", "b")],
    "earlier": lambda **o: [write("a"), write("loc", "scale"), draw("a", **o)],
    "not selected": lambda **o: [selected, draw("a", **o)],
    "not the last": lambda **o: [write("loc", "scale", "a"), draw("a"), draw("b")],
    "function": lambda **o: [lambda td: write("loc", "scale", "a")(td), draw("a", **o)],
    "in front": lambda **o: [ProbabilisticTensorDictSequential(write("loc", "scale", "a"), draw("a", **o)), write("d")],
}
CALLS = {
    "forward": lambda net, td: net(td),
    "entries": lambda net, td: TensorDict({str(i): value for i, value in enumerate(net(td["x"]))}),
    "into": lambda net, td: net(td, tensordict_out=TensorDict()),
    "selected": lambda net, td: net.select_out_keys("loc")(td),
    "get_dist": lambda net, td: [net.get_dist(td), td][1],
    "log_prob": lambda net, td: TensorDict(lp=net.log_prob(net(td))),
}
for (name, make), return_log_prob, kind in itertools.product(NETS.items(), [False, True], ["random", "mean"]):
    for call in CALLS:
        if call not in ("forward", "into") and name not in ("kept", "nested key", "another one", "earlier"):
            continue
        net = ProbabilisticTensorDictSequential(*make(return_log_prob=return_log_prob))
        torch.manual_seed(0)
        with set_interaction_type(kind):
            result = CALLS[call](net, TensorDict(x=torch.zeros(3)))
        kept = {str(key): value.tolist() for key, value in sorted(result.items(True, True), key=str)}
        found[f"{name} {return_log_prob} {kind} {call}"] = [kept, torch.randn(()).item()]
""",
    "out-keys that are a property with a setter": """
class Loss(TensorDictModuleBase):
    def __init__(self):
        super().__init__()
        self.in_keys = ["x"]
        self._out_keys = None

    @property
    def out_keys(self):
        if self._out_keys is None:
            self._out_keys = ["a", "b", "c"]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values):
        self._out_keys = values

    @dispatch
    def forward(self, tensordict):
        return TensorDict(a=tensordict["x"] + 1, b=tensordict["x"] + 2, c=tensordict["x"] + 3)

class Inherits(Loss):
    @property
    def out_keys(self):
        return super().out_keys

    @out_keys.setter
    def out_keys(self, values):
        TensorDictModuleBase.out_keys.fset(self, values)

class Fixed(TensorDictModuleBase):
    in_keys = ["x"]
    out_keys = property(lambda self: ["a", "b"])

def results(loss):
    entries = loss(x=torch.zeros(()))
    entries = [entries.item()] if isinstance(entries, torch.Tensor) else [entry.item() for entry in entries]
    return [loss.out_keys, sorted(loss(TensorDict(x=torch.zeros(()))).keys()), entries]

for make in Loss, Inherits:
    loss = make()
    found[f"{make.__name__} selected"] = [loss.select_out_keys("a", "b") is loss, *results(loss)]
    found[f"{make.__name__} selected again"] = results(loss.select_out_keys("b"))
    try:
        loss.select_out_keys("c")
    except ValueError:
        found[f"{make.__name__} not selected"] = results(loss)
    loss = make()
    loss.select_out_keys("a")
    found[f"{make.__name__} reset"] = [loss.reset_out_keys() is loss, *results(loss)]
    found[f"{make.__name__} in a sequence"] = results(TensorDictSequential(make().select_out_keys("c")))
fixed = Fixed()
try:
    fixed.select_out_keys("a")
except RuntimeError:
    found["Fixed"] = [fixed.out_keys, len(fixed._forward_hooks)]
""",
    "parameters that are put where a module has plain tensors": """
class Net(nn.Module):
    def __init__(self, put):
        super().__init__()
        self.params = TensorDict.from_module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to("meta")
        TensorDict.from_module(self.net).data.to_module(self.net, preserve_module_state=False)
        found[f"emptied, {put}"] = names(self)
        if put:
            self.params.to_module(self.net, preserve_module_state=False)

    def forward(self, x):
        with self.params.to_module(self.net, preserve_module_state=False):
            return self.net(x)

def names(net):
    plain = [name for name, module in net.named_modules() if "weight" in module.__dict__]
    return [sorted(name for name, _ in net.named_parameters()), plain, str(net.net[0].weight.device)]

x = torch.ones(5, 3)
for put in False, True:
    net = Net(put)
    found[f"made, {put}"] = names(net)
    with net.params.to_module(net.net, preserve_module_state=False):
        found[f"inside, {put}"] = names(net)
    net(x).sum().backward()
    found[f"after, {put}"] = [names(net), net.params["0", "weight"].grad.tolist()]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch lists the dicts of parameters that it restores
    exported = torch.export.export(net, (x,), strict=True)
found["exported"] = [net(x).tolist(), len(list(exported.parameters()))]
assert torch.allclose(exported.module()(x), net(x))
""",
}


@pytest.mark.reference
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_what_it_finds_on_the_reference(name: str, behaviour: Reference) -> None:
    program = f"{PROLOGUE}{PROGRAMS[name]}\nimport json\nprinted = json.dumps(found)"
    names: dict[str, object] = {}
    exec(program, names)
    here = json.loads(str(names["printed"]))
    there = json.loads(behaviour.run(f"{program}\nprint(printed)"))
    assert here and {key: (here.get(key), there[key]) for key in there if here.get(key) != there[key]} == {}
