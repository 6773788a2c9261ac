"""Objects that only this package pickles, and a program that pickles them beside those of `pickled_kinds.py`.

python more_kinds.py FOLDER    # writes NAME.pkl

The files beside this one were written before the modules moved into rooms: they name the modules of that time.
"""

from __future__ import annotations

import pathlib
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tensordict import (
    LazyStackedTensorDict,
    LazyView,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
    lazy_stack,
)
from tensordict.base import _NESTED_TENSORS_AS_LISTS, NO_DEFAULT

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "pickles"))
import pickled_kinds


def error(key: str) -> Exception:
    """What a container raises when an entry is missing."""
    try:
        TensorDict(a=torch.ones(2))[key]
    except KeyError as raised:
        return raised
    raise AssertionError(key)


def locked_error() -> Exception:
    try:
        TensorDict().lock_()["a"] = 1
    except RuntimeError as raised:
        return raised
    raise AssertionError


def treespec() -> Any:
    td = TensorDict(
        a=torch.ones(2), l=lazy_stack([TensorDict(), TensorDict()]), s="x", t=NonTensorStack("a", "b"), batch_size=[2]
    )
    return torch.utils._pytree.tree_flatten(td)[1]


KINDS: dict[str, Callable[[], Any]] = {
    "unbatched_alone": lambda: UnbatchedTensor(torch.arange(3)),
    "typed_value": lambda: MetaData[str]("text"),
    "keyerror": lambda: error("b"),
    "lockederror": locked_error,
    "no_default": lambda: NO_DEFAULT,
    "as_lists": lambda: _NESTED_TENSORS_AS_LISTS,
    "sequence_of_values": lambda: TensorDict(s=NonTensorStack("x", "y"), batch_size=[2])["s"],
    "treespec": treespec,
    "classes": lambda: [
        TensorDict,
        LazyStackedTensorDict,
        LazyView,
        NonTensorData,
        NonTensorStack,
        TensorClass,
        TypedTensorDict,
        UnbatchedTensor,
        TensorDictParams,
    ],
}
# Of the kinds of `pickled_kinds.py`, those whose pickles name something that has moved.
MOVED = [
    "dense", "names", "locked", "shared", "own", "ragged", "unbatched", "lazy", "lazy_names", "lazy_unequal",
    "lazy_nested", "lazy_locked", "values", "value", "metadata", "value_stack", "value_stacks", "tensorclass",
    "tensorclass_nested", "tensorclass_lazy", "tensorclass_frozen", "typed", "consolidated", "consolidated_lazy",
    "consolidated_values", "consolidated_nested", "consolidated_stack", "consolidated_tensorclass",
    "consolidated_params", "params", "params_of_tensorclass", "from_module", "module", "state_tensorclass",
]  # fmt: skip
# Those that are in files of `torch.save`, too.
SAVED = ["dense", "lazy_nested", "values", "tensorclass", "typed", "unbatched", "params", "consolidated"]


def main(folder: pathlib.Path) -> None:
    warnings.simplefilter("ignore")
    for name, make in KINDS.items():
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(make(), protocol=4))
    for name in MOVED:
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(pickled_kinds.KINDS[name](), protocol=4))
    for name in SAVED:
        torch.save(pickled_kinds.KINDS[name](), folder / f"{name}.pt")
    # As text, in which another folder can be put in the place of this one.
    with tempfile.TemporaryDirectory() as place:
        content = pickle.dumps(pickled_kinds.mapped(place), protocol=0)
        (folder / "mapped.pkl").write_bytes(content.replace(place.encode(), b"FOLDER"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
