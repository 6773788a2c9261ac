"""Truncated normal, one-hot and point distributions, and what makes their parameters, against scipy and by hand."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import distributions as D
from torch import nn
from torch.autograd import gradcheck
from torch.func import grad, jacfwd, jacrev, vmap

from cases import mark_slow
from tensordict import TensorDict
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    OneHotCategorical,
    TruncatedNormal,
    rand_one_hot,
)
from tensordict.nn.distributions import Delta, TruncatedStandardNormal, distributions_maps

INF = float("inf")
compiled = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def double(*values):
    return torch.tensor(values, dtype=torch.double)


# --- the truncated normal distribution --------------------------------------------------------------------------------

# loc, scale, a, b
INTERVALS = [
    (0.0, 1.0, -1.0, 2.0),
    (0.5, 2.0, -1.0, 2.0),
    (1.0, 1.0, 1.0, 2.0),
    (3.0, 0.1, -1.0, 1.0),
    (0.0, 1.0, -20.0, 20.0),
    (0.0, 1.0, 0.5, 0.7),
    (5.0, 100.0, -1.0, 1.0),
    (0.0, 1.0, 8.0, 9.0),
    (0.0, 1.0, -9.0, -8.0),
    (0.0, 1.0, 30.0, 31.0),
    (-50.0, 1.0, -1.0, 1.0),
    (0.0, 1.0, 8.0, INF),
    (0.0, 1.0, -INF, -3.0),
    (0.2, 1.5, -INF, INF),
]


def both(loc, scale, a, b):
    """Our distribution and scipy's."""
    reference = stats.truncnorm((a - loc) / scale, (b - loc) / scale, loc, scale)
    return TruncatedNormal(double(loc), double(scale), double(a), double(b)), reference


def quantiles(dist):
    return dist.icdf(double(1e-9, 1e-3, 0.1, 0.5, 0.8, 0.999, 1 - 1e-9))


def close(ours, theirs, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=ours.dtype).expand(ours.shape), rtol=rtol, atol=atol)


@pytest.mark.parametrize("interval", INTERVALS)
def test_truncated_normal_is_that_of_scipy(interval):
    dist, reference = both(*interval)
    x = quantiles(dist)
    close(dist.log_prob(x), reference.logpdf(x))
    close(dist.cdf(x), reference.cdf(x), atol=1e-11)
    # The inverse of scipy is precise to 1e-8 or so in the tails.
    close(x, reference.ppf(double(1e-9, 1e-3, 0.1, 0.5, 0.8, 0.999, 1 - 1e-9)), rtol=1e-7)
    close(dist.mean, reference.mean(), rtol=1e-8, atol=1e-8)
    close(dist.variance, reference.var(), rtol=1e-5, atol=1e-10)
    close(dist.stddev, reference.std(), rtol=1e-5)
    if not math.isinf(interval[2] + interval[3]):
        close(dist.entropy(), integrated(dist, *interval), rtol=1e-7, atol=1e-7)


def integrated(dist, loc, scale, a, b):
    """The entropy, by Gauss-Legendre quadrature in pieces where the mass is."""
    low, high = dist.icdf(double(1e-15)).item(), dist.icdf(double(1 - 1e-15)).item()
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.legendre.leggauss(60))
    edges = torch.linspace(low, high, 41, dtype=torch.double)
    half = (edges[1:] - edges[:-1]) / 2
    x = (edges[:-1] + half)[:, None] + half[:, None] * nodes
    log_prob = dist.log_prob(x)
    return -((log_prob.exp() * log_prob) @ weights @ half)


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("dtype", [torch.float, torch.double])
def test_truncated_normal_inverts_itself(interval, dtype):
    dist = TruncatedNormal(*(torch.tensor(value, dtype=dtype) for value in interval))
    chance = torch.linspace(0, 1, 101, dtype=dtype)
    x = dist.icdf(chance)
    assert x[0] == interval[2] and x[-1] == interval[3] and (x.diff() >= 0).all()
    assert not x.isnan().any()
    # The effect of rounding the values: an ulp times the density.
    rounding = x.abs().nan_to_num(0, 0, 0) * dist.log_prob(x).exp() * torch.finfo(dtype).eps
    assert ((dist.cdf(x) - chance).abs() <= 4 * rounding + 500 * torch.finfo(dtype).eps).all()
    assert dist.cdf(x.new_tensor(-1e4)) == 0 and dist.cdf(x.new_tensor(1e4)) == 1


