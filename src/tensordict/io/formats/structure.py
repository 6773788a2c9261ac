"""The structure of a container as one JSON value beside a flat list of named tensors, for formats in one file."""

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
from tensordict.io.formats.stack_columns import Column, count_elements, is_ragged_leaf, join_ragged, split_ragged
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
from tensordict.io.values import EncodedValue, decode, encode_entry

# The suffix of the name of the table with the sizes of the rows of a ragged tensor.
SIZES = "%sizes"


class TensorSource(Protocol):
    """The interface through which a loader reads tensors by name."""

    def take(self, name: str, key: Path) -> Tensor:
        """Return the tensor of this name. Raises a `SaveError` that names the key if it is missing."""
        ...


# A callback for a broken entry: takes the error, and returns the entry that stands for it, or `None` to leave it out.
Complain = Callable[[OSError], Any]


class Description:
    """The description of a container for a file: `spec` is its structure as JSON, and `tensors` its tensors by name.

    Args:
        container: the container.
        separator: joins the names of a nested key to the name of its tensor.

    Raises:
        SaveError: two keys give the same name, or a key cannot be encoded as UTF-8.
        UnsupportedEntryError: an entry cannot be stored.
    """

    def __init__(self, container: Contract, separator: str) -> None:
        self.separator = separator
        self.tensors: dict[str, Tensor] = {}
        self.keys: dict[str, Path] = {}
        # The names of the tensors in values, which are not leaves.
        self.in_values: set[str] = set()
        check_levels(container)
        self.spec = self._describe_node(container, ())

    def _describe_node(self, container: Contract | Specification, key: Path) -> dict[str, Any]:
        form = specification_of(container, key, unread=True, ragged_columns=True)
        if form.is_tensorclass:
            return {**self._describe_node(form.entries[WRAPPED], key), "class": form.kind}
        spec = node_to_json(form)
        if form.is_value:
            spec["value"], tensors = self._encode_value(form, key)
            if tensors:
                parts = {str(at): tensor for at, tensor in enumerate(tensors)}
                spec["entries"] = {name: self._add_leaf(tensor, (*key, name)) for name, tensor in parts.items()}
                self.in_values |= {self.separator.join((*key, name)) for name in parts}
        elif form.kind == UNBATCHED:
            spec["entries"] = {OWN: self._add_leaf(form.entries[OWN], key)}
        else:
            spec["entries"] = {name: self._describe_entry(value, (*key, name)) for name, value in form.entries.items()}
        return spec

    def _encode_value(self, form: Specification, key: Path) -> EncodedValue:
        """Encode the value of a non-tensor entry as JSON."""
        advice = ": this format stores only JSON values; save to a directory with allow_pickle=True"
        return encode_entry(form.value, key, advice)

    def _describe_entry(self, value: object, key: Path) -> dict[str, Any]:
        if isinstance(value, (Contract, Specification)):
            return self._describe_node(value, key)
        return self._add_leaf(value, key)

    def _add_leaf(self, value: object, key: Path) -> dict[str, Any]:
        """Add the tensors of a leaf, and describe it."""
        name = self.separator.join(key)
        if not is_ragged_leaf(value):
            if not isinstance(value, Tensor):
                raise UnsupportedEntryError(f"{entry_of(key)}a {type(value).__name__} cannot be stored")
            self._add(name, value, key)
            return {}
        if isinstance(value, Tensor) and value.is_meta:
            raise SaveError(f"{entry_of(key)}a ragged tensor on the meta device has no rows to store")
        flat, sizes, row = split_ragged(value)
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
            raise SaveError(f"{entry_of(key)}a name with lone surrogates cannot be written to a file as text") from None
        self.tensors[name] = tensor


def node_to_json(form: Specification) -> dict[str, Any]:
    """Describe a container other than a tensorclass in JSON, without its entries and its value."""
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


def decode_value(form: object, key: Path, tensors: Sequence[Tensor] = ()) -> Any:
    """Decode a value and its tensors.

    Raises:
        SaveError: the form is broken; names the key.
    """
    try:
        return decode(form, tensors)
    except ValueError as error:
        raise structure_error(key, f"its value is broken: {error}") from None


@contextlib.contextmanager
def name_file(path: str) -> Iterator[None]:
    """Add the path of a file to the errors of a block."""
    try:
        yield
    except RecursionError as error:
        raise SaveError(f"the container in {path!r} is nested too deeply") from error
    except SaveError as error:
        raise type(error)(f"{error} (in {path!r})") from error


def restore(
    spec: object,
    tensors: TensorSource,
    separator: str,
    value: Callable[[Any, Path, Sequence[Tensor]], Any] = decode_value,
    complain: Complain | None = None,
    device: torch.device | None = None,
) -> Specification:
    """Restore a specification from a `Description.spec` in a file and the tensors.

    Args:
        spec: the description as read from the file, of any type and not yet validated.
        tensors: reads the tensors.
        separator: the separator of the `Description`.
        value: decodes a value from its form, its key and its tensors.
        complain: is called with the error of a broken entry; by default the error is raised.
        device: the device of all containers, instead of the described ones.

    Raises:
        SaveError: the description is broken, or does not fit the tensors; names the key.
    """
    return _Reader(tensors, separator, value, complain, device).read_node(spec, ())


