"""The public place of assertions on containers, and of a small tensorclass for tests."""

import importlib as _importlib
import typing as _typing

from tensordict.ops.assertions import assert_allclose_td, assert_close

if _typing.TYPE_CHECKING:
    from tensordict.compat.paths._testing import MyDistData
else:

    def __getattr__(name: str) -> object:
        """Make the class when it is asked for, because that takes a millisecond."""
        if name == "MyDistData":
            return _importlib.import_module("tensordict._testing").MyDistData
        raise AttributeError(f"module 'tensordict.testing' has no attribute {name!r}", name=name)


__all__ = ["MyDistData", "assert_allclose_td", "assert_close"]
