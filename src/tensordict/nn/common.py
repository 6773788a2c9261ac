"""Names of several rooms for programs, and pickles of the reference, that look for them here: TorchRL does."""

from tensordict.nn.dispatch import dispatch
from tensordict.nn.module import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    WrapModule,
    as_tensordict_module,
)
from tensordict.nn.pickled import _OutKeysSelect

__all__ = [
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "WrapModule",
    "_OutKeysSelect",
    "as_tensordict_module",
    "dispatch",
]
