"""The keys of one container on a Redis server, and the requests that read and write them; for `redis.py`.

The layout is compatible with the reference, and was found by inspecting the keys that it writes. All keys begin with
`PREFIX:{ID}:`, so that a cluster keeps them together. A container with the identifier ID has these keys:

- `__batch_size__`, `__device__`, `__tensorclass__`: texts, the first a list in JSON;
- `__keys__`: a set of the paths of the leaves, names joined by dots;
- `d:PATH`: the elements of a leaf in C order, little-endian; or a value in JSON;
- `m:PATH`: a hash with `shape` (a list in JSON) and `dtype` (`torch.float32`), or `is_non_tensor` and `encoding`.

A lazy stack has `__type__` (`lazy_stack`), `__count__`, `__stack_dim__` and `__inner_batch_size__` instead of
`__batch_size__`. `d:PATH` concatenates the elements of its members, and `m:PATH` has `homogeneous`. If the shapes
differ, `homogeneous` is `0`, `shapes` lists all shapes, and `d:PATH:idx` has the byte offsets as 64-bit integers.

These are extensions of this package, which the reference ignores: `__groups__`, a hash with the attributes of nested
containers in JSON, by path; and in the hash of a leaf `_order`, its position in the order of creation, and `_form`, the
attributes of a value, and `_write`, the token of the last write that changed shapes. `t:UUID` is a temporary upload.
`__stop__` exists for a millisecond when a check fails, see `own.CHECK`.

The package redis implements the protocol, connection pools, addresses, authentication, encryption and retries.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from tensordict.core import extras
from tensordict.core.exceptions import SaveError, ServerFullError
from tensordict.core.keys import Path, entries_of
from tensordict.io.remote.credentials import GuardedConnection

# Largest request or answer in bytes. Larger tensors take several.
LIMIT = 32 << 20
# Milliseconds after which the server deletes an upload that was never used.
FORGOTTEN = 3_600_000
_TRIES = 4
_LARGE = 1 << 17
# The length of a SHA-1 digest in hexadecimal.
_DIGEST = 40
_LOOKED_AT = ("shape", "dtype", "is_non_tensor", "_form", "shapes")

# `redis_commands.lua` is a script that extends the commands of the server. Its arguments are commands, each with its
# number of words first. The script executes them and returns the answers. The first word is a command of the server, or
# one of these functions:
#
# - LOOK: returns the digest of all shapes of a leaf whose elements differ, its dtype and its form.
# - WRITE: writes pieces of an array, given by their length and offsets.
# - PLACE: like WRITE, with the pieces from an upload.
# - TAKE: renames an upload to the leaf, and leaves an empty upload, which a repeated request recognizes.
# - SPLICE: replaces a range of bytes by others of any length.
# - CHECK: returns 0 if a leaf (hash, data) still has this shape, dtype and length; or, without a shape, if an upload
#   exists. Otherwise it modifies a watched key, so that the following transaction is aborted, and returns 1; or 2 if
#   the write of this token was executed before. A full server refuses SET but accepts RENAME.
#
# A full server refuses transactions but executes scripts. They are slow with large data, so they are the fallback.
_FUNCTIONS = {"LOOK", "WRITE", "PLACE", "TAKE", "SPLICE", "CHECK"}
_FREEING = {"DEL", "HDEL", "SREM"}
Word = bytes | str | int | memoryview
Command = tuple[Word, ...]


@functools.cache
def _read_script() -> str:
    return files(__package__).joinpath("redis_commands.lua").read_text("utf-8")


def library() -> Any:
    """Import redis; raises an error that names the extra if it is missing."""
    return extras.require("redis", "redis")


@dataclass(frozen=True)
class Address:
    """The address of a container: the arguments of `redis.Redis`, and the identifier on the server.

    Attributes:
        ttl: seconds without a write after which the server deletes the container; `None` for never.
        connection: the arguments of `redis.Redis`; pickles omit their secrets.
        cached: cache shapes and dtypes of leaves between calls.
        client: an existing client. It is not pickled, but `connection` creates an equal one.
    """

    backend: str
    connection: GuardedConnection
    prefix: str
    td_id: str
    ttl: float | None = None
    cached: bool = True
    client: Any = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        td_id: str | None = None,
        cache_metadata: bool = True,
        client: Any = None,
        ttl: float | None = None,
        **connection: Any,
    ) -> Address:
        """Build the address from the arguments of a store, with a new identifier by default."""
        if not backend:
            raise ValueError("backend is the name of a kind of server, such as 'redis' or 'dragonfly'")
        if td_id is not None and (not td_id or "}" in td_id):
            raise ValueError(f"td_id is a text without '}}', got {td_id!r}")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is a number of seconds above 0, or None, got {ttl!r}")
        if client is not None:
            client, connection = _split_client(client, connection)
        else:
            known = {"unix_socket_path": str(unix_socket_path)} if unix_socket_path else {"host": host, "port": port}
            connection = {**known, "db": db, **connection}
        td_id = td_id or str(uuid.uuid4())
        return cls(backend, GuardedConnection(connection), prefix, td_id, ttl, cache_metadata, client)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "client": None}

    @property
    def server(self) -> str:
        """The name of the server in errors, without a password."""
        of = self.connection
        return of.get("unix_socket_path") or f"{of.get('host', 'localhost')}:{of.get('port', 6379)}"

    def missing(self) -> KeyError:
        """Return the error for a missing container."""
        return KeyError(
            f"there is no container {self}: it was never written, was cleared or has expired, or the server is another "
            "one"
        )

    def __str__(self) -> str:
        return f"{self.prefix}:{{{self.td_id}}} at {self.server} db={self.connection.get('db', 0)}"


# Settings of a client that are copied to create another one, and an argument with a different name.
_OF_A_CLIENT = ("path", "host", "port", "db", "username", "password", "socket_timeout", "socket_connect_timeout")
_NAMES = {"path": "unix_socket_path"}


def _split_client(client: Any, extra: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return `client` if it can send requests here, else `None`, and the arguments to create an equal one."""
    redis = library()
    pool = getattr(client, "connection_pool", None)
    known = getattr(pool, "connection_kwargs", None)
    if not isinstance(client, (redis.Redis, redis.asyncio.Redis)) or not isinstance(known, dict):
        raise TypeError(f"client is a redis.Redis or a redis.asyncio.Redis, got {type(client).__name__}")
    connection = {_NAMES.get(name, name): known[name] for name in _OF_A_CLIENT if known.get(name) is not None}
    ssl = {name: value for name, value in known.items() if name.startswith("ssl_") and value is not None}
    if ssl or "SSL" in getattr(pool, "connection_class", object).__name__:
        connection.update(ssl, ssl=True)
    connection.update(extra)
    return (client if isinstance(client, redis.Redis) and not known.get("decode_responses") else None), connection


