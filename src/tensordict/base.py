"""TensorDictBase: the mapping-like half of the containers."""

from __future__ import annotations

from collections.abc import MutableMapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tensordict.collection import TensorCollection
from tensordict.convert.any import from_any, from_namedtuple, from_tuple
from tensordict.convert.mappings import from_dict
from tensordict.convert.numpy import from_struct_array
from tensordict.io.api import from_h5
from tensordict.ops.reading import NO_DEFAULT
from tensordict.settings import get_defaults_to_none, set_get_defaults_to_none
from tensordict.views import (
    NESTED_TENSORS_AS_LISTS,
    NESTED_TENSORS_AS_LISTS_NONTENSOR,
    default_is_leaf,
    is_leaf_nontensor,
    is_tensor_collection,
)

if TYPE_CHECKING:
    from tensordict.lazy import LazyStackedTensorDict
    from tensordict.persistent import PersistentTensorDict

__all__ = [
    "NO_DEFAULT",
    "TensorDictBase",
    "from_any",
    "from_dict",
    "from_h5",
    "from_namedtuple",
    "from_struct_array",
    "from_tuple",
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


class TensorDictBase(TensorCollection):
    """The parent class of the containers that are used like a dict of tensors.

    `isinstance(td, collections.abc.MutableMapping)` holds; the registration avoids that module's metaclass, whose
    `isinstance` costs ten times a plain one.
    """

    if TYPE_CHECKING:
        # What is another class than that of the container, whose faces keep theirs.
        def to_lazystack(self, dim: int = 0) -> LazyStackedTensorDict: ...
        def to_h5(
            self, filename: Any, *, durable: bool = False, progress: bool = False, **kwargs: Any
        ) -> PersistentTensorDict: ...
        @classmethod
        def from_h5(
            cls,
            filename: Any,
            *,
            mode: str = "r",
            auto_batch_size: bool = False,
            batch_dims: int | None = None,
            batch_size: Any = None,
            device: Any = None,
        ) -> PersistentTensorDict: ...

    @classmethod
    def __class_getitem__(cls, item: Any) -> GenericAlias:
        """`TensorDict[str, Frame]` says in an annotation what the entries are, as `dict[str, Frame]` does."""
        return GenericAlias(cls, item)


MutableMapping.register(TensorDictBase)
