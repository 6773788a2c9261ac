"""Every name that client programs import is where they look for it, and is the thing itself."""

from __future__ import annotations

import importlib
import logging
import pickle
import re
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch

import tensordict as package
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential

ROWS = [
    line.split("\t")
    for line in files("tensordict.compat").joinpath("client_names.tsv").read_text().splitlines()
    if not line.startswith("#")
][1:]
NAMES = [name for kind, name, _ in ROWS if kind == "name"]

# Public names of the modules of the API, which programs and tests written against it import from there.
PUBLIC = {
    "tensordict._C": "_unravel_key_to_tuple unravel_key unravel_key_list unravel_keys",
    "tensordict._pytree": "PYTREE_REGISTERED_LAZY_TDS PYTREE_REGISTERED_TDS",
    "tensordict.base": (
        "NO_DEFAULT TensorDictBase from_any from_dict from_h5 from_namedtuple from_struct_array from_tuple "
        "get_defaults_to_none is_tensor_collection set_get_defaults_to_none"
    ),
    "tensordict.functional": "dense_stack_tds make_tensordict merge_tensordicts pad pad_sequence",
    "tensordict.memmap": "MemoryMappedTensor",
    "tensordict.persistent": "PersistentTensorDict",
    "tensordict.tensorclass": (
        "MetaData NonTensorData NonTensorDataBase NonTensorStack TensorAttrs TensorClass from_dataclass is_non_tensor "
        "is_tensorclass tensorclass"
    ),
    "tensordict.utils": (
        "Buffer BufferLegacy KeyDependentDefaultDict LinkedList NUMPY_TO_TORCH_DTYPE_DICT NestedKey "
        "TORCH_TO_NUMPY_DTYPE_DICT TensorDictFuture assert_allclose_td assert_close cache capture_non_tensor_stack "
        "convert_ellipsis_to_idx erase_cache expand_as_right expand_right get_json_backend get_printoptions "
        "implement_for infer_size_impl int_generator is_namedtuple is_namedtuple_class is_nested_key is_non_tensor "
        "is_seq_of_nested_key is_tensorclass isin json_dumps lazy_legacy list_to_stack lock_blocked "
        "parse_tensor_dict_string print_directory_tree prod remove_duplicates set_capture_non_tensor_stack "
        "set_json_backend set_lazy_legacy set_list_to_stack set_printoptions strtobool timeit unravel_key "
        "unravel_key_list unravel_keys"
    ),
}


def test_the_table_is_whole() -> None:
    assert len(NAMES) == len(set(NAMES)) == 167
    assert {kind for kind, _, _ in ROWS} == {"name", "container member", "module member"}
    assert all(re.fullmatch(r"[\w-]+:\d+( [\w-]+:\d+)*", programs) for _, _, programs in ROWS)


@pytest.mark.parametrize("path", NAMES)
def test_names_that_clients_import(path: str) -> None:
    assert resolve_name(path) is not None


@pytest.mark.parametrize("name", [name for kind, name, _ in ROWS if kind == "container member"])
def test_private_members_of_containers_that_clients_reach(name: str) -> None:
    td = package.TensorDict(a=torch.ones(2), batch_size=[2])
    assert any(hasattr(container, name) for container in (td, package.TensorDictParams(td.copy())))


@pytest.mark.parametrize("name", [name for kind, name, _ in ROWS if kind == "module member"])
def test_private_members_of_modules_that_clients_reach(name: str) -> None:
    module = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["a"], out_keys=["loc"])
    drawn = ProbabilisticTensorDictModule(["loc"], ["x"], distribution_class=torch.distributions.Categorical)
    assert any(hasattr(found, name) for found in (module, drawn, TensorDictSequential(module)))


@pytest.mark.parametrize("path", [f"{module}.{name}" for module, names in PUBLIC.items() for name in names.split()])
def test_public_names_of_modules(path: str) -> None:
    assert resolve_name(path) is not None


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("tensordict._C.unravel_key", "tensordict.unravel_key"),
        ("tensordict._C.unravel_key_list", "tensordict.unravel_key_list"),
        ("tensordict._C._unravel_key_to_tuple", "tensordict.utils._unravel_key_to_tuple"),
        ("tensordict._tensorcollection.TensorCollection", "tensordict.TensorCollection"),
        ("tensordict.base._default_is_leaf", "tensordict.default_is_leaf"),
        ("tensordict.base._is_leaf_nontensor", "tensordict.is_leaf_nontensor"),
        ("tensordict.tensorclass.from_dataclass", "tensordict.from_dataclass"),
        ("tensordict.tensorclass.is_non_tensor", "tensordict.is_non_tensor"),
        ("tensordict.tensorclass.MetaData", "tensordict.MetaData"),
        ("tensordict.tensordict.assert_allclose_td", "tensordict.assert_allclose_td"),
        ("tensordict.utils._is_tensorclass", "tensordict.is_tensorclass"),
        ("tensordict.functional.make_tensordict", "tensordict.make_tensordict"),
    ],
)
def test_one_thing_under_two_names(path: str, same: str) -> None:
    assert resolve_name(path) is resolve_name(same)