@pytest.mark.parametrize("interval", INTERVALS)
def test_samples_of_the_truncated_normal(interval):
    torch.manual_seed(0)
    dist = TruncatedNormal(*interval)
    _, reference = both(*interval)
    draws = dist.sample((2000,))
    assert draws.dtype == torch.float and not draws.isnan().any()
    assert (draws >= interval[2]).all() and (draws <= interval[3]).all()
    assert dist.log_prob(draws).isfinite().all()
    assert stats.kstest(draws.double().numpy(), reference.cdf).pvalue > 1e-4


@pytest.mark.parametrize("sigmas", [8.0, 40.0, 300.0, 1e4])
@pytest.mark.parametrize("side", [1, -1])
def test_nothing_is_nan_far_from_the_mean(sigmas, side):
    loc = torch.zeros(5, requires_grad=True)
    scale = torch.ones(5, requires_grad=True)
    bounds = sorted((side * sigmas, side * (sigmas + 1)))
    dist = TruncatedNormal(loc, scale, *bounds)
    x = dist.rsample((7,))
    values = [x, dist.log_prob(x), dist.cdf(x), dist.mean, dist.variance, dist.entropy(), dist.mode, dist.auc]
    assert all(value.isfinite().all() for value in values)
    assert (dist.mean >= bounds[0]).all() and (dist.mean <= bounds[1]).all()
    for derivative in torch.autograd.grad(sum(value.sum() for value in values[:-1]), (loc, scale)):
        assert derivative.isfinite().all()
    # In a tail it is nearly exponential, of rate `sigmas`.
    assert (dist.mean - side * sigmas).abs().max() < 1.1 / sigmas


FUNCTIONS = {
    "log_prob": lambda dist, x, chance: dist.log_prob(x),
    "cdf": lambda dist, x, chance: dist.cdf(x),
    "icdf": lambda dist, x, chance: dist.icdf(chance),
    "mean": lambda dist, x, chance: dist.mean,
    "variance": lambda dist, x, chance: dist.variance,
    "entropy": lambda dist, x, chance: dist.entropy(),
    "auc": lambda dist, x, chance: dist.auc,
}


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_the_truncated_normal(interval, name):
    loc, scale, a, b = (double(value, value) for value in interval)
    loc, scale = (loc + double(0.03, -0.05)).requires_grad_(), (scale * double(1.0, 1.1)).requires_grad_()
    for bound in (a, b):
        bound.requires_grad_(bool(bound.isfinite().all()))
    chance = double(0.3, 0.9).requires_grad_()
    x = TruncatedNormal(loc, scale, a, b).icdf(chance).detach().requires_grad_()

    def called(loc, scale, a, b, x, chance):
        return FUNCTIONS[name](TruncatedNormal(loc, scale, a, b, validate_args=False), x, chance)

    step = 1e-4 * min(1.0, interval[3] - interval[2])
    assert gradcheck(called, (loc, scale, a, b, x, chance), eps=step, atol=1e-4, rtol=1e-3)


def test_gradients_of_samples_are_those_of_the_inverse():
    parameters = [double(0.3, 2.0), double(1.0, 0.5), double(-1.0, -1.0), double(2.0, 1.0)]

    def drawn(*parameters):
        torch.manual_seed(3)
        return TruncatedNormal(*parameters).rsample((4,))

    assert gradcheck(drawn, [value.requires_grad_() for value in parameters], atol=1e-5)
    assert not TruncatedNormal(*parameters).sample().requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_derivatives_in_forward_mode_and_under_vmap():
    loc, chance = double(0.3, 0.9), double(0.1, 0.6)

    def icdf(loc, chance):
        return TruncatedNormal(loc, torch.ones_like(loc), -1.0, 2.0, validate_args=False).icdf(chance)

    for argument in (0, 1):
        torch.testing.assert_close(jacfwd(icdf, argument)(loc, chance), jacrev(icdf, argument)(loc, chance))
    torch.testing.assert_close(vmap(icdf)(loc, chance), icdf(loc, chance))
    torch.testing.assert_close(vmap(grad(icdf))(loc, chance), jacrev(icdf)(loc, chance).diagonal())


