"""Modules over containers in compiled code: one graph without a break, the results of the module, no second graph."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _pytree

from cases import mark_slow
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictParams, lazy_stack
from tensordict.nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    EnsembleModule,
    InteractionType,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorClassModuleBase,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    TruncatedNormal,
    WrapModule,
    as_tensordict_module,
    composite_lp_aggregate,
    dispatch,
    interaction_type,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
    skip_existing,
)
from tensordict.nn.distributions import Delta

# Torch warns about its own code while it compiles.
pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def make(count=5):
    return TensorDict(
        x=torch.randn(count, 3), scale=torch.rand(count, 1), nested={"x": torch.randn(count, 3)}, batch_size=[count]
    )


def compiled(function, backend="eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def graphs():
    return counters["stats"]["unique_graphs"]


def seeded(function, *args):
    torch.manual_seed(1)
    return function(*args)


def assert_same(result, expected):
    assert type(result) is type(expected)
    if isinstance(expected, (TensorDict, TensorClass, LazyStackedTensorDict)):
        assert result.batch_size == expected.batch_size
        assert set(result.keys(True)) == set(expected.keys(True))
    torch.testing.assert_close(_pytree.tree_leaves(result), _pytree.tree_leaves(expected))


def assert_one_graph(function, make=make):
    """Compiled, the function gives what it gives, writes what it writes, and calls of the same form share a graph."""
    fast, before = compiled(function), graphs()
    for _ in range(2):
        td = make()
        given, written = td.copy(), td.copy()
        assert_same(seeded(fast, given), seeded(function, written))
        assert_same(given, written)
        assert graphs() == before + 1


# --- modules over a container -----------------------------------------------------------------------------------------


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, *, scale=1.0):
        return self.linear(x) * scale

    def shifted(self, x, by):
        return self.linear(x) + by


class Labelled(nn.Module):
    def forward(self, x, label):
        return (-x if label == "minus" else x), label + "!"


class Noisy(TensorDictModuleWrapper):
    def forward(self, tensordict):
        return super().forward(tensordict.set("x", tensordict["x"] + torch.randn(3)))


class Scaled(TensorDictModuleBase):
    in_keys = ["x", ("nested", "x")]
    out_keys = ["y", "z"]

    def __init__(self):
        super().__init__()
        self.params = TensorDictParams(TensorDict(inner={"scale": torch.full((3,), 2.0)}))

    @dispatch(separator="__")
    @set_skip_existing(None)
    def forward(self, tensordict):
        x = tensordict["x"] * self.params.inner.scale
        return tensordict.set("y", x).set("z", x + tensordict["nested", "x"])


def linear(**kwargs):
    return TensorDictModule(nn.Linear(3, 4), ["x"], ["h"], **kwargs)


def readout(**kwargs):
    return TensorDictModule(nn.Linear(4, 2), ["h"], ["y"], **kwargs)


def net(**kwargs):
    return TensorDictSequential(linear(), readout(), **kwargs)


def labelled():
    return make().set_non_tensor("label", "minus")


def half_lazy():
    return lazy_stack([make(), make().set("h", torch.randn(5, 4))])


def with_result():
    return make().set("h", torch.zeros(5, 4))


MODULES = {
    "linear": linear,
    "nested keys": lambda: TensorDictModule(nn.Linear(3, 4), [("nested", "x")], [("out", "a", "b")]),
    "arguments by name": lambda: TensorDictModule(Affine(), {"x": "x", "scale": "scale"}, ["h"]),
    "names by argument": lambda: TensorDictModule(Affine(), {"scale": "scale", "x": "x"}, ["h"], out_to_in_map=False),
    "method": lambda: TensorDictModule(Affine(), ["x"], ["h"], method="shifted", method_kwargs={"by": 3.0}),
    "inplace=False": lambda: linear(inplace=False),
    "inplace='empty'": lambda: linear(inplace="empty"),
    "several": lambda: TensorDictModule(lambda x: (x * 2, x, x + 1), ["x"], ["h", "_", ("n", "i")]),
    "dict": lambda: TensorDictModule(lambda x: {"h": x * 2, "g": x + 1}, ["x"], ["h", "g"]),
    "container": lambda: TensorDictModule(lambda x: TensorDict(h=x * 2), ["x"], ["inner"]),
    "strict": lambda: linear(strict=True),
    "optional": lambda: TensorDictModule(lambda x, q: x * 2 if q is None else x + q, ["x", "absent"], ["h"]),
    "select_out_keys": lambda: TensorDictModule(lambda x: (x * 2, x + 1), ["x"], ["h", "i"]).select_out_keys("i"),
    "wrapper": lambda: Noisy(linear()),
    "WrapModule": lambda: WrapModule(lambda td: td.reshape(-1) * 2),
    "WrapModule in place": lambda: WrapModule(lambda td: td.select("x") * 2, inplace=True),
    "user's": Scaled,
    "sequence": net,
    "sequence by name": lambda: TensorDictSequential({"first": linear(), "second": readout()}),
    "sequence with a function": lambda: TensorDictSequential(linear(), lambda td: td.set("y", td["h"] * 2)),
    "selected_out_keys": lambda: net(selected_out_keys=["y"]),
    "partial_tolerant": lambda: TensorDictSequential(linear(), readout(), Scaled(), partial_tolerant=True),
    "sequence inplace=False": lambda: net(inplace=False),
    "sequence inplace='empty'": lambda: net(inplace="empty"),
    "select_subsequence": lambda: net().select_subsequence(out_keys=["h"]),
    "ensemble": lambda: EnsembleModule(linear(), 3),
    "ensembles": lambda: TensorDictSequential(
        EnsembleModule(linear(), 3), EnsembleModule(readout(), 3, expand_input=False)
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    assert_one_graph(MODULES[name]())


def test_values_that_are_no_tensors():
    module = TensorDictModule(Labelled(), ["x", "label"], ["h", "label"])
    assert_one_graph(module, labelled)
    assert compiled(module)(labelled())["label"] == "minus!"


def test_partial_tolerant_on_a_lazy_stack():
    assert_one_graph(TensorDictSequential(readout(), partial_tolerant=True), half_lazy)


def test_the_other_container_is_written():
    first, both = linear(), net()
    assert_one_graph(lambda td: first(td, tensordict_out=TensorDict()))
    assert_one_graph(lambda td: both(td, tensordict_out=TensorDict()))


@as_tensordict_module(in_keys=["x"], out_keys=["z"])
def double(x):
    return 2 * x


def test_a_decorated_function():
    assert_one_graph(lambda td: (double(td), double(td["x"])))


class Pair(TensorClass):
    a: torch.Tensor
    b: torch.Tensor


class Total(TensorClass):
    total: torch.Tensor


class Add(TensorClassModuleBase[Pair, Total]):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Pair) -> Total:
        return Total(self.linear(x.a) + x.b, batch_size=x.batch_size)


def test_tensorclass_modules():
    add = Add()
    over_containers = add.as_td_module()

    def every_way(pair):
        plain = TensorDict(a=pair.a, b=pair.b, batch_size=pair.batch_size)
        return add(pair), over_containers(pair), over_containers(plain), over_containers(a=pair.a, b=pair.b)

    assert_one_graph(every_way, lambda: Pair(torch.randn(5, 3), torch.randn(5, 3), batch_size=[5]))


# --- called with tensors ----------------------------------------------------------------------------------------------

NAMED = {
    "module": (linear, ["x"], ["x"]),
    "nested": (MODULES["nested keys"], ["nested_x"], [("nested", "x")]),
    "sequence": (lambda: TensorDictSequential(linear(), Affine2()), ["x", "scale"], ["x", "scale"]),
    "ensemble": (MODULES["ensemble"], ["x"], ["x"]),
    "user's": (Scaled, ["x", "nested__x"], ["x", ("nested", "x")]),
}


def Affine2():
    return TensorDictModule(lambda h, scale: (h * scale, h.sum(-1)), ["h", "scale"], ["y", "total"])


@pytest.mark.parametrize("name", NAMED)
def test_dispatch(name):
    if torch.__version__.startswith("2.11.") and name == "user's":
        pytest.skip("torch 2.11 does not compile from_dict(auto_batch_size=True), which dispatch calls")
    make_module, names, keys = NAMED[name]
    module = make_module()

    def every_way(td):
        entries = [td[key] for key in keys]
        last = {names[-1]: entries[-1]}
        return module(*entries), module(**dict(zip(names, entries))), module(*entries[:-1], **last)

    assert_one_graph(every_way)


def test_the_module_itself_called_by_keyword():
    """The module is compiled, so its arguments are the inputs of the graph."""
    module, x = TensorDictSequential(linear(), Affine2()), torch.randn(5, 3)
    fast, one = compiled(module), torch.ones(5, 1)
    for scale in (one, one * 2):
        assert_same(fast(x=x, scale=scale), module(x=x, scale=scale))
    assert graphs() == 1


# --- other inputs -----------------------------------------------------------------------------------------------------


def test_a_size_that_varies_takes_one_more_graph():
    module = net()
    fast = compiled(module)
    for count, expected in ((4, 1), (6, 2), (8, 2), (10, 2)):
        td = make(count)
        assert_same(fast(td.copy()), module(td.copy()))
        assert graphs() == expected


def test_parameters_that_were_trained_need_no_other_graph():
    module = net()
    fast = compiled(module)
    for _ in range(2):
        td = make()
        assert_same(fast(td.copy()), module(td.copy()))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
    assert graphs() == 1


def test_keys_that_are_changed_are_followed():
    module = linear()
    fast = compiled(module)
    fast(make())
    module.out_keys = ["other"]
    assert "other" in fast(make()) and "h" not in fast(make())


def test_an_entry_that_is_missing_is_named_as_ever():
    """By code that may break the graph: an exception that leaves a full graph is torch's."""
    with pytest.raises(KeyError, match="reads 'x', not found in the container"):
        torch.compile(linear(), backend="eager")(TensorDict(z=torch.zeros(3)))


