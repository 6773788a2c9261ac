"""The contract: the dozen primitives that a container supplies, and the structural walks written on top of them.

Every public method of the package is written once, in `ops/`, on what this file declares. A container is done when it
supplies the abstract primitives; everything else follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from tensordict.errors import KeyMismatchError

if TYPE_CHECKING:
    import pathlib
    import weakref

    from typing_extensions import Self

Names = list["str | None"]
LeafFn = Callable[[Any], Any]
Rename = Callable[[Names], Names]
Size = torch.Size


class Contract:
    """What a container of tensors supplies; `isinstance(value, Contract)` tells a node from a leaf.

    State that most containers leave at its default lives on the class, so that building a container costs two
    attribute writes. A class with other needs (a view, a file) may define any of these as properties.
    """

    _batch_size: torch.Size
    _device: torch.device | None = None
    _names: Names | None = None
    _locked: bool = False
    _lock_owners: list[weakref.ref[Any]] | None = None
    _is_memmap: bool = False
    _is_shared: bool = False
    _memmap_prefix: pathlib.Path | None = None
    _undo: tuple[Any, ...] | None = None

    # --- primitives ---------------------------------------------------------------------------------------------
    # The entries of this level, name -> leaf or node. Reading gives what is stored (or made on reading), writing takes
    # what has been checked already (shape, device, lock). An attribute, because every access goes through it: a method
    # call in its place would cost 45 ns. A class whose entries are no dict makes it a property over its own mapping.
    _entries: MutableMapping[str, Any]

    def _build(
        self,
        entries: dict[str, Any],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Names | None,
    ) -> Self:
        """A new container of this kind over `entries`, which it takes over and does not check."""
        raise NotImplementedError

    def _build_many(
        self,
        pieces: Iterable[dict[str, Any]],
        sizes: Sequence[torch.Size],
        device: torch.device | None,
        names: Names | None,
    ) -> list[Self]:
        """One `_build` per piece, each with its batch size."""
        return [self._build(entries, size, device, names) for entries, size in zip(pieces, sizes, strict=True)]

    # --- structural walks -----------------------------------------------------------------------------------------
    # All take the new batch size of the root and `lead`, the number of batch dims of the root that it replaces: a
    # nested container, whose batch size begins with its parent's, gets `size + its own batch size past lead`.

    def _map(self, fn: LeafFn, size: torch.Size | None = None, lead: int = 0, rename: Rename | None = None) -> Self:
        """The same structure with every leaf replaced by `fn(leaf)`.

        Args:
            fn: called once per leaf.
            size: the root's new batch size; `None` when `fn` leaves the batch dims as they are.
            lead: the number of batch dims that `size` replaces.
            rename: maps the names of the replaced dims to the new ones; `None` drops the names (with `size`).
        """
        mapping = self._entries
        if is_flat(mapping):
            entries = dict(zip(mapping, map(fn, mapping.values())))
        else:
            # No comprehension: its frame would halve the depth of nesting that Python's recursion limit leaves.
            entries = {}
            for name, value in mapping.items():
                entries[name] = value._map(fn, size, lead, rename) if isinstance(value, Contract) else fn(value)
        if size is None:
            return self._build(entries, self._batch_size, self._device, self._names)
        own = self._batch_size
        return self._build(
            entries,
            size if len(own) == lead else size + own[lead:],
            self._device,
            None if self._names is None else self._renamed(len(size), lead, rename),
        )

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        """The same structure with every leaf replaced by the next of `leaves`, in the order in which `_map` goes."""
        mapping = self._entries
        if is_flat(mapping):
            entries = dict(zip(mapping, leaves))
        else:
            entries = {}
            for name, value in mapping.items():
                entries[name] = value._rebuilt(leaves) if isinstance(value, Contract) else next(leaves)
        return self._build(entries, self._batch_size, self._device, self._names)

    def _map_many(
        self, fn: Callable[[Any], Sequence[Any]], sizes: Sequence[torch.Size], lead: int, rename: Rename | None
    ) -> list[Self]:
        """As `_map`, for an `fn` that cuts a leaf in `len(sizes)` pieces: one container per piece."""
        mapping = self._entries
        columns: list[Sequence[Any]] = (
            [
                value._map_many(fn, sizes, lead, rename) if isinstance(value, Contract) else fn(value)
                for value in mapping.values()
            ]
            if not is_flat(mapping)
            else list(map(fn, mapping.values()))
        )
        own = self._batch_size
        names = None if self._names is None or not sizes else self._renamed(len(sizes[0]), lead, rename)
        if len(own) != lead:
            sizes = [size + own[lead:] for size in sizes]
        if columns:
            # The names and the row are of one length by construction; checking it again would cost 30 ns a piece.
            keys = list(mapping)
            pieces = [dict(zip(keys, row)) for row in zip(*columns, strict=True)]
        else:
            pieces = [{} for _ in sizes]
        return self._build_many(pieces, sizes, self._device, names)

    def _merge(
        self,
        others: Sequence[Contract],
        fn: Callable[[list[Any]], Any],
        size: torch.Size,
        lead: int,
        rename: Rename | None,
        path: tuple[str, ...] = (),
    ) -> Self:
        """The structure of `self` with every leaf replaced by `fn([this leaf of each of the others])`.

        `others` holds all the inputs, `self` among them, and must agree on the keys.
        """
        mappings = [other._entries for other in others]
        count = len(mappings[0])
        entries: dict[str, Any] = {}
        if list(map(len, mappings)).count(count) != len(mappings):
            raise_key_mismatch(mappings, path)
        try:
            for name, value in mappings[0].items():
                column = [mapping[name] for mapping in mappings]
                if type(value) is not Tensor and isinstance(value, Contract):
                    for other in column:
                        if not isinstance(other, Contract):
                            raise TypeError(
                                f"entry {(*path, name)!r} is a container in one input and a tensor in another"
                            )
                    entries[name] = value._merge(column, fn, size, lead, rename, (*path, name))
                else:
                    entries[name] = fn(column)
        except KeyMismatchError:
            raise
        except KeyError:
            raise_key_mismatch(mappings, path)
        except (RuntimeError, TypeError) as error:
            raise named_error(error, (*path, name)) from error
        own = self._batch_size
        return self._build(
            entries,
            size if len(own) == lead else size + own[lead:],
            merged_device(others),
            None if self._names is None else self._renamed(len(size), lead, rename),
        )

    def _renamed(self, count: int, lead: int, rename: Rename | None) -> Names | None:
        """The names after `lead` leading dims became `count` dims."""
        if self._names is None:
            return None
        head: Names = [None] * count if rename is None else rename(self._names[:lead])
        names = head + self._names[lead:]
        return names if any(name is not None for name in names) else None


def is_flat(mapping: Mapping[str, Any]) -> bool:
    """Whether no entry is a container; about 25 ns an entry."""
    for value in mapping.values():  # noqa: SIM110 (a generator inside all() would double the cost)
        if type(value) is not Tensor and isinstance(value, Contract):
            return False
    return True


def merged_device(containers: Sequence[Contract]) -> torch.device | None:
    """The device that all the containers share, or `None`."""
    devices = [container._device for container in containers]
    return devices[0] if devices.count(devices[0]) == len(devices) else None


def named_error(error: Exception, path: tuple[str, ...]) -> Exception:
    """`error` again with the nested key in front of its message; an error that names its key already is kept."""
    message = str(error)
    if message.startswith("entry "):
        return error
    key = path[0] if len(path) == 1 else path
    return type(error)(f"entry {key!r}: {message}")


def raise_key_mismatch(mappings: Sequence[Mapping[str, Any]], path: tuple[str, ...]) -> NoReturn:
    """Raise the error of containers that should have the same keys, naming those that only some have."""
    union = set().union(*mappings)
    common = set(mappings[0]).intersection(*mappings)
    odd = sorted(union - common)
    where = f" under {'.'.join(path)!r}" if path else ""
    raise KeyMismatchError(
        f"the containers must have the same keys{where}; only some of them have {odd}. "
        "Select the common keys first, or use a lazy stack"
    )
