"""The mixin of `names`, `rename` and `refine_names`: the names of the batch dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tensordict.core.contract import Contract, Names, identity
from tensordict.core.exceptions import DimError, NamesError
from tensordict.core.keys import Path, joined
from tensordict.core.shapes import as_dim

if TYPE_CHECKING:
    from typing_extensions import Self


class Naming(Contract):
    """The `names` of the batch dims. Nested containers share the names of their parent."""

    @property
    def names(self) -> Names:
        """One name, or `None`, per batch dim.

        Assign a sequence to name the dims of the whole tree, or `None` to remove all names.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["batch", "time"])
            >>> td[0].names
            ['time']

        Raises:
            ValueError: on assignment: the number of names is not the number of dims, a name is used twice, or a nested
                container has an additional dim of the same name. Nothing changes then.
        """
        names = self._names
        return [None] * len(self._batch_size) if names is None else names[:]

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._name_tree(names)

    def _name_tree(self, names: Sequence[str | None] | None) -> None:
        """Set the names of the batch dims of this container, and of the same dims of all nested containers.

        Works on a frozen tensorclass, too.
        """
        batch_dims = len(self._batch_size)
        names = [None] * batch_dims if names is None else as_names(names, batch_dims)
        nested: list[tuple[Path, Contract, Names]] = []
        _collect_nodes(self, (), names, nested)
        for path, node, own in nested:
            _check_tail(node, own, path)
        with self._at_once():
            _rename(self, names)
            for _, node, own in nested:
                _rename(node, own)

    def refine_names(self, *names: object) -> Self:
        """Name the dims that do not have a name yet. Returns this container.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(batch_size=[3, 4, 5])
            >>> td.refine_names("batch", ...).refine_names(..., "time").names
            ['batch', None, 'time']

        Args:
            *names: one name, or `None`, per batch dim. A dim that has a name must keep it. One of the names can be
                `...`, which stands for any number of dims and leaves them unchanged.

        Raises:
            RuntimeError: a name contradicts the present one, or the number of names does not fit. Nothing changes then.
        """
        own = self.names
        wanted = as_names(_fill_ellipsis(names, own, "refine_names"), len(own))
        for old, new in zip(own, wanted, strict=True):
            if old is not None and old != new:
                raise NamesError(
                    f"refine_names: the dims are named {own} and cannot be given the names {wanted}: a dim that has a "
                    "name keeps it. Use rename_() to change names"
                )
        if wanted != own:
            self._name_tree(wanted)
        return self

    def rename(self, *names: object, **rename_map: str | None) -> Self:
        """Return a container of the same entries with other dim names.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(batch_size=[3, 4, 5], names=["batch", "time", "step"])
            >>> td.rename(time="frame").names, td.rename("b", ...).names
            (['batch', 'frame', 'step'], ['b', 'time', 'step'])

        Args:
            *names: one name, or `None`, per batch dim. One of them can be `...`, which stands for any number of dims
                and keeps their names. A single `None` removes all names.
            **rename_map: instead of `names`, `old="new"` for each dim to rename.

        Returns:
            a new, unlocked container that shares the leaves.

        Raises:
            ValueError: both names and a map are given, or neither; the number of names does not fit; a name is used
                twice; or the map names an unknown dim.
        """
        wanted = self._resolve_names("rename", names, rename_map)
        renamed = self._map(identity)
        renamed._name_tree(wanted)
        return renamed

    def rename_(self, *names: object, **rename_map: str | None) -> Self:
        """Rename the dims of this container and of all nested ones. Arguments and errors as for :meth:`rename`.

        Returns this container, which may be locked.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict(batch_size=[3, 4], names=["a", "b"]).rename_(a="b", b="a").names
            ['b', 'a']
        """
        self._name_tree(self._resolve_names("rename_", names, rename_map))
        return self

    def _resolve_names(self, call: str, names: tuple[object, ...], rename_map: dict[str, str | None]) -> Names:
        """Return the new names that the arguments of `rename` describe."""
        if len(names) == len(self._batch_size) and not rename_map and ... not in names and "..." not in names:
            return as_names(names, len(names))
        own = self.names
        if names and rename_map:
            raise NamesError(
                f"{call} takes names or a map from old to new ones, not both: got {names} and {rename_map}"
            )
        if rename_map:
            unknown = [name for name in rename_map if name not in own]
            if unknown:
                raise NamesError(f"{call}: no dim is named {', '.join(map(repr, unknown))}; the names are {own}")
            return as_names([name if name is None else rename_map.get(name, name) for name in own], len(own))
        if not names and own:
            raise NamesError(f"{call} needs names, or a map from old names to new ones; the names are {own}")
        if names == (None,):
            return [None] * len(own)
        return as_names(_fill_ellipsis(names, own, call), len(own))

    def _dim(self, dim: object) -> int:
        """Return the position of a batch dim, given by number or by name, counted from the front.

        Raises:
            IndexError: the number is out of range, or the name is unknown.
        """
        if type(dim) is not str:
            return as_dim(dim, len(self._batch_size))
        own = self.names
        if dim not in own:
            raise DimError(f"no dim is named {dim!r}; the batch dims are named {own}")
        return own.index(dim)

    def _dims(self, dims: object) -> tuple[int, ...]:
        """Return the positions of one or several different batch dims, as `_dim` does."""
        if not isinstance(dims, (tuple, list)):
            return (self._dim(dims),)
        out = tuple([self._dim(dim) for dim in dims])
        if len(set(out)) != len(out):
            raise DimError(f"each dim can be given once, got {dims} for {len(self._batch_size)} batch dims")
        return out


def as_names(names: Any, ndim: int) -> Names:
    """Return names as a list. Raises unless they are one per dim and differ from each other."""
    if type(names) not in (list, tuple) and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise TypeError(f"names are a sequence of strings or None, one per batch dim, got {names!r}")
    checked = list(names)
    if len(checked) != ndim:
        raise NamesError(f"{len(checked)} names {checked} do not fit {ndim} batch dims: give one for each, or None")
    given = [name for name in checked if name is not None]
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"names are strings or None, got {checked}")
    if len(set(given)) != len(given):
        raise NamesError(f"each name can be used only once, got {checked}")
    return checked


def check_agreement(containers: Sequence[Contract], call: str) -> None:
    """Raise if two of the containers to join name the same dim differently. A dim without a name fits any name."""
    given = [container._names for container in containers]
    if given.count(given[0]) == len(given):
        return
    known: Names = []
    origins: list[int] = []
    for position, container in enumerate(containers):
        names = container._names
        if names is None:
            continue
        if not known:
            known, origins = list(names), [position] * len(names)
        for dim, (old, new) in enumerate(zip(known, names, strict=True)):
            if old is None:
                known[dim], origins[dim] = new, position
            elif new is not None and new != old:
                raise NamesError(
                    f"{call}: dim {dim} is named {old!r} in the container at position {origins[dim]} and {new!r} in "
                    f"the one at position {position}: {containers[origins[dim]]._names} and {names}. Rename one of "
                    "them first"
                )


def _fill_ellipsis(names: tuple[Any, ...], own: Names, call: str) -> Names:
    """Replace `...` in `names` by the present names of the dims that it stands for."""
    if ... not in names and "..." not in names:
        return list(names)
    places = [i for i, name in enumerate(names) if name is ... or name == "..."]
    if len(places) > 1:
        raise NamesError(f"{call}: at most one '...' can stand for dims, got {names}")
    before, after = places[0], len(names) - places[0] - 1
    if before + after > len(own):
        raise NamesError(f"{call}: the names {names} do not fit {len(own)} batch dims, which are named {own}")
    return [*names[:before], *own[before : len(own) - after], *names[before + 1 :]]


def _collect_nodes(node: Contract, prefix: Path, names: Names, found: list[tuple[Path, Contract, Names]]) -> None:
    """Append all nested containers to `found`, each with its path and the new names of its leading dims."""
    structure = entries if type(entries := node._entries) is dict else node._structure()
    for name, value in structure.items():
        if not isinstance(value, Tensor) and isinstance(value, Contract):
            path = (*prefix, name)
            found.append((path, value, names))
            _collect_nodes(value, path, names, found)
    if not isinstance(entries, dict) and (members := node._members()):
        # Nested containers that only some members have are not in `structure`. They lack the stack dim.
        dim: int = node.stack_dim
        rest = names[:dim] + names[dim + 1 :]
        for member in members:
            for name, value in member._structure().items():
                if name not in structure and not isinstance(value, Tensor) and isinstance(value, Contract):
                    found.append(((*prefix, name), value, rest))
                    _collect_nodes(value, (*prefix, name), rest, found)


def _check_tail(node: Contract, names: Names, path: Path) -> None:
    """Raise if a nested container uses one of the new names for one of its additional dims."""
    if (own := _find_conflict(node, names)) is not None:
        raise NamesError(
            f"entry {joined(path)!r} has an additional dim {own!r} (its names are {node._names}): its leading dims "
            f"cannot be named {names}. Rename that dim first"
        )


def _find_conflict(node: Contract, names: Names) -> str | None:
    """Return the first name in `names` that a dim behind the leading `len(names)` dims has too; `None` if there is
    none."""
    behind = [] if node._names is None else node._names[len(names) :]
    return next((name for name in behind if name is not None and name in names), None)


def take_names(container: Any, value: Any) -> None:
    """Copy the dim names of a nested container that was set into a container without names.

    Does nothing if a nested container uses one of the names for an additional dim.
    """
    if not isinstance(value, Contract) or value._names is None:
        return
    names = value._names[: len(container._batch_size)]
    nested: list[tuple[Path, Contract, Names]] = []
    _collect_nodes(container, (), names, nested)
    if any(names) and all(_find_conflict(node, own) is None for _, node, own in nested):
        container._name_tree(names)


def _rename(node: Contract, names: Names) -> None:
    """Set the names of the leading dims of one container."""
    batch_dims = len(names)
    if len(node._batch_size) > batch_dims:
        names = [*names, *(node._names or [None] * len(node._batch_size))[batch_dims:]]
    node._names = list(names) if any(names) else None
