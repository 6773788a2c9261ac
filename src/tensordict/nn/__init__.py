"""Modules that read and write containers, distributions for them, and containers as modules."""

from tensordict.nn.dispatch import dispatch
from tensordict.nn.ensemble import EnsembleModule
from tensordict.nn.functional_modules import get_functional, is_functional, make_functional, repopulate_module
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
from tensordict.nn.tensorclasses import TensorClassModuleBase, TensorClassModuleWrapper

__all__ = [
    "EnsembleModule",
    "InteractionType",
    "TensorClassModuleBase",
    "TensorClassModuleWrapper",
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "TensorDictParams",
    "TensorDictSequential",
    "WrapModule",
    "as_tensordict_module",
    "dispatch",
    "get_functional",
    "is_functional",
    "make_functional",
    "repopulate_module",
    "set_interaction_type",
    "set_skip_existing",
    "skip_existing",
]
