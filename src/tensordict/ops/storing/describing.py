"""`describe` and `attrs`, which return a description of each leaf, and the conversion of leaves to such attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core import makers, ragged, registry
from tensordict.core.contract import ContainerT, Contract, is_node, named_error
from tensordict.core.devices import place_of
from tensordict.core.keys import Path, joined
from tensordict.looking.texts import count_held_texts
from tensordict.memory.stored_tensors import read_stored
from tensordict.ops.math.statistics import compute_statistics, name_quantiles
from tensordict.ops.storing.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

_FIELDS = ("device", "dtype", "shape")


class Describing(Leaves):
    """The methods `describe` and `attrs`. The method `to` converts the leaves to the result of `attrs`."""

    def describe(self, percentiles: Sequence[float] = (0.25, 0.5, 0.75)) -> Any:
        """Compute statistics of the elements of each leaf, and return them in a container that prints as a table.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(obs=torch.tensor([[0.0, 1.0], [3.0, torch.nan]]), label="cat")
            >>> print(td.describe())
                 count     mean      std  min  25%  50%  75%  max   nan  zero
            obs      3  1.33333  1.52753    0  0.5    1    2    3  0.25  0.25
            label: 'cat'
            >>> td.describe()["obs", "max"]
            tensor(3.)

        The names and meanings are the same as in `DataFrame.describe` of pandas. NaN counts only for `"nan"`. Texts
        are counted, and all other values are left out. Leaves are read one at a time.

        Args:
            percentiles: the quantiles to compute, between 0 and 1, with linear interpolation between two elements.

        Returns:
            a container without batch dims that has a container of scalars for each leaf:

            - `"count"`: the number of elements that are not NaN (int64);
            - `"mean"`, `"std"` (with Bessel's correction) and the quantiles (`"25%"`, ...) in float64;
            - `"min"` and `"max"` in the dtype of the leaf;
            - `"nan"` and `"zero"`: the shares of NaN and of 0 in all elements, in float64.

            For an entry of texts, it has `"count"`, the number of different texts as `"unique"`, and `"counts"`: a dict
            with the number of elements that have a text, the most frequent one first.

            For a leaf without elements, all but the count are NaN. A complex leaf has neither `"min"`, `"max"` nor
            quantiles.

        Raises:
            ValueError: a percentile is not in [0, 1], or given twice.
        """
        return _summarize(self, name_quantiles(percentiles), ())

    def attrs(self, *, fields: Sequence[str] = _FIELDS, num_threads: int | None = None) -> Self:
        """Return the attributes of each leaf, in a container that can be passed to `to()` of another container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> wanted = TensorDict(a=torch.zeros(3, dtype=torch.int32)).attrs(fields=["dtype"])
            >>> wanted["a"].tgt_dtype
            torch.int32
            >>> TensorDict(a=torch.ones(3)).to(wanted)["a"]
            tensor([1, 1, 1], dtype=torch.int32)

        Args:
            fields: the attributes: `"device"`, `"dtype"`, `"shape"`.
            num_threads: accepted for compatibility, without effect.

        Returns:
            a container without device and batch dims that has a `TensorAttrs` for each leaf.

        Raises:
            ValueError: a field is unknown.
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


def _summarize(node: Contract, quantiles: dict[str, float], path: Path) -> Any:
    """Compute the statistics of each leaf of a tree."""
    make = registry.lookup("Summary")._make
    entries: dict[str, Any] = {}
    for name, value in node._structure().items():
        inside = (*path, name)
        if is_node(value):
            if not value._is_non_tensor:
                entries[name] = _summarize(value, quantiles, inside)
            elif counts := count_held_texts(node._entries[name]):
                found: dict[str, Any] = {"count": sum(counts.values()), "unique": len(counts)}
                found = {what: torch.tensor(number) for what, number in found.items()}
                found["counts"] = makers.value(counts, torch.Size(()), None)
                entries[name] = make(found, torch.Size(()), node._device, None)
            continue
        try:
            # All members of a lazy stack share one `UnbatchedTensor`.
            leaves = [node._entries[name]] if isinstance(value, Contract) else map(read_stored, node._leaves_of(name))
            parts = [ragged.pack_elements(leaf) for leaf in leaves]
            entries[name] = make(compute_statistics(parts, quantiles), torch.Size(()), node._device, None)
        except (RuntimeError, TypeError) as error:
            raise named_error(error, inside) from error
    return make(entries, torch.Size(()), node._device, None)


def _attrs_class() -> Any:
    return registry.lookup("TensorAttrs")


def is_description(container: Contract) -> bool:
    """Return whether a container is a result of `attrs`: it has a `TensorAttrs`, at any depth."""
    kind = _attrs_class()
    return any(
        isinstance(value, Contract) and (isinstance(value, kind) or is_description(value))
        for value in container._structure().values()
    )


def convert_leaves(node: ContainerT, description: Contract, path: Path = ()) -> ContainerT:
    """Convert the leaves to the devices and dtypes that a result of `attrs` has for them; share all other leaves."""
    wanted = description._structure()
    device = node._device
    entries: dict[str, Any] = {}
    for name, value in node._entries.items():
        target = wanted.get(name)
        if target is None:
            entries[name] = value
        elif isinstance(value, Contract):
            entries[name] = convert_leaves(value, target, (*path, name))
        else:
            entries[name] = _convert_leaf(value, target, (*path, name))
        if device is not None and entries[name].device not in (device, place_of(device)):
            device = None
    return node._build(entries, node._batch_size, device, node._names)


def _convert_leaf(leaf: Tensor, target: object, path: Path) -> Tensor:
    if not isinstance(target, _attrs_class()):
        raise TypeError(f"entry {joined(path)!r} is a tensor here, but a container in the description")
    device = leaf.device if target.tgt_device is None else target.tgt_device
    try:
        return leaf.to(device, leaf.dtype if target.tgt_dtype is None else target.tgt_dtype)
    except RuntimeError as error:
        raise named_error(error, path) from error
