"""The mixin of `repr`, and the print options of containers."""

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
from tensordict.ops.compact_printing import CompactPrinter

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
    "compact": False,
    "html": True,
}
# The options that both forms use. Any other option selects the detailed form.
_OF_BOTH_FORMS = ("show_batch_size", "show_device", "show_dtype", "sort_keys", "html")
# The options that `verbose=False` turns off.
_DETAILS = ("show_device", "show_is_shared", "show_field_device", "show_dtype", "show_field_is_shared")

_options = dict(_DEFAULTS)


class set_printoptions(internals.Decorator):  # callers use it like a function, so its name is lower case
    """Set the options of `repr` for a `with` block or a decorated function.

    `set_printoptions(...).set()` sets them for the rest of the program. Omitted options keep their values;
    :func:`get_printoptions` returns the current ones.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, set_printoptions
        >>> with set_printoptions(verbose=False):
        ...     print(TensorDict(a=torch.zeros(2)))
        TensorDict(
            fields={
                a: Tensor(shape=torch.Size([2]))},
            batch_size=torch.Size([]))
        >>> with set_printoptions(compact=True):
        ...     print(TensorDict(a=torch.zeros(2, 3), b={"c": torch.ones(2)}, batch_size=[2]))
        TensorDict(batch_size=[2], fields={a: f32[3], b: {c: f32[]}})

    Args:
        verbose: with `False`, hide devices, dtypes and `is_shared`, except for options that are set.
        show_batch_size, show_device, show_is_shared: lines about each container.
        show_shape, show_field_device, show_dtype, show_field_is_shared, show_grad, show_is_contiguous, show_is_view,
            show_storage_size: facts about each leaf.
        plain: show the range of integer leaves, and the mean and standard deviation of floating point leaves.
        sort_keys: `"alphabetical"`, `"insertion"` (or `None`), or a function like the `key` of `sorted`. It takes the
            line of an entry, which begins with the key of the entry.
        compact: print each entry as its dtype and its feature dims, as in `a: f32[3]`, with as few lines as possible.
            The compact form shows neither names nor memory. Options that only the detailed form uses turn it off.
        html: show a tree in notebooks, instead of the text.

    Raises:
        TypeError: an option is unknown.
        ValueError: `sort_keys` has another value.
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
        """Set the options for the rest of the program."""
        if not self._verbose:
            _options.update(dict.fromkeys(_DETAILS, False))
        if "compact" not in self._given and self._given.keys() - set(_OF_BOTH_FORMS):
            _options["compact"] = False
        _options.update(self._given)

    def clone(self) -> set_printoptions:
        """Return a copy. The decorator needs one for every call."""
        return type(self)(verbose=self._verbose, **self._given)

    def __enter__(self) -> None:
        self._before.append(dict(_options))
        self.set()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _options.update(self._before.pop())


def get_printoptions() -> dict[str, Any]:
    """Return the current options of `repr` in a new dict.

    Example:
        >>> from tensordict import get_printoptions
        >>> get_printoptions()["sort_keys"]
        'alphabetical'
    """
    return dict(_options)


class Printing(Contract):
    """`repr`, and the display in notebooks."""

    def __repr__(self) -> str:
        """Describe the container: class, entries sorted by key with shapes and dtypes, batch size and device."""
        if _options["compact"]:
            return format_compactly(self)
        return format_container(type(self).__name__, {"fields": list_entries(self)}, self._facts())

    def _repr_html_(self) -> str | None:
        """Return a foldable tree of the entries for notebooks; see docs/guides/looking-at-data.md."""
        return tree_html(self, sort_lines) if _options["html"] else None

    def _ipython_key_completions_(self) -> list[str | tuple[str, ...]]:
        """Return the keys, including nested ones, which IPython and notebooks complete after `td["`."""
        return [] if self._is_non_tensor else list(self.keys(include_nested=True))  # type: ignore[attr-defined]

    def _facts(self) -> list[str]:
        """Return the closing lines of `repr` that the options select."""
        facts = []
        if _options["show_batch_size"]:
            facts.append(f"batch_size={self._batch_size}")
        if _options["show_device"]:
            facts.append(f"device={self._device}")
        if _options["show_is_shared"]:
            facts.append(f"is_shared={self.is_shared()}")  # type: ignore[attr-defined]
        return facts


def is_compact() -> bool:
    """Return whether the options select the compact form."""
    return bool(_options["compact"])


def format_compactly(container: Contract) -> str:
    """Return the compact form of the `repr` of a container."""
    with container._at_once():
        return CompactPrinter(_options).format_container(container)


def format_container(name: str, groups: dict[str, Any], facts: Iterable[str]) -> str:
    """Return the `repr` of a container.

    Args:
        name: the class name.
        groups: the names of groups of entries, such as `fields`, each with the result of :func:`list_entries`.
        facts: the closing lines, such as `"device=cpu"`.
    """
    sections = [f"{group}={{{format_fields(entries)}}}" for group, entries in groups.items()]
    return f"{name}(\n    " + ",\n    ".join([*sections, *facts]) + ")"


def format_leaf(leaf: ShownLeaf) -> str:
    """Describe one leaf in the `repr` of a container: class, shape, device and dtype of a tensor; `repr` of a value."""
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
        facts.append(f"is_shared={not made and _in_shared_memory(tensor)}")
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
        facts += _summarize_values(leaf)
    return f"{leaf.kind}({', '.join(facts)})"


def format_fields(entries: Mapping[str, Any]) -> str:
    """Return the lines of the entries of one group, the result of :func:`list_entries`."""
    lines = sort_lines(f"{name}: {format_entry(value, '        ')}" for name, value in entries.items())
    return "\n        " + ",\n        ".join(lines) if lines else "\n    "


def format_entry(value: object, indent: str) -> str:
    """Return the text of one entry from :func:`list_entries`. All lines except the first begin with `indent`."""
    return format_leaf(value) if isinstance(value, ShownLeaf) else repr(value).replace("\n", f"\n{indent}")


def sort_lines(lines: Iterable[str]) -> list[str]:
    """Sort the lines of entries as the option `sort_keys` says."""
    order = _options["sort_keys"]
    if callable(order):
        return sorted(lines, key=order)
    return sorted(lines) if order == "alphabetical" else list(lines)


def _in_shared_memory(leaf: Tensor) -> bool:
    try:
        return bool(leaf.is_shared())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse tensors, tensors of function transforms and parameters of lazy modules (a ValueError) lack a storage.
        return False


def _summarize_values(leaf: ShownLeaf) -> list[str]:
    parts = [part.detach() for part in leaf.parts or [leaf.tensor]]
    if any(part.layout != torch.strided or part.is_nested or part.device.type == "meta" for part in parts):
        return []
    numbers = torch.cat([part.flatten() for part in parts]) if len(parts) > 1 else parts[0]
    if numbers.numel() == 0:
        return []
    if numbers.is_floating_point() or numbers.is_complex():
        values = numbers.to(torch.complex128 if numbers.is_complex() else torch.float64)
        # Torch warns about the standard deviation of one number.
        spread = values.std().item() if numbers.numel() > 1 else math.nan
        return [f"mean={values.mean().item():.4g}", f"std={spread:.4g}"]
    # Torch does not implement `min` for these dtypes.
    if numbers.dtype in (torch.uint16, torch.uint32, torch.uint64):
        array: Any = numbers.cpu().numpy()
        return [f"min={array.min().item()}", f"max={array.max().item()}"]
    return [f"min={numbers.min().item()}", f"max={numbers.max().item()}"]
