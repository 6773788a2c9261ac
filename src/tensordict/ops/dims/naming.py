"""Names of the batch dimensions."""

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
    """The `names` of the batch dims; nested containers share those of their parent."""

    @property
    def names(self) -> Names:
        """One name, or `None`, per batch dim; assigning a sequence (or `None`) names the dims of the whole tree.

        Raises:
            ValueError: on assignment, there is not one name per dim, a name is used twice, or it is the name of a dim
                that only a nested container has; nothing has changed then.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["batch", "time"])
            >>> td[0].names
            ['time']
        """
        names = self._names
        return [None] * len(self._batch_size) if names is None else names[:]

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        batch_dims = len(self._batch_size)
        self._name_tree([None] * batch_dims if names is None else checked_names(names, batch_dims))

    def _name_tree(self, names: Names) -> None:
        """Give the batch dims of this container, and the same dims of all nested ones, these names."""
        nested: list[tuple[Path, Contract, Names]] = []
        _collect(self, (), names, nested)
        for path, node, own in nested:
            _check_tail(node, own, path)
        with self._at_once():
            _rename(self, names)
            for _, node, own in nested:
                _rename(node, own)

    def refine_names(self, *names: object) -> Self:
        """Name the dims that have no name yet; returns the same container.

        Args:
            *names: one name, or `None`, per batch dim. A dim that has a name can only be given the same one. One of
                them can be `...`, which stands for the dims in its place and leaves them as they are.

        Raises:
            RuntimeError: the names disagree with those that the dims have, or do not fit their number; both are
                shown, and nothing has changed.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(batch_size=[3, 4, 5])
            >>> td.refine_names("batch", ...).refine_names(..., "time").names
            ['batch', None, 'time']
        """
        own = self.names
        wanted = checked_names(_spelled_out(names, own, "refine_names"), len(own))
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
        """A container of the same entries under other dim names.

        Args:
            *names: one name, or `None`, per batch dim. One of them can be `...`, which stands for the dims in its
                place and keeps their names; `None` alone drops all names.
            **rename_map: new names by old ones, instead of `names`; the other dims keep theirs.

        Returns:
            a new, unlocked container that shares the leaves.

        Raises:
            ValueError: names and a map were given, or neither; the names do not fit the number of dims; a name is
                used twice; or the map renames a dim that does not exist.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(batch_size=[3, 4, 5], names=["batch", "time", "step"])
            >>> td.rename(time="frame").names, td.rename("b", ...).names
            (['batch', 'frame', 'step'], ['b', 'time', 'step'])
        """
        wanted = self._renaming("rename", names, rename_map)
        renamed = self._map(identity)
        renamed._name_tree(wanted)
        return renamed

    def rename_(self, *names: object, **rename_map: str | None) -> Self:
        """Rename the dims of this container and of all nested ones; arguments and errors as :meth:`rename`.

        Allowed on a locked container; returns the same one.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict(batch_size=[3, 4], names=["a", "b"]).rename_(a="b", b="a").names
            ['b', 'a']
        """
        self._name_tree(self._renaming("rename_", names, rename_map))
        return self

    def _renaming(self, call: str, names: tuple[object, ...], rename_map: dict[str, str | None]) -> Names:
        """The names that `rename` asks for."""
        if len(names) == len(self._batch_size) and not rename_map and ... not in names and "..." not in names:
            return checked_names(names, len(names))
        own = self.names
        if names and rename_map:
            raise NamesError(
                f"{call} takes names or a map from old to new ones, not both: got {names} and {rename_map}"
            )
        if rename_map:
            unknown = [name for name in rename_map if name not in own]
            if unknown:
                raise NamesError(f"{call}: no dim is named {', '.join(map(repr, unknown))}; the names are {own}")
            return checked_names([name if name is None else rename_map.get(name, name) for name in own], len(own))
        if not names and own:
            raise NamesError(f"{call} needs names, or a map from old names to new ones; the names are {own}")
        if names == (None,):
            return [None] * len(own)
        return checked_names(_spelled_out(names, own, call), len(own))

    def _dim(self, dim: object) -> int:
        """A batch dim by number or by name, counted from the front.

        Raises:
            IndexError: there is no such dim.
        """
        if type(dim) is not str:
            return as_dim(dim, len(self._batch_size))
        own = self.names
        if dim not in own:
            raise DimError(f"no dim is named {dim!r}; the batch dims are named {own}")
        return own.index(dim)

    def _dims(self, dims: object) -> tuple[int, ...]:
        """One or several batch dims by number or by name, counted from the front, each once."""
        if not isinstance(dims, (tuple, list)):
            return (self._dim(dims),)
        out = tuple([self._dim(dim) for dim in dims])
        if len(set(out)) != len(out):
            raise DimError(f"each dim can be given once, got {dims} for {len(self._batch_size)} batch dims")
        return out