def test_conventions_of_the_truncated_normal():
    dist = TruncatedNormal(torch.zeros(3, 1), torch.ones(4), -1, 2.0)
    assert dist.batch_shape == (3, 4) and dist.event_shape == () and dist.has_rsample
    assert dist.sample((2,)).shape == dist.rsample((2,)).shape == (2, 3, 4)
    assert dist.support.check(dist.sample()).all() and not dist.support.check(torch.tensor(2.1)).any()
    assert set(dist.arg_constraints) == {"loc", "scale", "a", "b"}
    assert torch.equal(dist.a, -torch.ones(3, 4)) and torch.equal(dist.b, torch.full((3, 4), 2.0))
    assert torch.equal(dist.mode, torch.zeros(3, 4)) and torch.equal(dist.deterministic_sample, dist.mean)
    wide = dist.expand((5, 3, 4))
    assert wide.batch_shape == (5, 3, 4) and wide.loc.data_ptr() == dist.loc.data_ptr()
    torch.testing.assert_close(wide.mean, dist.mean.expand(5, 3, 4))
    assert wide.rsample().shape == wide.log_prob(wide.sample()).shape == (5, 3, 4)
    assert TruncatedNormal(torch.zeros(2, dtype=torch.bfloat16), 1.0, -1.0, 1.0).rsample().dtype is torch.bfloat16
    assert TruncatedNormal(5.0, 1.0, -1.0, 1.0).mode == 1
    standard = TruncatedStandardNormal(torch.tensor([-1.0, 8.0]), torch.tensor([2.0, 9.0]))
    close(standard.mean.double(), [stats.truncnorm(-1, 2).mean(), stats.truncnorm(8, 9).mean()], rtol=1e-6)
    close(standard.auc.double(), [stats.norm.cdf(2) - stats.norm.cdf(-1), stats.norm.sf(8) - stats.norm.sf(9)], 1e-5)
    again = pickle.loads(pickle.dumps(copy.deepcopy(dist)))
    assert torch.equal(again.mean, dist.mean)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((0.0, 1.0, 2.0, 1.0), "a must be less than the upper bound b, got a=2.0 and b=1.0"),
        ((0.0, 1.0, 1.0, 1.0), "a must be less"),
        ((0.0, 1.0, float("nan"), 1.0), "a must be less"),
        ((0.0, -1.0, 0.0, 1.0), "scale must not be negative"),
        ((float("nan"), 1.0, 0.0, 1.0), "parameter loc"),
    ],
)
def test_bad_parameters_of_the_truncated_normal(parameters, message):
    with pytest.raises(ValueError, match=message):
        TruncatedNormal(*parameters)
    TruncatedNormal(*parameters, validate_args=False)


def test_values_outside_of_the_interval():
    dist = TruncatedNormal(torch.zeros(2), 1.0, -1.0, 1.0)
    with pytest.raises(ValueError, match="within the support"):
        dist.log_prob(torch.tensor([0.0, 1.1]))
    free = TruncatedNormal(torch.zeros(2), 1.0, -1.0, 1.0, validate_args=False)
    assert free.log_prob(torch.tensor([0.0, 1.1])).isfinite().tolist() == [True, False]
    assert free.cdf(torch.tensor([-3.0, 3.0])).tolist() == [0.0, 1.0]
    assert free.icdf(torch.tensor([-0.5, 1.5])).tolist() == [-1.0, 1.0]


# --- one-hot vectors --------------------------------------------------------------------------------------------------


def test_one_hot_is_categorical_over_one_hot_vectors():
    logits = torch.randn(3, 5)
    dist, plain = OneHotCategorical(logits=logits), D.Categorical(logits=logits)
    index = plain.sample((7,))
    value = nn.functional.one_hot(index, 5)
    for given in (value, value.bool(), value.float(), value.to(torch.uint8)):
        torch.testing.assert_close(dist.log_prob(given), plain.log_prob(index))
    torch.testing.assert_close(dist.entropy(), plain.entropy())
    torch.testing.assert_close(dist.mean, plain.probs)
    torch.testing.assert_close(dist.variance, D.OneHotCategorical(logits=logits).variance)
    assert torch.equal(dist.mode.argmax(-1), plain.mode) and torch.equal(dist.deterministic_sample, dist.mode)
    assert dist.mode.dtype == dist.sample().dtype == torch.long
    assert dist.batch_shape == (3,) and dist.event_shape == (5,) and dist.num_params == 1
    assert isinstance(dist, D.Categorical) and dist.support.check(dist.sample()).all()
    every = dist.enumerate_support()
    assert every.shape == (5, 3, 5) and dist.enumerate_support(expand=False).shape == (5, 1, 5)
    torch.testing.assert_close(dist.log_prob(every).exp().sum(0), torch.ones(3))
    assert dist.log_prob(value[:, :1]).shape == (7, 3)


