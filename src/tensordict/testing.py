"""The public place of assertions on containers."""

from tensordict.ops.assertions import assert_allclose_td, assert_close

__all__ = ["assert_allclose_td", "assert_close"]
