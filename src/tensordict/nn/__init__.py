"""Public names: modules that read and write containers, distributions for them, and containers as modules."""

from tensordict.containers.api import make_tensordict
from tensordict.nn.cudagraphs import CudaGraphModule
from tensordict.nn.dispatch import dispatch
from tensordict.nn.distributions import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    NormalParamExtractor,
    OneHotCategorical,
    TruncatedNormal,
    composite_lp_aggregate,
    rand_one_hot,
    set_composite_lp_aggregate,
)
from tensordict.nn.ensemble import EnsembleModule
from tensordict.nn.exporting import export
from tensordict.nn.functional_modules import get_functional, is_functional, make_functional, repopulate_module
from tensordict.nn.interaction import InteractionType, interaction_type, set_interaction_type
from tensordict.nn.module import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    WrapModule,
    as_tensordict_module,
)
from tensordict.nn.params import TensorDictParams
from tensordict.nn.probabilistic import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn.scale_mappings import add_custom_mapping, biased_softplus, inv_softplus, mappings
from tensordict.nn.sequence import TensorDictSequential
from tensordict.nn.skipping import set_skip_existing, skip_existing
from tensordict.nn.tensorclasses import TensorClassModuleBase, TensorClassModuleWrapper

__all__ = [
    "AddStateIndependentNormalScale",
    "CompositeDistribution",
    "CudaGraphModule",
    "EnsembleModule",
    "InteractionType",
    "NormalParamExtractor",
    "OneHotCategorical",
    "ProbabilisticTensorDictModule",
    "ProbabilisticTensorDictSequential",
    "TensorClassModuleBase",
    "TensorClassModuleWrapper",
    "TensorDictModule",
    "TensorDictModuleBase",
    "TensorDictModuleWrapper",
    "TensorDictParams",
    "TensorDictSequential",
    "TruncatedNormal",
    "WrapModule",
    "add_custom_mapping",
    "as_tensordict_module",
    "biased_softplus",
    "composite_lp_aggregate",
    "dispatch",
    "export",
    "get_functional",
    "interaction_type",
    "inv_softplus",
    "is_functional",
    "make_functional",
    "make_tensordict",
    "mappings",
    "rand_one_hot",
    "repopulate_module",
    "set_composite_lp_aggregate",
    "set_interaction_type",
    "set_skip_existing",
    "skip_existing",
]
