"""Modules with keys, sequences, distributions, parameters swapped in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributions import Categorical, Normal

from compile_table.forms import Form
from tensordict import TensorDict, TensorDictParams, from_module, from_modules
from tensordict.nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    EnsembleModule,
    InteractionType,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    TruncatedNormal,
    WrapModule,
    dispatch,
    set_interaction_type,
    set_skip_existing,
)


class Halving(TensorDictModuleBase):
    in_keys = ["a"]
    out_keys = ["half"]

    @dispatch
    def forward(self, tensordict: Any) -> Any:
        return tensordict.set("half", tensordict.get("a") / 2)


class Held(nn.Module):
    """A module that holds parameters in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.params = TensorDictParams(TensorDict(scale=torch.ones(4), n={"shift": torch.zeros(4)}))

    def forward(self, td: Any) -> Any:
        return td.get("a") * self.params["scale"] + self.params["n", "shift"]


def linear(*keys: Any) -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 4), in_keys=[keys[0] if keys else "a"], out_keys=[keys[1] if keys else "h"])


def sequence() -> TensorDictSequential:
    return TensorDictSequential(linear(), TensorDictModule(nn.Tanh(), in_keys=["h"], out_keys=[("deep", "h")]))


def actor(
    distribution: Any = Normal, keys: tuple[str, ...] = ("loc", "scale"), **options: Any
) -> ProbabilisticTensorDictSequential:
    if len(keys) == 2:
        net = TensorDictModule(
            nn.Sequential(nn.Linear(4, 8), NormalParamExtractor()), in_keys=["a"], out_keys=list(keys)
        )
    else:
        net = linear("a", keys[0])
    return ProbabilisticTensorDictSequential(
        net,
        ProbabilisticTensorDictModule(in_keys=list(keys), out_keys=["s"], distribution_class=distribution, **options),
    )


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def fresh(make: Callable[[], Any]) -> Callable[[str, int], tuple[Any]]:
    """The same module each time: torch does not compile again for parameters of the same form."""

    def given(kind: str, count: int) -> tuple[Any]:
        torch.manual_seed(0)
        return (make(),)

    return given


def called(td: Any, module: Any) -> Any:
    return module(td)


def deterministic(td: Any, module: Any) -> Any:
    with set_interaction_type(InteractionType.DETERMINISTIC):
        return module(td)


def swapped(td: Any, module: Any) -> Any:
    params = from_module(module)
    with (params.data * 2).to_module(module):
        return module(td.get("a"))


def swapped_given(td: Any, module: Any, params: Any) -> Any:
    with params.to_module(module):
        return module(td.get("a"))


