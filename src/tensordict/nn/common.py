"""Names of `module.py` and `dispatch.py` for programs that import them from here: TorchRL does."""

from tensordict.nn.dispatch import dispatch
from tensordict.nn.module import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    WrapModule,
    as_tensordict_module,
)

__all__ = [
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "WrapModule",
    "as_tensordict_module",
    "dispatch",
]
