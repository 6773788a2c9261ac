"""How containers are shown: `repr`, its options, and the table that notebooks display."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._contextlib import _DecoratorContextManager

from tensordict import ragged
from tensordict.contract import Contract, is_node

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


class set_printoptions(_DecoratorContextManager):  # a function to its callers, as in torch
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
        sort_keys: `"alphabetical"`, or `"insertion"` (also `None`).

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

    def __init__(self, *, verbose: bool = True, **kwargs: Any) -> None:
        super().__init__()
        unknown = kwargs.keys() - _DEFAULTS.keys()
        if unknown:
            raise TypeError(f"unknown print options {sorted(unknown)}; known are {sorted(_DEFAULTS)}")
        if kwargs.get("sort_keys") not in (None, False, "insertion", "alphabetical"):
            raise ValueError(f"sort_keys is 'alphabetical' or 'insertion', got {kwargs['sort_keys']!r}")
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
    """`repr`, and the HTML table of notebooks."""

    def __repr__(self) -> str:
        """The class, the entries sorted by key with their shapes and dtypes, the batch size and the device."""
        return container_repr(type(self).__name__, {"fields": self._entries}, self._facts())

    def _repr_html_(self) -> str:
        """A nested table of keys, shapes, dtypes and devices, for notebooks."""
        return f'<div class="tensordict">{_html(self)}</div>'

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
        groups: what `fields={...}` and its like are called, each with a mapping of entries, or with its lines.
        facts: the closing lines, as `"device=cpu"`.
    """
    sections = [f"{group}={{{fields_text(entries)}}}" for group, entries in groups.items()]
    return f"{name}(\n    " + ",\n    ".join([*sections, *facts]) + ")"


def leaf_repr(leaf: Any, shape: str | None = None) -> str:
    """One leaf in the `repr` of a container: the class, shape, device and dtype of a tensor, else the object.

    A `shape` is shown in place of the leaf's, as for the stack of several that `leaf` is one of.
    """
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    facts = []
    if _options["show_shape"]:
        facts.append(f"shape={shape_text(leaf) if shape is None else shape}")
    if _options["show_field_device"]:
        facts.append(f"device={leaf.device}")
    if _options["show_dtype"]:
        facts.append(f"dtype={leaf.dtype}")
    if _options["show_field_is_shared"]:
        facts.append(f"is_shared={_is_shared(leaf)}")
    if _options["show_grad"]:
        facts.append(f"requires_grad={leaf.requires_grad}")
    if _options["show_is_contiguous"]:
        facts.append(f"is_contiguous={leaf.is_contiguous()}")
    if _options["show_is_view"]:
        facts.append(f"is_view={leaf._is_view()}")
    if _options["show_storage_size"] and leaf.layout == torch.strided:
        facts.append(f"storage_size={leaf.untyped_storage().nbytes()}")
    if _options["plain"]:
        facts += _statistics(leaf)
    return f"{type(leaf).__name__ if shape is None else 'Tensor'}({', '.join(facts)})"


def shape_text(leaf: Tensor) -> str:
    """The shape of a leaf as `torch.Size([...])`, with -1 for the ragged dims of a nested tensor."""
    return repr(ragged.shape_of(leaf))


def fields_text(entries: Any) -> str:
    """The entries of one group, a line each; entries that are texts already are taken as they are."""
    lines = []
    for name, value in entries.items():
        if not isinstance(value, str):
            value = repr(value).replace("\n", "\n        ") if is_node(value) else leaf_repr(value)
        lines.append(f"{name}: {value}")
    if not lines:
        return "\n    "
    if _options["sort_keys"] == "alphabetical":
        lines.sort()
    return "\n        " + ",\n        ".join(lines)


def _is_shared(leaf: Tensor) -> bool:
    try:
        return bool(leaf.is_shared())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse tensors, the wrappers of function transforms and the parameters of lazy modules (a ValueError) have no
        # storage, so none that could be shared.
        return False


def _statistics(leaf: Tensor) -> list[str]:
    if leaf.layout != torch.strided or leaf.is_nested or leaf.numel() == 0 or leaf.device.type == "meta":
        return []
    leaf = leaf.detach()
    if leaf.is_floating_point() or leaf.is_complex():
        values = leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)
        # Of one number there is none, which torch would say with a warning.
        spread = values.std().item() if leaf.numel() > 1 else math.nan
        return [f"mean={values.mean().item():.4g}", f"std={spread:.4g}"]
    # Torch has no `min` for the wider unsigned dtypes.
    numbers: Any = leaf.cpu().numpy() if leaf.dtype in (torch.uint16, torch.uint32, torch.uint64) else leaf
    return [f"min={numbers.min().item()}", f"max={numbers.max().item()}"]


_TABLE = '<table style="border-collapse: collapse; text-align: left">'


def _html(node: Any) -> str:
    head = (
        f"<strong>{html.escape(type(node).__name__)}</strong> "
        f"batch_size={html.escape(str(list(node._batch_size)))}, device={html.escape(str(node._device))}"
    )
    entries = node._entries
    if not entries:
        return f"<div>{head} (empty)</div>"
    names = sorted(entries) if _options["sort_keys"] == "alphabetical" else list(entries)
    rows = "".join(_html_row(name, entries[name]) for name in names)
    titles = "".join(f"<th>{title}</th>" for title in ("key", "type", "shape", "dtype", "device"))
    return f"<details open><summary>{head}</summary>{_TABLE}<tr>{titles}</tr>{rows}</table></details>"


def _html_row(name: str, value: Any) -> str:
    key = f"<td>{html.escape(name)}</td>"
    if is_node(value) and not value._is_non_tensor:
        return f'<tr>{key}<td colspan="4">{_html(value)}</td></tr>'
    if not isinstance(value, Tensor):
        return f'<tr>{key}<td colspan="4">{html.escape(repr(value))}</td></tr>'
    shape = shape_text(value).removeprefix("torch.Size(").removesuffix(")")
    dtype = str(value.dtype).removeprefix("torch.")
    cells = (type(value).__name__, shape, dtype, str(value.device))
    return f"<tr>{key}{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
