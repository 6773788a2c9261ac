"""A model of every kind of module; this file runs on the reference too, whose checkpoints are compared with ours.

python checkpointed.py save FILE    # the state of the model, an input and the output
python checkpointed.py load FILE    # loads such a file into a new model; fails when the output differs
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn

from tensordict import TensorDict, TensorDictParams
from tensordict.nn import (
    AddStateIndependentNormalScale,
    EnsembleModule,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
)


def make() -> nn.Module:
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 6), in_keys=["x"], out_keys=["h"]),
        TensorDictModule(NormalParamExtractor(), in_keys=["h"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
            distribution_kwargs=TensorDictParams(TensorDict(validate_args=torch.tensor(True)), no_convert=True),
        ),
    )
    named = TensorDictSequential(
        {
            "first": TensorDictModuleWrapper(TensorDictModule(nn.LazyLinear(5), in_keys=["x"], out_keys=["f"])),
            "norm": TensorDictModule(nn.BatchNorm1d(5), in_keys=["f"], out_keys=["g"]),
        }
    )
    scale = nn.Sequential(nn.Linear(4, 2), AddStateIndependentNormalScale(2))
    return TensorDictSequential(
        policy,
        named,
        TensorDictModule(scale, in_keys=["x"], out_keys=["m", "s"]),
        EnsembleModule(TensorDictModule(nn.Linear(4, 1), in_keys=["x"], out_keys=["value"]), num_copies=3),
        WrapModule(nn.Identity()),
    ).eval()


def outputs(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        td = model(TensorDict(x=x))
    return {key: td[key].clone() for key in ("action", "g", "m", "s", "value")}


def main(action: str, path: str) -> None:
    warnings.simplefilter("ignore")
    model = make()
    if action == "save":
        torch.manual_seed(0)
        x = torch.randn(5, 4)
        outputs(model, x)  # gives the lazy module its size
        torch.save({"state": dict(model.state_dict()), "x": x, "outputs": outputs(model, x)}, path)
        return
    found = torch.load(path, weights_only=True)
    model.load_state_dict(found["state"])
    for key, value in outputs(model, found["x"]).items():
        torch.testing.assert_close(value, found["outputs"][key])


if __name__ == "__main__":
    main(*sys.argv[1:])
