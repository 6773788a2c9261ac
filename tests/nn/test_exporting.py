"""`tensordict.nn.export`: programs and files that take and return tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions as D
from torch import nn

from tensordict import TensorClass, TensorDict, UnbatchedTensor
from tensordict.nn import (
    CompositeDistribution,
    EnsembleModule,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    TruncatedNormal,
    export,
    exporting,
    set_interaction_type,
)

# Torch warns about its own code while it exports.
pytestmark = [
    pytest.mark.seconds,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def net() -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["obs"], ["hidden"]),
        TensorDictModule(nn.Dropout(0.5), ["hidden"], [("inner", "hidden")]),
        TensorDictModule(
            lambda h, scale: (h * scale, h.sum(-1), h), [("inner", "hidden"), ("in", "scale")], ["action", "value", "_"]
        ),
    ).select_out_keys("action", "value", ("inner", "hidden"))


def inputs(*size: int) -> TensorDict:
    return TensorDict({"obs": torch.randn(*size, 3), "in": {"scale": torch.randn(*size, 4)}}, size)


def policy(distribution: Any, *keys: str, **kwargs: Any) -> ProbabilisticTensorDictSequential:
    head = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()) if len(keys) == 2 else nn.Linear(3, 4)
    draw = ProbabilisticTensorDictModule(
        list(keys),
        ["action"],
        distribution_class=distribution,
        distribution_kwargs=kwargs,
        return_log_prob=True,
        default_interaction_type="random",
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(head, ["obs"], list(keys)), draw)


def composite() -> ProbabilisticTensorDictSequential:
    def head(obs: torch.Tensor) -> Any:
        return TensorDict({"a": {"loc": obs, "scale": obs.exp()}, "b": {"logits": obs}}, obs.shape[:-1])

    draw = ProbabilisticTensorDictModule(
        ["params"],
        ["a", "b"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"a": D.Normal, "b": D.Categorical}},
        default_interaction_type="random",
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(head, ["obs"], ["params"]), draw)


POLICIES = [
    lambda: policy(D.Normal, "loc", "scale"),
    lambda: policy(D.Categorical, "logits"),
    lambda: policy(OneHotCategorical, "logits"),
    lambda: policy(TruncatedNormal, "loc", "scale", a=-1.0, b=1.0),
    composite,
]


def call(program: Any, td: TensorDict, names: Any = ("obs", "in_scale")) -> dict[str, torch.Tensor]:
    keys = {"obs": "obs", "in_scale": ("in", "scale")}
    return program.module()(**{name: td[keys[name]] for name in names})  # type: ignore[no-any-return]


def assert_results(found: Any, module: Any, td: TensorDict) -> None:
    """Compare the results of a program or a model with those of the module in evaluation mode."""
    with torch.no_grad(), set_interaction_type("deterministic"):
        expected = module.eval()(td.copy())
    leaves = {}
    for key in module.out_keys:
        value = expected.get(key)
        inner = [((), value)] if isinstance(value, torch.Tensor) else value.items(True, True)
        for rest, leaf in inner:
            parts = [one for part in (key, rest) for one in ([part] if isinstance(part, str) else part)]
            leaves["_".join(parts)] = leaf.numpy()
    assert list(found) == list(leaves)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(np.asarray(torch.as_tensor(found[name]).detach()), leaf, rtol=1e-4, atol=1e-5)


def run_onnx(path: Any, *given: torch.Tensor) -> dict[str, Any]:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {entry.name: value.numpy() for entry, value in zip(session.get_inputs(), given, strict=True)}
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feed), strict=True))


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_sequence_takes_all_batch_sizes() -> None:
    module = net()
    program = export(module, inputs(5))
    for count in (1, 2, 5, 9):
        assert_results(call(program, td := inputs(count)), module, td)
    assert list(call(program, inputs(3), ["in_scale", "obs"])) == ["action", "value", "inner_hidden"]


def test_examples_of_one_row_and_of_two_batch_dims() -> None:
    module = net()
    for size, other in (((1,), (7,)), ((1, 2), (4, 1)), ((3, 1), (1, 6))):
        assert_results(call(export(module, inputs(*size)), td := inputs(*other)), module, td)


def test_a_fixed_batch() -> None:
    module = net()
    for td in (inputs(5), inputs()):
        program = export(module, td, dynamic_batch=False)
        assert_results(call(program, td), module, td)
        with pytest.raises(Exception, match="(?i)guard|expected"):
            call(program, inputs(4))


@pytest.fixture
def _validated() -> Iterator[None]:
    """Check arguments of distributions by default. Importing Dynamo switches that off."""
    before = D.Normal(0.0, 1.0)._validate_args
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


@pytest.mark.usefixtures("_validated")
def test_the_module_and_the_example_stay_as_they_are() -> None:
    module, td = net(), inputs(5)
    module[0].eval()
    before = {key: value.clone() for key, value in td.items(True, True)}
    parameters = dict(module.named_parameters())
    program = export(module, td)
    assert module.training and not module[0].training and module[1].training
    assert set(td.keys(True, True)) == set(before) and all(torch.equal(td[key], before[key]) for key in before)
    assert all(value is parameters[name] for name, value in module.named_parameters())
    assert D.Normal(0.0, 1.0)._validate_args
    with torch.no_grad():  # the program shares the parameters
        module[0].module.weight.zero_()
        module[0].module.bias.zero_()
    assert not call(program, td)["action"].any()

    def fail(obs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    broken = TensorDictModule(fail, ["obs"], ["action"])
    with pytest.raises(RuntimeError, match="no"):
        export(broken, td)
    assert broken.training and D.Normal(0.0, 1.0)._validate_args


@pytest.mark.usefixtures("_validated")
@pytest.mark.parametrize("make", POLICIES)
def test_policies_take_the_deterministic_value(make: Any, tmp_path: Any) -> None:
    module, td = make(), inputs(9)
    program = export(module, inputs(5), tmp_path / "policy.pt2")
    assert_results(call(program, td, ["obs"]), module, td)
    loaded = torch.export.load(tmp_path / "policy.pt2")
    assert_results(call(loaded, td, ["obs"]), module, td)


def test_another_value_of_a_policy() -> None:
    module, td = policy(D.Normal, "loc", "scale"), inputs(9)
    with set_interaction_type("random"):
        program = export(module, inputs(5))
    first, second = (call(program, td, ["obs"]) for _ in range(2))
    assert torch.equal(first["loc"], second["loc"]) and not torch.equal(first["action"], second["action"])


class Pair(TensorClass):
    a: torch.Tensor
    b: torch.Tensor


class Swap(TensorDictModuleBase):
    in_keys = ["pair", "word"]
    out_keys = ["swapped"]

    def forward(self, tensordict: Any) -> Any:
        pair = tensordict["pair"]
        assert type(pair) is Pair and tensordict["word"] == "minus" and pair.batch_size == tensordict.batch_size
        return tensordict.set("swapped", Pair(a=-pair.b, b=pair.a, batch_size=pair.batch_size))


def test_containers_and_values_at_keys() -> None:
    pair = Pair(a=torch.arange(3.0), b=torch.ones(3, 2), batch_size=[3])
    td = TensorDict({"pair": pair, "other": torch.ones(3)}, [3]).set_non_tensor("word", "minus")
    found = export(Swap(), td).module()(pair_a=torch.arange(5.0), pair_b=torch.ones(5, 2))
    assert list(found) == ["swapped_a", "swapped_b"]
    assert found["swapped_b"].tolist() == [0, 1, 2, 3, 4] and (found["swapped_a"] == -1).all()


def test_an_ensemble_and_a_lazy_stack() -> None:
    module = EnsembleModule(TensorDictModule(nn.Linear(3, 4), ["obs"], ["value"]), 3)
    stack = TensorDict.lazy_stack([inputs(), inputs()])
    found = export(module, stack).module()(obs=(td := inputs(6))["obs"])
    torch.testing.assert_close(found["value"], module(td)["value"])


def test_names() -> None:
    module = TensorDictModule(lambda a, b, c: (a + b + c, a), ["lambda", "next.obs", "1st"], [("self",), "a b"])
    td = TensorDict({"lambda": torch.ones(2), "next.obs": torch.ones(2), "1st": torch.ones(2)}, [2])
    found = export(module, td).module()(lambda_=torch.ones(3), next_obs=torch.ones(3), _1st=torch.ones(3))
    assert list(found) == ["self_", "a_b"] and found["self_"].tolist() == [3, 3, 3]


# --- files ------------------------------------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["tensordict"] = None  # importing it is an error
import torch
for file in sys.argv[1:]:
    program = torch.export.load(file).module()
    torch.save(program(**torch.load(file + ".given", weights_only=True)), file + ".found")
assert [name for name in sys.modules if name.startswith("tensordict")] == ["tensordict"]
"""


