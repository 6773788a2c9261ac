"""Descriptions of the leaves: containers that say what each leaf is, or what is in it, and leaves made to fit one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core import makers, ragged, registry
from tensordict.core.contract import ContainerT, Contract, is_node, named_error
from tensordict.core.devices import place_of
from tensordict.core.keys import Path, joined
from tensordict.memory.stored_tensors import in_memory
from tensordict.ops.math.statistics import compute_statistics, name_quantiles
from tensordict.ops.storing.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.containers.summary import Summary

_FIELDS = ("device", "dtype", "shape")


class Describing(Leaves):
    """`describe`, and `attrs`, of which `to(description)` is the counterpart."""

    def describe(self, percentiles: Sequence[float] = (0.25, 0.5, 0.75)) -> Summary:
        """Statistics of the elements of each leaf, in a container that prints as a table.

        They are called as in `DataFrame.describe` of pandas, and mean the same: NaN is left out of all but its own
        share. Values that are no tensors are left out; leaves are read one at a time.

        Args:
            percentiles: which quantiles to give, as parts between 0 and 1; between two elements, by linear
                interpolation.

        Returns:
            a container without batch dims in which a container of scalars is in the place of each leaf: `"count"` of
            elements that are not NaN (int64); `"mean"`, `"std"` with Bessel's correction, and the quantiles (`"25%"`,
            ...) in float64; `"min"` and `"max"` in the dtype of the leaf; `"nan"` and `"zero"`, the shares of them in
            all elements, in float64. A leaf without elements has NaN for all but the count; a complex one has no least
            and greatest element and no quantiles.

        Raises:
            ValueError: a percentile is not in [0, 1], or given twice.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(obs=torch.tensor([[0.0, 1.0], [3.0, torch.nan]]), label="cat")
            >>> print(td.describe())
                 count     mean      std  min  25%  50%  75%  max   nan  zero
            obs      3  1.33333  1.52753    0  0.5    1    2    3  0.25  0.25
            >>> td.describe()["obs", "max"]
            tensor(3.)
        """
        return _described(self, name_quantiles(percentiles), ())

    def attrs(self, *, fields: Sequence[str] = _FIELDS, num_threads: int | None = None) -> Self:
        """A container of the same keys that says what each leaf is, to be passed to `to()` of another one.

        Args:
            fields: what to say: `"device"`, `"dtype"`, `"shape"`.
            num_threads: accepted for the sake of programs that pass it: there is nothing here to be done in parallel.

        Returns:
            a container without device and batch dims that has a `TensorAttrs` in the place of each leaf.

        Raises:
            ValueError: a field is none of these.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> wanted = TensorDict(a=torch.zeros(3, dtype=torch.int32)).attrs(fields=["dtype"])
            >>> wanted["a"].tgt_dtype
            torch.int32
            >>> TensorDict(a=torch.ones(3)).to(wanted)["a"]
            tensor([1, 1, 1], dtype=torch.int32)
        """
        unknown = [field for field in fields if field not in _FIELDS]
        if unknown:
            raise ValueError(f"attrs: the fields are {', '.join(map(repr, _FIELDS))}, got {unknown}")
        make = _attrs_class()
        entries: dict[str, Any] = {}
        for name, value in self._entries.items():
            if isinstance(value, Contract) and value._is_non_tensor:
                continue
            if isinstance(value, Describing):
                entries[name] = value.attrs(fields=fields)
            else:
                entries[name] = make(**{f"tgt_{field}": getattr(value, field) for field in fields})
        made = makers.dense(entries, torch.Size(()), None, None)
        return self._rewrap(made)  # type: ignore[no-any-return]


def _described(node: Contract, quantiles: dict[str, float], path: Path) -> Summary:
    make = registry.lookup("Summary")._make
    entries: dict[str, Any] = {}
    for name, value in node._structure().items():
        inside = (*path, name)
        if is_node(value):
            if not value._is_non_tensor:
                entries[name] = _described(value, quantiles, inside)
            continue
        try:
            # An UnbatchedTensor is one for all members of a lazy stack.
            leaves = [node._entries[name]] if isinstance(value, Contract) else map(in_memory, node._leaves_of(name))
            parts = [ragged.elements(leaf) for leaf in leaves]
            entries[name] = make(compute_statistics(parts, quantiles), torch.Size(()), node._device, None)
        except (RuntimeError, TypeError) as error:
            raise named_error(error, inside) from error
    return make(entries, torch.Size(()), node._device, None)  # type: ignore[no-any-return]


def _attrs_class() -> Any:
    return registry.lookup("TensorAttrs")


def is_description(container: Contract) -> bool:
    """Whether a container has `TensorAttrs` in the place of leaves."""
    kind = _attrs_class()
    return any(
        isinstance(value, Contract) and (isinstance(value, kind) or is_description(value))
        for value in container._structure().values()
    )


def fitted(node: ContainerT, description: Contract, path: Path = ()) -> ContainerT:
    """A container whose leaves have the devices and dtypes that a description gives them; others are shared."""
    wanted = description._structure()
    device = node._device
    entries: dict[str, Any] = {}
    for name, value in node._entries.items():
        target = wanted.get(name)
        if target is None:
            entries[name] = value
        elif isinstance(value, Contract):
            entries[name] = fitted(value, target, (*path, name))
        else:
            entries[name] = _leaf_fitted(value, target, (*path, name))
        if device is not None and entries[name].device not in (device, place_of(device)):
            device = None
    return node._build(entries, node._batch_size, device, node._names)


def _leaf_fitted(leaf: Tensor, target: object, path: Path) -> Tensor:
    if not isinstance(target, _attrs_class()):
        raise TypeError(f"entry {joined(path)!r} is a tensor, but a container in the description")
    device = leaf.device if target.tgt_device is None else target.tgt_device
    try:
        return leaf.to(device, leaf.dtype if target.tgt_dtype is None else target.tgt_dtype)
    except RuntimeError as error:
        raise named_error(error, path) from error
