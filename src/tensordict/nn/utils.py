"""Re-export names that TorchRL and its tests import from here."""

from torch.nn import Buffer

from tensordict.nn.dispatch import _set_dispatch_td_nn_modules
from tensordict.nn.distributions.composite import composite_lp_aggregate, set_composite_lp_aggregate
from tensordict.nn.scale_mappings import add_custom_mapping, biased_softplus, expln, inv_softplus, mappings
from tensordict.nn.skipping import _set_skip_existing_None, set_skip_existing, skip_existing

__all__ = [
    "Buffer",
    "_set_dispatch_td_nn_modules",
    "_set_skip_existing_None",
    "add_custom_mapping",
    "biased_softplus",
    "composite_lp_aggregate",
    "expln",
    "inv_softplus",
    "mappings",
    "set_composite_lp_aggregate",
    "set_skip_existing",
    "skip_existing",
]
