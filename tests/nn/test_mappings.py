"""Maps from real numbers to positive ones, by name."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

from tensordict.nn import add_custom_mapping, biased_softplus, inv_softplus, mappings
from tensordict.nn.scale_mappings import _MAPPINGS, expln

X = torch.tensor([-100.0, -20.0, -5.0, -1.0, 0.0, 1.0, 5.0, 20.0, 80.0], dtype=torch.double)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("softplus", F.softplus),
        ("exp", torch.exp),
        ("relu", torch.relu),
        ("none", lambda x: x),
        ("expln", lambda x: torch.tensor([math.exp(v) if v <= 0 else math.log(v + 1) + 1 for v in x.tolist()])),
    ],
)
def test_mappings_are_the_functions_of_their_names(name, expected):
    torch.testing.assert_close(mappings(name)(X), expected(X), check_dtype=False)


@pytest.mark.parametrize(
    ("name", "bias", "minimum"),
    [
        ("biased_softplus", 1.0, 0.01),
        ("biased_softplus_1", 1.0, 0.01),
        ("biased_softplus_0.5", 0.5, 0.01),
        ("biased_softplus_2.0_0.1", 2.0, 0.1),
    ],
)
def test_biased_softplus_has_its_value_at_0_and_its_minimum(name, bias, minimum):
    mapped = mappings(name)(X)
    assert mapped[X == 0].item() == pytest.approx(bias)
    assert mapped[0].item() == pytest.approx(minimum)
    # log(exp(bias - min) - 1) is the shift: softplus of a sum, plus the minimum.
    shift = math.log(math.expm1(bias - minimum))
    torch.testing.assert_close(mapped, (X + shift).exp().log1p() + minimum)
    torch.testing.assert_close(biased_softplus(bias, minimum)(X), mapped)
    assert not biased_softplus(bias).state_dict()


@pytest.mark.parametrize("value", [1e-3, 0.5, 1.0, 30.0, 1000.0])
def test_inv_softplus_undoes_softplus_without_overflow(value):
    inverse = inv_softplus(value)
    assert isinstance(inverse, float)
    assert F.softplus(torch.tensor(inverse, dtype=torch.double)).item() == pytest.approx(value)
    tensor = torch.tensor([value, value], dtype=torch.double)
    assert inv_softplus(tensor).tolist() == pytest.approx([inverse, inverse])


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9])
def test_inv_softplus_has_a_floor(value):
    expected = math.log(math.expm1(1e-6))
    assert inv_softplus(value) == pytest.approx(expected, rel=1e-6)
    assert inv_softplus(torch.tensor(value, dtype=torch.double)).item() == pytest.approx(expected, rel=1e-6)


def test_gradients():
    x = torch.tensor([-3.0, -0.5, 0.4, 2.0, 30.0], dtype=torch.double, requires_grad=True)
    for name in ("softplus", "exp", "expln", "biased_softplus_1.0"):
        assert gradcheck(mappings(name), (x,))
    assert gradcheck(inv_softplus, (x.detach().abs().requires_grad_(),))


def test_expln_has_finite_gradients_where_the_exponential_overflows():
    x = torch.tensor([-1e6, 0.0, 1e6], requires_grad=True)
    expln(x).sum().backward()
    assert x.grad.isfinite().all()


def test_custom_mappings():
    try:
        add_custom_mapping("thirds", lambda x: x / 3)
        assert mappings("thirds")(torch.tensor(9.0)) == 3
        add_custom_mapping("thirds", torch.square)
        assert mappings("thirds")(torch.tensor(9.0)) == 81
    finally:
        _MAPPINGS.pop("thirds", None)
    with pytest.raises(TypeError, match="'thirds' must be a function of a tensor, got int"):
        add_custom_mapping("thirds", 3)
    assert "thirds" not in _MAPPINGS


@pytest.mark.parametrize("name", ["unheard_of", "", None, 3, "biased_softplus-1"])
def test_unknown_names_list_those_that_there_are(name):
    with pytest.raises(NotImplementedError, match="there is no mapping .*'biased_softplus', 'exp', 'expln'"):
        mappings(name)


@pytest.mark.parametrize(
    "name", ["biased_softplus_x", "biased_softplus_", "biased_softplus_1_2_3", "biased_softplus_1_"]
)
def test_bad_arguments_of_biased_softplus(name):
    with pytest.raises(ValueError, match=f"the mapping '{name}' must be 'biased_softplus_BIAS'"):
        mappings(name)


def test_mappings_are_copied_and_pickled():
    for name in ("softplus", "exp", "relu", "none", "expln", "biased_softplus_1.0"):
        mapping = mappings(name)
        for again in (copy.deepcopy(mapping), pickle.loads(pickle.dumps(mapping))):
            assert torch.equal(again(X), mapping(X))
