"""Probabilistic modules: distributions from containers, interaction types, log-probabilities, sequences, generators."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import distributions as D
from torch import nn

from tensordict import TensorDict, TensorDictParams, UnbatchedTensor
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    TruncatedNormal,
    set_composite_lp_aggregate,
    set_interaction_type,
    set_skip_existing,
)
from tensordict.nn.generators import use_generator as _use_generator
from tensordict.nn.interaction import interaction_type


def normal(*args, **options):
    options = {"in_keys": ["loc", "scale"], "out_keys": ["a"], "distribution_class": D.Normal, **options}
    return ProbabilisticTensorDictModule(*args, **options)


def params(*shape):
    return TensorDict(loc=torch.zeros(*shape), scale=torch.full(shape, 2.0), batch_size=shape)


def step(reads, writes, shift=1):
    return TensorDictModule(lambda x: x + shift, [reads], [writes])


def policy(**options):
    split = TensorDictModule(lambda x: (x, x.exp()), ["x"], ["loc", "scale"])
    return ProbabilisticTensorDictSequential(split, normal(**options))


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_of_parameters():
    td = TensorDict(n={"l": torch.tensor(1.0)}, s=torch.tensor(2.0))
    mapped = normal(in_keys={"loc": ("n", "l"), "scale": "s"})
    assert mapped.in_keys == mapped.dist_params_keys == [("n", "l"), "s"] and mapped.dist_keys == ("loc", "scale")
    assert mapped(td)["a"] == 1 and mapped(torch.tensor(3.0), torch.tensor(1.0)) == 3
    assert mapped(n_l=torch.tensor(4.0), s=torch.tensor(1.0)) == 4
    nested = normal(in_keys=[("n", "loc"), ("n", "scale")])
    assert nested(TensorDict(n={"loc": torch.tensor(1.0), "scale": torch.tensor(2.0)}))["a"] == 1
    single = normal(in_keys="loc", out_keys="a", distribution_kwargs={"scale": 2.0})
    assert single.in_keys == ["loc"] and single.get_dist(TensorDict(loc=torch.tensor(1.0))).scale == 2


def test_keys_of_log_probabilities():
    plain, scored = normal(), normal(return_log_prob=True)
    assert plain.out_keys == ["a"] and plain.log_prob_key == "a_log_prob"
    assert scored.out_keys == ["a", "a_log_prob"] and scored.dist_sample_keys == ["a"]
    assert normal(return_log_prob=True, log_prob_key="lp").out_keys == ["a", "lp"]
    assert normal(return_log_prob=True, log_prob_keys=["lp"]).out_keys == ["a", "lp"]
    assert normal(out_keys=[("n", "a")]).log_prob_keys == [("n", "a_log_prob")]
    two = normal(out_keys=["a", "b"], return_log_prob=True)
    assert two.out_keys == ["a", "b", "a_log_prob", "b_log_prob"]
    with pytest.raises(
        RuntimeError, match=r"several log-probabilities, at log_prob_keys=\['a_log_prob', 'b_log_prob'\]"
    ):
        _ = two.log_prob_key
    with pytest.raises(ValueError, match=r"log_prob_keys has 2 keys, .* for the 1 out-keys \['a'\]"):
        normal(log_prob_keys=["x", "y"])
    with set_composite_lp_aggregate(True):
        assert normal(out_keys=["a", "b"], return_log_prob=True).out_keys == ["a", "b", "sample_log_prob"]
        assert normal(return_log_prob=True, log_prob_key="lp").log_prob_keys == ["lp"]


@pytest.mark.parametrize("first", [True, False])
def test_the_setting_of_sums_must_be_the_same_when_it_is_called(first):
    with set_composite_lp_aggregate(first):
        module = normal(return_log_prob=True)
    with set_composite_lp_aggregate(not first):
        td = params(3)
        with pytest.raises(RuntimeError, match=f"from `{first}` to `{not first}`"):
            module(td)
        assert set(td.keys()) == {"loc", "scale"}
        with pytest.raises(RuntimeError, match="composite_lp_aggregate"):
            module.log_prob(td)


# --- values -----------------------------------------------------------------------------------------------------------


class Tractable(D.Normal):
    deterministic_sample = property(lambda self: self.loc + 1)
    get_mode = lambda self: self.loc + 2  # noqa: E731
    get_median = lambda self: self.loc + 3  # noqa: E731
    get_mean = lambda self: self.loc + 4  # noqa: E731


@pytest.mark.parametrize(
    ("distribution", "values"),
    [
        (lambda: D.Normal(2.0, 3.0), {"mode": 2, "median": 2, "mean": 2, "deterministic": 2}),
        (lambda: D.Gamma(2.0, 4.0), {"mode": 0.25, "median": None, "mean": 0.5, "deterministic": 0.5}),
        (lambda: D.Exponential(2.0), {"mode": 0, "median": 0.34657359, "mean": 0.5, "deterministic": 0.5}),
        (lambda: D.Bernoulli(0.7), {"mode": 1, "median": None, "mean": 0.7, "deterministic": 1}),
        (lambda: D.Poisson(2.5), {"mode": 2, "mean": 2.5, "deterministic": 2.5}),
        (lambda: D.Cauchy(1.0, 1.0), {"mode": 1, "median": 1}),
        (lambda: D.Independent(D.Normal(torch.ones(2), 1.0), 1), {"mode": [1, 1], "median": None, "mean": [1, 1]}),
        (
            lambda: D.TransformedDistribution(D.Normal(0.5, 0.1), [D.ExpTransform()]),
            {"mode": None, "median": 1.6487213},
        ),
        (lambda: Tractable(0.0, 1.0), {"deterministic": 1, "mode": 2, "median": 3, "mean": 4}),
    ],
)
def test_interaction_types(distribution, values):
    for kind, value in values.items():
        module = ProbabilisticTensorDictModule(
            ["p"], ["a"], distribution_class=lambda p: distribution(), default_interaction_type=kind
        )
        if value is None:
            with pytest.raises(NotImplementedError):
                module(TensorDict(p=1.0))
        else:
            expected = torch.tensor(value, dtype=torch.float32)
            torch.testing.assert_close(module(TensorDict(p=1.0))["a"], expected, check_dtype=False)


def test_means_are_estimated_where_there_is_none():
    class Shifted(D.Distribution):
        arg_constraints = {}

        def __init__(self, p):
            super().__init__(validate_args=False)
            self.p = p

        def sample(self, shape=()):
            return self.p + torch.arange(shape[0])

    module = ProbabilisticTensorDictModule(
        ["p"], ["a"], distribution_class=Shifted, default_interaction_type="mean", n_empirical_estimate=3
    )
    assert module(TensorDict(p=1.0))["a"] == 2


def test_the_type_that_a_block_asks_for():
    module = normal(default_interaction_type="random")
    td = params(3)
    torch.manual_seed(0)
    expected = torch.normal(td["loc"], td["scale"])
    torch.manual_seed(0)
    torch.testing.assert_close(module(td)["a"], expected)
    with set_interaction_type("mean"):
        assert interaction_type() is InteractionType.MEAN and (module(td)["a"] == 0).all()
        with set_interaction_type(None):
            assert interaction_type() is None and (module(td)["a"] != 0).all()
    assert interaction_type() is None

    @set_interaction_type(InteractionType.MODE)
    def decorated():
        return interaction_type()

    assert decorated() is InteractionType.MODE and interaction_type() is None
    with set_interaction_type():
        assert interaction_type() is InteractionType.DETERMINISTIC
    for wrong in (set_interaction_type, InteractionType.from_str):
        with pytest.raises(ValueError, match="bogus"):
            wrong("bogus")
    assert InteractionType.from_str("MODE") == "mode" and str(InteractionType.MODE) == "mode"


def test_random_values_have_gradients_where_the_distribution_gives_them():
    td = params(3)
    td["loc"].requires_grad_()
    with set_interaction_type("random"):
        normal()(td)["a"].sum().backward()
    assert td["loc"].grad.tolist() == [1, 1, 1]
    logits = torch.zeros(3, requires_grad=True)
    draw = ProbabilisticTensorDictModule(["logits"], ["a"], distribution_class=D.Categorical)
    with set_interaction_type("random"):
        assert not draw(TensorDict(logits=logits))["a"].requires_grad


@pytest.mark.parametrize(("samples", "shape"), [(4, (4,)), (torch.Size([2, 5]), (2, 5)), ((2,), (2,))])
@pytest.mark.parametrize("kind", ["random", "mean"])
def test_several_samples(samples, shape, kind):
    module = normal(num_samples=samples, default_interaction_type=kind, return_log_prob=True)
    td = params(3)
    result = module(td)
    assert result is not td and result.batch_size == (*shape, 3) and td.batch_size == (3,)
    assert result["a"].shape == result["a_log_prob"].shape == result["loc"].shape == (*shape, 3)
    assert set(td.keys()) == {"loc", "scale"} and module.num_samples == shape


def test_where_values_go():
    module, td, out = normal(return_log_prob=True), params(3), TensorDict(batch_size=[3])
    assert module(td, tensordict_out=out) is out and set(out.keys()) == {"a", "a_log_prob"}
    assert set(td.keys()) == {"loc", "scale"} and normal()(td, _requires_sample=False) is td and "a" not in td.keys()
    with pytest.raises(KeyError, match="scores 'a', not found in the container"):
        module(td, _requires_sample=False)
    assert module(td) is td
    torch.testing.assert_close(td["a_log_prob"], D.Normal(0.0, 2.0).log_prob(td["a"]))
    with set_skip_existing(True):
        assert (module(td.set("a", torch.ones(3)))["a"] == 1).all()
    assert (module(td)["a"] == 0).all()


def test_several_values_of_one_distribution():
    class Pair(D.Distribution):
        arg_constraints = {}

        def __init__(self, p):
            super().__init__(validate_args=False)
            self.p = p

        def sample(self, shape=()):
            return self.p, self.p + 1

        def log_prob(self, first, second):
            return first + second

    with set_composite_lp_aggregate(True):
        module = ProbabilisticTensorDictModule(
            ["p"], ["a", "b"], distribution_class=Pair, default_interaction_type="random", return_log_prob=True
        )
        td = module(TensorDict(p=1))
        assert td["a"] == 1 and td["b"] == 2 and td["sample_log_prob"] == 3 == module.log_prob(td)
    wrong = ProbabilisticTensorDictModule(["p"], ["a"], distribution_class=Pair, default_interaction_type="random")
    with pytest.raises(RuntimeError, match=r"gave 2 values for the 1 out-keys \['a'\]"):
        wrong(TensorDict(p=1))


def test_failures_name_what_is_missing_and_change_nothing():
    td = TensorDict(loc=torch.zeros(()))
    with pytest.raises(KeyError, match=r"reads 'scale', not found.*\['loc'\]"):
        normal()(td)
    with pytest.raises(TypeError, match=r"must match.*'foo'.*dist_keys=\['loc', 'foo'\]"):
        normal(in_keys=["loc", "foo"])(TensorDict(loc=0.0, foo=1.0))
    with pytest.raises(KeyError, match=r"scores 'a', not found"):
        normal().log_prob(params(3))
    with pytest.raises(RuntimeError, match="does not support select_out_keys"):
        normal().select_out_keys("a")
    with pytest.raises(ValueError, match="is not a valid InteractionType; choose one of .*'median'"):
        normal(default_interaction_type="bogus")
    misfit = normal(distribution_class=lambda loc, scale: D.Independent(D.Normal(loc, scale), 1), return_log_prob=True)
    td = params(3)
    with pytest.raises(RuntimeError, match="a_log_prob.*batch size"):
        misfit(td)
    assert set(td.keys()) == {"loc", "scale"}
    with pytest.raises(RuntimeError, match="fully deprecated"):
        _ = normal().SAMPLE_LOG_PROB_KEY


def test_the_default_distribution_is_certain():
    module = ProbabilisticTensorDictModule(["param"], ["a"])
    assert module(TensorDict(param=torch.tensor([1.0, 2.0])))["a"].tolist() == [1, 2]


def test_distribution_kwargs_follow_the_module():
    module = normal(
        in_keys=["loc"], distribution_kwargs=TensorDictParams(TensorDict(scale=torch.tensor(2.0)), no_convert=True)
    )
    assert list(module.state_dict()) == ["distribution_kwargs.scale"]
    assert module.to(torch.float64).get_dist(TensorDict(loc=0.0)).scale.dtype == torch.float64


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_repr(copied):
    module = copied(normal(return_log_prob=True))
    assert module.out_keys == ["a", "a_log_prob"] and module(params(3))["a"].tolist() == [0, 0, 0]
    assert repr(module) == (
        "ProbabilisticTensorDictModule(\n"
        "    in_keys=['loc', 'scale'],\n"
        "    out_keys=['a', 'a_log_prob'],\n"
        "    distribution_class=<class 'torch.distributions.normal.Normal'>,\n"
        "    distribution_kwargs={},\n"
        "    default_interaction_type='deterministic',\n"
        "    num_samples=None)"
    )


# --- generators -------------------------------------------------------------------------------------------------------


def test_a_generator_of_its_own():
    td = params(3)
    torch.manual_seed(3)
    first, second = D.Normal(0.0, 2.0).sample((3,)), D.Normal(0.0, 2.0).sample((3,))
    for generator in (3, torch.Generator().manual_seed(3)):
        module = normal(default_interaction_type="random", generator=generator)
        torch.manual_seed(0)
        expected = torch.randn(2)
        torch.manual_seed(0)
        torch.testing.assert_close(module(td)["a"], first)
        torch.testing.assert_close(module(td)["a"], second)
        torch.testing.assert_close(torch.randn(2), expected)
    with pytest.raises(TypeError, match="must be a torch.Generator, int, NestedKey, or None; got float"):
        normal(generator=5.5)


@pytest.mark.parametrize("tensor", [True, False])
def test_a_seed_in_the_container(tensor):
    def seeded():
        td = params(3)
        return td.set("g", torch.tensor(3)) if tensor else td.set_non_tensor("g", 3)

    module = normal(default_interaction_type="random", generator="g")
    td = seeded() if not tensor else params(3).apply(lambda x: x, batch_size=[]).set("g", torch.tensor(3))
    first = module(td)["a"].clone()
    torch.manual_seed(3)
    torch.testing.assert_close(first, D.Normal(0.0, 2.0).sample((3,)))
    assert int(td["g"]) != 3
    second = module(td)["a"]
    assert not torch.equal(first, second)


def test_a_generator_in_the_container_advances():
    module, td = normal(default_interaction_type="random", generator="g"), params(3)
    td.set_non_tensor("g", torch.Generator().manual_seed(3))
    first = module(td)["a"].clone()
    torch.manual_seed(3)
    torch.testing.assert_close(first, D.Normal(0.0, 2.0).sample((3,)))
    torch.testing.assert_close(module(td)["a"], D.Normal(0.0, 2.0).sample((3,)))
    assert normal(default_interaction_type="random", generator="absent")(params(3))["a"].shape == (3,)


def test_the_state_is_given_back_when_the_block_raises():
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    before = torch.get_rng_state()

    @_use_generator(generator)
    def fails():
        torch.randn(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)
    again = torch.Generator().manual_seed(3)
    torch.randn(1, generator=again)
    assert torch.equal(generator.get_state(), again.get_state())


# --- composite distributions ------------------------------------------------------------------------------------------


PARTS = {"distribution_map": {"cont": D.Normal, ("n", "disc"): D.Categorical}}


def composite(**options):
    kwargs = {"distribution_class": CompositeDistribution, "distribution_kwargs": PARTS, **options}
    return ProbabilisticTensorDictModule(["params"], **kwargs)


def composite_params():
    return TensorDict(
        params={
            "cont": {"loc": torch.zeros(3, 4), "scale": torch.ones(3, 4)},
            "n": {"disc": {"logits": torch.zeros(3, 5)}},
        },
        batch_size=[3],
    )


def test_composites_write_each_value_and_its_log_probability():
    module = composite(return_log_prob=True, default_interaction_type="random")
    keys = ["cont", ("n", "disc"), "cont_log_prob", ("n", "disc_log_prob")]
    assert module.out_keys == keys
    td = module(composite_params())
    assert set(td.exclude("params").keys(True, True)) == set(keys)
    torch.testing.assert_close(td["cont_log_prob"], D.Normal(0.0, 1.0).log_prob(td["cont"]))
    torch.testing.assert_close(td["n", "disc_log_prob"], torch.full((3,), 0.2).log())
    assert set(module.log_prob(td).keys(True, True)) == set(keys[2:])


def test_composites_sum_log_probabilities():
    with set_composite_lp_aggregate(True):
        module = composite(return_log_prob=True, default_interaction_type="random")
        assert module.out_keys == ["cont", ("n", "disc"), "sample_log_prob"]
        td = module(composite_params())
        total = D.Normal(0.0, 1.0).log_prob(td["cont"]).sum(-1) + torch.full((3,), 0.2).log()
        torch.testing.assert_close(td["sample_log_prob"], total)
        torch.testing.assert_close(module.log_prob(td), total)


def test_composites_write_log_probabilities_where_they_are_asked_for():
    module = composite(return_log_prob=True, log_prob_keys=["l1", ("l", "l2")])
    td = module(composite_params())
    assert module.out_keys[2:] == ["l1", ("l", "l2")] and td["l1"].shape == (3, 4) and td["l", "l2"].shape == (3,)
    assert "cont_log_prob" not in td.keys()


def test_names_of_the_parts_of_composites():
    named = composite(distribution_kwargs={**PARTS, "name_map": {"cont": "A", ("n", "disc"): ("q", "B")}})
    assert named.out_keys == ["A", ("q", "B")] and named(composite_params())["q", "B"].shape == (3,)
    several = composite(num_samples=2, default_interaction_type="random", return_log_prob=True)(composite_params())
    assert several.batch_size == (2, 3) and several["cont"].shape == several["cont_log_prob"].shape == (2, 3, 4)
    with pytest.raises(ValueError, match="out_keys can be left out if"):
        composite(distribution_kwargs={})


# --- sequences --------------------------------------------------------------------------------------------------------


def test_a_policy():
    net = policy(return_log_prob=True)
    td = TensorDict(x=torch.zeros(3), batch_size=[3])
    assert net(td) is td and set(td.keys()) == {"x", "loc", "scale", "a", "a_log_prob"}
    assert net.in_keys == ["x"] and net.out_keys == ["loc", "scale", "a", "a_log_prob"] and not net.return_composite
    assert net.log_prob_key == "a_log_prob" and net.log_prob_keys == ["a_log_prob"] and net.num_samples == ()
    assert net.dist_params_keys == ["loc", "scale"] and net.dist_sample_keys == ["a"]
    assert net.default_interaction_type is InteractionType.DETERMINISTIC
    assert type(net.det_part) is TensorDictSequential and len(net.det_part) == 1
    value, *_ = net(torch.zeros(3))[2:]
    assert value.tolist() == [0, 0, 0]


def test_distributions_of_a_policy():
    net, td = policy(), TensorDict(x=torch.zeros(3), batch_size=[3])
    assert isinstance(net.get_dist(td), D.Normal) and set(td.keys()) == {"x", "loc", "scale"}
    assert net.get_dist_params(td) is td
    scored = TensorDict(x=torch.zeros(3), a=torch.ones(3), batch_size=[3])
    torch.testing.assert_close(net.log_prob(scored), D.Normal(0.0, 1.0).log_prob(torch.ones(3)))
    torch.testing.assert_close(
        net.log_prob(scored, dist=D.Normal(1.0, 1.0)), D.Normal(0.0, 1.0).log_prob(torch.zeros(3))
    )
    out = TensorDict(batch_size=[3])
    net.get_dist(TensorDict(x=torch.zeros(3), batch_size=[3]), out)
    assert set(out.keys()) == {"loc", "scale"}
    changed = TensorDict(x=torch.zeros(3), loc=torch.ones(3), scale=torch.ones(3))
    assert (net.build_dist_from_params(changed).loc == 1).all() and (net.get_dist(changed).loc == 0).all()


def two(first="deterministic", second="deterministic", **options):
    def part(reads, writes, kind):
        return ProbabilisticTensorDictModule(
            {"loc": reads}, [writes], distribution_class=D.Normal, distribution_kwargs={"scale": 1},
            default_interaction_type=kind,
        )  # fmt: skip

    return ProbabilisticTensorDictSequential(
        step("x", "l0"), part("l0", "s0", first), step("s0", "l1"), part("l1", "s1", second), **options
    )


def test_several_distributions_are_composed():
    net, td = two(), TensorDict(x=torch.ones(3))
    assert net.return_composite and net.dist_sample_keys == ["s1", "s0"] and net.dist_params_keys == ["l1", "l0"]
    assert net.log_prob_keys == ["s1_log_prob", "s0_log_prob"]
    dist = net.get_dist(td)
    assert isinstance(dist, CompositeDistribution) and set(dist.dists) == {"s0", "s1"}
    assert set(td.keys()) == {"x"} and (dist.dists["s1"].loc == 3).all()
    built = net.build_dist_from_params(net(td))
    assert set(built.dists) == {"s0", "s1"}


def keeping(*keys, **options):
    """A sequence whose first module writes the parameters and 7 at the keys."""
    write = TensorDictModule(lambda x: (x, x.exp(), *[x + 7 for _ in keys]), ["x"], ["loc", "scale", *keys])
    return ProbabilisticTensorDictSequential(write, normal(return_log_prob=True), **options)


@pytest.mark.parametrize("options", [{}, {"return_composite": True}, {"partial_tolerant": True}, {"inplace": False}])
def test_a_value_that_an_earlier_module_has_written_is_kept_and_scored(options):
    net = keeping("a", **options)
    nets = [net, pickle.loads(pickle.dumps(net[1:])), copy.deepcopy(net), net[:], net.select_subsequence(["x"])]
    for each, keeps in zip(nets, [True, False, True, True, True]):
        td = each(TensorDict(x=torch.zeros(3), a=torch.ones(3), loc=torch.zeros(3), scale=torch.ones(3)))
        assert (td["a"] == (7 if keeps else 0)).all()
        torch.testing.assert_close(td["a_log_prob"], D.Normal(0.0, 1.0).log_prob(td["a"]))
    net[0] = keeping("b")[0]
    assert (net(TensorDict(x=torch.zeros(3)))["a"] == 0).all()
    net[0] = keeping("a")[0]
    assert (net(TensorDict(x=torch.zeros(3)))["a"] == 7).all()
    if "partial_tolerant" not in options:
        net[0].select_out_keys("loc", "scale")
        assert (net(TensorDict(x=torch.zeros(3)))["a"] == 0).all()


def test_a_value_is_kept_by_a_sequence_that_is_the_last_module_too():
    inner = ProbabilisticTensorDictSequential(step("x", "y"), normal(return_log_prob=True))
    net = ProbabilisticTensorDictSequential(keeping("a")[0], inner)
    assert (net(TensorDict(x=torch.zeros(3)))["a"] == 7).all()
    assert (inner(TensorDict(x=torch.zeros(3), loc=torch.zeros(3), scale=torch.ones(3)))["a"] == 0).all()
    inner.append(step("a", "z"))
    td = ProbabilisticTensorDictSequential(keeping("a")[0], inner)(TensorDict(x=torch.zeros(3)))
    assert (td["a"] == 0).all() and (td["z"] == 1).all()


@pytest.mark.parametrize("aggregate", [True, False])
def test_the_values_of_a_composite_distribution_are_kept(aggregate):
    with set_composite_lp_aggregate(aggregate):
        write = TensorDictModule(lambda x: (x + 7, x[..., 0].long() + 2), ["x"], ["cont", ("n", "disc")])
        last = composite(return_log_prob=True, default_interaction_type="random")
        td = ProbabilisticTensorDictSequential(write, last)(composite_params().set("x", torch.zeros(3, 4)))
        assert (td["cont"] == 7).all() and (td["n", "disc"] == 2).all()
        cont, disc = D.Normal(0.0, 1.0).log_prob(td["cont"]), torch.full((3,), 0.2).log()
        torch.testing.assert_close(td["cont_log_prob"], cont)
        torch.testing.assert_close(td["n", "disc_log_prob"], disc)
        if aggregate:
            torch.testing.assert_close(td["sample_log_prob"], cont.sum(-1) + disc)


def test_a_nested_sequence_takes_its_values_by_its_own_interaction_types():
    seen = []

    def look(x):
        seen.append(interaction_type())
        return x

    random, mode = InteractionType.RANDOM, InteractionType.MODE
    inner = two("random", "mode")
    inner.insert(0, TensorDictModule(look, ["x"], ["x"]))
    net = ProbabilisticTensorDictSequential(TensorDictModule(look, ["x"], ["x"]), inner)
    td = net(TensorDict(x=torch.ones(3)))
    assert seen == [mode, None] and (td["s0"] != td["l0"]).all() and (td["s1"] == td["l1"]).all()
    inner.return_composite = False
    td = net(TensorDict(x=torch.ones(3)))
    assert seen[2:] == [mode, mode] and (td["s0"] == td["l0"]).all()
    with set_interaction_type(random):
        td = net(TensorDict(x=torch.ones(3)))
    assert seen[4:] == [random, random] and (td["s1"] != td["l1"]).all()


def test_log_probabilities_of_later_values_are_conditional():
    net = two("random", "random")
    td = net(TensorDict(x=torch.ones(3)))
    before = td.clone()
    log_prob = net.log_prob(td)
    torch.testing.assert_close(log_prob["s0_log_prob"], D.Normal(2.0, 1.0).log_prob(td["s0"]))
    torch.testing.assert_close(log_prob["s1_log_prob"], D.Normal(td["s0"] + 1, 1.0).log_prob(td["s1"]))
    assert (td == before).all() and set(td.keys()) == set(before.keys())
    with set_composite_lp_aggregate(True):
        summed = two("random", "random").log_prob(td)
    torch.testing.assert_close(summed, sum(log_prob.values()).sum())


@pytest.mark.parametrize("composed", [True, False])
def test_each_module_takes_its_value_in_its_way_unless_the_last_one_counts(composed):
    td = two("random", "mean", return_composite=composed)(TensorDict(x=torch.ones(100)))
    assert bool((td["s0"] == 2).all()) is not composed and (td["s1"] == td["l1"]).all()
    td = two("mean", "random", return_composite=composed)(TensorDict(x=torch.ones(100)))
    assert bool((td["s0"] == 2).all()) is composed and not (td["s1"] == td["l1"]).any()


def test_the_last_of_several_distributions():
    net = two(return_composite=False)
    assert isinstance(net.get_dist(TensorDict(x=torch.ones(3))), D.Normal)
    td = TensorDict(x=torch.ones(3), s1=torch.full((3,), 4.0))
    torch.testing.assert_close(net.log_prob(td), D.Normal(3.0, 1.0).log_prob(td["s1"]))


def test_a_sequence_that_ends_in_no_distribution():
    draw = normal(in_keys=["loc"], distribution_kwargs={"scale": 1})
    net = ProbabilisticTensorDictSequential(draw, step("a", "y"))
    assert net.return_composite and net.out_keys == ["a", "y"]
    td = net(TensorDict(loc=0.0))
    assert td["y"] == 1 and set(net.log_prob(td).keys()) == {"a_log_prob"}
    assert set(net.get_dist(TensorDict(loc=0.0)).dists) == {"a"}
    with pytest.raises(TypeError, match="the last module is a TensorDictModule"):
        ProbabilisticTensorDictSequential(draw, step("a", "y"), return_composite=False)
    with pytest.raises(ValueError, match="made of modules"):
        ProbabilisticTensorDictSequential()
    with pytest.raises(TypeError, match="none of the modules"):
        ProbabilisticTensorDictSequential(step("a", "y")).get_dist(TensorDict(a=1))


def test_nested_sequences():
    outer = ProbabilisticTensorDictSequential(step("w", "x", 0), policy())
    td = TensorDict(w=torch.tensor(1.0))
    assert outer(td)["a"] == 1 and isinstance(outer.get_dist(td), D.Normal) and outer.dist_sample_keys == ["a"]
    torch.testing.assert_close(outer.log_prob(td), D.Normal(1.0, torch.tensor(1.0).exp()).log_prob(td["a"]))
    composed = ProbabilisticTensorDictSequential(two(), policy(in_keys={"loc": "s1", "scale": "scale"}, out_keys=["b"]))
    assert set(composed.get_dist(TensorDict(x=torch.ones(3))).dists) == {"s0", "s1", "b"}


def test_parts_of_sequences():
    net = policy()
    assert type(net[:1]) is TensorDictSequential and type(net[1:]) is type(net[:]) is ProbabilisticTensorDictSequential
    assert type(net[-1]) is ProbabilisticTensorDictModule
    assert type(net.select_subsequence(out_keys=["a"])) is ProbabilisticTensorDictSequential


@pytest.mark.parametrize("inplace", [None, True, False, "empty"])
def test_where_results_of_sequences_go(inplace):
    split = TensorDictModule(lambda x: (x, x.exp()), ["x"], ["loc", "scale"])
    net = ProbabilisticTensorDictSequential(split, normal(), inplace=inplace, selected_out_keys=["a"])
    td = TensorDict(x=torch.zeros(3), batch_size=[3])
    result = net(td)
    assert set(result.keys()) == ({"x", "a"} if inplace in (None, True) else {"a"})
    assert (result is td) == (inplace in (None, True)) and (inplace in (None, True) or set(td.keys()) == {"x"})


def test_samples_flow_through_a_sequence():
    split = TensorDictModule(lambda x: (x, x.exp()), ["x"], ["loc", "scale"])
    draw = normal(num_samples=3, default_interaction_type="random")
    net = ProbabilisticTensorDictSequential(split, draw, step("a", "y"))
    td = net(TensorDict(x=torch.zeros(2), batch_size=[2]))
    assert td.batch_size == (3, 2) and td["y"].shape == td["loc"].shape == (3, 2) and net.num_samples == (3,)


def test_functional_calls_under_vmap():
    net = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 8), ["x"], ["h"]),
        TensorDictModule(NormalParamExtractor(), ["h"], ["loc", "scale"]),
        normal(distribution_class=TruncatedNormal, distribution_kwargs={"a": -2.0, "b": 2.0}, return_log_prob=True),
    )
    stacked = TensorDict.from_module(net).data.expand(3).clone()

    def run(params, td):
        with params.to_module(net):
            return net(td)

    td = torch.vmap(run, (0, None))(stacked, TensorDict(x=torch.ones(5, 4), batch_size=[5]))
    assert td.batch_size == (3, 5) and td["a_log_prob"].shape == (3, 5, 4)


def test_parameters_without_batch_dims_of_their_own():
    td = TensorDict({"loc": UnbatchedTensor(torch.zeros(2)), "scale": UnbatchedTensor(torch.ones(2))}, [4])
    out = normal(default_interaction_type="mean", return_log_prob=True)(td)
    assert out["a"].tolist() == [0, 0] and out["a_log_prob"].shape == (2,)


def test_one_key_for_several_log_probabilities_is_refused():
    with pytest.raises(RuntimeError, match="log_prob_key names one log-probability"):
        ProbabilisticTensorDictModule(["loc", "scale"], ["a", "b"], log_prob_key="lp", return_log_prob=True)


def test_further_arguments_of_a_sequence():
    net = ProbabilisticTensorDictSequential(
        ProbabilisticTensorDictModule(["loc", "scale"], ["a"], distribution_class=D.Normal)
    )
    td = TensorDict(loc=torch.zeros(3), scale=torch.ones(3), batch_size=[3])
    out = TensorDict(batch_size=[3])
    assert net(td.copy(), out) is out and net(td.copy(), tensordict_out=out) is out
    assert (net(td.copy(), _requires_sample=None)["a"] == 0).all()
    with pytest.raises(TypeError, match="takes a container and `tensordict_out`"):
        net(td.copy(), out, True)
