"""Changing which entries a container has, and where they sit in the tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core import registry
from tensordict.core.context import remember, remember_state
from tensordict.core.contract import Contract, is_node
from tensordict.core.key_views import IsLeaf, _all_leaves
from tensordict.core.keys import Path, joined, path_of
from tensordict.core.replacing import replacing
from tensordict.core.shapes import as_size
from tensordict.ops.entries.locking import raise_locked
from tensordict.ops.entries.reading import NO_DEFAULT
from tensordict.ops.entries.writing import Writing

if TYPE_CHECKING:
    from typing_extensions import Self


class Structure(Writing):
    """`select`, `exclude`, `flatten_keys`, `split_keys` and their kin."""

    def select(self, *keys: object, inplace: bool = False, strict: bool = True, as_tensordict: bool = False) -> Self:
        """Only the entries at these nested keys.

        Args:
            *keys: nested keys; a key of a nested container takes all of it.
            inplace: delete the other entries from this container instead.
            strict: raise when a key is missing; otherwise ignore it.
            as_tensordict: give a plain `TensorDict` when this container is of another kind; nested ones stay what they
                are.

        Returns:
            a new container over the same tensors (unlocked), or `self` with `inplace`.

        Raises:
            KeyError: a key is missing and `strict`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(1), "b": {"c": torch.zeros(1), "d": torch.zeros(1)}})
            >>> list(td.select(("b", "c")).keys(True, True))
            [('b', 'c')]
        """
        mapping = self._entries
        if type(mapping) is dict and not inplace and not as_tensordict:
            # The usual case: keys of this level, all of them there.
            entries: dict[str, Any] = {}
            for key in keys:
                if type(key) is not str or key not in mapping:
                    break
                entries[key] = mapping[key]
            else:
                return self._build(entries, self._batch_size, self._device, self._names)
        if inplace:
            self._refuse_if_locked("select in place")
        wanted: dict[str, Any] = {}
        for key in keys:
            path = (key,) if type(key) is str else path_of(key)
            if not (self._has(path) if strict else self._has_anywhere(path)):
                if strict:
                    raise self._missing(joined(path))
                continue
            _want(wanted, path)
        if inplace:
            gone: list[tuple[Any, str]] = []
            with self._at_once():
                self._plan_keep(wanted, gone)
                _delete(gone, "select in place")
            return self
        selected = self._selected(wanted)
        plain = registry.lookup("TensorDict")
        if as_tensordict and not isinstance(selected, plain):
            made: Any = plain._make(dict(selected._entries), selected._batch_size, selected._device, selected._names)
            return made  # type: ignore[no-any-return]
        return selected

    def _selected(self, wanted: dict[str, object]) -> Self:
        mapping: Mapping[str, Any] = self._entries
        if type(mapping) is not dict:
            if (members := self._members(or_template=True)) is not None:
                return self._restack([member._selected(_known(member, wanted)) for member in members])
            mapping = self._share_entries()
        entries: dict[str, Any] = {}
        for name, below in wanted.items():
            entries[name] = mapping[name] if below is None else mapping[name]._selected(below)
        if type(mapping) is not dict:
            return self._subset(entries, self._device)
        return self._build(entries, self._batch_size, self._device, self._names)

    def _plan_keep(self, wanted: dict[str, object], gone: list[tuple[Contract, str]]) -> None:
        """List the entries that are not wanted, and the containers that hold them."""
        if (members := self._members(or_template=True)) is not None:
            for member in members:
                member._plan_keep(_known(member, wanted), gone)
            return
        for name in self._entries:
            if name not in wanted:
                gone.append((self, name))
            elif wanted[name] is not None:
                self._entries[name]._plan_keep(wanted[name], gone)

    def exclude(self, *keys: object, inplace: bool = False) -> Self:
        """All entries but those at these nested keys; missing keys are ignored.

        Returns:
            a new container over the same tensors (unlocked), or `self` with `inplace`. A nested container that is
            left without entries stays.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> list(TensorDict({"a": torch.zeros(1), "b": torch.zeros(1)}).exclude("a").keys())
            ['b']
        """
        paths = [(key,) if type(key) is str else path_of(key) for key in keys]
        if inplace:
            self._refuse_if_locked("exclude in place")
            if (members := self._members(or_template=True)) is not None:
                with self._at_once():
                    for member in members:
                        member.exclude(*paths, inplace=True)
                return self
            with self._at_once():
                _delete([self._holder(path) for path in paths if self._peek(path) is not None], "exclude in place")
            return self
        return self._excluding(paths)

    def _excluding(self, paths: list[Path]) -> Self:
        mapping: Mapping[str, Any] = self._entries
        if type(mapping) is dict:
            entries = dict(mapping)
        else:
            if (members := self._members(or_template=True)) is not None:
                return self._restack([member._excluding(paths) for member in members])
            # What goes is not looked at: it may be what a file has and torch has not.
            mapping = self._share_entries()
            entries = {name: mapping[name] for name in mapping if (name,) not in paths}
        below: dict[str, list[Path]] = {}
        for path in paths:
            if len(path) == 1:
                entries.pop(path[0], None)
            else:
                below.setdefault(path[0], []).append(path[1:])
        for name, rest in below.items():
            child = entries.get(name)
            if isinstance(child, Structure):
                entries[name] = child._excluding(rest)
        if type(mapping) is not dict:
            return self._subset(entries, self._device)
        return self._build(entries, self._batch_size, self._device, self._names)

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: Any = None,
        device: Any = NO_DEFAULT,
        names: Any = None,
    ) -> Self:
        """A new container without entries: same batch size, device and names unless others are given.

        Args:
            recurse: keep the nested containers, emptied too.

        Of a lazy stack this is one of empty members; a `TensorDict` when another batch size is asked for.
        """
        if (
            type(self._entries) is dict
            and batch_size is None
            and device is NO_DEFAULT
            and names is None
            and not recurse
        ):
            return self._build({}, self._batch_size, self._device, self._names)
        size = None if batch_size is None else as_size(batch_size)
        if type(self._entries) is not dict and (members := self._members(or_template=True)) is not None:
            stack = self._restack([member.empty(recurse, device=device) for member in members])
            if size is not None and size != self._batch_size:
                return stack._dense().empty(recurse, batch_size=size, device=device, names=names)
            if names is not None:
                stack.names = names  # type: ignore[attr-defined]
            return stack
        target = self._device if device is NO_DEFAULT else (None if device is None else torch.device(device))
        own_names = names if names is not None or batch_size is not None else self._names
        entries: dict[str, Any] = {}
        if recurse:
            for name, value in self._entries.items():
                if isinstance(value, Structure):
                    entries[name] = value.empty(recurse=True, batch_size=batch_size, device=device, names=names)
        return self._build(entries, self._batch_size if size is None else size, target, own_names and list(own_names))

    def replace(self, *args: Any, **kwargs: Any) -> Self:
        """A shallow copy in which the entries of one mapping, or the keyword arguments, are replaced or added.

        With nothing to replace the container itself is returned.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(1))
            >>> td.replace(a=torch.ones(1))["a"], td["a"]
            (tensor([1.]), tensor([0.]))
        """
        if len(args) > 1:
            raise TypeError(f"replace takes one mapping, got {len(args)} positional arguments")
        source: Any = args[0] if args else {}
        if not isinstance(source, (Contract, Mapping)):
            raise TypeError(f"replace takes a mapping or a container, got {type(source).__name__}")
        # A shadow class may have a field that is called `keys`.
        names = source._entries if isinstance(source, Contract) else source
        if not len(names) and not kwargs:
            return self
        return self.copy().update(source, **kwargs)

    def flatten_keys(self, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None) -> Self:
        """One level of entries, whose names are the nested keys joined by `separator`.

        Args:
            separator: what goes between the names.
            inplace: change this container instead of making one.
            is_leaf: takes a class and says whether its instances count as leaves (and are not flattened).

        Returns:
            a container over the same tensors (unlocked). As a context manager, entries written to it end up at their
            nested keys in the original.

        Raises:
            KeyError: two keys have the same joined name.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": {"b": torch.zeros(1)}})
            >>> with td.flatten_keys(".") as flat:
            ...     flat["a.c"] = torch.ones(1)
            >>> sorted(td["a"].keys())
            ['b', 'c']
        """
        keys: list[Any] = []
        flat = self._flat(separator, is_leaf, keys)
        undo = _Unflatten(separator, keys)
        if inplace:
            self._refuse_if_locked("flatten the keys in place")
            self._exchange(flat)
            return remember_state(self, _KeysInPlace(undo, "unflatten"))
        return remember(flat, self, undo)

    def _flat(self, separator: str, is_leaf: IsLeaf | None, keys: list[Any]) -> Self:
        """One level of entries; `keys` gets the nested keys that they had."""
        if (members := self._members(or_template=True)) is not None:
            return self._restack([member._flat(separator, is_leaf, keys) for member in members])
        items = _all_leaves(self) if is_leaf is None else list(self.items(True, True, is_leaf))
        entries = {}
        for key, value in items:
            keys.append(key)
            entries[key if type(key) is str else separator.join(key)] = value
        if len(entries) != len(items):
            names = [separator.join(path_of(key)) for key, _ in items]
            twice = next(name for name in names if names.count(name) > 1)
            raise KeyError(
                f"Flattening keys in tensordict causes keys to collide: two entries would be called {twice!r}; use "
                f"another separator than {separator!r}"
            )
        return self._build(entries, self._batch_size, self._device, self._names)

    def unflatten_keys(self, separator: str = ".", inplace: bool = False) -> Self:
        """A tree of entries, made by splitting the names at `separator`: the reverse of :meth:`flatten_keys`.

        Raises:
            KeyError: a name would need a container where another entry is a tensor.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> list(TensorDict({"a.b": torch.zeros(1)}).unflatten_keys().keys(True, True))
            [('a', 'b')]
        """
        tree = self._tree(separator)
        undo = _Flatten(separator, self)
        if inplace:
            self._refuse_if_locked("unflatten the keys in place")
            self._exchange(tree)
            return remember_state(self, _KeysInPlace(undo, "flatten"))
        return remember(tree, self, undo)

    def _tree(self, separator: str, places: Mapping[str, Path] | None = None) -> Self:
        """The entries by the parts of their names, or where `places` says; containers that meet are merged."""
        if (members := self._members(or_template=True)) is not None:
            return self._restack([member._tree(separator, places) for member in members])
        root: Any = self._build({}, self._batch_size, self._device, self._names)
        # The entries of the containers that are new here, by path, and by the joined names of it, which are at hand.
        levels: dict[Any, Any] = {(): root._entries}
        for name, value in self._entries.items():
            path = places.get(name) if places else None
            if path is not None:
                _place(root, path, value, levels)
                continue
            parent, found, last = name.rpartition(separator)
            level = levels.get(parent) if found else root._entries
            if level is None:
                level = levels[parent] = _level(root, tuple(parent.split(separator)), levels)
            if last in level:
                _place(root, tuple(name.split(separator)), value, levels)
            else:
                level[last] = value
        return root  # type: ignore[no-any-return]

    def _exchange(self, other: Any) -> None:
        """Make the entries of `other`, a container of the same kind, all there is in this one."""
        if (members := self._members(or_template=True)) is not None:
            with self._at_once():
                for member, piece in zip(members, other._members(or_template=True), strict=True):
                    member._exchange(piece)
            return
        entries = dict(other._entries)
        if self._wrapped_container()._is_in_file:
            # What is written may be read from what is there, so that goes last; nested containers that stay are left.
            own: Any = self._entries
            stay = {name for name, value in entries.items() if name in own and own.node(name) is value}
            gone = set(own) - entries.keys()
            if gone:
                own.refuse_deletion()
            with self._at_once(), replacing():
                own.update({name: value for name, value in entries.items() if name not in stay})
                for name in gone:
                    del own[name]
            return
        for name in list(self._entries):
            del self._entries[name]
        for name, value in entries.items():
            self._entries[name] = value

    def rename_keys(self, mapping: Mapping[Any, Any], *, safe: bool = False) -> Self:
        """A shallow copy whose entries have moved: `{old nested key: new nested key}`.

        All moves happen at once, so names can be swapped.

        Raises:
            KeyError: an old key is missing, or a new one is taken and `safe=True`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> list(TensorDict(a=torch.zeros(1)).rename_keys({"a": ("b", "c")}).keys(True, True))
            [('b', 'c')]
        """
        if (members := self._members(or_template=True)) is not None:
            return self._restack([member.rename_keys(mapping, safe=safe) for member in members])
        out = self.copy()
        moved = {path_of(new): out.pop(old) for old, new in mapping.items()}
        for path, value in moved.items():
            if safe and out._peek(path) is not None:
                raise KeyError(f"cannot rename to {joined(path)!r}: there is such an entry already (safe=True)")
            out._write(path, value)
        return out

    def split_keys(
        self,
        *key_sets: Any,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """Split by keys: one container per set of keys, and one with what is left.

        Args:
            *key_sets: lists of nested keys, or mappings from a nested key to the key it gets in the result.
            inplace: remove the entries from this container, which becomes the last one returned.
            default: written for missing keys.
            strict: raise when a key is missing and there is no default; otherwise ignore it.
            reproduce_struct: give every result the nested containers of this one, empty if need be.

        Raises:
            KeyError: a key is missing, or asked for twice.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> one, two, rest = TensorDict(a=0, b=0, c=0).split_keys(["a"], {"b": "d"})
            >>> list(one.keys()), list(two.keys()), list(rest.keys())
            (['a'], ['d'], ['c'])
        """
        if inplace:
            self._refuse_if_locked("split the keys in place")
        moves = [list(keys.items()) if isinstance(keys, Mapping) else [(key, key) for key in keys] for keys in key_sets]
        *outs, last = self._split_by(moves, default if default is not NO_DEFAULT or strict else None, reproduce_struct)
        if inplace:
            self._exchange(last)
            last = self
        return (*outs, last)

    def _split_by(self, moves: list[list[tuple[Any, Any]]], default: object, reproduce_struct: bool) -> list[Any]:
        """A container for each list of (old key, new key), and one with what is left."""
        if (members := self._members(or_template=True)) is not None:
            columns = [member._split_by(moves, default, reproduce_struct) for member in members]
            return [self._restack(column) for column in zip(*columns, strict=True)]
        last = self.copy()
        kept: dict[str, Any] = last._entries if type(last._entries) is dict else {}
        outs: list[Any] = []
        for pairs in moves:
            out = self.empty(recurse=reproduce_struct)
            for old, new in pairs:
                if type(old) is str and old in kept and type(new) is str:
                    # What fits at this level here fits there.
                    out._check_field(new)
                    out._entries[new] = kept.pop(old)
                elif (value := last.pop(old, default)) is not None:
                    out._write(path_of(new), value)
            outs.append(out)
        if not reproduce_struct:
            last.filter_empty_()
        return [*outs, last]

    def separates(
        self, *keys: object, default: object = NO_DEFAULT, strict: bool = True, filter_empty: bool = True
    ) -> Self:
        """Remove the entries at these nested keys from this container and return them in a new one.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=0, b=0)
            >>> list(td.separates("a").keys()), list(td.keys())
            (['a'], ['b'])
        """
        out, _ = self.split_keys(keys, inplace=True, default=default, strict=strict, reproduce_struct=not filter_empty)
        return out

    def filter_empty_(self) -> Self:
        """Delete the nested containers in which no leaf is found; returns the same container."""
        self._refuse_if_locked("filter empty containers")
        if (members := self._members(or_template=True)) is not None:
            for member in members:
                member.filter_empty_()
            return self
        gone: list[tuple[Any, str]] = []
        self._plan_filter(gone)
        _delete(gone, "filter empty containers")
        return self

    def _plan_filter(self, gone: list[tuple[Contract, str]]) -> None:
        """List the nested containers in which no leaf is found, and those that hold them."""
        for name, value in self._structure().items():
            if isinstance(value, Structure):
                if value.is_empty():
                    gone.append((self, name))
                else:
                    value._plan_filter(gone)


class _Flatten:
    """The undoing of `unflatten_keys`: containers that were there before stay, the others become names again."""

    def __init__(self, separator: str, source: Contract) -> None:
        self.separator = separator
        self._names: dict[Path, str] | None = None
        structures = [member._structure() for member in source._members() or (source,)]
        self.flat_names = [name for structure in structures for name in structure]
        self.nodes = {
            name
            for structure in structures
            for name, value in structure.items()
            if type(value) is not Tensor and is_node(value)
        }

    @property
    def names(self) -> dict[Path, str]:
        """The names by what they are split into; made at the end of a block, which most calls do not have.

        `functools.cached_property` takes a lock before Python 3.12, which Dynamo does not trace.
        """
        if self._names is None:
            self._names = {tuple(name.split(self.separator)): name for name in self.flat_names}
        return self._names

    def __call__(self, tree: Any) -> Any:
        if (members := tree._members(or_template=True)) is not None:
            return tree._restack(list(map(self, members)))  # members may have different entries
        entries: dict[str, Any] = {}
        for name, value in tree._entries.items():
            for new, item in self._flat(name, value):
                if new in entries:
                    raise KeyError(f"flatten_keys: two entries would be called {new!r}")
                entries[new] = item
        return tree._build(entries, tree._batch_size, tree._device, tree._names)

    def _flat(self, name: str, value: Any) -> list[tuple[str, object]]:
        """The entries that an entry of the tree becomes."""
        if not is_node(value) or value._is_non_tensor:
            return [(name, value)]
        if name not in self.nodes:
            return [(self.separator.join((name, *path_of(key))), item) for key, item in _all_leaves(value)]
        # What was merged into it by its name.
        merged = [path for path in self.names if len(path) > 1 and path[0] == name and value._has(path[1:])]
        kept = value.exclude(*[path[1:] for path in merged]) if merged else value
        return [(name, kept), *[(self.names[path], value._find(path[1:])) for path in merged]]


class _KeysInPlace:
    """The undoing of `flatten_keys` or `unflatten_keys` in the container itself.

    An object, as compiled code cannot give back a method of one.
    """

    def __init__(self, undo: Callable[[Any], Any], done: str) -> None:
        self.undo, self.done = undo, done

    def __call__(self, container: Any) -> None:
        container._refuse_if_locked(f"{self.done} the keys in place")
        container._exchange(self.undo(container))


class _Unflatten:
    """The undoing of `flatten_keys`: what was flattened goes back to where it was, what is new by its name."""

    def __init__(self, separator: str, keys: list[Any]) -> None:
        self.separator = separator
        self.keys = keys

    def __call__(self, container: Any) -> Any:
        return container._tree(self.separator, self._places())

    def _places(self) -> dict[str, Path]:
        """Where the entries were whose names have the separator in them, and so do not tell."""
        paths = map(path_of, self.keys)
        return {self.separator.join(path): path for path in paths if any(self.separator in name for name in path)}


def _place(root: Any, path: Path, value: Any, levels: dict[Any, Any]) -> None:
    """Put an entry at a path below `root`; a container is merged with the one that is there."""
    level = _level(root, path[:-1], levels)
    name = path[-1]
    if name not in level:
        level[name] = value
        return
    for node in (value, level[name]):
        if not is_node(node) or node._is_non_tensor:
            raise KeyError(
                "Unflattening key(s) in tensordict will override an existing one: two entries would be at "
                f"{joined(path)!r}"
            )
    for below, item in value._entries.items():
        _place(root, (*path, below), item, levels)


def _level(root: Any, path: Path, levels: dict[Any, Any]) -> Any:
    """The entries of the container at a path below `root`; `levels` has those that are new."""
    level = levels[()]
    for depth, name in enumerate(path, 1):
        prefix = path[:depth]
        if prefix not in levels:
            child = level.get(name)
            if child is not None and not isinstance(child, Contract):
                raise KeyError(f"unflatten_keys: a container is needed at {joined(prefix)!r}, where there is a tensor")
            child = level[name] = root._child() if child is None else child.copy()
            levels[prefix] = child._entries
        level = levels[prefix]
    return level


def _delete(gone: list[tuple[Contract, str]], what: str) -> None:
    """Delete entries from the containers that hold them, or none: another parent may have locked a nested container."""
    for node, name in gone:
        if node._locked:
            raise_locked(f"{what}, which deletes {name!r} from a locked nested container")
    for node, name in gone:
        node._entries.pop(name, None)


def _known(member: Contract, wanted: dict[str, object]) -> dict[str, Any]:
    """The wanted names that a member of a lazy stack has."""
    return {name: below for name, below in wanted.items() if name in member._entries}


def _want(wanted: dict[str, Any], path: Path) -> None:
    """Add a path to a tree of wanted names, in which `None` stands for 'all of it'."""
    for name in path[:-1]:
        if name in wanted and wanted[name] is None:
            return
        wanted = wanted.setdefault(name, {})
    wanted[path[-1]] = None
