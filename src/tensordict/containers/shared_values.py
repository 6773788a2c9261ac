"""The classes that values shared between processes had in pickles of earlier versions; see `shared_file.py`."""

from __future__ import annotations

from typing import Any

from tensordict.containers.lazy.vmapping import flatten_stack, flatten_stack_with_keys, unflatten_stack
from tensordict.containers.nontensor import MetaData, NonTensorData, NonTensorStack
from tensordict.containers.nontensor_base import Saved, flatten_holder, flatten_holder_with_keys, unflatten_holder
from tensordict.core import pytree


class _Pickled(Saved):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._put_at(self._place, True)


class FollowingNonTensorData(_Pickled, NonTensorData):
    """A :class:`NonTensorData` whose value is shared between processes."""

    _stored_as = "NonTensorData"
    _of = NonTensorData._of  # type: ignore[assignment]


class FollowingMetaData(_Pickled, MetaData):
    """A :class:`MetaData` whose value is shared between processes."""

    _stored_as = "MetaData"
    _of = MetaData._of  # type: ignore[assignment]


class FollowingNonTensorStack(_Pickled, NonTensorStack):
    """A :class:`NonTensorStack` whose values are shared between processes."""

    _stored_as = "NonTensorStack"
    _over = NonTensorStack._over  # type: ignore[assignment]


for _cls in (FollowingNonTensorData, FollowingMetaData):
    pytree.register(_cls, flatten_holder, unflatten_holder, flatten_holder_with_keys)
pytree.register(FollowingNonTensorStack, flatten_stack, unflatten_stack, flatten_stack_with_keys)
