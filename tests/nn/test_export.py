"""Modules over containers, exported: programs of `torch.export`, and ONNX models run by onnxruntime."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.export import Dim

from tensordict import TensorDict, TensorDictParams
from tensordict.nn import (
    EnsembleModule,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
    set_interaction_type,
)

# Torch warns about its own code while it exports.
pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def net():
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["obs"], ["hidden"]),
        TensorDictModule(nn.Tanh(), ["hidden"], [("inner", "hidden")]),
        TensorDictModule(lambda h, scale: (h * scale, h.sum(-1)), [("inner", "hidden"), "scale"], ["action", "value"]),
        selected_out_keys=["action", "value"],
    )


def inputs(count=5):
    return {"obs": torch.randn(count, 3), "scale": torch.randn(4)}


def policy(keys=("loc", "scale"), distribution=D.Normal, **kwargs):
    head = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()) if len(keys) == 2 else nn.Linear(3, 4)
    draw = ProbabilisticTensorDictModule(
        list(keys),
        ["action"],
        distribution_class=distribution,
        # The check reads the values of arguments, and an export has no values.
        distribution_kwargs={"validate_args": False},
        return_log_prob=True,
        **kwargs,
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(head, ["obs"], list(keys)), draw)


def exported(module, strict=False, **kwargs):
    return torch.export.export(module, args=(), kwargs=kwargs, strict=strict)


class Named(nn.Module):
    """A network with named arguments of varying sizes. Torch supports no varying sizes in `**kwargs`."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, obs, scale):
        return self.net(obs=obs, scale=scale)


class Scaled(TensorDictModuleBase):
    in_keys = ["obs"]
    out_keys = ["action"]

    def __init__(self):
        super().__init__()
        self.params = TensorDictParams(TensorDict(inner={"scale": torch.ones(3)}))

    @dispatch
    def forward(self, tensordict):
        return tensordict.set("action", tensordict["obs"] * self.params["inner", "scale"])


# --- torch.export -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_a_sequence_by_keyword(strict):
    module, given = net(), inputs()
    program = exported(module, strict, **given)
    torch.testing.assert_close(program.module()(**given), module(**given))
    other = inputs()
    torch.testing.assert_close(program.module()(**other), module(**other))


@pytest.mark.parametrize("strict", [False, True])
def test_a_container(strict):
    module, td = net(), TensorDict(inputs())
    program = torch.export.export(module, (td.copy(),), strict=strict)
    result, expected = program.module()(td.copy()), module(td.copy())
    assert type(result) is TensorDict and set(result.keys()) == {"obs", "scale", "action", "value"}
    torch.testing.assert_close(result.to_dict(), expected.to_dict())


def test_a_module_by_keyword_saved_and_loaded():
    module, obs = TensorDictModule(nn.Linear(3, 4), [("in", "obs")], ["action"]), torch.randn(5, 3)
    file = io.BytesIO()
    torch.export.save(exported(module, in_obs=obs), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(in_obs=obs), module(obs))


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_vary(strict):
    """By position, or by the names of a module around."""
    module, batch = net(), Dim("batch", min=2, max=64)
    other = inputs(9)
    program = torch.export.export(module, tuple(inputs().values()), dynamic_shapes=({0: batch}, (None,)), strict=strict)
    torch.testing.assert_close(program.module()(*other.values()), module(**other))
    program = torch.export.export(
        Named(module), (), inputs(), dynamic_shapes={"obs": {0: batch}, "scale": None}, strict=strict
    )
    torch.testing.assert_close(program.module()(**other), module(**other))


@pytest.mark.parametrize("strict", [False, True])
def test_a_probabilistic_sequence(strict):
    """Values are taken in the way that held when it was exported."""
    module, obs = policy(), torch.randn(5, 3)
    mean = exported(module, strict, obs=obs).module()
    with set_interaction_type("random"):
        random = exported(module, strict, obs=obs).module()
        torch.manual_seed(1)
        expected = module(obs=obs)
    torch.manual_seed(1)
    torch.testing.assert_close(random(obs=obs), expected)
    torch.testing.assert_close(mean(obs=obs), module(obs=obs))
    assert (random(obs=obs)[2] != mean(obs=obs)[2]).all()


@pytest.mark.parametrize(
    "make", [Scaled, lambda: EnsembleModule(TensorDictModule(nn.Linear(3, 4), ["obs"], ["action"]), 3)]
)
def test_parameters_in_containers_stay_those_of_the_module(make):
    """Torch replaces all parameters by stand-ins while it exports."""
    module = TensorDictSequential(make())
    before, obs = dict(module.named_parameters()), torch.randn(5, 3)
    program = exported(module, obs=obs)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
    torch.testing.assert_close(program.module()(obs=obs), module(obs))
    # Those of the program are its own under the same names.
    assert set(program.state_dict) >= {name for name in before if "params" in name}


# --- ONNX -------------------------------------------------------------------------------------------------------------


def run_by_onnxruntime(program, *given):
    """The results, by the names of the outputs."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feed = {entry.name: value.numpy() for entry, value in zip(session.get_inputs(), given, strict=True)}
    return dict(zip(names, session.run(None, feed)))


def as_onnx(module, given, **kwargs):
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    return torch.onnx.export(module, args=(), kwargs=given, dynamo=True, verbose=False, **kwargs)


def assert_close(results, expected):
    for result, tensor in zip(results.values(), expected, strict=True):
        assert result.shape == tensor.shape
        np.testing.assert_allclose(result, tensor.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_onnx_of_a_sequence_by_keyword():
    module, given = net(), inputs()
    program = as_onnx(module, given, output_names=["action", "value"])
    other = inputs()
    results = run_by_onnxruntime(program, *other.values())
    assert list(results) == ["action", "value"]
    assert_close(results, module(**other))


def test_onnx_of_sizes_that_vary():
    module, other = net(), inputs(9)
    program = as_onnx(Named(module), inputs(), dynamic_shapes={"obs": {0: "batch"}, "scale": None})
    assert_close(run_by_onnxruntime(program, *other.values()), module(**other))


@pytest.mark.parametrize(
    "make",
    [
        lambda: policy(default_interaction_type="mean"),
        lambda: policy(["logits"], OneHotCategorical, default_interaction_type="mode"),
    ],
)
def test_onnx_of_a_probabilistic_sequence(make):
    module, obs = make(), torch.randn(5, 3)
    program = as_onnx(module, {"obs": torch.randn(5, 3)})
    assert_close(run_by_onnxruntime(program, obs), module(obs=obs))


def test_onnx_draws_samples():
    module, obs = policy(), torch.zeros(5, 3)
    with set_interaction_type("random"):
        program = as_onnx(module, {"obs": obs}, output_names=["loc", "scale", "action", "log_prob"])
    results = {name: torch.from_numpy(value) for name, value in run_by_onnxruntime(program, obs).items()}
    normal = D.Normal(results["loc"], results["scale"])
    torch.testing.assert_close(results["log_prob"], normal.log_prob(results["action"]))
    # Rows are equal but for the noise.
    assert results["action"].unique().numel() == 10 and results["loc"].unique(dim=0).shape[0] == 1


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 exports no ensemble to ONNX")
def test_onnx_of_a_module_of_ones_own_and_of_an_ensemble():
    obs = torch.randn(5, 3)
    module = TensorDictSequential(
        Scaled(), EnsembleModule(TensorDictModule(nn.Linear(3, 4), ["action"], ["value"]), 3)
    ).select_out_keys("value")
    assert_close(run_by_onnxruntime(as_onnx(module, {"obs": obs}), obs), (module(obs=obs),))
