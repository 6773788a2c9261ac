"""Public helpers that clients import from `tensordict.utils`."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeAlias

import torch
from torch.nn import Buffer

from tensordict.compat.classes import _is_non_tensor
from tensordict.compat.decorators import cache, erase_cache, lock_blocked
from tensordict.compat.index_shapes import (
    _getitem_batch_size,
    _maybe_correct_neg_dim,
    _shape,
    convert_ellipsis_to_idx,
    infer_size_impl,
)
from tensordict.compat.nested_keys import _unravel_key_to_tuple, is_seq_of_nested_key, unravel_keys
from tensordict.compat.small_helpers import (
    KeyDependentDefaultDict,
    _LockedSchema,
    _zip_strict,
    get_json_backend,
    int_generator,
    is_namedtuple,
    is_namedtuple_class,
    json_dumps,
    prod,
    set_json_backend,
    strtobool,
)
from tensordict.compat.timing import timeit
from tensordict.compat.versions import implement_for
from tensordict.containers.parsing import parse_tensor_dict_string
from tensordict.containers.tensor_class import is_tensorclass
from tensordict.core.dtypes import is_bool, is_floating, is_inexact, is_integer
from tensordict.core.key_views import is_non_tensor
from tensordict.core.keys import (
    KEY_SEPARATOR,
    NestedKey,
    is_nested_key,
    unravel_key,
    unravel_key_list,
    unravel_key_to_tuple,
)
from tensordict.core.logs import logger
from tensordict.core.settings import (
    capture_non_tensor_stack,
    lazy_legacy,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_lazy_legacy,
    set_list_to_stack,
)
from tensordict.io.saving.tree import print_directory_tree
from tensordict.memory.stored_tensors import _NUMPY as TORCH_TO_NUMPY_DTYPE_DICT
from tensordict.memory.stored_tensors import _TORCH as NUMPY_TO_TORCH_DTYPE_DICT
from tensordict.ops.assertions import assert_allclose_td, assert_close
from tensordict.ops.converting import LinkedList
from tensordict.ops.dims.duplicates import isin, remove_duplicates
from tensordict.ops.dims.expanding import expand_as_right, expand_right
from tensordict.ops.printing import get_printoptions, set_printoptions

# Types for annotations.
DeviceType: TypeAlias = "torch.device | str | int"
IndexType: TypeAlias = "int | slice | str | torch.Tensor | list[Any] | tuple[Any, ...] | None"
# What `return_early=True` gives; the class of buffers; `is_tensorclass` of a class.
TensorDictFuture = Future
BufferLegacy = Buffer
_is_tensorclass = is_tensorclass

__all__ = [
    "KEY_SEPARATOR",
    "NUMPY_TO_TORCH_DTYPE_DICT",
    "TORCH_TO_NUMPY_DTYPE_DICT",
    "Buffer",
    "BufferLegacy",
    "DeviceType",
    "IndexType",
    "KeyDependentDefaultDict",
    "LinkedList",
    "NestedKey",
    "TensorDictFuture",
    "_LockedSchema",
    "_getitem_batch_size",
    "_is_non_tensor",
    "_is_tensorclass",
    "_maybe_correct_neg_dim",
    "_shape",
    "_unravel_key_to_tuple",
    "_zip_strict",
    "assert_allclose_td",
    "assert_close",
    "cache",
    "capture_non_tensor_stack",
    "convert_ellipsis_to_idx",
    "erase_cache",
    "expand_as_right",
    "expand_right",
    "get_json_backend",
    "get_printoptions",
    "implement_for",
    "infer_size_impl",
    "int_generator",
    "is_bool",
    "is_floating",
    "is_inexact",
    "is_integer",
    "is_namedtuple",
    "is_namedtuple_class",
    "is_nested_key",
    "is_non_tensor",
    "is_seq_of_nested_key",
    "is_tensorclass",
    "isin",
    "json_dumps",
    "lazy_legacy",
    "list_to_stack",
    "lock_blocked",
    "logger",
    "parse_tensor_dict_string",
    "print_directory_tree",
    "prod",
    "remove_duplicates",
    "set_capture_non_tensor_stack",
    "set_json_backend",
    "set_lazy_legacy",
    "set_list_to_stack",
    "set_printoptions",
    "strtobool",
    "timeit",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
    "unravel_keys",
]
