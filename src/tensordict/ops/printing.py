"""How containers are shown: `repr`, its options, and the table that notebooks display."""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._contextlib import _DecoratorContextManager

from tensordict.core import ragged
from tensordict.core.contract import Contract, EntryStore, is_node

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
    """`repr`, and the HTML table of notebooks."""

    def __repr__(self) -> str:
        """The class, the entries sorted by key with their shapes and dtypes, the batch size and the device."""
        return container_repr(type(self).__name__, {"fields": shown(self)}, self._facts())

    def _repr_html_(self) -> str:
        """A nested table of keys, shapes, dtypes and devices, for notebooks; as `repr`, it reads and stacks nothing."""
        common, others = shown_by_member(self)
        for position, entries in others.items():
            common |= {f"{position} -> {name}": value for name, value in entries.items()}
        return container_html(self, common)

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


@dataclass(slots=True)
class ShownLeaf:
    """A tensor as it is shown: `tensor` itself, unless `shape` says that it stands for one that is made on reading.

    shape: of what is read, with -1 for the dims in which the members of a lazy stack differ.
    parts: the tensors that it is made of.
    """

    tensor: Any
    shape: torch.Size | None = None
    parts: Sequence[Tensor] = ()

    @property
    def is_stacked(self) -> bool:
        """Whether reading it gives a new tensor."""
        return self.shape is not None and -1 not in self.shape

    @property
    def kind(self) -> str:
        """The name of the class."""
        return "Tensor" if self.is_stacked else type(self.tensor).__name__

    @property
    def dtype(self) -> torch.dtype:
        """That of what is read: of a stack, what torch makes of those of its parts."""
        dtypes = [part.dtype for part in self.parts] if self.is_stacked else []
        return functools.reduce(torch.promote_types, dtypes) if dtypes else self.tensor.dtype

    @property
    def shape_text(self) -> str:
        """The shape as `torch.Size([...])`, with -1 for the ragged dims."""
        return repr(ragged.shape_of(self.tensor) if self.shape is None else self.shape)


def shown(container: Contract) -> dict[str, Any]:
    """The entries of a container as they are shown, a nested container or a :class:`ShownLeaf` each; it makes none."""
    structure = container._structure()
    made = structure is not container._entries
    return {
        name: value if is_node(value) else _leaf_of(container, name, value) if made else ShownLeaf(value)
        for name, value in structure.items()
    }


def shown_by_member(container: Contract) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """What :func:`shown` gives, and what it gives of what only some members of a lazy stack have, by their position."""
    common = shown(container)
    others: dict[int, dict[str, Any]] = {}
    for position, member in enumerate(container._members() or ()):
        if member._structure().keys() - common.keys():
            others[position] = {name: value for name, value in shown(member).items() if name not in common}
    return common, others


def _leaf_of(container: Contract, name: str, value: object) -> ShownLeaf:
    if isinstance(value, Contract) or not isinstance(value, Tensor):
        return ShownLeaf(value)
    return ShownLeaf(value, container._shape_of(name), _parts_of(container, name) if container._members() else [value])


def _parts_of(container: Contract, name: str) -> list[Any]:
    members = container._members()
    if members is None:
        return [container._structure()[name]]
    # Where a container is in the place of a tensor, the stack has no such entry that could be read.
    return [part for member in members for part in _parts_of(member, name) if isinstance(part, Tensor)]


def container_repr(name: str, groups: dict[str, Any], facts: Iterable[str]) -> str:
    """The `repr` of a container.

    Args:
        name: the class name.
        groups: what `fields={...}` and its like are called, each with what :func:`shown` gives.
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
        facts.append(f"is_view={not made and tensor._is_view()}")
    if _options["show_storage_size"] and tensor.layout == torch.strided:
        size = math.prod(leaf.shape) * leaf.dtype.itemsize if made else tensor.untyped_storage().nbytes()  # type: ignore[arg-type]
        facts.append(f"storage_size={size}")
    if _options["plain"]:
        facts += _statistics(leaf)
    return f"{leaf.kind}({', '.join(facts)})"


def fields_text(entries: Mapping[str, Any]) -> str:
    """The entries of one group as :func:`shown` gives them, a line each."""
    lines = in_order(f"{name}: {entry_text(value, '        ')}" for name, value in entries.items())
    return "\n        " + ",\n        ".join(lines) if lines else "\n    "


def entry_text(value: object, indent: str) -> str:
    """The text of one of the entries that :func:`shown` gives, `indent` before all lines of it but the first."""
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


_TABLE = '<table style="border-collapse: collapse; text-align: left">'


def container_html(node: Contract, entries: Mapping[str, object]) -> str:
    """The table of a container with these entries, which are those that :func:`shown` gives."""
    head = (
        f"<strong>{html.escape(type(node).__name__)}</strong> "
        f"batch_size={html.escape(str(list(node._batch_size)))}, device={html.escape(str(node._device))}"
    )
    if isinstance(node._entries, EntryStore) and (fact := node._entries.fact()):
        head += f", {html.escape(fact)}"
    if not entries:
        return f'<div class="tensordict">{head} (empty)</div>'
    rows = "".join(_html_row(name, entries[name]) for name in in_order(entries))
    titles = "".join(f"<th>{title}</th>" for title in ("key", "type", "shape", "dtype", "device"))
    table = f"<details open><summary>{head}</summary>{_TABLE}<tr>{titles}</tr>{rows}</table></details>"
    return f'<div class="tensordict">{table}</div>'


def _html_row(name: str, value: Any) -> str:
    key = f"<td>{html.escape(name)}</td>"
    if not isinstance(value, ShownLeaf):
        whole = html.escape(repr(value)) if value._is_non_tensor else value._repr_html_()
        return f'<tr>{key}<td colspan="4">{whole}</td></tr>'
    if not isinstance(value.tensor, Tensor):
        return f'<tr>{key}<td colspan="4">{html.escape(repr(value.tensor))}</td></tr>'
    shape = value.shape_text.removeprefix("torch.Size(").removesuffix(")")
    cells = (value.kind, shape, str(value.dtype).removeprefix("torch."), str(value.tensor.device))
    return f"<tr>{key}{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
