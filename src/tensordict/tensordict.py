"""The public place of `TensorDict`."""

from tensordict.containers.dense import TensorDict
from tensordict.ops.assertions import assert_allclose_td

__all__ = ["TensorDict", "assert_allclose_td"]
