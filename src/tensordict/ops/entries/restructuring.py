"""Methods that select, remove or move entries: `select`, `exclude`, `flatten_keys`, `rename_keys`, `split_keys`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

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

    SelfT = TypeVar("SelfT", bound="Structure")


class Structure(Writing):
    """The methods `select`, `exclude`, `empty`, `replace`, `flatten_keys`, `rename_keys`, `split_keys` and others."""

    def select(
        self: SelfT, *keys: object, inplace: bool = False, strict: bool = True, as_tensordict: bool = False
    ) -> SelfT:
        """Select the entries at these nested keys.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(1), "b": {"c": torch.zeros(1), "d": torch.zeros(1)}})
            >>> list(td.select(("b", "c")).keys(True, True))
            [('b', 'c')]

        Args:
            *keys: nested keys. The key of a nested container selects all of its entries.
            inplace: delete the other entries from this container instead of making a new one.
            strict: raise an error for a missing key, instead of ignoring it.
            as_tensordict: return a plain `TensorDict`, whatever the class of this container. Nested containers keep
                their class.

        Returns:
            a new container over the same tensors, not locked; with `inplace`, this container.

        Raises:
            KeyError: a key is missing, with `strict`.
            RuntimeError: with `inplace`, the container is locked.
        """
        mapping = self._entries
        if isinstance(mapping, dict) and not inplace and not as_tensordict:
            # The usual case: all keys are names of this level and exist.
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
                    raise self._make_missing_error(joined(path))
                continue
            _want(wanted, path)
        if inplace:
            deletions: list[tuple[Any, str]] = []
            with self._at_once():
                self._plan_deletions(wanted, deletions)
                _delete(deletions, "select in place")
            return self
        selected = self._select_tree(wanted)
        plain = registry.lookup("TensorDict")
        if as_tensordict and not isinstance(selected, plain):
            made: Any = plain._make(dict(selected._entries), selected._batch_size, selected._device, selected._names)
            return made  # type: ignore[no-any-return]
        return selected

    def _select_tree(self, wanted: dict[str, object]) -> Self:
        mapping: Mapping[str, Any] = self._entries
        if not isinstance(mapping, dict):
            if (members := self._members(or_template=True)) is not None:
                return self._restack([member._select_tree(_restrict_to_member(member, wanted)) for member in members])
            mapping = self._share_entries()
        entries: dict[str, Any] = {}
        for name, below in wanted.items():
            entries[name] = mapping[name] if below is None else mapping[name]._select_tree(below)
        if not isinstance(mapping, dict):
            return self._subset(entries, self._device)
        return self._build(entries, self._batch_size, self._device, self._names)

    def _plan_deletions(self, wanted: dict[str, object], deletions: list[tuple[Contract, str]]) -> None:
        """Add the entries that are not wanted to `deletions`, as pairs of their container and their name."""
        if (members := self._members(or_template=True)) is not None:
            for member in members:
                member._plan_deletions(_restrict_to_member(member, wanted), deletions)
            return
        for name in self._entries:
            if name not in wanted:
                deletions.append((self, name))
            elif wanted[name] is not None:
                self._entries[name]._plan_deletions(wanted[name], deletions)

    def exclude(self: SelfT, *keys: object, inplace: bool = False) -> SelfT:
        """Leave out the entries at these nested keys; missing keys are ignored.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> list(TensorDict({"a": torch.zeros(1), "b": torch.zeros(1)}).exclude("a").keys())
            ['b']

        Args:
            *keys: nested keys.
            inplace: delete the entries from this container instead of making a new one.

        Returns:
            a new container over the same tensors, not locked; with `inplace`, this container. A nested container
            without remaining entries is kept.

        Raises:
            RuntimeError: with `inplace`, the container is locked.
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
                _delete([self._find_parent(path) for path in paths if self._peek(path) is not None], "exclude in place")
            return self
        return self._exclude_paths(paths)

    def _exclude_paths(self, paths: list[Path]) -> Self:
        mapping: Mapping[str, Any] = self._entries
        if isinstance(mapping, dict):
            entries = dict(mapping)
        else:
            if (members := self._members(or_template=True)) is not None:
                return self._restack([member._exclude_paths(paths) for member in members])
            # Do not read the excluded entries: a file may have data that torch has no dtype for.
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
                entries[name] = child._exclude_paths(rest)
        if not isinstance(mapping, dict):
            return self._subset(entries, self._device)
        return self._build(entries, self._batch_size, self._device, self._names)

    def empty(
        self: SelfT,
        recurse: bool = False,
        *,
        batch_size: Any = None,
        device: Any = NO_DEFAULT,
        names: Any = NO_DEFAULT,
    ) -> SelfT:
        """Make a container without entries, with the same batch size, device and names.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.zeros(3)}}, batch_size=[3])
            >>> list(td.empty().keys()), list(td.empty(recurse=True).keys()), td.empty().batch_size
            ([], ['b'], torch.Size([3]))

        Args:
            recurse: keep the nested containers, without their entries.
            batch_size: another batch size.
            device: another device, or `None` for no device.
            names: other dim names, or `None` for no names.

        Returns:
            a new container. For a lazy stack, a lazy stack of empty members, or a `TensorDict` if another batch size is
            given.
        """
        if (
            isinstance(self._entries, dict)
            and batch_size is None
            and device is NO_DEFAULT
            and names is NO_DEFAULT
            and not recurse
        ):
            return self._build({}, self._batch_size, self._device, self._names)
        size = None if batch_size is None else as_size(batch_size)
        if not isinstance(self._entries, dict) and (members := self._members(or_template=True)) is not None:
            stack = self._restack([member.empty(recurse, device=device) for member in members])
            if size is not None and size != self._batch_size:
                if self._is_non_tensor:
                    # Values have no entries to leave out. The dense form of a stack of values is not for users.
                    fits = self._batch_size[: len(size)] == size
                    return stack if fits else self._build({}, size, stack._device, None)
                return stack._dense().empty(recurse, batch_size=size, device=device, names=names)
            if names is not NO_DEFAULT:
                stack.names = names  # type: ignore[attr-defined]
            return stack
        target = self._device if device is NO_DEFAULT else (None if device is None else torch.device(device))
        own_names = names
        if names is NO_DEFAULT:
            own_names = self._names if batch_size is None else None
        entries: dict[str, Any] = {}
        if recurse:
            for name, value in self._entries.items():
                if isinstance(value, Structure):
                    entries[name] = value.empty(recurse=True, batch_size=batch_size, device=device, names=names)
        return self._build(entries, self._batch_size if size is None else size, target, own_names and list(own_names))

    def replace(self, *args: Any, **kwargs: Any) -> Self:
        """Make a shallow copy and replace or add entries, given as a mapping or as keyword arguments.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(1))
            >>> td.replace(a=torch.ones(1))["a"], td["a"]
            (tensor([1.]), tensor([0.]))

        Returns:
            a new container that shares the other tensors. Without arguments, this container.

        Raises:
            TypeError: the argument is not a mapping or a container, or several are given.
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

    def flatten_keys(self: SelfT, separator: str = ".", inplace: bool = False, is_leaf: IsLeaf | None = None) -> SelfT:
        """Put all leaves into one level, under their nested keys joined by `separator`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": {"b": torch.zeros(1)}})
            >>> with td.flatten_keys(".") as flat:
            ...     flat["a.c"] = torch.ones(1)
            >>> sorted(td["a"].keys())
            ['b', 'c']

        Args:
            separator: the text between the names.
            inplace: change this container instead of making a new one.
            is_leaf: takes a class and returns whether its instances count as leaves. They are then not flattened.

        Returns:
            a new container over the same tensors, not locked; with `inplace`, this container. As a context manager, it
            writes the entries back to their nested keys in the original at the end of the block.

        Raises:
            KeyError: two keys have the same joined name.
            RuntimeError: with `inplace`, the container is locked.
        """
        keys: list[Any] = []
        flat = self._flatten(separator, is_leaf, keys)
        undo = _Unflatten(separator, keys)
        if inplace:
            self._refuse_if_locked("flatten the keys in place")
            self._replace_entries(flat)
            return remember_state(self, _KeysInPlace(undo, "unflatten"))
        return remember(flat, self, undo)

    def _flatten(self, separator: str, is_leaf: IsLeaf | None, keys: list[Any]) -> Self:
        """Return a container with all leaves in one level. Adds their nested keys to `keys`, in the same order."""
        if (members := self._members(or_template=True)) is not None:
            return self._restack([member._flatten(separator, is_leaf, keys) for member in members])
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

    def unflatten_keys(self: SelfT, separator: str = ".", inplace: bool = False) -> SelfT:
        """Split the names at `separator` and nest the entries accordingly, the reverse of :meth:`flatten_keys`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> list(TensorDict({"a.b": torch.zeros(1)}).unflatten_keys().keys(True, True))
            [('a', 'b')]

        Args:
            separator: the text between the parts of a name.
            inplace: change this container instead of making a new one.

        Returns:
            a new container over the same tensors, not locked; with `inplace`, this container. As a context manager, it
            writes the entries back to the original at the end of the block, under their joined names.

        Raises:
            KeyError: a name leads into an entry that is a tensor.
            RuntimeError: with `inplace`, the container is locked.
        """
        tree = self._nest(separator)
        undo = _Flatten(separator, self)
        if inplace:
            self._refuse_if_locked("unflatten the keys in place")
            self._replace_entries(tree)
            return remember_state(self, _KeysInPlace(undo, "flatten"))
        return remember(tree, self, undo)

    def _nest(self, separator: str, places: Mapping[str, Path] | None = None) -> Self:
        """Nest the entries by the parts of their names, or at the path that `places` has for a name.

        Containers at the same path are merged.
        """
        if (members := self._members(or_template=True)) is not None:
            return self._restack([member._nest(separator, places) for member in members])
        root: Any = self._build({}, self._batch_size, self._device, self._names)
        # The entries of all new containers, by their path. The loop also looks them up by the joined name of the path.
        levels: dict[Any, Any] = {(): root._entries}
        for name, value in self._entries.items():
            path = places.get(name) if places else None
            if path is not None:
                _place(root, path, value, levels)
                continue
            parent, found, last = name.rpartition(separator)
            level = levels.get(parent) if found else root._entries
            if level is None:
                level = levels[parent] = _enter_level(root, tuple(parent.split(separator)), levels)
            if last in level:
                _place(root, tuple(name.split(separator)), value, levels)
            else:
                level[last] = value
        return root  # type: ignore[no-any-return]

    def _replace_entries(self, other: Any) -> None:
        """Replace all entries of this container by the entries of `other`, a container of the same kind."""
        if (members := self._members(or_template=True)) is not None:
            with self._at_once():
                for member, piece in zip(members, other._members(or_template=True), strict=True):
                    member._replace_entries(piece)
            return
        entries = dict(other._entries)
        if self._wrapped_container()._is_in_file:
            # New entries may be read from old ones, so write first and delete then. Skip unchanged nested containers.
            own: Any = self._entries
            stay = {name for name, value in entries.items() if name in own and own.node(name) is value}
            deletions = set(own) - entries.keys()
            if deletions:
                own.refuse_deletion()
            with self._at_once(), replacing():
                own.update({name: value for name, value in entries.items() if name not in stay})
                for name in deletions:
                    del own[name]
            return
        for name in list(self._entries):
            del self._entries[name]
        for name, value in entries.items():
            self._entries[name] = value

    def rename_keys(self, mapping: Mapping[Any, Any], *, strict: bool = True) -> Self:
        """Make a shallow copy in which entries have other nested keys.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(1), n=TensorDict(x=torch.ones(1)))
            >>> list(td.rename_keys({"a": ("b", "c"), ("n", "x"): "a"}).keys(True))
            [('b', 'c'), 'b', 'a']

        Args:
            mapping: the new nested key for each old one. All entries move at once, so keys can be swapped. A nested
                container moves with its entries. A nested container that loses its last entry goes, unless it is a
                tensorclass.
            strict: raise an error for a missing old key, instead of ignoring it.

        Returns:
            a new container over the same tensors, not locked. In a lazy stack, the entries of each member move.

        Raises:
            KeyError: an old key is missing, with `strict`.
            ValueError: an entry exists at a new key and does not move, or lies above it; or the result would depend on
                the order of the keys, because two keys are the same, or one is inside another.
            AttributeError: a new key is no field of this tensorclass.
        """
        moves = _parse_moves(mapping)
        for target in moves.values():
            self._check_field(target[0])
        parts = _copy_parts(self)
        found = [_take_entries(part, moves, strict) for part in parts]
        for path in _find_emptied(parts, moves, {source for entries in found for source in entries}):
            for part in parts:
                if part._has(path):
                    part.del_(path)
        for part, entries in zip(parts, found, strict=True):
            for source, value in entries.items():
                _put_entry(part, moves[source], value)
        return _join_parts(self, iter(parts))  # type: ignore[no-any-return]

    def split_keys(
        self,
        *key_sets: Any,
        inplace: bool = False,
        default: object = NO_DEFAULT,
        strict: bool = True,
        reproduce_struct: bool = False,
    ) -> tuple[Self, ...]:
        """Split the entries by keys: one container for each set of keys, and one for the remaining entries.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> one, two, rest = TensorDict(a=0, b=0, c=0).split_keys(["a"], {"b": "d"})
            >>> list(one.keys()), list(two.keys()), list(rest.keys())
            (['a'], ['d'], ['c'])

        Args:
            *key_sets: lists of nested keys, or mappings from a nested key to the key in the result.
            inplace: remove the entries from this container and return it as the last one.
            default: the entry for missing keys.
            strict: raise an error for a missing key without a default, instead of ignoring it.
            reproduce_struct: give every result all nested containers of this one, even without entries.

        Returns:
            a tuple of new containers over the same tensors.

        Raises:
            KeyError: a key is missing, or occurs in two sets.
            RuntimeError: with `inplace`, the container is locked.
        """
        if inplace:
            self._refuse_if_locked("split the keys in place")
        moves = [list(keys.items()) if isinstance(keys, Mapping) else [(key, key) for key in keys] for keys in key_sets]
        *outs, last = self._split_by(moves, default if default is not NO_DEFAULT or strict else None, reproduce_struct)
        if inplace:
            self._replace_entries(last)
            last = self
        return (*outs, last)

    def _split_by(self, moves: list[list[tuple[Any, Any]]], default: object, reproduce_struct: bool) -> list[Any]:
        """Return a container for each list of (old key, new key) pairs, and one for the remaining entries."""
        if (members := self._members(or_template=True)) is not None:
            columns = [member._split_by(moves, default, reproduce_struct) for member in members]
            return [self._restack(column) for column in zip(*columns, strict=True)]
        last = self.copy()
        kept: dict[str, Any] = last._entries if isinstance(last._entries, dict) else {}
        outs: list[Any] = []
        for pairs in moves:
            out = self.empty(recurse=reproduce_struct)
            for old, new in pairs:
                if type(old) is str and old in kept and type(new) is str:
                    # The entry fits there, because `out` has the batch size and device of this container.
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

        Args:
            *keys: nested keys.
            default: the entry for missing keys.
            strict: raise an error for a missing key without a default, instead of ignoring it.
            filter_empty: `False` gives the result all nested containers of this one, even without entries.

        Raises:
            KeyError: a key is missing.
            RuntimeError: the container is locked.
        """
        out, _ = self.split_keys(keys, inplace=True, default=default, strict=strict, reproduce_struct=not filter_empty)
        return out

    def filter_empty_(self) -> Self:
        """Delete the nested containers that have no leaves at any depth; returns the same container.

        Raises:
            RuntimeError: the container is locked.
        """
        self._refuse_if_locked("filter empty containers")
        if (members := self._members(or_template=True)) is not None:
            with self._at_once():
                for member in members:
                    member.filter_empty_()
            return self
        deletions: list[tuple[Any, str]] = []
        self._list_empty(deletions)
        _delete(deletions, "filter empty containers")
        return self

    def _list_empty(self, deletions: list[tuple[Contract, str]]) -> None:
        """Add the nested containers without leaves to `deletions`, as pairs of their parent and their name."""
        for name, value in self._structure().items():
            if isinstance(value, Structure):
                if value.is_empty():
                    deletions.append((self, name))
                else:
                    value._list_empty(deletions)


