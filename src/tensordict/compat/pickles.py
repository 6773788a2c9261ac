"""Allow the classes and functions named in pickles of the reference for `torch.load(weights_only=True)`.

That call imports nothing by itself, so everything that such a file may name is listed here. The functions that rebuild
containers are in `io/formats/pickled_containers.py`.
"""

import torch

from tensordict.compat.small_helpers import _LockedSchema
from tensordict.containers.dense import TensorDict
from tensordict.containers.lazy import LazyStackedTensorDict
from tensordict.containers.nontensor import MetaData, NonTensorData, NonTensorStack
from tensordict.containers.unbatched import UnbatchedTensor
from tensordict.io.formats.pickled_containers import make as _make_td
from tensordict.io.formats.pickled_containers import rebuild as _rebuild_tensordict_files_consolidated
from tensordict.nn.params import TensorDictParams

__all__ = ["_make_td", "_rebuild_tensordict_files_consolidated"]

torch.serialization.add_safe_globals(
    [
        (_make_td, "tensordict._reductions._make_td"),
        (_rebuild_tensordict_files_consolidated, "tensordict._reductions._rebuild_tensordict_files_consolidated"),
        (TensorDict, "tensordict._td.TensorDict"),
        (LazyStackedTensorDict, "tensordict._lazy.LazyStackedTensorDict"),
        (UnbatchedTensor, "tensordict._unbatched.UnbatchedTensor"),
        (NonTensorData, "tensordict.tensorclass.NonTensorData"),
        (MetaData, "tensordict.tensorclass.MetaData"),
        (NonTensorStack, "tensordict.tensorclass.NonTensorStack"),
        (TensorDictParams, "tensordict.nn.params.TensorDictParams"),
        (_LockedSchema, "tensordict.utils._LockedSchema"),
    ]
)
