"""LazyStackedTensorDictStore: the lazy stack whose elements are on a Redis server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from tensordict.containers.lazy import LazyStackedTensorDict
from tensordict.containers.lazy.members import Members
from tensordict.containers.lazy.vmapping import flatten_stack, flatten_stack_with_keys, unflatten_stack
from tensordict.containers.on_disk import _all_of
from tensordict.containers.persistent_tensordict import PersistentTensorDict
from tensordict.core import pytree, registry
from tensordict.core.contract import Contract, identity
from tensordict.core.devices import as_device
from tensordict.core.exceptions import StackError
from tensordict.core.indices import leaf_index
from tensordict.core.shapes import as_new_dim, as_size
from tensordict.core.signatures import spells
from tensordict.io.specification import check_levels, class_name, find_class, is_stored_as_class
from tensordict.io.stores import entries as stored_entries
from tensordict.io.stores.array_store import StaleError
from tensordict.io.stores.entries import read_class
from tensordict.io.stores.redis_stacks import ElementGroup, StackServer
from tensordict.io.stores.redis_wire import Address

__all__ = ["LazyStackedTensorDictStore"]

# Attribute with the name of the stack dim.
_NAME = "_stack_name"


@pytree.register
class StackElement(PersistentTensorDict):
    """A member of a lazy stack on a server. Writes go to the server at once."""

    _group: ElementGroup
    _store: StackServer

    def __getstate__(self) -> dict[str, Any]:
        group = self._group
        state = {"address": self._store.address, "at": group.at, "place": group.place, "key": group.key}
        return {**state, "device": self._device, "locked": self._locked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = StackServer(state["address"]).element(state["at"], state["place"], state["key"])
        self._open(group, (), {}, state["device"])
        self._adopt_size(None, False)
        if state["locked"]:
            self._lock_tree()


StackElement._plain = StackElement


def _over(group: ElementGroup, device: Any) -> StackElement:
    made = object.__new__(StackElement)
    made._open(group, (), {}, device)
    made._adopt_size(None, False)
    return made


class Elements(Members):
    """The members of a lazy stack on a server, or of a container nested in it; all of them or a selection."""

    __slots__ = ("group",)
    group: ElementGroup

    @classmethod
    def of(cls, group: ElementGroup, device: Any) -> Elements:
        """Wrap all members of the stack, or of a container nested in it."""
        server = group.store
        containers: list[Any] = [
            _over(server.element(at, group.place, group.key), device) for at in range(server.count)
        ]
        if group.place:
            containers = [container._as_saved_class() for container in containers]
        return cls.over(group, containers, server.dim, server.attributes_at("").get(_NAME))

    @classmethod
    def over(cls, group: ElementGroup, containers: list[Any], dim: int, name: str | None, path: Any = ()) -> Elements:
        made = cls(containers, dim, name=name, path=path)
        made.group = group
        return made

    def __reduce__(self) -> Any:
        # Pickle a selection of members one by one.
        return Members, (self.containers, self.dim, None, None, self.template, self.name, self.path)

    @property
    def server(self) -> StackServer:
        return self.group.store

    def together(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None] | None:
        server = self.server
        if server.is_together:
            return None
        return server.together() if fn is None else server.together(self.groups(), _all_of)

    def groups(self) -> list[ElementGroup]:
        """Return the groups of the members."""
        if len(self.containers) == self.server.count:
            return [self.group]
        inner = [container._wrapped_container() for container in self.containers]
        return [container._group for container in inner if isinstance(container, StackElement)]

    def read(self, name: str) -> Any:
        if len(self.containers) == self.server.count:
            for last in (False, True):
                try:
                    column = self._column(name)
                    break
                except KeyError:  # not compiled: a server is asked
                    return None
                except StaleError:
                    # Cached metadata was stale: another process replaced the entry.
                    if last:
                        raise
            if column is not None:
                return column
        with self.reading(name):
            return super().read(name)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        with self.server.together():
            group, server = self.group, self.server
            server.prefetch([server.element(found.at, group._below(name)) for found in self.groups()])
            yield

    def _column(self, name: str) -> Tensor | None:
        """Read a leaf of all members as one tensor; `None` if their shapes differ."""
        group = self.group
        array = self.server.column(group._below(name), (*group.key, name))
        if array is None:
            return None
        found: Any = array.tensor(self.containers[0]._device)
        return found.read().movedim(0, self.dim).contiguous()  # type: ignore[no-any-return]

    def _stack(self, name: str, containers: list[Any], template: Any) -> Any:
        if not containers or type(containers[0]) is not StackElement:
            return super()._stack(name, containers, template)
        inner = self.server.element(None, self.group._below(name), (*self.group.key, name))
        return LazyStackedTensorDictStore._at(
            Elements.over(inner, containers, self.dim, self.name, (*self.path, name)), len(self.containers)
        )

    def names(self) -> list[str]:
        return self.group.names()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.group.has(name)

    def write(self, name: str, pieces: Sequence[Any]) -> None:
        with self.server.together():
            super().write(name, pieces)

    def __delitem__(self, name: str) -> None:
        with self.server.together():
            super().__delitem__(name)

    def structure(self) -> dict[str, Any]:
        with self.server.together():
            return super().structure()

    def node(self, name: str) -> Any:
        with self.server.together():
            return super().node(name)


@registry.register
class LazyStackedTensorDictStore(LazyStackedTensorDict):
    """Keep a lazy stack on a Redis server, or one of the same protocol, and share it between processes.

    :meth:`~tensordict.TensorDictBase.to_store` of a lazy stack returns this class. Its members may differ in the shapes
    of their entries.

    - Reading an entry fetches it from all members in one request, and stacks it in memory. An integer index returns a
      member without fetching it: `store[3]["a"]` reads, and `store[3]["a"] = tensor` writes, one entry of one member.
      Any other index fetches the selected members in one request, as a lazy stack in memory.
    - Writing an entry, `update` and in-place operations send one request, which the server executes completely or not
      at all. A member may get an entry of another shape; the other members keep theirs. Processes that write different
      members do not disturb each other. If two processes change shapes in one entry at the same time, the second gets
      an error, and its call has no effect.
    - An entry is in all members, as tensors of one dtype or as containers. A value, or an entry that some members lack,
      raises an error that names it. Lazy stacks nested in members are stored as dense containers.
    - The number of members is fixed. :meth:`select` and :meth:`exclude` query each member; on `store.to_local()` they
      are faster.

    The layout on the server is the layout of the reference, in both directions. The reference does not see the names of
    dims and unequal batch sizes.

    Args:
        backend, host, port, db, unix_socket_path, prefix, device, client, cache_metadata, ttl, **connection: as of
            :class:`TensorDictStore`.
        count: the number of elements, at least 1.
        stack_dim: the dim that runs over them, in the batch size of the whole.
        inner_batch_size: the batch size of each element.
        td_id: the identifier of a stack that is on the server, of this count and these sizes; a new one by default.

    Raises:
        ConnectionError: the server does not answer.
        ValueError: the server has another container under this identifier.
        ModuleNotFoundError: the package redis is not installed.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> from tensordict.store import LazyStackedTensorDictStore
        >>> runs = lazy_stack([TensorDict(reward=torch.ones(length)) for length in (5, 3, 8)])
        >>> store = runs.to_store(host="localhost")  # doctest: +SKIP
        >>> there = LazyStackedTensorDictStore.from_store(host="localhost", td_id=store.td_id)  # doctest: +SKIP
        >>> there[2]["reward"].sum()  # doctest: +SKIP
        tensor(8.)
        >>> there[1]["reward"] = torch.zeros(4)  # doctest: +SKIP
        >>> there[[1, 2]].get("reward", as_list=True)[0]  # doctest: +SKIP
        tensor([0., 0., 0., 0.])
    """

    _entries: Elements
    # Saving it elsewhere stores a lazy stack in memory.
    _stored_as = "LazyStackedTensorDict"
    _is_in_file = True

    def __init__(
        self,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        count: int,
        stack_dim: int = 0,
        inner_batch_size: object,
        device: object = None,
        client: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        ttl: float | None = None,
        **connection: Any,
    ) -> None:
        size = as_size(inner_batch_size)
        if type(count) is not int or count < 1:
            raise ValueError(f"count is the number of elements, at least 1, got {count!r}")
        dim = as_new_dim(stack_dim, len(size))
        address = Address.of(
            backend, host, port, db, unix_socket_path, prefix, td_id, cache_metadata, client, ttl, **connection
        )
        store = StackServer(address, (count, dim, size))
        have = store.count, store.dim, store.inner_size
        if have != (count, dim, tuple(size)):
            raise ValueError(
                f"{store.name} has {have[0]} elements of batch size {list(have[2])} stacked along dim {have[1]}, and "
                f"not {count} of {list(size)} along dim {dim}; from_store opens it as it is"
            )
        target = None if device is None else as_device(device)
        if store.is_new:
            with store.together() as scope:
                scope.adds = True
                store.set_header("__device__", b"" if target is None else str(target).encode())
        elif target is not None:
            store.set_header("__device__", str(target).encode())
        self._adopt(store, target)

    def _adopt(self, store: StackServer, device: Any) -> None:
        self._size = None
        self._entries = Elements.of(store.element(None), store.device if device is None else device)

    @classmethod
    def _at(cls, members: Elements, count: int) -> Any:
        """Wrap members; a selection of the members of the server becomes a plain lazy stack."""
        if count < members.server.count:
            return LazyStackedTensorDict._over(members)
        self = object.__new__(cls)
        self._size, self._entries = None, members
        return self

    @classmethod
    def _over(cls, members: Members) -> Any:
        # Results of operations are in memory, or are a selection of the members.
        first = members.containers[0]._wrapped_container() if members.containers else None
        if type(first) is StackElement and not isinstance(members, Elements):
            store, place = first._store, first._group.place
            others = [member._wrapped_container() for member in members.containers]
            if all(type(other) is StackElement and other._store is store for other in others):
                group = store.element(None, place, first._group.key)
                members = Elements.over(group, members.containers, members.dim, members.name, members.path)
        return LazyStackedTensorDict._over(members)

    @property
    def _unread(self) -> Any:
        # The members read their entries when they are used.
        return self

    def _index(self, index: object) -> Any:
        store = self._entries
        picks = self._split_index(leaf_index(index, self._batch_size))
        if picks is not None and not picks.block and not picks.rest:
            return store.containers[picks.positions[0]]
        server = store.server
        if server.is_together:
            return super()._index(index)
        groups = (
            [store.group]
            if picks is None
            else [store.containers[at]._wrapped_container()._group for at in picks.positions]
        )
        with server.together(groups, _all_of):
            return super()._index(index)._map(identity)

    def _admit_member(self, member: object, first: Any = None) -> Any:
        raise StackError("the number of elements of a lazy stack on a server is fixed: store a longer one anew")

    def __getstate__(self) -> dict[str, Any]:
        group = self._entries.group
        state = {"address": group.store.address, "place": group.place, "key": group.key}
        return {**state, "device": self._entries.containers[0]._device, "locked": self._locked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = StackServer(state["address"]).element(None, state["place"], state["key"])
        self._size, self._entries = None, Elements.of(group, state["device"])
        if state["locked"]:
            self._lock_tree()

    @property
    def td_id(self) -> str:
        """The identifier of the stack on its server, for :meth:`from_store`."""
        return self._entries.server.address.td_id

    @property
    def _td_id(self) -> str:
        # The name that programs for the reference use.
        return self.td_id

    @classmethod
    @spells(Address.of)
    def from_lazy_stack(
        cls,
        lazy_td: Any,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        device: object = None,
        **kwargs: Any,
    ) -> Any:
        """Write a lazy stack to a server; :meth:`to_store` does the same.

        Args:
            lazy_td: the stack, or a tensorclass over one.
            backend, host, port, db, unix_socket_path, prefix: as of the class.
            device: tensors are moved there when they are fetched; `None` for the device of `lazy_td`.
            **kwargs: further arguments of :class:`TensorDictStore`, such as `ttl=` and `password=`.

        Returns:
            a :class:`LazyStackedTensorDictStore`, or the tensorclass over one.

        Raises:
            TypeError: `lazy_td` is not a lazy stack, or has no members.
            UnsupportedEntryError: an entry cannot be stored; it is named, and nothing was written.
            ConnectionError: the server does not answer.
        """
        return cls._write_to(Address.of(backend, host, port, db, unix_socket_path, prefix, **kwargs), lazy_td, device)

    @classmethod
    def _write_to(cls, address: Address, lazy_td: Any, device: object) -> Any:
        """Write a lazy stack to an address."""
        members = lazy_td._members() if isinstance(lazy_td, Contract) else None
        if not members:
            raise TypeError(f"a lazy stack of at least one member is needed, got {type(lazy_td).__name__}")
        check_levels(lazy_td)
        stack: Any = lazy_td._wrapped_container()
        target = stack._device if device is None else as_device(device)
        store = StackServer(address, (len(members), stack.stack_dim, members[0]._batch_size))
        with store.together() as scope:
            scope.adds = True
            store.set_header("__device__", b"" if target is None else str(target).encode())
            if is_stored_as_class(lazy_td):
                store.set_header("__tensorclass__", class_name(lazy_td).encode())
            if stack.stack_dim_name is not None:
                store.note("", {**store.attributes_at(""), _NAME: stack.stack_dim_name})
            for at, member in enumerate(members):
                stored_entries.write_container(store.element(at), member, {})
        return cls._open_store(store, target)

    @classmethod
    def _open_store(cls, store: StackServer, device: Any) -> Any:
        self = object.__new__(cls)
        self._adopt(store, device)
        name = read_class(store.element(None))
        return self if name is None else find_class(name)._wrap_container(self)

    @classmethod
    @spells(Address.of)
    def from_store(
        cls,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        td_id: str,
        device: object = None,
        **kwargs: Any,
    ) -> Any:
        """Open a lazy stack on a server by its identifier.

        Args:
            backend, host, port, db, unix_socket_path, prefix, **kwargs: as of the class.
            td_id: the identifier; see :attr:`td_id`.
            device: tensors are moved there when they are fetched; `None` for the device that is stored.

        Returns:
            a :class:`LazyStackedTensorDictStore`, or the tensorclass over one.

        Raises:
            KeyError: the server has no container of this identifier.
            ValueError: the container is not a lazy stack.
            UnsupportedEntryError: this program does not know its tensorclass.
            ConnectionError: the server does not answer.
        """
        store = StackServer(Address.of(backend, host, port, db, unix_socket_path, prefix, td_id, **kwargs))
        return cls._open_store(store, None if device is None else as_device(device))

    def to_local(self) -> Any:
        """Fetch a copy into memory, a :class:`LazyStackedTensorDict`, in one request per 32 MiB."""
        return self._map(identity)

    def clear_redis(self) -> None:
        """Delete the stack on the server. It has no entries then, and can be written to again."""
        self._refuse_if_locked("clear it")
        self._entries.server.clear()

    def close(self) -> None:
        """Close this stack and its members. The data on the server stays."""
        self._entries.server.close()


pytree.register(LazyStackedTensorDictStore, flatten_stack, unflatten_stack, flatten_stack_with_keys)