# --- modes of a block, inside of compiled code and around it ----------------------------------------------------------


def test_set_skip_existing_inside():
    module = net()

    def skipping(td):
        with set_skip_existing(True):
            td = module(td)
            on = skip_existing()
        return td.set("on", td["x"] * on)

    assert_one_graph(skipping, with_result)


def test_set_skip_existing_around():
    module = net()
    fast = compiled(module)
    for mode in (False, True, False, True):
        with set_skip_existing(mode):
            assert bool((fast(with_result())["h"] == 0).all()) is mode
    assert graphs() == 2


def normal(**kwargs):
    """A sequence that draws from a normal distribution and writes the log-probability."""
    return drawn(nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["loc", "scale"], D.Normal, **kwargs)


def drawn(module, keys, distribution, **kwargs):
    draw = ProbabilisticTensorDictModule(keys, ["y"], distribution_class=distribution, return_log_prob=True, **kwargs)
    return ProbabilisticTensorDictSequential(TensorDictModule(module, ["x"], keys), draw)


def test_set_interaction_type_around():
    """One graph for each type, made when it first holds; `None` is one of them."""
    module = normal()
    fast = compiled(module)
    known = set()
    for kind in (None, "random", "mean", "random", InteractionType.MEDIAN, None, "mean", "random"):
        known.add(kind)
        with set_interaction_type(kind):
            td = make()
            assert_same(seeded(fast, td.copy()), seeded(module, td.copy()))
        assert graphs() == len(known)


