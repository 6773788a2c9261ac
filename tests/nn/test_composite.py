"""Composite distributions: values, log-probabilities and entropies, summed or under their keys."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import distributions as D

from cases import mark_slow
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictParams
from tensordict.core.exceptions import ContainerExpected
from tensordict.core.settings import from_environment
from tensordict.nn import (
    CompositeDistribution,
    OneHotCategorical,
    ProbabilisticTensorDictModule,
    TruncatedNormal,
    composite_lp_aggregate,
    set_composite_lp_aggregate,
    set_interaction_type,
)
from tensordict.nn.distributions import Delta
from tensordict.nn.distributions.composite import _add_suffix

MAP = {"move": D.Normal, ("say", "word"): D.Categorical}


def params(batch=(3,)):
    torch.manual_seed(0)
    return TensorDict(
        {
            "move": {"loc": torch.randn(3, 4), "scale": torch.rand(3, 4) + 0.1},
            ("say", "word"): {"logits": torch.randn(3, 7)},
        },
        batch,
    )


def composite(batch=(3,), **options):
    return CompositeDistribution(params(batch), MAP, **options)


def by_hand(given, sample):
    """The log-probabilities of the two values, from torch."""
    move = D.Normal(given["move", "loc"], given["move", "scale"]).log_prob(sample["move"])
    word = D.Categorical(logits=given["say", "word", "logits"]).log_prob(sample["say", "word"])
    return move, word


def keys_of(container):
    return set(container.keys(True, True))


# --- making one -------------------------------------------------------------------------------------------------------


def test_it_is_a_mapping_of_distributions():
    dist = composite()
    assert dist.batch_shape == (3,) and dist.event_shape == () and not dist.has_rsample
    assert list(dist) == list(dist.keys()) == list(dist.dists) == ["move", ("say", "word")] and len(dist) == 2
    assert type(dist["move"]) is D.Normal and type(dist["say", "word"]) is D.Categorical
    assert dist[("say", ("word",))] is dist["say", "word"] and dist.get("absent") is None and "move" in dist
    assert (
        [type(part) for part in dist.values()] == [D.Normal, D.Categorical] == [type(part) for _, part in dist.items()]
    )
    assert repr(dist).startswith("CompositeDistribution({'move': Normal(")
    assert dist.log_prob_key == "sample_log_prob" and dist.entropy_key == "entropy"
    for key in ("absent", "say", 0):
        with pytest.raises(KeyError, match=r"no distribution has the key .*; there are \['move', \('say', 'word'\)\]"):
            dist[key]
    again = pickle.loads(pickle.dumps(dist))
    assert torch.equal(again.mode["move"], dist.mode["move"])


def test_names_keys_and_arguments_of_the_parts():
    dist = composite(
        name_map={"move": ("a", "b"), ("say", ("word",)): "c"},
        extra_kwargs={"move": {"validate_args": False}},
        log_prob_key=("x", "lp"),
        entropy_key=("x", ("ent",)),
    )
    assert list(dist) == [("a", "b"), "c"] and not dist["a", "b"]._validate_args and dist["c"]._validate_args
    assert keys_of(dist.sample()) == {("a", "b"), "c"}
    assert dist.log_prob_key == ("x", "lp") and dist.entropy_key == ("x", "ent")
    assert keys_of(dist.entropy_composite(include_sum=True)) == {("a", "b_entropy"), "c_entropy", ("x", "ent")}
    found = dist.log_prob_composite(dist.sample(), include_sum=True)
    assert keys_of(found) == {("a", "b_log_prob"), "c_log_prob", ("x", "lp")}
    dist.log_prob_key = "lp"
    dist.entropy_key = "ent"
    assert "lp" in dist.log_prob_composite(dist.sample(), include_sum=True)
    assert "ent" in dist.entropy_composite(include_sum=True)
    assert list(composite(name_map={"move": "m"})) == ["m", ("say", "word")]


def test_functions_make_distributions_too():
    given = TensorDict(x={"rate": torch.ones(3), "label": "not a tensor"}, batch_size=[3])
    seen = []

    def make(rate, label, power):
        seen.append((label, power))
        return D.Exponential(rate**power)

    dist = CompositeDistribution(given, {"x": make}, extra_kwargs={"x": {"power": 2}})
    assert type(dist["x"]) is D.Exponential and seen == [("not a tensor", 2)]


def test_existing_distributions():
    normal, word = D.Normal(torch.zeros(3), 1.0), D.Categorical(logits=torch.zeros(3, 2))
    dist = CompositeDistribution.from_distributions(
        TensorDict(batch_size=[3]),
        {"a": normal, ("b", "c"): word},
        name_map={"a": "z"},
        log_prob_key="l",
        entropy_key="e",
    )
    assert dist["z"] is normal and dist["b", "c"] is word
    assert dist.log_prob_key == "l" and dist.entropy_key == "e" and dist.batch_shape == (3,)
    assert len(CompositeDistribution(TensorDict(batch_size=[3]), {})) == 0


@pytest.mark.parametrize("kind", ["lazy", "tensorclass", "params"])
def test_parameters_in_any_container(kind):
    class Arguments(TensorClass):
        loc: torch.Tensor
        scale: torch.Tensor

    loc, scale = torch.randn(2, 3), torch.rand(2, 3) + 0.1
    if kind == "lazy":
        parts = [TensorDict(x={"loc": loc[i], "scale": scale[i]}, batch_size=[3]) for i in range(2)]
        given = LazyStackedTensorDict.lazy_stack(parts)
    elif kind == "tensorclass":
        given = TensorDict(x=Arguments(loc=loc, scale=scale, batch_size=[2, 3]), batch_size=[2, 3])
    else:
        given = TensorDictParams(TensorDict(x={"loc": loc, "scale": scale}, batch_size=[2, 3]))
    dist = CompositeDistribution(given, {"x": D.Normal})
    assert dist.batch_shape == (2, 3) and torch.equal(dist.mean["x"], loc)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"distribution_map": {"absent": D.Normal}},
            KeyError,
            r"no parameters at 'absent'; the container has \[\('move', 'loc'",
        ),
        (
            {"distribution_map": {("move", "loc"): D.Normal}},
            TypeError,
            r"entry \('move', 'loc'\) must be a container .* got Tensor",
        ),
        (
            {"distribution_map": {"move": D.Categorical}},
            TypeError,
            r"entry 'move': .*'loc'.* The arguments are \['loc', 'scale'\]",
        ),
        ({"distribution_map": {"move": lambda loc, scale: loc}}, TypeError, "entry 'move': a distribution is needed"),
        ({"distribution_map": {"move": 3}}, TypeError, "entry 'move': 'int' object is not callable"),
        (
            {"name_map": {"mvoe": "x"}},
            KeyError,
            r"name_map has the keys \['mvoe'\].*there are \['move', \('say', 'word'\)\]",
        ),
        ({"extra_kwargs": {"say": {}}}, KeyError, r"extra_kwargs has the keys \['say'\]"),
        (
            {"name_map": {"move": "x", ("say", "word"): "x"}},
            ValueError,
            "name_map gives values of several distributions the same key",
        ),
        (
            {"extra_kwargs": {"move": {"loc": 0.0}}},
            TypeError,
            "entry 'move': .*multiple values for keyword argument 'loc'",
        ),
        ({"params": {"move": {}}}, ContainerExpected, "the parameters must be in a container, got dict"),
        ({"distribution_map": None}, TypeError, "not iterable"),
    ],
)
def test_bad_arguments_name_the_key(arguments, error, message):
    with pytest.raises(error, match=message):
        CompositeDistribution(**{"params": params(), "distribution_map": MAP, **arguments})


def test_missing_and_refused_arguments_name_the_key():
    given = params().exclude(("move", "scale"))
    with pytest.raises(TypeError, match=r"entry 'move': .*missing .*'scale'. The arguments are \['loc'\]"):
        CompositeDistribution(given, MAP)
    given = params()
    given["move", "scale"] *= -1
    with pytest.raises(ValueError, match="entry 'move': Expected parameter scale"):
        CompositeDistribution(given, MAP)
    with pytest.raises(KeyError, match=r"name_map has the keys \['b'\]"):
        CompositeDistribution.from_distributions(TensorDict(), {"a": D.Normal(0.0, 1.0)}, name_map={"b": "c"})
    with pytest.raises(TypeError, match=r"entry 'a': a distribution is needed, got <class"):
        CompositeDistribution.from_distributions(TensorDict(), {"a": D.Normal})


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("shape", [None, (), (2,), [2], torch.Size([2, 5])])
def test_samples_lie_in_front_of_the_batch(batch, shape):
    drawn = composite(batch).sample(shape)
    lead = tuple(shape or ())
    assert drawn.batch_size == drawn["say"].batch_size == lead + batch
    assert drawn["move"].shape == (*lead, 3, 4) and drawn["say", "word"].shape == (*lead, 3)


def test_samples_are_those_of_the_parts():
    dist = composite()
    torch.manual_seed(1)
    drawn = dist.sample((2,))
    torch.manual_seed(1)
    assert torch.equal(drawn["move"], dist["move"].sample((2,)))
    assert torch.equal(drawn["say", "word"], dist["say", "word"].sample((2,)))


def test_reparametrised_samples():
    loc = torch.zeros(3, requires_grad=True)
    given = TensorDict(x={"loc": loc, "scale": torch.ones(3)}, batch_size=[3])
    dist = CompositeDistribution(given, {"x": D.Normal})
    assert dist.has_rsample
    (gradient,) = torch.autograd.grad(dist.rsample((2,))["x"].sum(), loc)
    assert gradient.tolist() == [2, 2, 2]
    assert not dist.sample()["x"].requires_grad
    with pytest.raises(NotImplementedError, match=r"entry \('say', 'word'\): Categorical has no rsample"):
        composite().rsample()


def test_modes_means_and_deterministic_values():
    dist = composite()
    given = params()
    for name in ("mode", "mean", "deterministic_sample"):
        value = getattr(dist, name)
        assert value.batch_size == (3,) and torch.equal(value["move"], given["move", "loc"])
    assert torch.equal(dist.mode["say", "word"], given["say", "word", "logits"].argmax(-1))
    assert dist.mean["say", "word"].isnan().all()
    assert torch.equal(dist.deterministic_sample["say", "word"], dist.mode["say", "word"])
    with pytest.raises(NotImplementedError, match="entry 'x': MixtureSameFamily has no mode"):
        mixture().mode  # noqa: B018


def mixture():
    parts = D.MixtureSameFamily(D.Categorical(logits=torch.zeros(3, 2)), D.Normal(torch.zeros(3, 2), 1.0))
    return CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), {"x": parts})


class Own(D.Normal):
    @property
    def deterministic_sample(self):
        return self.loc + 7


@pytest.mark.parametrize(
    ("dist", "expected"),
    [
        (Own(torch.zeros(3), 1.0), torch.full((3,), 7.0)),
        (D.Gamma(torch.full((3,), 2.0), 1.0), torch.full((3,), 2.0)),  # mean; the mode is 1
        (D.Poisson(torch.full((3,), 2.5)), torch.full((3,), 2.5)),
        (D.Bernoulli(torch.full((3,), 0.7)), torch.ones(3)),
        (D.Binomial(5, torch.full((3,), 0.3)), torch.ones(3)),
        (D.Independent(D.Bernoulli(torch.full((3, 2), 0.7)), 1), torch.ones(3, 2)),
        (D.OneHotCategorical(logits=torch.eye(3)), torch.eye(3)),
        (OneHotCategorical(logits=torch.eye(3)), torch.eye(3).long()),
        (D.RelaxedOneHotCategorical(torch.tensor(0.1), logits=torch.eye(3)), torch.eye(3)),
        (D.RelaxedBernoulli(torch.tensor(0.1), logits=torch.tensor([-1.0, 0.5, 1.0])), torch.tensor([0.0, 1.0, 1.0])),
        (D.LogisticNormal(torch.zeros(3, 2), torch.ones(3, 2)), torch.full((3, 3), 1 / 3)),
        (Delta(torch.full((3, 2), 4.0)), torch.full((3, 2), 4.0)),
        (TruncatedNormal(torch.zeros(3), 1.0, -1.0, 1.0), torch.zeros(3)),
    ],
)
def test_deterministic_value(dist, expected):
    whole = CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), {"x": dist})
    value = whole.deterministic_sample["x"]
    assert value.dtype == expected.dtype
    torch.testing.assert_close(value, expected)


def test_expanded():
    dist = composite(log_prob_key="lp").expand((5, 3))
    assert dist.batch_shape == (5, 3) and dist.log_prob_key == "lp"
    assert dist.sample()["move"].shape == (5, 3, 4) and dist.sample((2,)).batch_size == (2, 5, 3)
    torch.testing.assert_close(dist.mode["move"], params()["move", "loc"].expand(5, 3, 4))


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_log_prob_under_keys(batch, shape):
    dist = composite(batch)
    sample = dist.sample(shape)
    before = keys_of(sample)
    move, word = by_hand(params(), sample)
    for found in (dist.log_prob(sample), dist.log_prob_composite(sample)):
        assert found is not sample and found.batch_size == shape + batch
        assert keys_of(found) == {"move_log_prob", ("say", "word_log_prob")}
        torch.testing.assert_close(found["move_log_prob"], move)
        torch.testing.assert_close(found["say", "word_log_prob"], word)
    summed = dist.log_prob_composite(sample, include_sum=True)["sample_log_prob"]
    expected = move.sum(-1) + word
    torch.testing.assert_close(summed, expected if batch else expected.sum(-1))
    assert keys_of(sample) == before


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_summed_log_prob_has_the_batch_shape(batch, shape):
    dist = composite(batch)
    sample = dist.sample(shape)
    move, word = by_hand(params(), sample)
    expected = move.sum(-1) + word
    with set_composite_lp_aggregate(True):
        # In a container without batch size, too: the shape is the distribution's.
        for given in (sample, TensorDict(sample.to_dict())):
            torch.testing.assert_close(dist.log_prob(given), expected if batch else expected.sum(-1))
        assert keys_of(sample) == {"move", ("say", "word")}
        written = dist.log_prob_composite(sample)
        assert written is sample
        assert keys_of(sample) == {
            "move",
            "move_log_prob",
            ("say", "word"),
            ("say", "word_log_prob"),
            "sample_log_prob",
        }
        torch.testing.assert_close(sample["sample_log_prob"], dist.log_prob(sample))
        again = dist.sample()
        assert "sample_log_prob" not in dist.log_prob_composite(again, include_sum=False) and "move_log_prob" in again


def test_a_sample_of_more_batch_dims_keeps_them():
    given = TensorDict(x={"loc": torch.zeros(3, 4), "scale": torch.ones(3, 4)})
    dist = CompositeDistribution(given, {"x": D.Normal})
    sample = TensorDict(x=torch.zeros(3, 4), batch_size=[3])
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(dist.log_prob(sample), dist["x"].log_prob(sample["x"]).sum(-1))


def test_log_prob_of_parts_with_various_shapes():
    torch.manual_seed(0)
    parts = {
        "scalar": D.Normal(torch.zeros(3), 1.0),
        "vector": D.Normal(torch.zeros(3, 4), 1.0),
        "event": D.Independent(D.Normal(torch.zeros(3, 4, 2), 1.0), 1),
        "whole": D.MultivariateNormal(torch.zeros(3, 2), torch.eye(2)),
        "table": D.Normal(torch.zeros(3, 4, 5), 1.0),
    }
    dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), parts)
    sample = dist.sample((6,))
    expected = sum(part.log_prob(sample[key]).reshape(6, 3, -1).sum(-1) for key, part in parts.items())
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(dist.log_prob(sample), expected)
    torch.testing.assert_close(dist.log_prob_composite(sample, include_sum=True)["sample_log_prob"], expected)
    expected = sum(part.entropy().reshape(3, -1).sum(-1) for part in parts.values())
    torch.testing.assert_close(dist.entropy(aggregate_probabilities=True), expected)


def test_composites_of_composites():
    inner = composite()
    outer = CompositeDistribution.from_distributions(
        TensorDict(batch_size=[3]), {"in": inner, "x": D.Normal(torch.zeros(3), 1.0)}
    )
    sample = outer.sample((2,))
    assert keys_of(sample) == {("in", "move"), ("in", "say", "word"), "x"}
    move, word = by_hand(params(), sample["in"])
    expected = move.sum(-1) + word + outer["x"].log_prob(sample["x"])
    assert ("in_log_prob", "say", "word_log_prob") in outer.log_prob(sample).keys(True)
    torch.testing.assert_close(outer.log_prob_composite(sample, include_sum=True)["sample_log_prob"], expected)
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(outer.log_prob(sample), expected)
        summed = outer.entropy()
    torch.testing.assert_close(outer.entropy_composite(include_sum=True)["entropy"], summed)


def test_samples_in_any_container():
    class Value(TensorClass):
        x: torch.Tensor

    dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), {"x": D.Normal(torch.zeros(3), 1.0)})
    x = torch.randn(2, 3)
    lazy = LazyStackedTensorDict.lazy_stack([TensorDict(x=row, batch_size=[3]) for row in x])
    for sample in (lazy, Value(x=x, batch_size=[2, 3])):
        torch.testing.assert_close(dist.log_prob(sample)["x_log_prob"], dist["x"].log_prob(x))
        with set_composite_lp_aggregate(True):
            torch.testing.assert_close(dist.log_prob(sample), dist["x"].log_prob(x))


def test_missing_values_name_the_key_and_change_nothing():
    dist = composite()
    sample = dist.sample().exclude(("say", "word"))
    before = keys_of(sample)
    for aggregate in (True, False):
        with set_composite_lp_aggregate(aggregate):
            for fn in (dist.log_prob, dist.log_prob_composite):
                with pytest.raises(KeyError, match=r"the sample has no value at \('say', 'word'\); it has \['move'\]"):
                    fn(sample)
    assert keys_of(sample) == before
    dist = CompositeDistribution.from_distributions(
        TensorDict(batch_size=[3]), {"a": D.Normal(torch.zeros(3), 1.0), "b": D.Normal(torch.zeros(3), 1.0)}
    )
    sample = TensorDict(a=torch.zeros(3), batch_size=[3])
    for fn in (dist.cdf, dist.icdf):
        with pytest.raises(KeyError, match=r"no value at 'b'; it has \['a'\]"):
            fn(sample)
    assert keys_of(sample) == {"a"}
    for fn in (dist.log_prob, dist.log_prob_composite, dist.cdf, dist.icdf):
        for given in (torch.zeros(3), {"a": torch.zeros(3)}):
            with pytest.raises(ContainerExpected, match=f"a sample is a container .* got {type(given).__name__}"):
                fn(given)
    locked = dist.sample().lock_()
    with pytest.raises(RuntimeError, match="lock"):
        dist.cdf(locked)


def test_log_probs_that_do_not_fit_name_their_key():
    part = D.Independent(D.Normal(torch.zeros(3), 1.0), 1)  # its batch shape is not that of the whole
    dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), {"x": part})
    with pytest.raises(RuntimeError, match="entry 'x_log_prob' has shape"):
        dist.log_prob(dist.sample())


# --- entropies --------------------------------------------------------------------------------------------------------


def test_entropies():
    dist = composite()
    move, word = dist["move"].entropy(), dist["say", "word"].entropy()
    for found in (dist.entropy(), dist.entropy_composite(), dist.entropy(aggregate_probabilities=False)):
        assert found.batch_size == (3,) and keys_of(found) == {"move_entropy", ("say", "word_entropy")}
        torch.testing.assert_close(found["move_entropy"], move)
        torch.testing.assert_close(found["say", "word_entropy"], word)
    total = move.sum(-1) + word
    torch.testing.assert_close(dist.entropy(include_sum=True)["entropy"], total)
    torch.testing.assert_close(dist.entropy(aggregate_probabilities=True), total)
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(dist.entropy(), total)
        torch.testing.assert_close(dist.entropy_composite()["entropy"], total)
        assert "entropy" not in dist.entropy_composite(include_sum=False)
        assert "move_entropy" in dist.entropy(aggregate_probabilities=False)
    torch.testing.assert_close(composite(()).entropy(aggregate_probabilities=True), total.sum())


def test_entropies_without_a_closed_form_are_estimated():
    torch.manual_seed(0)
    base = D.Normal(torch.zeros(3), 1.0)
    parts = {
        "reparametrised": D.TransformedDistribution(base, [D.AffineTransform(1.0, 2.0)]),
        "drawn": D.MixtureSameFamily(D.Categorical(logits=torch.zeros(3, 2)), D.Normal(torch.zeros(3, 2), 2.0)),
    }
    dist = CompositeDistribution.from_distributions(TensorDict(batch_size=[3]), parts)
    expected = D.Normal(0.0, 2.0).entropy().expand(3)
    found = dist.entropy(samples_mc=20000)
    for name in parts:
        torch.testing.assert_close(found[f"{name}_entropy"], expected, atol=0.03, rtol=0)
    assert dist.entropy()["drawn_entropy"].shape == (3,)


# --- distribution functions -------------------------------------------------------------------------------------------


def test_cdf_and_icdf_are_written_into_the_sample():
    given = TensorDict({("a", "x"): {"loc": torch.randn(3), "scale": torch.ones(3)}}, [3])
    dist = CompositeDistribution(given, {("a", "x"): D.Normal})
    sample = dist.sample((2,))
    assert dist.cdf(sample) is sample
    torch.testing.assert_close(sample["a", "x_cdf"], dist["a", "x"].cdf(sample["a", "x"]))
    assert dist.icdf(sample) is sample
    torch.testing.assert_close(sample["a", "x_icdf"], sample["a", "x"], atol=1e-4, rtol=1e-4)
    # Without `_cdf`, the probabilities replace the values.
    chances = TensorDict({("a", "x"): torch.full((3,), 0.5)}, [3])
    torch.testing.assert_close(dist.icdf(chances)["a", "x_icdf"], given["a", "x", "loc"])
    for name in ("cdf", "icdf"):
        with pytest.raises(NotImplementedError, match=rf"entry \('say', 'word'\): Categorical has no {name}"):
            getattr(composite(), name)(composite().sample())


# --- the setting ------------------------------------------------------------------------------------------------------


def test_the_setting_holds_for_a_block_a_function_or_the_program():
    assert composite_lp_aggregate() is False and composite_lp_aggregate(nowarn=True) is False
    with set_composite_lp_aggregate():
        assert composite_lp_aggregate()
        with set_composite_lp_aggregate(False):
            assert not composite_lp_aggregate()
        assert composite_lp_aggregate()
    assert set_composite_lp_aggregate(True)(composite_lp_aggregate)() and not composite_lp_aggregate()

    choice = set_composite_lp_aggregate(True)
    try:
        choice.set()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(composite_lp_aggregate()))
        thread.start()
        thread.join()
        assert composite_lp_aggregate() and seen == [True]
    finally:
        choice.unset()
    assert not composite_lp_aggregate()
    with pytest.raises(RuntimeError, match="unset\\(\\) undoes a set\\(\\) of the same object"):
        choice.unset()
    with set_composite_lp_aggregate(False):
        choice.set()
        assert composite_lp_aggregate()
        choice.unset()
        assert not composite_lp_aggregate()
    with pytest.raises(TypeError, match="set_composite_lp_aggregate takes True or False, got 'yes'"):
        set_composite_lp_aggregate("yes")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("no", False), ("f", False), (None, None)],
)
def test_the_environment_variable(monkeypatch, value, expected):
    monkeypatch.delenv("COMPOSITE_LP_AGGREGATE", raising=False)
    if value is not None:
        monkeypatch.setenv("COMPOSITE_LP_AGGREGATE", value)
    assert from_environment("COMPOSITE_LP_AGGREGATE") is expected
    monkeypatch.setenv("COMPOSITE_LP_AGGREGATE", "perhaps")
    with pytest.raises(ValueError, match="COMPOSITE_LP_AGGREGATE must be 1 or 0, got 'perhaps'"):
        from_environment("COMPOSITE_LP_AGGREGATE")


@pytest.mark.seconds
def test_the_environment_variable_is_read_when_a_program_starts():
    program = "from tensordict.nn import composite_lp_aggregate; print(composite_lp_aggregate())"
    environment = {**os.environ, "COMPOSITE_LP_AGGREGATE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_add_suffix():
    assert _add_suffix("a", "_x") == _add_suffix(("a",), "_x") == "a_x"
    assert _add_suffix(("a", ("b", "c")), "_x") == ("a", "b", "c_x")
    for key in ((), 3):
        with pytest.raises(TypeError, match="a key must be a string"):
            _add_suffix(key, "_x")


# --- compiled ---------------------------------------------------------------------------------------------------------

EVERY = {**MAP, "cut": TruncatedNormal, "hot": OneHotCategorical, "point": Delta}


def every(x):
    given = {
        "move": {"loc": x, "scale": x.exp()},
        ("say", "word"): {"logits": x},
        "cut": {"loc": x, "scale": x.exp(), "a": x - 1, "b": x + 1},
        "hot": {"logits": x},
        "point": {"param": x},
    }
    return CompositeDistribution(TensorDict(given, x.shape[:1]), EVERY, name_map={"move": ("a", "b")})


def sampled(x):
    dist = every(x)
    sample = dist.sample((2,))
    return sample, dist.log_prob(sample)


def smooth(x):
    parts = {"move": D.Normal, "cut": TruncatedNormal}
    given = TensorDict(move={"loc": x, "scale": x.exp()}, cut={"loc": x, "scale": x.exp(), "a": x - 1, "b": x + 1})
    dist = CompositeDistribution(given, parts)
    sample = dist.rsample()
    with set_composite_lp_aggregate(True):
        summed = dist.log_prob(sample), dist.entropy()
    return sample, summed, dist.entropy(), dist.mode, dist.mean, dist.deterministic_sample, dist.cdf(sample.copy())


@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("backend", mark_slow(["eager", "aot_eager"], keep=["aot_eager"]))
@pytest.mark.parametrize("program", [sampled, smooth])
@pytest.mark.parametrize("aggregate", [False, True])
def test_composites_compile_to_one_graph(program, aggregate, backend):
    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    x = torch.randn(3, 4)
    with set_composite_lp_aggregate(aggregate):
        torch.manual_seed(0)
        expected = program(x)
        torch.manual_seed(0)
        found = compiled(x)
    flat, shape = torch.utils._pytree.tree_flatten(found)
    wanted, expected_shape = torch.utils._pytree.tree_flatten(expected)
    assert shape == expected_shape
    torch.testing.assert_close(flat, wanted, equal_nan=True)


@pytest.mark.seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_log_prob_of_an_existing_composite_compiles_for_both_settings():
    torch._dynamo.reset()
    dist = composite()
    sample = dist.sample()
    compiled = torch.compile(dist.log_prob, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(sample)["move_log_prob"], dist.log_prob(sample)["move_log_prob"])
    with set_composite_lp_aggregate(True):
        torch.testing.assert_close(compiled(sample), dist.log_prob(sample))
    assert isinstance(compiled(sample), TensorDict)


# --- values with their log-probabilities ------------------------------------------------------------------------------


class Scored(D.Normal):
    """A distribution that computes the log-probability together with the value; 100 tells who computed it."""

    def sample_and_log_prob(self, shape):
        value = self.sample(shape)
        return value, self.log_prob(value) + 100

    def rsample_and_log_prob(self, shape):
        value = self.rsample(shape)
        return value, self.log_prob(value) + 200


def normals(requires_grad=False, **classes):
    given = {key: {"loc": torch.zeros(3, 4, requires_grad=requires_grad), "scale": torch.ones(3, 4)} for key in classes}
    return CompositeDistribution(TensorDict(given, [3]), classes)


@pytest.mark.parametrize("shape", [None, (), (2,), torch.Size([2, 1])])
def test_a_sample_with_its_log_probability(shape):
    dist = composite()
    for aggregate in (False, True):
        with set_composite_lp_aggregate(aggregate):
            torch.manual_seed(0)
            sample, log_prob = dist.sample_and_log_prob(shape)
            torch.manual_seed(0)
            expected = dist.sample(shape)
            assert sample.batch_size == (*(shape or ()), 3)
            assert (sample == expected).all() and (log_prob == dist.log_prob(expected)).all()
            assert isinstance(log_prob, torch.Tensor) is aggregate
    with pytest.raises(NotImplementedError, match=r"entry \('say', 'word'\): Categorical has no rsample"):
        dist.rsample_and_log_prob()
    sample, log_prob = normals(requires_grad=True, a=D.Normal).rsample_and_log_prob(shape)
    assert sample["a"].requires_grad and log_prob["a_log_prob"].shape == sample["a"].shape


def test_a_part_scores_its_own_values():
    dist = normals(a=Scored, b=D.Normal)
    for method, added in (("sample_and_log_prob", 100), ("rsample_and_log_prob", 200)):
        sample, log_prob = getattr(dist, method)()
        torch.testing.assert_close(log_prob["a_log_prob"], dist["a"].log_prob(sample["a"]) + added)
        torch.testing.assert_close(log_prob["b_log_prob"], dist["b"].log_prob(sample["b"]))


@pytest.mark.parametrize("aggregate", [False, True])
def test_a_module_lets_the_distribution_score_its_values(aggregate):
    with set_composite_lp_aggregate(aggregate):
        params = normals(a=Scored, b=D.Normal)
        given = {"distribution_map": {"a": Scored, "b": D.Normal}}
        draw = ProbabilisticTensorDictModule(
            ["params"],
            ["a", "b"],
            distribution_class=CompositeDistribution,
            distribution_kwargs=given,
            return_log_prob=True,
            default_interaction_type="random",
            generator=3,
        )
        inner = {key: {"loc": torch.zeros(3, 4), "scale": torch.ones(3, 4)} for key in "ab"}
        result = draw(TensorDict(params=inner, batch_size=[3]))
    scores = params["a"].log_prob(result["a"]) + 200
    torch.testing.assert_close(result["a_log_prob"], scores)
    if aggregate:
        expected = scores.sum(-1) + params["b"].log_prob(result["b"]).sum(-1)
        torch.testing.assert_close(result["sample_log_prob"], expected)
    alone = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["x"], distribution_class=Scored, return_log_prob=True, num_samples=2
    )
    td = TensorDict(loc=torch.zeros(3), scale=torch.ones(3), batch_size=[3])
    if not aggregate:
        with set_interaction_type("random"):
            result = alone(td.copy())
        torch.testing.assert_close(result["x_log_prob"], D.Normal(0.0, 1.0).log_prob(result["x"]) + 200)
        # Other ways to take a value do not draw one.
        assert (alone(td.copy())["x_log_prob"] < 100).all()
