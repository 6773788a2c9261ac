"""How containers are shown as text: `repr` and its options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.looking.notebook_tree import tree_html
from tensordict.looking.shown_entries import ShownLeaf, list_entries

_DEFAULTS: dict[str, Any] = {
    "show_batch_size": True,
    "show_device": True,
    "show_is_shared": True,
    "show_shape": True,
    "show_field_device": True,
    "show_dtype": True,
    "show_field_is_shared": True,
    "show_grad": False,
    "show_is_contiguous": False,
    "show_is_view": False,
    "show_storage_size": False,
    "plain": False,
    "sort_keys": "alphabetical",
}
# What `verbose=False` hides.
_DETAILS = ("show_device", "show_is_shared", "show_field_device", "show_dtype", "show_field_is_shared")

_options = dict(_DEFAULTS)


class set_printoptions(internals.Decorator):  # a function to its callers, as in torch
    """Choose what `repr` shows of a container, for a `with` block or a decorated function.

    `set_printoptions(...).set()` makes the choice for the rest of the program. Options that are not given
    keep their values; :func:`get_printoptions` shows them.

    Args:
        verbose: `False` hides devices, dtypes and `is_shared`, unless an option asks for them.
        show_batch_size, show_device, show_is_shared: lines about each container.
        show_shape, show_field_device, show_dtype, show_field_is_shared, show_grad, show_is_contiguous,
        show_is_view,
            show_storage_size: facts about each leaf.
        plain: show the range of integer leaves, and the mean and standard deviation of floating point ones.
        sort_keys: `"alphabetical"`, `"insertion"` (also `None`), or a function as the `key` of `sorted`, which is given
            the line of an entry, a text that begins with its key.

    Raises:
        TypeError: there is no such option.
        ValueError: `sort_keys` has another value.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, set_printoptions
        >>> with set_printoptions(verbose=False):
        ...     print(TensorDict(a=torch.zeros(2)))
        TensorDict(
            fields={
                a: Tensor(shape=torch.Size([2]))},
            batch_size=torch.Size([]))
    """

    def __init__(self, *, verbose: bool = True, **kwargs: object) -> None:
        super().__init__()
        unknown = kwargs.keys() - _DEFAULTS.keys()
        if unknown:
            raise TypeError(f"unknown print options {sorted(unknown)}; known are {sorted(_DEFAULTS)}")
        order = kwargs.get("sort_keys")
        if not (callable(order) or order in (None, False, "insertion", "alphabetical")):
            raise ValueError(f"sort_keys is 'alphabetical', 'insertion' or a function, got {order!r}")
        self._verbose = verbose
        self._given = kwargs
        self._before: list[dict[str, Any]] = []

    def set(self) -> None:
        """Make the choice for the rest of the program."""
        if not self._verbose:
            _options.update(dict.fromkeys(_DETAILS, False))
        _options.update(self._given)

    def clone(self) -> set_printoptions:
        """The same choice again, as the decorator needs it for every call."""
        return type(self)(verbose=self._verbose, **self._given)

    def __enter__(self) -> None:
        self._before.append(dict(_options))
        self.set()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _options.update(self._before.pop())


def get_printoptions() -> dict[str, Any]:
    """The current options of `repr`, as a new dict.

    Example:
        >>> from tensordict import get_printoptions
        >>> get_printoptions()["sort_keys"]
        'alphabetical'
    """
    return dict(_options)


class Printing(Contract):
    """`repr`, and what notebooks show."""

    def __repr__(self) -> str:
        """The class, the entries sorted by key with their shapes and dtypes, the batch size and the device."""
        return container_repr(type(self).__name__, {"fields": list_entries(self)}, self._facts())

    def _repr_html_(self) -> str:
        """What notebooks show: a tree that folds, with what is in the leaves; see docs/guides/looking-at-data.md."""
        return tree_html(self, in_order)

    def _facts(self) -> list[str]:
        """The closing lines of `repr`, those that the options ask for."""
        facts = []
        if _options["show_batch_size"]:
            facts.append(f"batch_size={self._batch_size}")
        if _options["show_device"]:
            facts.append(f"device={self._device}")
        if _options["show_is_shared"]:
            facts.append(f"is_shared={self.is_shared()}")  # type: ignore[attr-defined]
        return facts


def container_repr(name: str, groups: dict[str, Any], facts: Iterable[str]) -> str:
    """The `repr` of a container.

    Args:
        name: the class name.
        groups: what `fields={...}` and its like are called, each with what :func:`list_entries` gives.
        facts: the closing lines, as `"device=cpu"`.
    """
    sections = [f"{group}={{{fields_text(entries)}}}" for group, entries in groups.items()]
    return f"{name}(\n    " + ",\n    ".join([*sections, *facts]) + ")"


def leaf_repr(leaf: ShownLeaf) -> str:
    """One leaf in the `repr` of a container: the class, shape, device and dtype of a tensor, else the object."""
    tensor = leaf.tensor
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    made = leaf.is_stacked
    facts = []
    if _options["show_shape"]:
        facts.append(f"shape={leaf.shape_text}")
    if _options["show_field_device"]:
        facts.append(f"device={tensor.device}")
    if _options["show_dtype"]:
        facts.append(f"dtype={leaf.dtype}")
    if _options["show_field_is_shared"]:
        facts.append(f"is_shared={not made and _is_shared(tensor)}")
    if _options["show_grad"]:
        facts.append(f"requires_grad={any(part.requires_grad for part in leaf.parts or [tensor])}")
    if _options["show_is_contiguous"]:
        facts.append(f"is_contiguous={made or tensor.is_contiguous()}")
    if _options["show_is_view"]:
        facts.append(f"is_view={not made and internals.is_view(tensor)}")
    if _options["show_storage_size"] and tensor.layout == torch.strided:
        size = math.prod(leaf.shape) * leaf.dtype.itemsize if made else tensor.untyped_storage().nbytes()  # type: ignore[arg-type]
        facts.append(f"storage_size={size}")
    if _options["plain"]:
        facts += _statistics(leaf)
    return f"{leaf.kind}({', '.join(facts)})"


def fields_text(entries: Mapping[str, Any]) -> str:
    """The entries of one group as :func:`list_entries` gives them, a line each."""
    lines = in_order(f"{name}: {entry_text(value, '        ')}" for name, value in entries.items())
    return "\n        " + ",\n        ".join(lines) if lines else "\n    "


def entry_text(value: object, indent: str) -> str:
    """The text of one of the entries that :func:`list_entries` gives, `indent` before all lines of it but the first."""
    return leaf_repr(value) if isinstance(value, ShownLeaf) else repr(value).replace("\n", f"\n{indent}")


def in_order(lines: Iterable[str]) -> list[str]:
    """The lines of entries in the order that `sort_keys` asks for."""
    order = _options["sort_keys"]
    if callable(order):
        return sorted(lines, key=order)
    return sorted(lines) if order == "alphabetical" else list(lines)


def _is_shared(leaf: Tensor) -> bool:
    try:
        return bool(leaf.is_shared())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse tensors, the wrappers of function transforms and the parameters of lazy modules (a ValueError) have no
        # storage, so none that could be shared.
        return False


def _statistics(leaf: ShownLeaf) -> list[str]:
    parts = [part.detach() for part in leaf.parts or [leaf.tensor]]
    if any(part.layout != torch.strided or part.is_nested or part.device.type == "meta" for part in parts):
        return []
    numbers = torch.cat([part.flatten() for part in parts]) if len(parts) > 1 else parts[0]
    if numbers.numel() == 0:
        return []
    if numbers.is_floating_point() or numbers.is_complex():
        values = numbers.to(torch.complex128 if numbers.is_complex() else torch.float64)
        # Of one number there is none, which torch would say with a warning.
        spread = values.std().item() if numbers.numel() > 1 else math.nan
        return [f"mean={values.mean().item():.4g}", f"std={spread:.4g}"]
    # Torch has no `min` for the wider unsigned dtypes.
    if numbers.dtype in (torch.uint16, torch.uint32, torch.uint64):
        array: Any = numbers.cpu().numpy()
        return [f"min={array.min().item()}", f"max={array.max().item()}"]
    return [f"min={numbers.min().item()}", f"max={numbers.max().item()}"]
