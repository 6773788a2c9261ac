"""Modules that read and write containers, distributions for them, and containers as modules."""

from tensordict.nn.dispatch import dispatch
from tensordict.nn.interaction import InteractionType, set_interaction_type
from tensordict.nn.module import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    WrapModule,
    as_tensordict_module,
)
from tensordict.nn.params import TensorDictParams
from tensordict.nn.sequence import TensorDictSequential
from tensordict.nn.skipping import set_skip_existing, skip_existing

__all__ = [
    "InteractionType",
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "TensorDictParams",
    "TensorDictSequential",
    "WrapModule",
    "as_tensordict_module",
    "dispatch",
    "set_interaction_type",
    "set_skip_existing",
    "skip_existing",
]