def test_files_run_without_this_package(tmp_path: Any) -> None:
    modules, td = {"net.pt2": net(), "policy.pt2": POLICIES[0]()}, inputs(7)
    for name, module in modules.items():
        export(module, inputs(5), tmp_path / name)
        given = {"obs": td["obs"], "in_scale": td["in", "scale"]}
        torch.save(given if name == "net.pt2" else {"obs": td["obs"]}, tmp_path / f"{name}.given")
    files = [str(tmp_path / name) for name in modules]
    subprocess.run([sys.executable, "-c", WITHOUT, *files], check=True, capture_output=True)
    for name, module in modules.items():
        assert_results(torch.load(tmp_path / f"{name}.found", weights_only=True), module, td)


# Without the truncated normal distribution: it computes in double precision, for which onnxruntime has no `Erf`.
@pytest.mark.parametrize("make", [net, POLICIES[0], composite])
def test_onnx(make: Any, tmp_path: Any) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    module = make()
    export(module, inputs(5), tmp_path / "net.onnx")
    for count in (1, 7):
        td = inputs(count)
        given = [td["obs"], *([td["in", "scale"]] if make is net else [])]
        assert_results(run_onnx(tmp_path / "net.onnx", *given), module, td)


def test_an_onnx_model_that_replaces_an_input(tmp_path: Any) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    module = TensorDictModule(lambda obs: obs + 1, ["obs"], ["obs"])
    program = export(module, inputs(5), tmp_path / "net.onnx")
    td = inputs(2)
    assert list(call(program, td, ["obs"])) == ["obs"]
    found = run_onnx(tmp_path / "net.onnx", td["obs"])
    assert list(found) == ["obs_out"]
    np.testing.assert_allclose(found["obs_out"], td["obs"] + 1)


