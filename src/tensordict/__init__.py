"""TensorDict: a container that holds many tensors under nested keys and behaves as one tensor."""

from tensordict.base import TensorDictBase
from tensordict.collection import TensorCollection
from tensordict.convert.mappings import from_dict, fromkeys, make_tensordict
from tensordict.functional import cat, stack
from tensordict.io.api import load, load_memmap, memmap, save
from tensordict.keys import NestedKey, unravel_key, unravel_key_list
from tensordict.memmap import MemmapTensor, MemoryMappedTensor
from tensordict.printing import get_printoptions, set_printoptions
from tensordict.settings import get_defaults_to_none, set_get_defaults_to_none
from tensordict.tensordict import TensorDict
from tensordict.testing import assert_allclose_td, assert_close
from tensordict.views import default_is_leaf, is_tensor_collection

__version__ = "0.14.100"

__all__ = [
    "MemmapTensor",
    "MemoryMappedTensor",
    "NestedKey",
    "TensorCollection",
    "TensorDict",
    "TensorDictBase",
    "assert_allclose_td",
    "assert_close",
    "cat",
    "default_is_leaf",
    "from_dict",
    "fromkeys",
    "get_defaults_to_none",
    "get_printoptions",
    "is_tensor_collection",
    "load",
    "load_memmap",
    "make_tensordict",
    "memmap",
    "save",
    "set_get_defaults_to_none",
    "set_printoptions",
    "stack",
    "unravel_key",
    "unravel_key_list",
]
