"""Re-export names that TorchRL, and pickles of the reference, import from here."""

from tensordict.nn.dispatch import dispatch
from tensordict.nn.module import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    WrapModule,
    as_tensordict_module,
)
from tensordict.nn.pickled_modules import _OutKeysSelect

__all__ = [
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "WrapModule",
    "_OutKeysSelect",
    "as_tensordict_module",
    "dispatch",
]