def test_files_are_replaced_on_request_only(tmp_path: Any) -> None:
    module, path = TensorDictModule(nn.Linear(3, 4), ["obs"], ["action"]), tmp_path / "net.pt2"
    path.write_bytes(b"kept")
    with pytest.raises(RuntimeError, match="overwrite=True"):
        export(module, inputs(5), path)
    assert path.read_bytes() == b"kept"
    export(module, inputs(5), path, overwrite=True)
    assert torch.export.load(path).module()(obs=torch.ones(2, 3))["action"].shape == (2, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"]


def test_without_the_extra(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.delitem(sys.modules, "onnx", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tensordict\[onnx\]'"):
        export(net(), inputs(5), tmp_path / "net.onnx")


def test_a_model_beyond_the_size_of_onnx_files(tmp_path: Any, monkeypatch: Any) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    monkeypatch.setattr(exporting, "_ONNX_LIMIT", 64)
    with pytest.raises(ValueError, match="take 64 bytes.*external_data=True"):
        export(net(), inputs(5), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "td", "error", "message"),
    [
        (net, lambda: inputs(5).exclude("obs"), KeyError, r"reads \['obs'\], and the example has .*scale"),
        (net, lambda: inputs(), ValueError, r"batch_size=\[\].* dynamic_batch=False"),
        (net, lambda: inputs(0), ValueError, r"batch_size=\[0\]"),
        (net, lambda: {"obs": 1}, TypeError, "got dict"),
        (lambda: nn.Linear(3, 4), lambda: inputs(5), TypeError, "got Linear: wrap it"),
        (
            lambda: TensorDictModule(lambda: torch.ones(1), [], ["a"]),
            lambda: inputs(5),
            ValueError,
            "none at the in_keys",
        ),
        (
            lambda: TensorDictModule(lambda obs: "text", ["obs"], ["word"]),
            lambda: inputs(5),
            TypeError,
            "writes another value at 'word'.* select_out_keys",
        ),
        (
            lambda: TensorDictModule(lambda a, b: a, ["in_scale", ("in", "scale")], ["a"]),
            lambda: inputs(5).set("in_scale", torch.ones(5)),
            ValueError,
            r"'in_scale' and \('in', 'scale'\) have the same name",
        ),
        (
            lambda: TensorDictModule(lambda a: a, ["shared"], ["a"]),
            lambda: inputs(5).set("shared", UnbatchedTensor(torch.ones(2))),
            TypeError,
            "'shared' has no batch dims",
        ),
    ],
)
def test_what_is_refused(make: Any, td: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        export(make(), td())


def test_files_of_other_kinds(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"suffix .pt2 or .onnx, got '.*net.pt'"):
        export(net(), inputs(5), tmp_path / "net.pt")
