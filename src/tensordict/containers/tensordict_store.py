"""TensorDictStore: the container whose entries are on a Redis server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tensordict.containers.dense import TensorDict
from tensordict.containers.on_disk import UnreadMixin
from tensordict.containers.persistent_tensordict import PersistentTensorDict
from tensordict.containers.stacked_store import LazyStackedTensorDictStore
from tensordict.core import pytree, registry
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.shapes import as_size
from tensordict.io.specification import check_levels, find_class
from tensordict.io.stores import entries as stored_entries
from tensordict.io.stores.redis import Server
from tensordict.io.stores.redis_stacks import StackServer
from tensordict.io.stores.redis_wire import Address

__all__ = ["TensorDictStore"]


@pytree.register
@registry.register
class TensorDictStore(PersistentTensorDict):
    """A container whose entries are on a Redis server, or another one of its protocol, which many processes share.

    - Reading an entry fetches it, and gives a tensor in memory. An index fetches only the bytes that it takes:
      `store[torch.randint(len(store), (256,))]` is a mini-batch, in one request whatever the number of entries.
    - Writing an entry sends it, and so does everything that writes in place: `store[3] = item`, `set_`,
      `store.mul_(2)`. All that one call writes goes in one request, and is on the server whole or not at all; tensors
      of more than 32 MiB go ahead in several, under a name that nobody reads.
    - A nested container is read as a `TensorDictStore`. The results of operations are in memory, as `TensorDict`s.
    - Processes that write different entries, or different rows of one, lose nothing. A process that writes rows of an
      entry that another one has replaced by one of another shape, or deleted, gets an error and has written nothing.
    - A request that gets no answer is sent again for about a second, as every request may be; then it is a
      `ConnectionError`, and the same call works once the server is back.

    Values that are no tensors are kept as JSON, never as pickles. The layout on the server is that of the reference,
    which can read what is written here, and the other way round; names of dims, batch sizes of nested containers and
    nested containers without entries are kept beside it. The server holds at most 512 MiB in one tensor, unless its
    `proto-max-bulk-len` says otherwise.

    Args:
        backend: the kind of server: `"redis"`, `"dragonfly"`, `"keydb"`, or any other that speaks its protocol. It is
            kept for the reader; all are spoken to alike.
        host, port, db: the server, and the number of its data base.
        unix_socket_path: the socket of a server on this machine, in place of `host` and `port`.
        prefix: what the names of all keys on the server begin with.
        batch_size: the leading dims that all entries share; `None` for that which is stored, else no batch dims.
        device: tensors are moved there when they are fetched; `None` for the device that is stored.
        client: a `redis.Redis` to use in place of a connection of its own; of a `redis.asyncio.Redis` the settings are
            taken over. Containers on one server share one pool of connections.
        td_id: the identifier of a container that is on the server; a new one by default. See :attr:`td_id`.
        cache_metadata: keep shapes and dtypes between calls, which saves a request each. They are checked by the server
            with each read and write, so that what another process has changed is never read wrongly.
        ttl: after how many seconds without a write the server forgets the container; `None` for never. Writing rows
            sets the time anew when a tenth of it has passed.
        **redis_kwargs: further arguments of `redis.Redis`: `password=`, `ssl=`, `socket_timeout=`, `max_connections=`.
            The environment variable `TENSORDICT_REDIS_PASSWORD` gives a password where they give none. Pickling a
            container whose connection has a secret is a `PicklingError`, unless `allow_secrets=True` is among them.

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
    # What `from_schema` makes of this class.
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
        **redis_kwargs: Any,
    ) -> None:
        server = (backend, host, port, db, unix_socket_path, prefix, td_id, cache_metadata, client, ttl)
        self._adopt(Server(Address.of(*server, **redis_kwargs)), batch_size, device)

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
            KeyError: there is no such container on the server.
            UnsupportedEntryError: its tensorclass is not known to this program. Nothing is imported because of what is
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
        if isinstance(td, Contract) and not td._is_non_tensor and td._members():
            return LazyStackedTensorDictStore.from_lazy_stack(
                td, backend=backend, host=host, port=port, db=db, unix_socket_path=unix_socket_path, prefix=prefix,
                device=device, **kwargs,
            )  # fmt: skip
        check_levels(td)
        self = object.__new__(cls)
        device = td.device if device is None else device
        store = Server(Address.of(backend, host, port, db, unix_socket_path, prefix, **kwargs))
        with store.together():
            store.set_header("__device__", str(as_device(device)).encode() if device is not None else b"")
            stored_entries.write_container(store.root, td, {})
        self._open(store.root, (), {}, store.device)
        self._adopt_size(None, False)
        return self._as_saved_class()

    @classmethod
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
            batch_size: the batch size; that of a container, and none for a dict, by default.
            device: tensors are moved there when they are fetched.
            **kwargs: further arguments of the class.

        Returns:
            a :class:`TensorDictStore`.
        """
        if batch_size is None and isinstance(input_dict, Contract) and not auto_batch_size:
            batch_size = input_dict._batch_size
        source = TensorDict.from_dict(input_dict, auto_batch_size=auto_batch_size, batch_size=batch_size)
        server: Mapping[str, Any] = {
            "backend": backend, "host": host, "port": port, "db": db, "unix_socket_path": unix_socket_path,
            "prefix": prefix,
        }  # fmt: skip
        result: TensorDictStore = cls.from_tensordict(source, device=device, **server, **kwargs)
        return result

    @classmethod
    def _make_zeros(cls, entries: Mapping[Any, tuple[torch.Size, torch.dtype]], size: torch.Size, **kwargs: Any) -> Any:
        """Make a container of zeros on the server, without sending them; see `from_schema`."""
        self = object.__new__(cls)
        device = kwargs.pop("device", None)
        store = Server(Address.of(**kwargs))
        with store.together():
            self._adopt(store, size, device)
            for path, (shape, dtype) in entries.items():
                *outer, name = path
                group = store.root
                for part in outer:
                    group = group.child(part, size)
                key = tuple(path)
                stored_entries.check_leaf(store, torch.empty((), dtype=dtype), key)
                group.put(name, group.new_array(key, (*size, *shape), dtype, {}))
        return self

    def to_local(self) -> Any:
        """A copy in memory, the same as :meth:`to_tensordict`, fetched in one request for each 32 MiB."""
        return self.to_tensordict()

    def clear_redis(self) -> None:
        """Delete all that the server has of this container; it is without entries then, and can be written to again."""
        self._refuse_if_locked("clear it")
        self._store.clear()
        self._items.clear()
        self._nested.clear()


class _UnreadStore(UnreadMixin, TensorDictStore):
    """See `UnreadMixin`."""


TensorDictStore._unread_class = _UnreadStore
TensorDictStore._plain = TensorDictStore
