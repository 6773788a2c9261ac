"""The public place of `TensorDictBase`, and of names that programs import from here."""

from __future__ import annotations

from torch import Tensor

from tensordict.containers.api import (
    from_any,
    from_dict,
    from_h5,
    from_namedtuple,
    from_struct_array,
    from_tuple,
    from_zarr,
)
from tensordict.containers.tensordict_base import TensorDictBase
from tensordict.core.key_views import (
    NESTED_TENSORS_AS_LISTS,
    NESTED_TENSORS_AS_LISTS_NONTENSOR,
    default_is_leaf,
    is_leaf_nontensor,
    is_tensor_collection,
)
from tensordict.core.settings import get_defaults_to_none, set_get_defaults_to_none
from tensordict.ops.collection import TensorCollection
from tensordict.ops.entries.reading import NO_DEFAULT

__all__ = [
    "NO_DEFAULT",
    "TensorDictBase",
    "from_any",
    "from_dict",
    "from_h5",
    "from_namedtuple",
    "from_struct_array",
    "from_tuple",
    "from_zarr",
    "get_defaults_to_none",
    "is_tensor_collection",
    "set_get_defaults_to_none",
]

# The names under which programs, such as TorchRL, ask for them.
_NESTED_TENSORS_AS_LISTS = NESTED_TENSORS_AS_LISTS
_NESTED_TENSORS_AS_LISTS_NONTENSOR = NESTED_TENSORS_AS_LISTS_NONTENSOR
_default_is_leaf = default_is_leaf
_is_leaf_nontensor = is_leaf_nontensor
# The classes of entries, which TorchRL's lists of a storage take apart.
_ACCEPTED_CLASSES = (Tensor, TensorCollection)