def module_and_params(kind: str, count: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = net()
    return module, TensorDict.from_module(module).data * 0.5


def ensemble(td: Any, module: Any) -> Any:
    params = from_modules(module, module)
    return params.get(("0", "weight")).sum()


def over_ensemble(td: Any, module: Any, params: Any) -> Any:
    def one(params: Any) -> Any:
        with params.to_module(module):
            return module(td.get("a"))

    return torch.vmap(one)(params.expand(2))


def skipping(td: Any, module: Any) -> Any:
    with set_skip_existing(True):
        return module(td.set("h", td.get("a")))


def gradients(td: Any, module: Any) -> Any:
    module(td).get(("deep", "h")).sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def training_step(td: Any, module: Any, params: Any) -> Any:
    def loss(params: Any) -> Any:
        with params.to_module(module):
            return module(td.get("a")).pow(2).mean()

    return params - torch.func.grad(loss)(params) * 0.1


def composite(td: Any) -> Any:
    params = TensorDict(
        x={"loc": td.get("a"), "scale": td.get("a").exp()},
        y={"loc": td.get("a"), "scale": td.get("a").exp()},
        batch_size=td.batch_size,
    )
    return CompositeDistribution(params, {"x": Normal, "y": Normal}).mean


def composite_log_prob(td: Any) -> Any:
    params = TensorDict(x={"loc": td.get("a"), "scale": td.get("a").exp()}, batch_size=td.batch_size)
    return CompositeDistribution(params, {"x": Normal}).log_prob(
        TensorDict(x=td.get("a") * 2, batch_size=td.batch_size)
    )


def lazily(td: Any, module: Any) -> Any:
    params = TensorDict.from_module(module).data
    with torch.stack([params, params * 2])[1].to_module(module):
        return module(td.get("a"))


def module_form(
    name: str,
    make: Callable[[], Any],
    call: Callable[..., Any] = called,
    kinds: tuple[str, ...] = ("nested",),
    quick: bool = False,
) -> Form:
    return Form(
        name if name.startswith(("from_module", "to_module")) else f"module: {name}",
        call,
        kinds,
        fresh(make),
        quick="nested" if quick else None,
    )


MANY = ("nested", "lazy", "view", "named")

FORMS = [
    module_form("TensorDictModule", linear, kinds=MANY, quick=True),
    module_form("nested keys", lambda: TensorDictModule(lambda c: c * 2, [("b", "c")], [("n", "x")])),
    module_form("function", lambda: TensorDictModule(lambda a: a * 2, ["a"], ["h"])),
    module_form("two outputs", lambda: TensorDictModule(lambda a: (a * 2, a * 3), ["a"], ["h", "g"])),
    module_form("keyword inputs", lambda: TensorDictModule(lambda *, x: x * 2, {"x": "a"}, ["h"])),
    module_form("in place out", lambda: TensorDictModule(lambda a: a * 2, ["a"], ["a"])),
    module_form("no output", lambda: TensorDictModule(lambda a: a * 2, ["a"], ["_"])),
    module_form("dispatch", linear, lambda td, module: module(a=td.get("a"))),
    module_form("dispatch positional", linear, lambda td, module: module(td.get("a"))),
    module_form("base class", Halving, kinds=MANY),
    module_form("base class dispatch", Halving, lambda td, module: module(a=td.get("a"))),
    module_form("WrapModule", lambda: WrapModule(lambda td: td.set("w", td.get("a") * 2))),
    module_form("TensorDictSequential", sequence, kinds=MANY, quick=True),
    module_form("sequence dispatch", sequence, lambda td, module: module(a=td.get("a"))),
    module_form("sequence selected", lambda: TensorDictSequential(linear(), linear("h", "g"), selected_out_keys=["g"])),
    module_form(
        "sequence partial", lambda: TensorDictSequential(linear(), linear("absent", "g"), partial_tolerant=True)
    ),
    module_form("sequence item", sequence, lambda td, module: module[0](td)),
    module_form("sequence of subsequence", sequence, lambda td, module: module.select_subsequence(out_keys=["h"])(td)),
    module_form("select_out_keys", lambda: sequence().select_out_keys("h")),
    module_form("keys", sequence, lambda td, module: (module.in_keys, module.out_keys)),
    module_form(
        "tensordict_out", linear, lambda td, module: module(td, tensordict_out=TensorDict(batch_size=td.batch_size))
    ),
    module_form("skip existing", linear, skipping),
    module_form("gradients", sequence, gradients),
    module_form("eval", lambda: sequence().eval()),
    module_form("no gradients", sequence, lambda td, module: module(td).detach()),
    module_form("actor, deterministic", actor, deterministic, quick=True),
    module_form("actor, random", actor),
    module_form("actor, log prob", lambda: actor(return_log_prob=True)),
    module_form("actor, get_dist", actor, lambda td, module: module.get_dist(td).mean),
    module_form("actor, log_prob", actor, lambda td, module: module.log_prob(module(td))),
    module_form("actor, one hot", lambda: actor(OneHotCategorical, ("logits",))),
    module_form("actor, one hot deterministic", lambda: actor(OneHotCategorical, ("logits",)), deterministic),
    module_form("actor, categorical", lambda: actor(Categorical, ("logits",))),
    module_form("actor, truncated", lambda: actor(TruncatedNormal, distribution_kwargs={"a": -1.0, "b": 1.0})),
    module_form(
        "actor, tensors in kwargs",
        lambda: actor(TruncatedNormal, distribution_kwargs={"a": torch.tensor(-1.0), "b": torch.tensor(1.0)}),
    ),
    module_form("actor, default mode", lambda: actor(default_interaction_type=InteractionType.MEAN)),
    module_form("NormalParamExtractor", NormalParamExtractor, lambda td, module: module(td.get("a"))),
    module_form(
        "AddStateIndependentNormalScale",
        lambda: AddStateIndependentNormalScale(4),
        lambda td, module: module(td.get("a")),
    ),
    module_form("composite", net, lambda td, module: composite(td)),
    module_form("composite log prob", net, lambda td, module: composite_log_prob(td)),
    module_form("EnsembleModule", lambda: EnsembleModule(linear(), 2)),
    module_form("params held", Held),
    module_form(
        "params held, gradients",
        Held,
        lambda td, module: torch.autograd.grad(module(td).sum(), list(module.parameters())),
    ),
    module_form("from_module: locked container", net, lambda td, module: from_module(module), quick=True),
    module_form("from_module: values", net, lambda td, module: TensorDict.from_module(module).get(("0", "weight")) * 2),
    module_form("from_module: locked", net, lambda td, module: TensorDict.from_module(module, lock=True).is_locked),
    module_form(
        "from_module: state dict",
        net,
        lambda td, module: TensorDict.from_module(module, use_state_dict=True).get(("0", "weight")) * 2,
    ),
    module_form(
        "from_module: as module",
        net,
        lambda td, module: TensorDict.from_module(module, as_module=True).get(("0", "weight")) * 2,
    ),
    module_form("from_modules", net, ensemble),
    module_form("to_module: taken inside", net, swapped, quick=True),
    Form("to_module: given", swapped_given, ("nested",), module_and_params, quick="nested"),
    Form("to_module: vmap", over_ensemble, ("nested",), module_and_params),
    Form("module: training step", training_step, ("nested",), module_and_params),
    Form(
        "to_module: in place",
        lambda td, module, params: params.to_module(module, inplace=True),
        ("nested",),
        module_and_params,
    ),
    Form(
        "to_module: without swap",
        lambda td, module, params: params.to_module(module, return_swap=False),
        ("nested",),
        module_and_params,
    ),
    module_form("swap of lazy params", net, lambda td, module: lazily(td, module)),
    module_form("parameters of params", Held, lambda td, module: len(list(module.parameters()))),
    module_form("reset", sequence, lambda td, module: module.reset_out_keys()),
]