# Containers on one server share its connections.
_POOLS: WeakValueDictionary[str, Any] = WeakValueDictionary()


def _client(address: Address) -> Any:
    if address.client is not None:
        return address.client
    redis = library()
    arguments = address.connection.for_library()
    pool = _POOLS.get(key := repr(sorted(arguments.items(), key=repr)))
    if pool is None:
        # Requests are idempotent, so lost ones are repeated for about a second.
        retry = redis.retry.Retry(redis.backoff.ExponentialBackoff(cap=0.5, base=0.1), _TRIES)
        pool = _POOLS[key] = redis.Redis(**{"retry": retry, "protocol": 2, **arguments}).connection_pool
    return redis.Redis(connection_pool=pool)


class Request(NamedTuple):
    """A request for pieces of a leaf, all `run` bytes long, at these offsets (little-endian 64-bit integers).

    `run` is 0 for a value. `shape` and `dtype` are the expected ones; a leaf with others gives no answer.
    """

    path: str
    shape: bytes = b""
    dtype: bytes = b""
    run: int = 0
    offsets: bytes = b""

    @property
    def nbytes(self) -> int:
        return self.run * (len(self.offsets) // 8)

    def match(self, look: Sequence[bytes | None], parts: list[Any]) -> Any:
        """Return the result, from the metadata `look` and the `parts` of the leaf; `None` if the request is stale."""
        shape, dtype, mark, form, *shapes = look
        if not self.run:
            return None if mark is None or parts[0] is None else (parts[0], form or b"")
        same = mark is None and shape == self.shape and dtype == self.dtype and not any(shapes)
        return parts if same else None


# The condition of a write: the keys of a leaf's hash and data, and its expected shape, dtype and length. For an upload:
# its key, the key of the leaf, two empty texts, and 0.
Check = tuple[str, str, bytes, bytes, int]


# A listing of a container: its header, the paths of its leaves, and the attributes of nested containers.
Listing = tuple[dict[str, bytes], set[str], dict[str, bytes]]
HEADER = (
    "__batch_size__", "__device__", "__tensorclass__", "__type__", "__count__", "__stack_dim__", "__inner_batch_size__",
)  # fmt: skip


class Wire:
    """The keys of one container, and the requests for them; each method is one request unless it says otherwise."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.base = f"{address.prefix}:{{{address.td_id}}}:"
        self.client: Any = _client(address)
        self._names = [self.base + name for name in (*HEADER, "__keys__", "__groups__")]

    def data(self, path: str) -> str:
        return f"{self.base}d:{path}"

    def meta(self, path: str) -> str:
        return f"{self.base}m:{path}"

    def send(self, commands: Sequence[Command], keys: Sequence[Path] = ()) -> list[Any]:
        """Send commands together, again when nothing came back, and return the answers; errors name the `keys`.

        Raises:
            ServerFullError: the server has no memory left for one.
            SaveError: the server refuses one; the first is told.
            ConnectionError: it does not answer.
        """
        with self.errors(keys):
            pool = self.client.connection_pool
            connection = pool.get_connection()
            try:
                answers: list[Any] = connection.retry.call_with_retry(
                    lambda: _exchange(connection, commands), lambda error: connection.disconnect()
                )
            except BaseException:
                # Answers that were not read must not be taken for others.
                connection.disconnect()
                raise
            finally:
                pool.release(connection)
            for answer in answers:
                for part in answer if type(answer) is list else (answer,):
                    if isinstance(part, Exception):
                        raise part
        return answers

    def script(self, commands: Sequence[Command]) -> Command:
        """Return the command that executes other commands by the script."""
        words = list(itertools.chain.from_iterable((len(command), *command) for command in commands))
        names = dict.fromkeys(word for word in words if type(word) is str and word.startswith(self.base))
        return "EVAL", _read_script(), len(names), *names, *words

    @contextlib.contextmanager
    def errors(self, keys: Sequence[Path] = ()) -> Iterator[None]:
        """Convert errors of the client into standard ones that name the server and the entries."""
        errors, entries = library().exceptions, entries_of(keys)
        try:
            yield
        except (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError) as error:
            if isinstance(error, errors.AuthenticationError):
                # Drop the connections with the refused password.
                self.client.connection_pool.disconnect()
                raise PermissionError(f"{entries}the server at {self.address.server} refuses: {error}") from error
            raise ConnectionError(
                f"{entries}the server at {self.address.server} does not answer ({error}). What was being written "
                "is there whole or not at all: the same call works again once the server is back"
            ) from error
        except errors.OutOfMemoryError as error:
            raise ServerFullError(
                f"{entries}of the container {self.address}: the server is full, and refuses to write ({error}). Delete "
                "entries or containers, or raise its maxmemory"
            ) from error
        except errors.RedisError as error:
            raise SaveError(f"{entries}of the container {self.address}: {error}") from error

    # --- reading ------------------------------------------------------------------------------------------------------

    def state(self, requests: Sequence[Request] = ()) -> tuple[Listing, list[Any]]:
        """Return a listing of the container, and the answers to requests of the same moment."""
        listed = [("MGET", *self._names[:-2]), ("SMEMBERS", self._names[-2]), ("HGETALL", self._names[-1])]
        found, paths, groups, *answers = self.read(requests, commands=listed)
        header = {name: value for name, value in zip(HEADER, found, strict=True) if value is not None}
        notes = {_decode_path(name): raw for name, raw in _pairs(groups).items()}
        return (header, set(map(_decode_path, paths)), notes), answers

    def metas(self, paths: Sequence[str]) -> list[dict[bytes, bytes]]:
        """Read the hashes of leaves."""
        return [_pairs(reply) for reply in self.send([("HGETALL", self.meta(path)) for path in paths])]

    def read(self, requests: Sequence[Request], key: Path = (), commands: Sequence[Command] = ()) -> list[Any]:
        """Return the answers to `commands` that only read, and to requests, of the same moment.

        The answer is the parts for pieces of a leaf, and the text and form for a value. A stale request gives `None`.
        """
        # Long lists of shapes are compared by their digest, which the server computes.
        leaves = {request.path: len(request.shape) == _DIGEST for request in requests}
        looks = [
            ("LOOK", self.meta(path)) if is_digest else ("HMGET", self.meta(path), *_LOOKED_AT)
            for path, is_digest in leaves.items()
        ]
        parts = [self._commands_for(request) for request in requests]
        asked = [*commands, *looks, *itertools.chain.from_iterable(parts)]
        try:
            answers = self.send(self._transaction(asked), [key])[-1]
            answers = [answer[0] if word[0] in _FUNCTIONS else answer for word, answer in zip(asked, answers)]
        except ServerFullError:
            (answers,) = self.send([self.script(asked)], [key])
        found = iter(answers)
        first = list(itertools.islice(found, len(commands)))
        known = dict(zip(leaves, found))
        return first + [
            request.match(known[request.path], list(itertools.islice(found, len(part))))
            for request, part in zip(requests, parts)
        ]

    def _commands_for(self, request: Request) -> list[Command]:
        """Return the commands that read the content of a request."""
        data, run = self.data(request.path), request.run
        if not run:
            return [("GET", data)]
        return [("GETRANGE", data, start, start + run - 1) for (start,) in struct.iter_unpack("<Q", request.offsets)]

    def _transaction(self, commands: Sequence[Command]) -> list[Command]:
        """Return the commands that execute others as a transaction."""
        sent = [self.script([command]) if command[0] in _FUNCTIONS else command for command in commands]
        return [("MULTI",), *sent, ("EXEC",)]

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(
        self, checks: Sequence[Check], commands: Sequence[Command], written: Sequence[Path], token: str = ""
    ) -> int:
        """Execute commands atomically; returns 0, or the number of the check that failed.

        A request whose answer was lost is sent again, so commands must be idempotent. Otherwise they write a `token` to
        the hash of the leaf. A full server executes commands that only free memory. Errors name the keys in `written`.
        """
        if not checks and is_freeing(commands):
            self.send([self.script(commands)], written)
            return 0
        transaction = self._transaction(commands)
        if not checks:
            self.send(transaction, written)
            return 0
        stop = self.base + "__stop__"
        watch = ("WATCH", stop, *(check[0] for check in checks))
        check = self.script([("CHECK", stop, token, *known) for known in checks])
        while True:
            _, failed, *_, done = self.send([watch, check, *transaction], written)
            if any(failed) or done is not None:
                return failed.index(1) + 1 if 1 in failed else 0
            # Another client wrote to a watched key after the check: try again.

    def list_keys(self) -> list[str]:
        """List all keys of the container, including keys of other clients."""
        (_, paths, _), _ = self.state()
        leaves = ((self.meta(path), self.data(path), self.data(path) + ":idx") for path in paths)
        return [*self._names, *itertools.chain.from_iterable(leaves)]


def is_freeing(commands: Sequence[Command]) -> bool:
    """Return True if commands only free memory."""
    return all(command[0] in _FREEING for command in commands)


def _exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    pack, library_ = extras.require("hiredis", "redis").pack_command, library()
    # hiredis would copy large words; this serializer does not.
    packer = library_.connection.PythonRespSerializer(_LARGE, connection.encoder.encode)
    sent: list[Any] = []
    for is_large, group in itertools.groupby(commands, _is_large):
        if is_large:
            sent += itertools.chain.from_iterable(itertools.starmap(packer.pack, group))
        else:
            sent.append(b"".join(map(pack, group)))
    connection.send_packed_command(sent)
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(connection.read_response(disable_decoding=True))
        except library_.exceptions.ResponseError as error:
            answers.append(error)
    return answers


def _is_large(command: Command) -> bool:
    return type(command[-1]) is memoryview and len(command[-1]) > _LARGE


def _decode_path(raw: bytes) -> str:
    """Decode a path. One that is not UTF-8 names no key of the server, so its leaf is left out."""
    return raw.decode(errors="backslashreplace")


def _pairs(reply: Any) -> dict[bytes, bytes]:
    """Convert a hash to a dict. RESP2 answers with a flat list, RESP3 with a mapping."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
