"""TensorDict: the container whose entries are in a dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tensordict.containers.tensordict_base import TensorDictBase
from tensordict.convert.frames import columns_of
from tensordict.core import makers, pytree, registry
from tensordict.core.contract import Contract, Device, Names
from tensordict.core.devices import as_device
from tensordict.core.exceptions import suggest
from tensordict.core.shapes import as_size
from tensordict.ops.dims.naming import as_names

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]
    from typing_extensions import Self

    from tensordict.ops.collection import TensorCollection

__all__ = ["TensorDict"]

# The keyword arguments of the constructor that are not entries.
_OPTIONS = ("batch_size", "device", "names", "non_blocking", "lock")


@pytree.register
@registry.register
class TensorDict(TensorDictBase):
    """A dict of tensors with a common batch size.

    Args:
        source: a mapping from (nested) keys to values, or another container. Values are tensors, containers, mappings,
            numbers, lists, numpy arrays or any other objects, which `td[key]` returns unchanged. Tensors are stored
            without a copy, unless their device must change.
        batch_size: the leading dims that all entries share; an int, a sequence of ints or a `torch.Size`.
            `None` means no batch dims.
        device: if given, entries are moved to it, now and on every later write.
        names: one name (or `None`) per batch dim.
        non_blocking: passed to device transfers.
        lock: lock the new container.
        **kwargs: entries, instead of `source`.

    Raises:
        RuntimeError: an entry's shape does not begin with the batch size; the entry is named.
        TypeError: an entry cannot be stored, or the arguments are of the wrong type.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"obs": torch.zeros(3, 4), "next": {"obs": torch.ones(3, 4)}}, batch_size=[3])
        >>> td["next", "obs"].shape, td[0].batch_size
        (torch.Size([3, 4]), torch.Size([]))
    """

    # Compiled code reads and writes a slot directly. For an attribute in `__dict__`, it checks on each call that no
    # class attribute has the same name, and writes through a function call: 1 us for each container returned.
    __slots__ = _slots = ("_batch_size", "_device", "_entries", "_locked", "_names")

    _entries: dict[str, Any]
    # The same values as in `Contract`, repeated because `torch.compile` checks on each call that no class between this
    # one and `Contract` redefines them: 90 checks for these two attributes.
    _is_non_tensor: bool = False
    _is_tensor: bool = False

    def __init__(
        self,
        source: Mapping[Any, object] | TensorCollection | Iterable[tuple[Any, object]] | DataFrame | None = None,
        batch_size: int | Sequence[int] | None = None,
        device: torch.device | str | int | None = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: object,
    ) -> None:
        if kwargs:
            if source is not None:
                hint = "".join(suggest(name, _OPTIONS) for name in kwargs)
                raise ValueError(
                    f"entries come from a mapping or from keyword arguments, not from both: got {list(kwargs)} beside "
                    f"a mapping{hint}"
                )
            source = kwargs
        self._entries = {}
        self._batch_size = as_size(batch_size)
        self._device = None if device is None else as_device(device)
        self._names = None
        self._locked = False
        if names is not None:
            given = as_names(names, len(self._batch_size))
            if given.count(None) != len(given):
                self._names = given
        if source is not None and (type(source) is not dict or source):
            content: Any = source
            if type(source) is not dict and not isinstance(source, (Contract, Mapping)):
                content = _as_mapping(source)
            if device is None:
                self._fill(content)
            else:
                self._fill(content, (), self._queues_transfers(non_blocking))
                self._wait_for_transfers(non_blocking)
        if lock:
            self.lock_()

    if not TYPE_CHECKING:

        @classmethod
        def from_module(cls, module, as_module=False, lock=False, use_state_dict=False, filter_empty=True):
            """Call :meth:`TensorDictBase.from_module`, without locking the result by default."""
            return super().from_module(module, as_module, lock, use_state_dict, filter_empty)

    @classmethod
    def _make(cls, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        """Build a container without checks. It keeps `entries` itself, not a copy."""
        self = object.__new__(cls)
        self._entries = entries
        self._batch_size = batch_size
        self._device = device
        self._names = None if names is None else list(names)
        self._locked = False
        return self

    def _build(self, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        # The body of `_make`, inlined because every operation ends here.
        out = object.__new__(type(self))
        out._entries = entries
        out._batch_size = batch_size
        out._device = device
        out._names = None if names is None else list(names)
        out._locked = False
        return out

    def _build_many(
        self, pieces: Iterable[dict[str, Any]], sizes: Sequence[torch.Size], device: Device, names: Names | None
    ) -> list[Self]:
        # The body of `_make`, inlined: 0.2 us instead of 0.4 us a piece, and `unbind` makes many.
        new, cls = object.__new__, type(self)
        out = []
        for entries, size in zip(pieces, sizes, strict=True):
            piece = new(cls)
            piece._entries = entries
            piece._batch_size = size
            piece._device = device
            piece._names = names and list(names)
            piece._locked = False
            out.append(piece)
        return out


makers.dense = TensorDict._make


def _as_mapping(source: Any) -> dict[Any, Any]:
    if (columns := columns_of(source)) is not None:
        return columns
    try:
        return dict(source)
    except (TypeError, ValueError):
        raise TypeError(
            f"a TensorDict is made from a mapping, a container or (key, value) pairs, got {type(source).__name__}"
        ) from None
