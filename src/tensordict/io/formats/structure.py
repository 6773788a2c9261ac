"""The structure of a container as one JSON value beside a flat list of named tensors, for formats that keep both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
from tensordict.io.formats.stack_columns import Column, elements_of_rows, is_ragged, ragged_leaf, taken
from tensordict.io.specification import (
    KINDS,
    LAZY,
    OWN,
    UNBATCHED,
    WRAPPED,
    Specification,
    check,
    check_level,
    check_levels,
    specification_of,
    tensorclass_over,
)
from tensordict.io.values import EncodedValue, NotJson, decode, encode

# What follows the name of a ragged tensor in that of the table of the sizes of its rows.
SIZES = "%sizes"


class Tensors(Protocol):
    """Where a loader finds tensors by name."""

    def take(self, name: str, key: Path) -> Tensor:
        """The tensor of this name; a `SaveError` naming the key when there is none."""
        ...


# Is told what is wrong with an entry, and gives what stands in its place; or nothing, which leaves it out.
Complain = Callable[[OSError], Any]


class Described:
    """A container on its way: `spec` describes its structure, and `tensors` has its tensors by name.

    Args:
        container: what is described.
        separator: stands between the names of a nested key in the name of its tensor.

    Raises:
        SaveError: two keys would be the same name, or a key is no text that a file can hold.
        UnsupportedEntryError: an entry cannot be stored.
    """

    def __init__(self, container: Contract, separator: str) -> None:
        self.separator = separator
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[str, Path] = {}
        # The names of the tensors that are in values, and so are no leaves.
        self.in_values: set[str] = set()
        check_levels(container)
        self.spec = self._node(container, ())

    def _node(self, container: Contract | Specification, key: Path) -> dict[str, Any]:
        form = specification_of(container, key, unread=True, ragged_columns=True)
        if form.is_tensorclass:
            return {**self._node(form.entries[WRAPPED], key), "class": form.kind}
        spec = node_to_json(form)
        if form.is_value:
            spec["value"], tensors = self._value(form, key)
            if tensors:
                parts = {str(at): tensor for at, tensor in enumerate(tensors)}
                spec["entries"] = {name: self._leaf(tensor, (*key, name)) for name, tensor in parts.items()}
                self.in_values |= {self.separator.join((*key, name)) for name in parts}
        elif form.kind == UNBATCHED:
            spec["entries"] = {OWN: self._leaf(form.entries[OWN], key)}
        else:
            spec["entries"] = {name: self._item(value, (*key, name)) for name, value in form.entries.items()}
        return spec

    def _value(self, form: Specification, key: Path) -> EncodedValue:
        """The form of the value of a holder."""
        try:
            return encode(form.value)
        except NotJson as error:
            raise UnsupportedEntryError(
                f"{entry_of(key)}{error}: this format keeps JSON values; a directory does with allow_pickle=True"
            ) from None

    def _item(self, value: object, key: Path) -> dict[str, Any]:
        return self._node(value, key) if isinstance(value, (Contract, Specification)) else self._leaf(value, key)

    def _leaf(self, value: object, key: Path) -> dict[str, Any]:
        name = self.separator.join(key)
        if not is_ragged(value):
            if not isinstance(value, Tensor):
                raise UnsupportedEntryError(f"{entry_of(key)}a {type(value).__name__} cannot be stored")
            self._add(name, value, key)
            return {}
        if isinstance(value, Tensor) and value.is_meta:
            raise SaveError(f"{entry_of(key)}a ragged tensor on the meta device has no rows that could be stored")
        flat, sizes, row = taken(value)
        self._add(name, flat, key)
        self._add(name + SIZES, sizes, key)
        return {"ragged": None if row is None else list(row)}

    def _add(self, name: str, tensor: Tensor, key: Path) -> None:
        other = self.keys.setdefault(name, key)
        if name in self.tensors:
            raise SaveError(
                f"entries {joined(other)!r} and {joined(key)!r} would both be stored as {name!r}; rename one of them, "
                "or choose another separator"
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SaveError(f"{entry_of(key)}a name with lone surrogates is no text that a file can hold") from None
        self.tensors[name] = tensor


def node_to_json(form: Specification) -> dict[str, Any]:
    """Describe a container that is no tensorclass, without its entries and its value."""
    spec: dict[str, Any] = {"kind": form.kind, "batch_size": list(form.batch_size)}
    if form.device is not None:
        spec["device"] = str(form.device)
    if form.names is not None:
        spec["names"] = list(form.names)
    if form.stack_dim is not None:
        spec["stack_dim"] = form.stack_dim
    if form.columns:
        spec["columns"] = True
    return spec


def value_of(form: object, key: Path, tensors: Sequence[Tensor] = ()) -> Any:
    """The value that stands in a description as `form`, with these tensors in it.

    Raises:
        SaveError: it is none; the key is named.
    """
    try:
        return decode(form, tensors)
    except ValueError as error:
        raise bad(key, f"its value is broken: {error}") from None


@contextlib.contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Have what is wrong with a container in a file name the file."""
    try:
        yield
    except RecursionError as error:
        raise SaveError(f"the container in {path!r} is nested too deeply") from error
    except SaveError as error:
        raise type(error)(f"{error} (in {path!r})") from error


