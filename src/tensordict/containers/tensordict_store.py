"""TensorDictStore: the container whose entries are on a Redis server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tensordict.containers.dense import TensorDict
from tensordict.containers.persistent_tensordict import PersistentTensorDict
from tensordict.containers.stacked_store import LazyStackedTensorDictStore
from tensordict.core import pytree, registry
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.shapes import as_size
from tensordict.core.signatures import spells
from tensordict.io.specification import check_levels, find_class
from tensordict.io.stores import entries as stored_entries
from tensordict.io.stores.array_store import SIZE, Group
from tensordict.io.stores.redis import Server
from tensordict.io.stores.redis_stacks import StackServer
from tensordict.io.stores.redis_wire import Address

__all__ = ["TensorDictStore"]


@pytree.register
@registry.register
class TensorDictStore(PersistentTensorDict):
    """Keep a container on a Redis server, or one of the same protocol, and share it between processes.

    - Reading an entry fetches it as a tensor in memory. An index fetches only the selected bytes:
      `store[torch.randint(len(store), (256,))]` is a mini-batch, in one request for all entries.
    - Writing an entry sends it to the server. In-place operations do the same: `store[3] = item`, `set_`,
      `store.mul_(2)`. Each call sends one request, which the server executes completely or not at all. Tensors of more
      than 32 MiB are uploaded first, in several requests.
    - A nested container is read as a `TensorDictStore`. Results of operations are `TensorDict`s in memory.
    - Processes that write different entries, or different rows of an entry, do not disturb each other. Writing rows of
      an entry that another process has deleted, or replaced by another shape, raises an error and has no effect.
    - A request without an answer is repeated for about a second, then raises a `ConnectionError`. The same call works
      once the server is back.

    Values are stored as JSON, never as pickles. The layout on the server is the layout of the reference, in both
    directions. Additional keys hold the names of dims, and the batch sizes of nested containers and of empty ones. A
    tensor has at most 512 MiB, unless the setting `proto-max-bulk-len` of the server allows more.

    Args:
        backend: name of the kind of server: `"redis"`, `"dragonfly"`, `"keydb"`, or another one with this protocol. It
            is only informative.
        host, port, db: the server, and the number of its data base.
        unix_socket_path: the socket of a server on this machine; replaces `host` and `port`.
        prefix: prefix of all keys on the server.
        batch_size: the leading dims that all entries share; by default the stored batch size, or no batch dims.
        device: device of the fetched tensors; by default the stored device.
        client: a `redis.Redis` to send requests through, or a `redis.asyncio.Redis` to copy the settings from. By
            default, containers on one server share a pool of connections.
        td_id: the identifier of a container on the server; a new one by default. See :attr:`td_id`.
        cache_metadata: cache shapes and dtypes between calls, which saves a request each. Reads and writes still
            compare them on the server, so changes of other processes are noticed.
        ttl: seconds without a write after which the server deletes the container; `None` for never. Writing rows
            renews the time after a tenth of it.
        **connection: further arguments of `redis.Redis`: `password=`, `ssl=`, `socket_timeout=`, `max_connections=`.
            The default password is in the environment variable `TENSORDICT_REDIS_PASSWORD`. Pickling a container whose
            connection has a secret raises `PicklingError`, unless `allow_secrets=True` is given.

    Raises:
        ConnectionError: the server does not answer.
        ValueError: an entry does not begin with the batch size.
        ModuleNotFoundError: the package redis is not installed.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.store import TensorDictStore
        >>> store = TensorDictStore(host="localhost", batch_size=[1000])  # doctest: +SKIP
        >>> store["image"] = torch.zeros(1000, 8, 8)  # doctest: +SKIP
        >>> store[3] = TensorDict(image=torch.ones(8, 8))  # doctest: +SKIP
        >>> there = TensorDictStore.from_store(host="localhost", td_id=store.td_id)  # doctest: +SKIP
        >>> there[[3, 1, 3]]["image"].mean((1, 2))  # doctest: +SKIP
        tensor([1., 0., 1.])
    """

    _store: Server
    # An index fetches the rows of all entries in one request.
    _gives_views = False
    # The argument `storage` of `from_schema` that selects this class.
    _schema_storage: ClassVar[str | None] = "redis"

    def __init__(
        self,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        batch_size: object = None,
        device: object = None,
        client: Any = None,
        td_id: str | None = None,
        cache_metadata: bool = True,
        ttl: float | None = None,
        **connection: Any,
    ) -> None:
        address = Address.of(
            backend, host, port, db, unix_socket_path, prefix, td_id, cache_metadata, client, ttl, **connection
        )
        self._adopt(Server(address), batch_size, device)

    def _adopt(self, store: Server, batch_size: object, device: object) -> None:
        """Be the container of a store."""
        if store.is_stack:
            raise ValueError(f"{store.name} is a lazy stack: LazyStackedTensorDictStore.from_store opens it")
        size = None if batch_size is None else as_size(batch_size)
        with store.together():
            if not store.exists:
                size = torch.Size(()) if size is None else size
            if device is not None:
                store.set_header("__device__", str(as_device(device)).encode())
            self._open(store.root, (), {}, store.device)
            self._adopt_size(size, True)

    @property
    def td_id(self) -> str:
        """The identifier of the container on its server, for :meth:`from_store`."""
        return self._store.address.td_id

    @property
    def _td_id(self) -> str:
        # Programs written for the reference implementation read this private name.
        return self._store.address.td_id

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
        tensorclass_cls: type | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """The container of an identifier that is on a server, whichever process wrote it.

        Args:
            backend, host, port, db, unix_socket_path, prefix: as of the class.
            td_id: its identifier there; see :attr:`td_id`.
            device: tensors are moved there when they are fetched; `None` for the device that is stored.
            tensorclass_cls: a tensorclass to give it as, or the module and name of one that this program has imported;
                `None` for the class that it was written as.
            **kwargs: further arguments of the class.

        Returns:
            a :class:`TensorDictStore`, of a lazy stack a :class:`LazyStackedTensorDictStore`; or the tensorclass over
            one.

        Raises:
            KeyError: the server has no container of this identifier.
            UnsupportedEntryError: this program does not know its tensorclass. Nothing is imported because of what is
                on a server: import the module first.
            ConnectionError: the server does not answer.
        """
        address = Address.of(backend, host, port, db, unix_socket_path, prefix, td_id, **kwargs)
        store = Server(address)
        if not store.exists:
            raise address.missing()
        target = store.device if device is None else as_device(device)
        if store.is_stack:
            found = LazyStackedTensorDictStore._open_store(StackServer(address), target)
        else:
            self = object.__new__(cls)
            self._open(store.root, (), {}, target)
            self._adopt_size(None, True)
            found = self if tensorclass_cls is not None else self._as_saved_class()
        if tensorclass_cls is None:
            return found
        kind: Any = find_class(tensorclass_cls) if isinstance(tensorclass_cls, str) else tensorclass_cls
        return kind.from_tensordict(found._wrapped_container())

    @classmethod
    @spells(Address.of)
    def from_tensordict(
        cls,
        td: Any,
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
        """Write a container to a server; :meth:`to_store` does the same.

        Args:
            td: the container.
            backend, host, port, db, unix_socket_path, prefix: as of the class.
            device: tensors are moved there when they are fetched; `None` for the device of `td`.
            **kwargs: further arguments of the class.

        Returns:
            a :class:`TensorDictStore`, of a lazy stack a :class:`LazyStackedTensorDictStore`; or the tensorclass over
            one.

        Raises:
            UnsupportedEntryError: an entry cannot be stored; it is named, and nothing was written.
            ConnectionError: the server does not answer.
        """
        return cls._write_to(Address.of(backend, host, port, db, unix_socket_path, prefix, **kwargs), td, device)

    @classmethod
    def _write_to(cls, address: Address, td: Any, device: object) -> Any:
        """Write a container to an address."""
        if isinstance(td, Contract) and not td._is_non_tensor and td._members():
            return LazyStackedTensorDictStore._write_to(address, td, device)
        check_levels(td)
        self = object.__new__(cls)
        device = td.device if device is None else device
        store = Server(address)
        with store.together():
            store.set_header("__device__", str(as_device(device)).encode() if device is not None else b"")
            stored_entries.write_container(store.root, td, {})
        self._open(store.root, (), {}, store.device)
        self._adopt_size(None, False)
        return self._as_saved_class()

    @classmethod
    @spells(Address.of)
    def from_dict(  # type: ignore[override]
        cls,
        input_dict: object,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        auto_batch_size: bool = False,
        batch_size: object = None,
        device: object = None,
        **kwargs: Any,
    ) -> TensorDictStore:
        """Write a (nested) dict, or another container, to a server.

        Args:
            input_dict: what :meth:`TensorDict.from_dict` takes.
            backend, host, port, db, unix_socket_path, prefix: as of the class.
            auto_batch_size: without a `batch_size`, give every level the longest batch size that its entries share.
            batch_size: the batch size; by default the batch size of the container, and no batch dims for a dict.
            device: device of the fetched tensors.
            **kwargs: further arguments of the class.

        Returns:
            a :class:`TensorDictStore`.
        """
        if batch_size is None and isinstance(input_dict, Contract) and not auto_batch_size:
            batch_size = input_dict._batch_size
        source = TensorDict.from_dict(input_dict, auto_batch_size=auto_batch_size, batch_size=batch_size)
        return cls._write_to(Address.of(backend, host, port, db, unix_socket_path, prefix, **kwargs), source, device)  # type: ignore[no-any-return]

    @classmethod
    def _make_zeros(cls, entries: Mapping[Any, tuple[torch.Size, torch.dtype]], size: torch.Size, **kwargs: Any) -> Any:
        """Create a container of zeros on the server, without sending them; see `from_schema`."""
        self = object.__new__(cls)
        device = kwargs.pop("device", None)
        store = Server(Address.of(**kwargs))
        with store.together():
            self._adopt(store, size, device)
            groups: dict[Any, Group] = {(): store.root}
            for path, (shape, dtype) in entries.items():
                key, name = tuple(path), path[-1]
                for outer in (key[:depth] for depth in range(1, len(key))):
                    if outer not in groups:
                        groups[outer] = groups[outer[:-1]].new_group(outer)
                        groups[outer].set_attribute(SIZE, list(size))
                        groups[outer[:-1]].attach(outer[-1], groups[outer])
                group = groups[key[:-1]]
                stored_entries.check_leaf(store, torch.empty((), dtype=dtype), key)
                group.attach(name, group.new_array(key, (*size, *shape), dtype, {}))
        return self

    def to_local(self) -> Any:
        """Fetch a copy into memory, like :meth:`to_tensordict`, in one request per 32 MiB."""
        return self.to_tensordict()

    def clear_redis(self) -> None:
        """Delete the container on the server. It has no entries then, and can be written to again."""
        self._refuse_if_locked("clear it")
        self._store.clear()
        self._items.clear()
        self._nested.clear()


TensorDictStore._plain = TensorDictStore
