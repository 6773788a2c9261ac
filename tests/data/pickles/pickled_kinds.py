"""One object of every kind that programs pickle, and a program that pickles them; it runs on the reference too.

python pickled_kinds.py FOLDER    # writes NAME.pkl (pickle) and NAME.pt (torch.save) for every kind

The files beside this one were written by the reference 0.14.3.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)
from tensordict.nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
)


@tensorclass
class Labelled:
    a: torch.Tensor
    b: str
    c: Any = None


class Outer(TensorClass):
    a: torch.Tensor
    inner: Any = None


class Frozen(TensorClass["frozen"]):
    a: torch.Tensor


class Typed(TypedTensorDict):
    a: torch.Tensor


class Own(TensorDict):
    """A class of the program."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.params = TensorDictParams(dense(float))
        self.stats = dense()
        self.layer = filled(nn.Linear(2, 2))


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, 2 * x


def first(td: TensorDict) -> TensorDict:
    return td.set("b", td["a"] + 1)


def filled(module: nn.Module) -> nn.Module:
    """Fixed numbers replace random ones."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 8 - i)
    return module


def dense(kind: type = int) -> TensorDict:
    a = torch.arange(3, dtype=torch.float32 if kind is float else torch.int64)
    return TensorDict(a=a, n=TensorDict(b=torch.ones(3, 1), batch_size=[3]), batch_size=[3])


def labelled() -> Any:
    return Labelled(a=torch.arange(3.0), b="x", c=None, batch_size=[3])


def layer(in_key: str, out_key: str, module: Any = None) -> TensorDictModule:
    return TensorDictModule(module or filled(nn.Linear(2, 2)), in_keys=[in_key], out_keys=[out_key])


def policy() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        layer("a", "h", filled(nn.Linear(2, 4))),
        TensorDictModule(NormalParamExtractor(), in_keys=["h"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
            default_interaction_type=InteractionType.MEAN,
            return_log_prob=True,
        ),
    )


def named() -> TensorDict:
    td = dense()
    td.names = ["time"]
    return td


def unequal() -> LazyStackedTensorDict:
    one, other = TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3), b=torch.zeros(1))
    return lazy_stack([one, other])


def ragged() -> TensorDict:
    rows = [torch.arange(2.0), torch.arange(3.0)]
    return TensorDict(u=torch.nested.nested_tensor(rows, layout=torch.jagged), batch_size=[2])


def shared() -> TensorDict:
    x = torch.arange(4)
    return TensorDict(x=x, y=x, z=x[1:])


def sequence(names: bool) -> TensorDictSequential:
    one, two = layer("a", "b"), layer("b", "c")
    return TensorDictSequential({"one": one, "two": two}) if names else TensorDictSequential(one, two)


def composite() -> CompositeDistribution:
    params = TensorDict(x=TensorDict(loc=torch.zeros(3), scale=torch.ones(3)))
    return CompositeDistribution(params, distribution_map={"x": torch.distributions.Normal})


def mapped_net() -> TensorDictModule:
    return TensorDictModule(filled(nn.Linear(2, 2)), in_keys={"input": "a"}, out_keys=["b"])


KINDS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "names": named,
    "locked": lambda: dense().lock_(),
    "device": lambda: dense().to("cpu"),
    "shared": shared,
    "own": lambda: Own(a=torch.ones(2), batch_size=[2]),
    "ragged": ragged,
    "unbatched": lambda: TensorDict(u=UnbatchedTensor(torch.ones(5)), a=torch.ones(3), batch_size=[3]),
    "lazy": lambda: lazy_stack([dense(), dense() + 1], 1),
    "lazy_names": lambda: LazyStackedTensorDict(named(), named(), stack_dim=0, stack_dim_name="run"),
    "lazy_unequal": unequal,
    "lazy_nested": lambda: TensorDict(stack=unequal(), a=torch.ones(2), batch_size=[2]),
    "lazy_locked": lambda: unequal().lock_(),
    "values": lambda: TensorDict(a=torch.ones(2), s="text", o={"k": (1, 2)}, batch_size=[2]),
    "value": lambda: NonTensorData({"k": 1}, batch_size=[2]),
    "metadata": lambda: MetaData("text", batch_size=[2]),
    "value_stack": lambda: NonTensorStack("x", "y"),
    "value_stacks": lambda: TensorDict(
        s=NonTensorStack(NonTensorStack("x", "y"), NonTensorStack("z", 0)), batch_size=[2]
    ),
    "tensorclass": labelled,
    "tensorclass_locked": lambda: labelled().lock_(),
    "tensorclass_nested": lambda: Outer(a=torch.ones(3), inner=labelled(), batch_size=[3]),
    "tensorclass_lazy": lambda: lazy_stack([labelled(), labelled()]),
    "tensorclass_frozen": lambda: Frozen(a=torch.ones(3), batch_size=[3]),
    "tensorclass_inside": lambda: TensorDict(t=labelled(), batch_size=[3]),
    "typed": lambda: Typed(a=torch.ones(3), batch_size=[3]),
    "consolidated": lambda: named().consolidate(),
    "consolidated_lazy": lambda: TensorDict(stack=unequal(), batch_size=[2]).consolidate(),
    "consolidated_values": lambda: TensorDict(a=torch.ones(2), s="text", batch_size=[2]).consolidate(),
    "consolidated_nested": lambda: TensorDict(t=labelled(), s=ragged(), batch_size=[]).consolidate(),
    "consolidated_stack": lambda: TensorDict(s=NonTensorStack("x", {1, 2}), batch_size=[2]).consolidate(),
    "consolidated_tensorclass": lambda: labelled().consolidate(),
    "consolidated_params": lambda: TensorDictParams(dense(float)).consolidate(),
    "params": lambda: TensorDictParams(dense(float)),
    "params_buffers": lambda: TensorDictParams(dense(float), no_convert=True, lock=True),
    "params_mixed": lambda: TensorDictParams(dense()),
    "params_of_tensorclass": lambda: TensorDictParams(Outer(a=torch.ones(3), batch_size=[3]), no_convert=True),
    "params_of_module": lambda: TensorDict.from_module(filled(nn.Linear(2, 2)), as_module=True),
    "from_module": lambda: TensorDict.from_module(filled(nn.Linear(2, 2))),
    "module": Net,
    "td_module": lambda: layer("a", "b"),
    "td_module_mapped": mapped_net,
    "td_module_function": lambda: layer("a", "b", twice),
    "td_module_selected": lambda: TensorDictModule(both, in_keys=["a"], out_keys=["b", "c"]).select_out_keys("c"),
    "sequence": lambda: sequence(False),
    "sequence_names": lambda: sequence(True),
    "probabilistic": policy,
    "selected_sequence": lambda: sequence(False).select_out_keys("c"),
    "wrap": lambda: WrapModule(first),
    "wrapper": lambda: TensorDictModuleWrapper(layer("a", "b")),
    "scale": lambda: AddStateIndependentNormalScale(2),
    "composite": composite,
    "interaction": lambda: InteractionType.MEAN,
    "state": lambda: dense().state_dict(),
    "state_tensorclass": lambda: labelled().state_dict(),
}


# Kinds that the reference cannot pickle: an `EnsembleModule`, a consolidated container with an `UnbatchedTensor`.


def mapped(folder: str) -> TensorDict:
    """A container whose leaves are in files; a pickle says where these are."""
    return TensorDict(a=torch.arange(3), s="text", n={"b": torch.ones(3, 1)}, batch_size=[3]).memmap(folder)


FILE_MODES = ("r", "r+", "w", "group", "inside")


def of_file(folder: str, mode: str) -> Any:
    """A container over an HDF5 file, opened in this mode, or one of its groups, or a container that holds it."""
    path = os.path.join(folder, "data.h5")
    td = TensorDict(
        a=torch.arange(6).reshape(3, 2), n={"b": torch.ones(3), "m": {"c": torch.zeros(3, 1)}}, batch_size=[3]
    )
    if mode == "w":
        found = PersistentTensorDict(filename=path, mode="w", batch_size=[3], compression="gzip")
        found.update(td)
        return found
    PersistentTensorDict.from_dict(td, path).close()
    opened = PersistentTensorDict(filename=path, mode="r+" if mode == "r+" else "r", batch_size=[3])
    opened["n", "m", "c"]
    return {"group": lambda: opened["n"], "inside": lambda: TensorDict(h=opened, batch_size=[3])}.get(
        mode, lambda: opened
    )()


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    os.makedirs(folder, exist_ok=True)
    for name, make in KINDS.items():
        with open(os.path.join(folder, f"{name}.pkl"), "wb") as file:
            pickle.dump(make(), file, protocol=4)
        torch.save(make(), os.path.join(folder, f"{name}.pt"))
    # This is text, so a reader can replace this folder by another one.
    with tempfile.TemporaryDirectory() as place, open(os.path.join(folder, "mapped.pkl"), "wb") as file:
        file.write(pickle.dumps(mapped(place), protocol=0).replace(place.encode(), b"FOLDER"))
    for mode in FILE_MODES:
        with tempfile.TemporaryDirectory() as place, open(os.path.join(folder, f"hdf5_{mode}.pkl"), "wb") as file:
            file.write(pickle.dumps(of_file(place, mode), protocol=0).replace(place.encode(), b"FOLDER"))
            if mode == "r":
                shutil.copy(os.path.join(place, "data.h5"), os.path.join(folder, "hdf5.h5"))


if __name__ == "__main__":
    import pickled_kinds  # so that the classes are not those of `__main__`

    pickled_kinds.main(sys.argv[1])