@dataclass(slots=True)
class _Reader:
    """The arguments of `restore`, and the functions that read nodes and leaves with them."""

    tensors: TensorSource
    separator: str
    value: Callable[[Any, Path, Sequence[Tensor]], Any]
    complain: Complain | None
    device: torch.device | None
    share: ragged.SharedOffsets = field(default_factory=ragged.SharedOffsets)

    def read_node(self, spec: Any, key: Path) -> Specification:
        check_level(key)
        node, tensorclass = node_from_json(spec, key)
        node.device = self.device or node.device
        entries: dict[str, Any] = {}
        given = spec.get("entries")
        if not node.is_value:
            if type(given) is not dict or (node.kind == UNBATCHED and given.keys() != {OWN}):
                raise structure_error(key, f"its entries are {given!r:.80}")
            for name, item in given.items():
                path = key if node.kind == UNBATCHED else (*key, name)
                try:
                    entries[name] = self.read_entry(item, path, node.columns)
                except SaveError as error:
                    if self.complain is None:
                        raise
                    if (found := self.complain(error)) is not None:
                        entries[name] = found
        else:
            if "value" not in spec:
                raise structure_error(key, "it has no value")
            if given is not None:
                entries = self.read_parts(given, key)
            node.form = spec["value"]
            node.value = self.value(node.form, key, list(entries.values()))
        node.entries = entries
        check(node, key)
        return node if tensorclass is None else check(tensorclass_over(tensorclass, node), key)

    def read_parts(self, given: Any, key: Path) -> dict[str, Any]:
        """Read the tensors of a value, whose names are "0", "1", ... in this order."""
        if type(given) is not dict or list(given) != list(map(str, range(len(given)))):
            raise structure_error(key, f"its tensors are {given!r:.80}")
        return {name: self.tensors.take(self.separator.join((*key, name)), (*key, name)) for name in given}

    def read_entry(self, spec: object, key: Path, column: bool) -> Any:
        if type(spec) is not dict:
            raise structure_error(key, f"it is described by {spec!r:.80}")
        if "kind" in spec:
            return self.read_node(spec, key)
        leaf = self.tensors.take(self.separator.join(key), key)
        return self.read_rows(leaf, spec["ragged"], key, column) if "ragged" in spec else leaf

    def read_rows(self, flat: Tensor, form: object, key: Path, column: bool) -> Tensor | Column:
        table = self.tensors.take(self.separator.join(key) + SIZES, key)
        if table.is_meta:
            raise UnsupportedEntryError(
                f"{entry_of(key)}a ragged tensor cannot be without content, as on the meta device"
            )
        try:
            row = None if form is None else checks.sizes(form, "the form of its rows", -1)
            fits = flat.dim() == 1 and count_elements(table, row) == flat.numel()
        except ValueError as error:
            raise structure_error(key, str(error)) from None
        if not fits:
            raise structure_error(key, "the sizes of its rows do not fit its elements")
        return join_ragged(flat, table.clone(), row, column, self.share)


def node_from_json(spec: Any, key: Path) -> tuple[Specification, str | None]:
    """Return the specification of a described container without its content, and the name of the tensorclass over it.

    Raises:
        SaveError: the description is broken; names the key.
    """
    kind = spec.get("kind") if type(spec) is dict else None
    if kind not in KINDS:
        problem = f"its kind is {kind!r:.80}" if type(spec) is dict else f"it is described by {spec!r:.80}"
        raise structure_error(key, problem)
    try:
        # The members of a lazy stack may differ along a dim.
        size = checks.sizes(spec.get("batch_size"), "its batch size", -1 if kind == LAZY else 0)
        names, device = checks.names(spec.get("names")), checks.device(spec.get("device"))
        dim = None if spec.get("stack_dim") is None else checks.dim(spec["stack_dim"], len(size))
    except ValueError as error:
        raise structure_error(key, str(error)) from None
    tensorclass = spec.get("class")
    if tensorclass is not None and (type(tensorclass) is not str or tensorclass in KINDS):
        raise structure_error(key, f"its class is {tensorclass!r:.80}")
    columns = kind == LAZY and spec.get("columns") is True
    if columns and (dim is None or size[dim] < 0):
        raise structure_error(key, f"its batch size {list(size)} does not give the number of members")
    return Specification(kind, size, device, names, stack_dim=dim, columns=columns), tensorclass


def structure_error(key: Path, what: str) -> SaveError:
    """Return the error for a broken description."""
    return SaveError(f"{entry_of(key)}the description of the structure is broken: {what}")