def test_set_interaction_type_as_a_decorator():
    module = normal()
    assert_one_graph(set_interaction_type("random")(lambda td: module(td)))


@pytest.mark.parametrize("partial_tolerant", [False, True])
def test_a_value_that_an_earlier_module_has_written(partial_tolerant):
    write = TensorDictModule(lambda x: (x, x.exp(), x + 7), ["x"], ["loc", "scale", "y"])
    draw = normal(default_interaction_type="random")[-1]
    assert_one_graph(ProbabilisticTensorDictSequential(write, draw, partial_tolerant=partial_tolerant))


def test_set_composite_lp_aggregate_around():
    params = TensorDict(a={"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)}, batch_size=[3])

    def scored(params):
        dist = CompositeDistribution(params, {"a": D.Normal})
        return dist.log_prob(dist.mode)

    fast, results = compiled(scored), []
    for mode in (False, True, False, True):
        with set_composite_lp_aggregate(mode):
            results.append(fast(params))
    assert [type(result) for result in results] == [TensorDict, torch.Tensor] * 2
    assert graphs() == 2
    # A block of a thread concerns no other one, in compiled code too.
    for thread_local in (True, False):
        with set_composite_lp_aggregate(True, thread_local=thread_local):
            thread = threading.Thread(target=lambda: results.append(fast(params)))
            thread.start()
            thread.join()
    assert [type(result) for result in results[-2:]] == [TensorDict, torch.Tensor]


@pytest.mark.parametrize("thread_local", [False, True])
def test_settings_inside(thread_local):
    def scored(params):
        with set_composite_lp_aggregate(True, thread_local=thread_local):
            dist = CompositeDistribution(params, {"a": D.Normal})
            with set_interaction_type("mean", thread_local=thread_local):
                return dist.log_prob(dist.mode), interaction_type() is InteractionType.MEAN

    params = TensorDict(a={"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)}, batch_size=[3])
    for _ in range(2):
        total, chosen = compiled(scored)(params)
        assert total.shape == (3,) and chosen
    assert not composite_lp_aggregate() and interaction_type() is None


def test_sample_and_log_prob():
    def drawn(params):
        return CompositeDistribution(params, {"a": D.Normal}).sample_and_log_prob((2,))

    params = TensorDict(a={"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)}, batch_size=[3])
    for result, expected in zip(seeded(compiled(drawn), params), seeded(drawn, params)):
        assert_same(result, expected)


# --- distributions ----------------------------------------------------------------------------------------------------

ALL = list(InteractionType)
NO_MEDIAN = [kind for kind in ALL if kind is not InteractionType.MEDIAN]
# The mean of a torch.distributions.Categorical is NaN, whose log-probability is an error of torch's.
OF_CLASSES = [kind for kind in NO_MEDIAN if kind is not InteractionType.MEAN]


class IndependentNormal(D.Independent):
    def __init__(self, loc, scale):
        super().__init__(D.Normal(loc, scale), 1)


def two_halves():
    return nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())


DISTRIBUTIONS = {
    "Normal": (normal, ALL),
    "Independent": (lambda: drawn(two_halves(), ["loc", "scale"], IndependentNormal), NO_MEDIAN),
    "TruncatedNormal": (
        lambda: drawn(
            two_halves(), ["loc", "scale"], TruncatedNormal, distribution_kwargs={"a": -1.0, "b": torch.tensor(2.0)}
        ),
        ALL,
    ),
    "OneHotCategorical": (lambda: drawn(nn.Linear(3, 4), ["logits"], OneHotCategorical), NO_MEDIAN),
    "Categorical": (lambda: drawn(nn.Linear(3, 4), ["logits"], D.Categorical), OF_CLASSES),
    "Delta": (lambda: drawn(nn.Linear(3, 4), ["param"], Delta), NO_MEDIAN),
    "independent of the state": (
        lambda: drawn(nn.Sequential(nn.Linear(3, 2), AddStateIndependentNormalScale(2)), ["loc", "scale"], D.Normal),
        [InteractionType.RANDOM],
    ),
    "arguments that are trained": (
        lambda: drawn(
            two_halves(),
            ["loc", "scale"],
            TruncatedNormal,
            distribution_kwargs=TensorDictParams(TensorDict(a=torch.tensor(-1.0), b=torch.tensor(1.0))),
        ),
        [InteractionType.RANDOM],
    ),
}


@pytest.mark.parametrize(
    "name", mark_slow(DISTRIBUTIONS, keep=["Normal", "OneHotCategorical", "independent of the state"])
)
def test_distributions(name):
    """The value and its log-probability, taken in every way within one graph."""
    make_module, kinds = DISTRIBUTIONS[name]
    module = make_module()

    def every_way(td):
        results = []
        for kind in kinds:
            with set_interaction_type(kind):
                results.append(module(td.copy()))
        return torch.stack(results)

    assert_one_graph(every_way)


@pytest.mark.parametrize("aggregate", mark_slow([False, True], keep=[False]))
def test_composite_distributions(aggregate):
    heads = nn.Linear(3, 6)

    def params(x):
        loc, scale, logits = heads(x).chunk(3, -1)
        return loc, scale.exp(), logits

    with set_composite_lp_aggregate(aggregate):
        module = ProbabilisticTensorDictSequential(
            TensorDictModule(
                params, ["x"], [("params", "a", "loc"), ("params", "a", "scale"), ("params", "b", "logits")]
            ),
            ProbabilisticTensorDictModule(
                ["params"],
                ["a", ("n", "b")],
                distribution_class=CompositeDistribution,
                distribution_kwargs={
                    "distribution_map": {"a": D.Normal, "b": D.Categorical},
                    "name_map": {"b": ("n", "b")},
                },
                return_log_prob=True,
            ),
        )

    @set_composite_lp_aggregate(aggregate)
    def every_way(td):
        results = []
        for kind in OF_CLASSES:
            with set_interaction_type(kind):
                results.append(module(td.copy()))
        return torch.stack(results), module.log_prob(results[0]), module.get_dist(td).entropy()

    assert_one_graph(every_way)


def test_distributions_and_log_probabilities():
    module = normal()

    def scored(td):
        dist = module.get_dist(td)
        return (
            dist.mean,
            dist.entropy(),
            module.log_prob(td.set("y", torch.zeros(5, 2))),
            module.log_prob(td, dist=dist),
        )

    assert_one_graph(scored)


@pytest.mark.parametrize("return_composite", [None, False])
def test_several_probabilistic_modules(return_composite):
    """In the composite one `log_prob` runs the sequence with the values that are there."""
    module = ProbabilisticTensorDictSequential(
        *normal().module,
        TensorDictModule(nn.Linear(2, 3), ["y"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["z"],
            distribution_class=D.Categorical,
            return_log_prob=True,
            default_interaction_type="random",
        ),
        return_composite=return_composite,
    )

    def run(td):
        td = module(td)
        return td, module.log_prob(td.copy())

    assert_one_graph(run)


def test_number_of_samples():
    assert_one_graph(normal(num_samples=7, default_interaction_type="random"))


def test_probabilistic_modules_called_with_tensors():
    module = normal()
    assert_one_graph(lambda td: (module(td["x"]), module(x=td["x"])))


def test_generators_are_ignored():
    """As documented: the state of a generator cannot be exchanged in a graph, which draws from the global one."""
    generator = torch.Generator().manual_seed(3)
    module, state = normal(generator=generator, default_interaction_type="random"), generator.get_state()
    fast, td = compiled(module), make()
    result = seeded(fast, td.copy())
    module[-1]._generator = None
    assert_same(result, seeded(module, td.copy()))
    assert torch.equal(generator.get_state(), state)


# --- parameters as data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_module", [net, normal])
def test_vmap_over_stacked_parameters(make_module):
    module = make_module()
    params = torch.stack([TensorDict.from_module(module).data * factor for factor in (1, 2, 3)])

    def one(params, td):
        with params.to_module(module):
            return module(td)

    assert_one_graph(lambda td: torch.vmap(one, (0, None))(params, td))


@pytest.mark.parametrize(
    "use",
    [
        lambda module, params, x: params,
        lambda module, params, x: params["0", "weight"].sum() + params.data["1", "running_mean"],
        lambda module, params, x: [[name for name, _ in f()] for f in (params.named_parameters, params.named_buffers)],
    ],
)
def test_parameters_of_a_module_as_a_module(use):
    if torch.__version__.startswith("2.11.") and "named_parameters" in use.__code__.co_names:
        pytest.skip("Dynamo 2.11 hashes no object whose class defines `__hash__`")
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def call(x):
        return use(module, TensorDict.from_module(module, as_module=True), x)

    x = torch.ones(2, 3)
    found, expected = compiled(call)(x), call(x)
    assert type(found) is type(expected)
    if isinstance(expected, list):
        assert found == expected
    else:
        assert_same(found, expected)


def test_gradients_by_a_transform_through_a_log_probability():
    module, td = normal(), make().set("y", torch.zeros(5, 2))
    params = TensorDict.from_module(module).data

    def loss(params, td):
        with params.to_module(module):
            return -module.log_prob(td).mean()

    gradient = torch.func.grad(loss)
    assert_same(compiled(gradient)(params, td.copy()), gradient(params, td.copy()))


def backward(function, module, td):
    module.zero_grad()
    result = seeded(function, td)
    result["y"].pow(2).sum().backward()
    # The template of an ensemble has parameters that are not used.
    return result.detach(), [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ["sequence", "ensembles"])
def test_gradients_of_modules(name):
    module, td = MODULES[name](), make()
    result = backward(compiled(module, "aot_eager"), module, td.copy())
    expected = backward(module, module, td.copy())
    assert_same(result[0], expected[0])
    assert len(result[1]) == 4
    torch.testing.assert_close(result[1], expected[1])


def test_the_copies_of_an_ensemble_draw_differently():
    ensemble = EnsembleModule(TensorDictModule(nn.Dropout(), ["x"], ["y"]), 3)
    result = compiled(ensemble)(TensorDict(x=torch.ones(100)))["y"]
    assert result.shape == (3, 100) and (result[0] != result[1]).any() and (result[1] != result[2]).any()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor():
    """With the backend that is torch's default: a value that is drawn, its log-probability, and their gradients."""
    module, td = normal(default_interaction_type="random"), make()
    result, gradients = backward(torch.compile(module, fullgraph=True), module, td.copy())
    loc, scale = result["loc"], result["scale"]
    torch.testing.assert_close(result["y_log_prob"], D.Normal(loc, scale).log_prob(result["y"]))
    # The same noise as in the value, whatever way the backend draws it.
    noise = (result["y"] - loc) / scale
    module.zero_grad()
    expected = module[:2](td.copy())
    (expected["loc"] + noise * expected["scale"]).pow(2).sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in module.parameters()])