def test_samples_of_one_hot_are_those_of_categorical():
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.0, 1.0, 0.0]])
    torch.manual_seed(0)
    index = D.Categorical(probs=probs).sample((4000,))
    torch.manual_seed(0)
    drawn = OneHotCategorical(probs=probs).sample((4000,))
    assert torch.equal(drawn.argmax(-1), index) and (drawn.sum(-1) == 1).all()
    assert OneHotCategorical(probs=probs[0]).sample().shape == (3,)


def test_expanded_one_hot():
    for kind in ("logits", "probs"):
        dist = OneHotCategorical(**{kind: torch.rand(2, 4)}).expand((3, 2))
        assert type(dist) is OneHotCategorical and dist.batch_shape == (3, 2) and dist.event_shape == (4,)
        assert dist.sample((5,)).shape == dist.rsample((5,)).shape == (5, 3, 2, 4)
        assert dist.log_prob(dist.mode).shape == (3, 2)


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_relaxed_samples_of_one_hot(kind):
    torch.manual_seed(0)
    parameter = torch.tensor([[0.2, 0.5, 0.3]], requires_grad=True)
    dist = OneHotCategorical(**{kind: parameter})
    drawn = dist.rsample((4000,))
    # It is off by default, so that modules that sample get integers.
    assert not dist.has_rsample and drawn.dtype == torch.float
    torch.testing.assert_close(drawn.sum(-1), torch.ones(4000, 1))
    torch.testing.assert_close(drawn.mean(0), dist.probs, atol=0.03, rtol=0)
    # The gradient equals the softmax mean's: up for the favoured class, down for the others.
    (gradient,) = torch.autograd.grad(drawn[..., 0].mean(), parameter)
    assert gradient[0, 0] > 0 and (gradient[0, 1:] < 0).all()


def test_bad_input_of_one_hot():
    for given in ({}, {"logits": torch.zeros(2), "probs": torch.ones(2)}):
        with pytest.raises(ValueError, match="`probs` or `logits`"):
            OneHotCategorical(**given)
    with pytest.raises(ValueError, match="parameter logits"):
        OneHotCategorical(logits=torch.tensor([0.0, float("nan")]))
    with pytest.raises(ValueError, match=r"over 4 categories end in a dim of that size, got \[3\]"):
        OneHotCategorical(logits=torch.zeros(3, 4)).log_prob(torch.zeros(3).long())