def checked_names(names: Any, ndim: int) -> Names:
    """Names as a list; raises when there is not one per dim, or when one is used twice."""
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
        raise NamesError(f"each name can be used once, got {checked}")
    return checked


def check_agreement(containers: Sequence[Contract], call: str) -> None:
    """Raise when two containers that are to be joined give one dim different names; no name agrees with any."""
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
                    f"that at position {position}: {containers[origins[dim]]._names} and {names}. Rename one of them "
                    "first"
                )


def _spelled_out(names: tuple[Any, ...], own: Names, call: str) -> Names:
    """`names` with the `...` among them, if any, replaced by the names that the dims in its place have."""
    if ... not in names and "..." not in names:
        return list(names)
    places = [i for i, name in enumerate(names) if name is ... or name == "..."]
    if len(places) > 1:
        raise NamesError(f"{call}: one '...' at most can stand for dims, got {names}")
    before, after = places[0], len(names) - places[0] - 1
    if before + after > len(own):
        raise NamesError(f"{call}: the names {names} do not fit {len(own)} batch dims, which are named {own}")
    return [*names[:before], *own[before : len(own) - after], *names[before + 1 :]]


def _collect(node: Contract, prefix: Path, names: Names, found: list[tuple[Path, Contract, Names]]) -> None:
    """All nested containers, their paths, and the names that their leading dims are to have."""
    structure = entries if type(entries := node._entries) is dict else node._structure()
    for name, value in structure.items():
        if not isinstance(value, Tensor) and isinstance(value, Contract):
            path = (*prefix, name)
            found.append((path, value, names))
            _collect(value, path, names, found)
    if type(entries) is not dict and (members := node._members()):
        # What only some members have lies in these, which lack the stack dim.
        dim: int = node.stack_dim
        rest = names[:dim] + names[dim + 1 :]
        for member in members:
            for name, value in member._structure().items():
                if name not in structure and not isinstance(value, Tensor) and isinstance(value, Contract):
                    found.append(((*prefix, name), value, rest))
                    _collect(value, (*prefix, name), rest, found)


def _check_tail(node: Contract, names: Names, path: Path) -> None:
    """Raise when a nested container calls a dim of its own by one of the names that its leading dims are to have."""
    if (own := _doubled(node, names)) is not None:
        raise NamesError(
            f"entry {joined(path)!r} has a dim {own!r} of its own, its names being {node._names}: its leading dims "
            f"cannot be named {names}"
        )


def _doubled(node: Contract, names: Names) -> str | None:
    """The first of these names for the leading dims of a container that another dim of it has."""
    behind = [] if node._names is None else node._names[len(names) :]
    return next((name for name in behind if name is not None and name in names), None)


def take_names(container: Any, value: Any) -> None:
    """Give a container without names those of a nested one that was set into it.

    It stays without where such a name is that of a dim further behind, in any of the containers in it.
    """
    if not isinstance(value, Contract) or value._names is None:
        return
    names = value._names[: len(container._batch_size)]
    nested: list[tuple[Path, Contract, Names]] = []
    _collect(container, (), names, nested)
    if any(names) and all(_doubled(node, own) is None for _, node, own in nested):
        container._name_tree(names)


def _rename(node: Contract, names: Names) -> None:
    """Give the leading dims of one container these names."""
    batch_dims = len(names)
    if len(node._batch_size) > batch_dims:
        names = [*names, *(node._names or [None] * len(node._batch_size))[batch_dims:]]
    node._names = list(names) if any(names) else None