class _Flatten:
    """Undoes `unflatten_keys`: flattens the containers that it created, and keeps containers that existed before."""

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
        """The names by their parts. They are split when a block ends, because most calls are not used as a block.

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
            for new, item in self._flatten(name, value):
                if new in entries:
                    raise KeyError(f"flatten_keys: two entries would be called {new!r}")
                entries[new] = item
        return tree._build(entries, tree._batch_size, tree._device, tree._names)

    def _flatten(self, name: str, value: Any) -> list[tuple[str, object]]:
        """Return the flat entries for one entry of the tree, as (name, entry) pairs."""
        if not is_node(value) or value._is_non_tensor:
            return [(name, value)]
        if name not in self.nodes:
            return [(self.separator.join((name, *path_of(key))), item) for key, item in _all_leaves(value)]
        # The container existed before `unflatten_keys`, which moved the entries at the paths `merged` into it. Take
        # only these out again.
        merged = [path for path in self.names if len(path) > 1 and path[0] == name and value._has(path[1:])]
        kept = value.exclude(*[path[1:] for path in merged]) if merged else value
        return [(name, kept), *[(self.names[path], value._find(path[1:])) for path in merged]]


class _KeysInPlace:
    """Undoes `flatten_keys` or `unflatten_keys` with `inplace=True`.

    This is a class because compiled code cannot return a bound method.
    """

    def __init__(self, undo: Callable[[Any], Any], done: str) -> None:
        self.undo, self.done = undo, done

    def __call__(self, container: Any) -> None:
        container._refuse_if_locked(f"{self.done} the keys in place")
        container._replace_entries(self.undo(container))


class _Unflatten:
    """Undoes `flatten_keys`: returns flattened entries to their old keys, and splits the names of new entries."""

    def __init__(self, separator: str, keys: list[Any]) -> None:
        self.separator = separator
        self.keys = keys

    def __call__(self, container: Any) -> Any:
        return container._nest(self.separator, self._find_old_paths())

    def _find_old_paths(self) -> dict[str, Path]:
        """Return the old paths of entries that had the separator in a name. Splitting their joined name would fail."""
        paths = map(path_of, self.keys)
        return {self.separator.join(path): path for path in paths if any(self.separator in name for name in path)}


def _place(root: Any, path: Path, value: Any, levels: dict[Any, Any]) -> None:
    """Put an entry at a path below `root`. A container is merged with an existing one."""
    level = _enter_level(root, path[:-1], levels)
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


def _enter_level(root: Any, path: Path, levels: dict[Any, Any]) -> Any:
    """Return the entries of the container at a path below `root`, creating it if needed, and add them to `levels`.

    An existing container is replaced by a copy, so that the original does not change.
    """
    level = levels[()]
    for depth, name in enumerate(path, 1):
        prefix = path[:depth]
        if prefix not in levels:
            child = level.get(name)
            if child is not None and not isinstance(child, Contract):
                raise KeyError(f"unflatten_keys: {joined(prefix)!r} would be both a tensor and a container")
            child = level[name] = root._make_child() if child is None else child.copy()
            levels[prefix] = child._entries
        level = levels[prefix]
    return level


def _delete(deletions: list[tuple[Contract, str]], what: str) -> None:
    """Delete entries, given as pairs of container and name. If one of the containers is locked, delete none."""
    for node, name in deletions:
        if node._locked:
            raise_locked(f"{what}, which deletes {name!r} from a locked nested container")
    for node, name in deletions:
        node._entries.pop(name, None)


def _restrict_to_member(member: Contract, wanted: dict[str, object]) -> dict[str, Any]:
    """Return the wanted names that a member of a lazy stack has."""
    return {name: below for name, below in wanted.items() if name in member._entries}


def _want(wanted: dict[str, Any], path: Path) -> None:
    """Add a path to a tree of wanted names. In this tree, `None` selects an entry as a whole."""
    for name in path[:-1]:
        if name in wanted and wanted[name] is None:
            return
        wanted = wanted.setdefault(name, {})
    wanted[path[-1]] = None


# --- renaming ---------------------------------------------------------------------------------------------------------


def _parse_moves(mapping: Mapping[Any, Any]) -> dict[Path, Path]:
    """Return the new path for each old one.

    Raises:
        ValueError: the result would depend on the order of the keys.
    """
    moves: dict[Path, Path] = {}
    for old, new in mapping.items():
        source = path_of(old)
        if source in moves:
            raise ValueError(f"rename_keys: the old key {joined(source)!r} is given twice")
        moves[source] = path_of(new)
    for side, paths in (("old", list(moves)), ("new", list(moves.values()))):
        known = set(paths)
        if len(known) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise ValueError(f"rename_keys: the {side} key {joined(twice)!r} is given twice")
        for path in paths:
            if above := [path[:depth] for depth in range(1, len(path)) if path[:depth] in known]:
                raise ValueError(f"rename_keys: the {side} key {joined(path)!r} is inside of {joined(above[0])!r}")
    return moves


def _copy_parts(node: Any) -> list[Any]:
    """Return shallow copies of the members of a lazy stack, and of their members; of another container one copy."""
    members = node._members(or_template=True)
    return [node.exclude().copy()] if members is None else [part for member in members for part in _copy_parts(member)]


def _join_parts(node: Any, parts: Iterator[Any]) -> Any:
    """Stack the results of `_copy_parts` as they were stacked in `node`."""
    members = node._members(or_template=True)
    return next(parts) if members is None else node._restack([_join_parts(member, parts) for member in members])


def _take_entries(part: Any, moves: dict[Path, Path], strict: bool) -> dict[Path, Any]:
    """Remove the entries at the old paths, and return them."""
    found = {source: part._peek(source) for source in moves if strict or part._has(source)}
    for source, value in found.items():
        if value is None:
            raise part._make_missing_error(joined(source))
        part.del_(source)
    return found


def _find_emptied(parts: list[Any], moves: dict[Path, Path], found: set[Path]) -> list[Path]:
    """Return the paths of nested containers that have lost all entries in all parts, the deepest first."""
    above = {source[:depth] for source in found for depth in range(1, len(source))}
    filled = {moves[source][:depth] for source in found for depth in range(1, len(moves[source]))}
    emptied: list[Path] = []
    for path in sorted(above - filled, key=len, reverse=True):
        if all(node is None or _has_only(node, path, emptied) for node in (part._peek(path) for part in parts)):
            emptied.append(path)
    return emptied


def _has_only(node: Any, path: Path, emptied: list[Path]) -> bool:
    """Return whether a container has no entries but emptied containers, and declares no fields."""
    if (members := node._members(or_template=True)) is not None:
        return all(_has_only(member, path, emptied) for member in members)
    return not hasattr(node, "__expected_keys__") and all((*path, name) in emptied for name in node._structure())


def _put_entry(part: Any, target: Path, value: object) -> None:
    if part._has_anywhere(target):
        raise ValueError(f"rename_keys: the entry {joined(target)!r} exists and keeps its key")
    for depth in range(1, len(target)):
        entry = part._peek(target[:depth])
        if entry is not None and not is_node(entry):
            raise ValueError(
                f"rename_keys: the new key {joined(target)!r} leads through {joined(target[:depth])!r}, which is no "
                "container"
            )
    part._write(target, value)