def test_rand_one_hot():
    torch.manual_seed(0)
    probs = torch.tensor([[0.0, 0.25, 0.75, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.double)
    drawn = rand_one_hot(probs.expand(4000, 2, 4), do_softmax=False)
    assert drawn.dtype == torch.long and (drawn.sum(-1) == 1).all()
    torch.testing.assert_close(drawn.double().mean(0), probs, atol=0.03, rtol=0)
    logits = torch.tensor([0.0, 1.0, -1.0])
    torch.testing.assert_close(
        rand_one_hot(logits.expand(4000, 3)).float().mean(0), logits.softmax(0), atol=0.03, rtol=0
    )
    mapped = vmap(rand_one_hot, randomness="different")(torch.zeros(5, 3))
    assert mapped.shape == (5, 3) and (mapped.sum(-1) == 1).all()


# --- a single point ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "batch", "event"),
    [
        ({}, (2, 3), (4,)),
        ({"batch_shape": (2,)}, (2,), (3, 4)),
        ({"batch_shape": torch.Size([2, 3, 4])}, (2, 3, 4), ()),
        ({"event_shape": ()}, (2, 3, 4), ()),
        ({"event_shape": [3, 4]}, (2,), (3, 4)),
        ({"batch_shape": (), "event_shape": (2, 3, 4)}, (), (2, 3, 4)),
    ],
)
def test_shapes_of_delta(given, batch, event):
    point = torch.randn(2, 3, 4)
    dist = Delta(point, **given)
    assert dist.batch_shape == batch and dist.event_shape == event and dist.has_rsample
    for value in (dist.mean, dist.mode, dist.deterministic_sample, dist.sample(), dist.rsample(None)):
        assert torch.equal(value, point)
    assert torch.equal(dist.sample((5,)), point.expand(5, 2, 3, 4))
    assert dist.log_prob(dist.sample((5,))).shape == (5, *batch)
    assert torch.equal(dist.variance, torch.zeros(2, 3, 4))
    assert dist.support.check(point).shape == batch
    wide = dist.expand((6, *batch))
    assert wide.batch_shape == (6, *batch) and wide.event_shape == event


def test_delta_without_dims():
    assert Delta(torch.tensor(1.0)).log_prob(torch.tensor([1.0, 2.0])).tolist() == [INF, -INF]


def test_log_prob_of_delta_is_within_the_tolerance():
    point = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    value = point + torch.tensor([[0.0, 0.0], [0.0, 1e-3]])
    assert Delta(point).log_prob(value).tolist() == [INF, -INF]
    assert Delta(point, atol=1e-2).log_prob(value).tolist() == [INF, INF]
    assert Delta(point, rtol=1e-2).log_prob(value).tolist() == [INF, INF]
    assert Delta(point.long()).log_prob(point.long()).dtype == torch.float
    assert Delta(point.double()).log_prob(point.double()).dtype == torch.double


def test_samples_of_delta_carry_the_gradient_of_the_point():
    point = torch.ones(2, requires_grad=True)
    for value in (Delta(point).rsample((3,)), Delta(point).sample((3,)), Delta(point).deterministic_sample):
        (gradient,) = torch.autograd.grad(value.sum(), point)
        assert gradient.unique().tolist() == [value.numel() / 2]


def test_updated_delta():
    dist = Delta(torch.zeros(2, 3))
    dist.update(torch.ones(2, 5))
    assert dist.batch_shape == (2,) and dist.event_shape == (5,) and torch.equal(dist.mode, torch.ones(2, 5))


def test_bad_shapes_of_delta():
    for given in ({"batch_shape": (7,)}, {"event_shape": (4,)}, {"batch_shape": (2,), "event_shape": ()}):
        with pytest.raises(ValueError, match=r"is no part of the shape of the point, \[2, 3\]"):
            Delta(torch.zeros(2, 3), **given)
    with pytest.raises(ValueError, match=r"event_shape \[1, 2, 3\]"):
        Delta(torch.zeros(2, 3), event_shape=(1, 2, 3))


# --- what makes parameters --------------------------------------------------------------------------------------------


def test_normal_param_extractor():
    x = torch.randn(3, 6)
    loc, scale, *others = NormalParamExtractor()(x, "other", 2)
    assert torch.equal(loc, x[:, :3]) and others == ["other", 2]
    shift = math.log(math.expm1(1 - 0.01))
    torch.testing.assert_close(scale, (x[:, 3:] + shift).exp().log1p() + 0.01)
    assert NormalParamExtractor("exp", scale_lb=0.5)(torch.full((2,), -3.0))[1] == 0.5
    assert NormalParamExtractor("none")(-torch.ones(2))[1].item() == pytest.approx(1e-4)
    assert [part.shape for part in NormalParamExtractor()(torch.zeros(3, 5))] == [(3, 3), (3, 2)]
    with pytest.raises(NotImplementedError, match="no mapping 'thing'"):
        NormalParamExtractor("thing")
    with pytest.raises(ValueError, match="a tensor to split is needed"):
        NormalParamExtractor()()


@pytest.mark.parametrize("make_param", [True, False])
@pytest.mark.parametrize("shape", [4, (4,), torch.Size([3, 4]), (), None])
def test_state_independent_scale(shape, make_param):
    module = AddStateIndependentNormalScale(shape, make_param=make_param, init_value=0.5)
    loc = torch.randn(2, 3, 4)
    same, scale, other = module(loc, 7)
    assert same is loc and other == 7
    torch.testing.assert_close(scale, torch.full((2, 3, 4), math.exp(0.5)))
    scale.detach().mul_(2)  # of its own memory
    assert len(list(module.parameters())) == make_param and list(module.state_dict()) == ["state_independent_scale"]
    if make_param:
        scale.sum().backward()
        close(module.state_independent_scale.grad.sum(), 24 * math.exp(0.5), rtol=1e-5)


def test_options_of_the_state_independent_scale():
    module = AddStateIndependentNormalScale(2, scale_mapping="biased_softplus_2.0", scale_lb=3.0)
    assert torch.equal(module(torch.zeros(1, 2))[1], torch.full((1, 2), 3.0))
    assert AddStateIndependentNormalScale(2, device="meta").state_independent_scale.device.type == "meta"
    loaded = AddStateIndependentNormalScale(2)
    loaded.load_state_dict({"state_independent_scale": torch.tensor([1.0, 2.0])})
    torch.testing.assert_close(copy.deepcopy(loaded)(torch.zeros(2))[1], torch.tensor([1.0, 2.0]).exp())
    for shape, loc in ((3, (2, 4)), ((2, 3, 4), (3, 4)), ((1, 4), (2, 4)), (4, ())):
        with pytest.raises(RuntimeError, match="whose last dims must be those of the scale"):
            AddStateIndependentNormalScale(shape)(torch.zeros(loc))
    with pytest.raises(NotImplementedError, match="no mapping 'thing'"):
        AddStateIndependentNormalScale(4, scale_mapping="thing")


def test_distributions_maps():
    assert distributions_maps["onehotcategorical"] is OneHotCategorical and distributions_maps["delta"] is Delta


# --- compiled ---------------------------------------------------------------------------------------------------------


def truncated(loc):
    dist = TruncatedNormal(loc, torch.ones_like(loc), -1.0, 2.0)
    x = dist.rsample()
    return x, dist.log_prob(x), dist.cdf(x), dist.mean, dist.variance, dist.entropy()


def one_hot(logits):
    dist = OneHotCategorical(logits=logits)
    return dist.log_prob(dist.sample()), dist.rsample(), dist.mode, dist.entropy()


def delta(point):
    dist = Delta(point)
    return dist.rsample((2,)), dist.log_prob(dist.sample((2,)))


PROGRAMS = {
    "truncated": truncated,
    "one-hot": one_hot,
    "delta": delta,
    "extractor": NormalParamExtractor(),
    "scale": AddStateIndependentNormalScale(4, make_param=False),
    "rand_one_hot": rand_one_hot,
}


@compiled
@pytest.mark.seconds
@pytest.mark.parametrize("backend", mark_slow(["eager", "aot_eager"], keep=["aot_eager"]))
@pytest.mark.parametrize("name", PROGRAMS)
def test_distributions_compile_to_one_graph(name, backend):
    torch._dynamo.reset()
    program = torch.compile(PROGRAMS[name], fullgraph=True, backend=backend)
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    expected = PROGRAMS[name](x)
    torch.manual_seed(0)
    torch.testing.assert_close(program(x), expected)
    # With a gradient that is the same, too.
    if name in ("truncated", "one-hot"):
        derivatives = []
        for fn in (PROGRAMS[name], program):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(0)
            sum(value.sum() for value in fn(leaf)[:2]).backward()
            derivatives.append(leaf.grad)
        torch.testing.assert_close(*derivatives)


@pytest.mark.gpu
def test_distributions_on_a_gpu():
    loc = torch.zeros(3, 4, device="cuda")
    dist = TruncatedNormal(loc, 1.0, 8.0, 9.0)
    x = dist.rsample((5,))
    assert x.is_cuda and dist.log_prob(x).isfinite().all()
    torch.testing.assert_close(dist.mean.cpu(), TruncatedNormal(loc.cpu(), 1.0, 8.0, 9.0).mean)
    assert OneHotCategorical(logits=loc).sample().is_cuda and rand_one_hot(loc).is_cuda
    assert AddStateIndependentNormalScale(4, device="cuda")(loc)[1].is_cuda
    assert TensorDict(x=Delta(loc).sample())["x"].is_cuda


def test_the_smallest_scale_of_a_truncated_normal():
    assert TruncatedNormal.eps == 1e-6
    bounds = -torch.ones(2), torch.ones(2)
    dist = TruncatedNormal(torch.zeros(2), torch.tensor([0.0, 1e-9]), *bounds)
    assert (dist.scale == 1e-6).all() and (dist.sample((100,)).abs() < 1e-5).all()
    assert dist.log_prob(torch.zeros(2)).isfinite().all()
    for wrong in (-1.0, torch.nan):
        with pytest.raises(ValueError, match="scale"):
            TruncatedNormal(torch.zeros(2), torch.tensor([1.0, wrong]), *bounds)


def test_a_delta_over_a_number():
    assert Delta(torch.tensor(1.0)).sample() == 1 and Delta(torch.tensor(1.0)).rsample((2,)).shape == (2,)


def test_a_scale_that_is_not_trained_is_a_buffer():
    scale = AddStateIndependentNormalScale(3, make_param=False)
    assert isinstance(scale.state_independent_scale, torch.nn.Buffer) and list(scale.state_dict())