def restore(
    spec: object,
    tensors: Tensors,
    separator: str,
    value: Callable[[Any, Path, Sequence[Tensor]], Any] = value_of,
    complain: Complain | None = None,
    device: torch.device | None = None,
) -> Specification:
    """The specification that a `Described.spec` has as JSON, and the tensors.

    Args:
        spec: as read from a file: anything.
        tensors: gives the tensors.
        separator: that of `Described`.
        value: gives each value of its form, its key and its tensors.
        complain: is told of an entry that is broken; without it, that is raised.
        device: that of all containers, in place of what is said.

    Raises:
        SaveError: the description is broken, or does not fit the tensors; the key is named.
    """
    return _Reader(tensors, separator, value, complain, device).node(spec, ())


@dataclass(slots=True)
class _Reader:
    """The arguments of `restore`."""

    tensors: Tensors
    separator: str
    value: Callable[[Any, Path, Sequence[Tensor]], Any]
    complain: Complain | None
    device: torch.device | None
    share: ragged.SharedOffsets = field(default_factory=ragged.SharedOffsets)

    def node(self, spec: Any, key: Path) -> Specification:
        check_level(key)
        node, tensorclass = node_from_json(spec, key)
        node.device = self.device or node.device
        entries: dict[str, Any] = {}
        given = spec.get("entries")
        if not node.is_value:
            if type(given) is not dict or (node.kind == UNBATCHED and given.keys() != {OWN}):
                raise bad(key, f"its entries are {given!r:.80}")
            for name, item in given.items():
                path = key if node.kind == UNBATCHED else (*key, name)
                try:
                    entries[name] = self.item(item, path, node.columns)
                except SaveError as error:
                    if self.complain is None:
                        raise
                    if (found := self.complain(error)) is not None:
                        entries[name] = found
        else:
            if "value" not in spec:
                raise bad(key, "it has no value")
            if given is not None:
                entries = self.parts(given, key)
            node.form = spec["value"]
            node.value = self.value(node.form, key, list(entries.values()))
        node.entries = entries
        check(node, key)
        return node if tensorclass is None else check(tensorclass_over(tensorclass, node), key)

    def parts(self, given: Any, key: Path) -> dict[str, Any]:
        """The tensors of a value, which are called `0`, `1`, ... in this order."""
        if type(given) is not dict or list(given) != list(map(str, range(len(given)))):
            raise bad(key, f"its tensors are {given!r:.80}")
        return {name: self.tensors.take(self.separator.join((*key, name)), (*key, name)) for name in given}

    def item(self, spec: object, key: Path, column: bool) -> Any:
        if type(spec) is not dict:
            raise bad(key, f"it is described by {spec!r:.80}")
        if "kind" in spec:
            return self.node(spec, key)
        leaf = self.tensors.take(self.separator.join(key), key)
        return self.ragged(leaf, spec["ragged"], key, column) if "ragged" in spec else leaf

    def ragged(self, flat: Tensor, form: object, key: Path, column: bool) -> Tensor | Column:
        table = self.tensors.take(self.separator.join(key) + SIZES, key)
        if table.is_meta:
            raise UnsupportedEntryError(
                f"{entry_of(key)}a ragged tensor has no form without content, as on the meta device"
            )
        try:
            row = None if form is None else checks.sizes(form, "the form of its rows", -1)
            fits = flat.dim() == 1 and elements_of_rows(table, row) == flat.numel()
        except ValueError as error:
            raise bad(key, str(error)) from None
        if not fits:
            raise bad(key, "the sizes of its rows do not fit its elements")
        return ragged_leaf(flat, table.clone(), row, column, self.share)


def node_from_json(spec: Any, key: Path) -> tuple[Specification, str | None]:
    """Return the container that a description tells of, without its content, and the name of the tensorclass over it.

    Raises:
        SaveError: the description is broken; the key is named.
    """
    kind = spec.get("kind") if type(spec) is dict else None
    if kind not in KINDS:
        raise bad(key, f"its kind is {kind!r:.80}" if type(spec) is dict else f"it is described by {spec!r:.80}")
    try:
        # The members of a lazy stack may differ along a dim.
        size = checks.sizes(spec.get("batch_size"), "its batch size", -1 if kind == LAZY else 0)
        names, device = checks.names(spec.get("names")), checks.device(spec.get("device"))
        dim = None if spec.get("stack_dim") is None else checks.dim(spec["stack_dim"], len(size))
    except ValueError as error:
        raise bad(key, str(error)) from None
    tensorclass = spec.get("class")
    if tensorclass is not None and (type(tensorclass) is not str or tensorclass in KINDS):
        raise bad(key, f"its class is {tensorclass!r:.80}")
    columns = kind == LAZY and spec.get("columns") is True
    if columns and (dim is None or size[dim] < 0):
        raise bad(key, f"its batch size {list(size)} says no number of members")
    return Specification(kind, size, device, names, stack_dim=dim, columns=columns), tensorclass


def bad(key: Path, what: str) -> SaveError:
    """Return the error for a description that is broken."""
    return SaveError(f"{entry_of(key)}the description of the structure is broken: {what}")