def test_modules_of_the_name_of_a_function() -> None:
    """`tensordict.tensorclass` and `tensordict.memmap` are functions; imports find the modules all the same."""
    assert callable(package.tensorclass) and callable(package.memmap)
    from tensordict.memmap import set_transfer_ownership
    from tensordict.tensorclass import from_dataclass

    assert callable(from_dataclass)
    tensor = torch.ones(2)
    set_transfer_ownership(tensor)
    assert tensor.tolist() == [1, 1]


def test_classes_of_entries() -> None:
    """TorchRL unpacks the tuple in a tuple of its own, for `isinstance`."""
    from tensordict.base import _ACCEPTED_CLASSES

    class Point(package.TensorClass):
        x: torch.Tensor

    entries = [torch.zeros(1), package.TensorDict(), Point(torch.zeros(1)), package.NonTensorData("a")]
    entries += [package.lazy_stack([package.TensorDict()]), package.TensorDictParams()]
    assert all(isinstance(entry, (list, *_ACCEPTED_CLASSES)) for entry in entries)
    assert not isinstance("a", _ACCEPTED_CLASSES) and not isinstance({}, _ACCEPTED_CLASSES)


def test_classes_known_to_pytrees() -> None:
    from torch.utils._pytree import SUPPORTED_NODES

    from tensordict._pytree import PYTREE_REGISTERED_LAZY_TDS, PYTREE_REGISTERED_TDS

    assert set(PYTREE_REGISTERED_TDS) == {package.TensorDict, package.PersistentTensorDict}
    assert (package.LazyStackedTensorDict,) == PYTREE_REGISTERED_LAZY_TDS
    assert package.PYTREE_REGISTERED_TDS is PYTREE_REGISTERED_TDS
    assert package.PYTREE_REGISTERED_LAZY_TDS is PYTREE_REGISTERED_LAZY_TDS
    assert {*PYTREE_REGISTERED_TDS, *PYTREE_REGISTERED_LAZY_TDS} <= SUPPORTED_NODES.keys()


def test_dtypes() -> None:
    from tensordict.utils import NUMPY_TO_TORCH_DTYPE_DICT, TORCH_TO_NUMPY_DTYPE_DICT

    assert len(TORCH_TO_NUMPY_DTYPE_DICT) == 14
    for dtype, numpy_dtype in TORCH_TO_NUMPY_DTYPE_DICT.items():
        assert torch.zeros(1, dtype=dtype).numpy().dtype == numpy_dtype
        assert NUMPY_TO_TORCH_DTYPE_DICT[numpy_dtype] is dtype
    assert NUMPY_TO_TORCH_DTYPE_DICT[np.dtype("bool")] is torch.bool


def test_futures(tmp_path: Path) -> None:
    from tensordict.utils import TensorDictFuture

    future = package.TensorDict(a=torch.ones(3)).memmap(tmp_path, num_threads=2, return_early=True)
    assert isinstance(future, TensorDictFuture)
    assert future.result()["a"].tolist() == [1, 1, 1]


def test_lists_that_write_to_a_stack_are_linked_lists() -> None:
    from tensordict.utils import LinkedList

    td = package.TensorDict(a=package.NonTensorStack("x", "y"), batch_size=[2])
    assert isinstance(td["a"], LinkedList) and isinstance(td["a"], list)
    td["a"][0] = "z"
    assert td["a"] == ["z", "y"]
    # Made by hand, and as `to_dict` of the stack gives it.
    stack = td.get("a")
    LinkedList(["z", "y"], td=stack)[1] = "w"
    stack.to_dict(as_linked_list=True)[0] = "v"
    assert stack.tolist() == ["v", "w"] and type(stack.to_dict()) is list
    alone = LinkedList("ab")
    alone[0] = "c"
    assert alone == ["c", "b"]


def test_the_class_for_tests_of_several_processes() -> None:
    from tensordict.testing import MyDistData

    data = MyDistData(a=torch.zeros(2), b=torch.ones(2), batch_size=[2])
    assert pickle.loads(pickle.dumps(data))[0].b == 1


def test_the_logger() -> None:
    from tensordict.utils import logger

    assert isinstance(logger, logging.Logger)


@pytest.mark.parametrize(
    "module", [*PUBLIC, *(f"tensordict.nn.{name}" for name in ["common", "params", "sequence", "ensemble"])]
)
def test_a_star_import_takes_the_api_alone(module: str) -> None:
    found: dict[str, Any] = {}
    exec(f"from {module} import *", found)
    names = found.keys() - {"__builtins__"}
    assert names == set(importlib.import_module(module).__all__)
    assert not names & {"torch", "Any", "Tensor", "annotations", "registry"}
