"""TensorDictBase: the mapping-like half of the containers."""

from __future__ import annotations

from collections.abc import MutableMapping

from tensordict.collection import TensorCollection
from tensordict.ops.reading import NO_DEFAULT
from tensordict.views import is_tensor_collection

__all__ = ["NO_DEFAULT", "TensorDictBase", "is_tensor_collection"]


class TensorDictBase(TensorCollection):
    """The parent class of the containers that are used like a dict of tensors.

    `isinstance(td, collections.abc.MutableMapping)` holds; the registration avoids that module's metaclass, whose
    `isinstance` costs ten times a plain one.
    """


MutableMapping.register(TensorDictBase)
