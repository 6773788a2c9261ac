"""Public names of the distributions for probabilistic modules."""

from tensordict.nn.distributions import continuous, discrete
from tensordict.nn.distributions.composite import (
    CompositeDistribution,
    composite_lp_aggregate,
    set_composite_lp_aggregate,
)
from tensordict.nn.distributions.continuous import AddStateIndependentNormalScale, Delta, NormalParamExtractor
from tensordict.nn.distributions.discrete import OneHotCategorical, rand_one_hot
from tensordict.nn.distributions.truncated_normal import TruncatedNormal, TruncatedStandardNormal
from tensordict.nn.interaction import InteractionType, set_interaction_type
from tensordict.nn.scale_mappings import add_custom_mapping, mappings

# Programs look distributions up by their name in lower case.
distributions_maps = {
    made.__name__.lower(): made
    for made in (NormalParamExtractor, AddStateIndependentNormalScale, Delta, OneHotCategorical)
}

__all__ = [
    "AddStateIndependentNormalScale",
    "CompositeDistribution",
    "Delta",
    "InteractionType",
    "NormalParamExtractor",
    "OneHotCategorical",
    "TruncatedNormal",
    "TruncatedStandardNormal",
    "add_custom_mapping",
    "composite_lp_aggregate",
    "continuous",
    "discrete",
    "distributions_maps",
    "mappings",
    "rand_one_hot",
    "set_composite_lp_aggregate",
    "set_interaction_type",
]
