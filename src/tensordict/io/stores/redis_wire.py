"""The keys of one container on a Redis server, and the requests that read and write them.

The layout is that of the reference, found by looking at the keys that it writes. All keys begin with
`PREFIX:{ID}:`, so that a cluster keeps them together. Behind it come, for a container of the identifier ID:

- `__batch_size__`, `__device__`, `__tensorclass__`: texts, the first a list in JSON;
- `__keys__`: a set of the paths of the leaves, names joined by dots;
- `d:PATH`: the elements of a leaf in C order, little-endian; or a value that is no tensor, in JSON;
- `m:PATH`: a hash with `shape` (a list in JSON) and `dtype` (`torch.float32`), or `is_non_tensor` and `encoding`.

Of a lazy stack there are `__type__` (`lazy_stack`), `__count__`, `__stack_dim__` and `__inner_batch_size__` in place of
the batch size; the elements of the members lie one behind the other in `d:PATH`, and `m:PATH` has `homogeneous`. Where
the shapes differ that is `0`, `shapes` has all of them, and `d:PATH:idx` the offsets in bytes as integers of 64 bits.

Only this package has `__groups__`, a hash from the paths of nested containers to what is noted of them, in JSON, and
in the hash of a leaf `_order`, the number that it was made as, and `_form` of a value. The reference passes over them.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from tensordict.core import extras
from tensordict.core.errors import SaveError
from tensordict.core.keys import Path, entry_of

# What one request carries at most, in bytes: larger tensors go in several.
LIMIT = 32 << 20
# What was uploaded ahead and never taken over is forgotten by the server after this time, in milliseconds.
_FORGOTTEN = 3_600_000
# Pieces of an array that one request asks for at most, so that the server answers others in between.
_PIECES = 4096
# From how many bytes on one piece is asked for by a command of its own.
_LARGE = 1 << 16
_TRIES = 4

# Reads of leaves and values: KEYS are the hash and the data of each; ARGV, for each, the shape and dtype that it is
# known to have, the length of a piece and the offsets of all pieces. No length asks for a value.
_READ = """
local out = {}
for i = 1, #KEYS / 2 do
  local meta, data, at = KEYS[2 * i - 1], KEYS[2 * i], 4 * i - 3
  if ARGV[at + 2] == '' then
    local form = redis.call('HMGET', meta, 'is_non_tensor', '_form')
    local text = form[1] and redis.call('GET', data)
    out[i] = text and {text, form[2] or ''} or false
  else
    local have = redis.call('HMGET', meta, 'shape', 'dtype', 'is_non_tensor')
    if have[1] ~= ARGV[at] or have[2] ~= ARGV[at + 1] or have[3] then
      out[i] = false
    else
      local run, offsets, parts = tonumber(ARGV[at + 2]), ARGV[at + 3], {}
      for k = 1, #offsets / 8 do
        local offset = struct.unpack('<I8', offsets, 8 * k - 7)
        parts[k] = redis.call('GETRANGE', data, string.format('%.0f', offset), string.format('%.0f', offset + run - 1))
      end
      out[i] = #parts == 1 and parts[1] or table.concat(parts)
    end
  end
end
return out
"""

# Writes, all or none: first the checks (hash, shape, dtype, data, length), then the commands, each behind the number
# of its words. For 0, `key, length, offsets, data` are pieces of an array; for -1, `key, target, length` are data that
# were uploaded ahead. Sent twice, as when an answer was lost, it does the same.
_WRITE = """
local at = 2
for i = 1, tonumber(ARGV[1]) do
  local have = redis.call('HMGET', ARGV[at], 'shape', 'dtype')
  if have[1] ~= ARGV[at + 1] or have[2] ~= ARGV[at + 2] or redis.call('STRLEN', ARGV[at + 3]) ~= tonumber(ARGV[at + 4])
  then
    return i
  end
  at = at + 5
end
local first = at
while at <= #ARGV do
  local n = tonumber(ARGV[at])
  if n == -1 and redis.call('EXISTS', ARGV[at + 1]) == 0
    and redis.call('STRLEN', ARGV[at + 2]) ~= tonumber(ARGV[at + 3]) then
    return -1
  end
  at = at + (n == 0 and 5 or n == -1 and 4 or n + 1)
end
at = first
while at <= #ARGV do
  local n = tonumber(ARGV[at])
  if n == 0 then
    local key, run, offsets, data = ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3], ARGV[at + 4]
    for k = 1, #offsets / 8 do
      local piece = #offsets == 8 and data or string.sub(data, (k - 1) * run + 1, k * run)
      redis.call('SETRANGE', key, string.format('%.0f', struct.unpack('<I8', offsets, 8 * k - 7)), piece)
    end
    at = at + 5
  elseif n == -1 then
    if redis.call('EXISTS', ARGV[at + 1]) == 1 then
      redis.call('RENAME', ARGV[at + 1], ARGV[at + 2])
      redis.call('PERSIST', ARGV[at + 2])
    end
    at = at + 4
  else
    redis.call(unpack(ARGV, at + 1, at + n))
    at = at + n + 1
  end
end
return 0
"""


def library() -> Any:
    """The package redis; a clear error when it is not installed."""
    return extras.require("redis", "redis")


@dataclass(frozen=True)
class Address:
    """Where a container is: the server, as arguments of `redis.Redis`, and its identifier there.

    ttl: after how many seconds without a write the server forgets it; `None` for never.
    cached: whether the shapes and dtypes of its leaves are kept between calls.
    client: a client to use; it is not pickled, the arguments that it was made of are.
    """

    backend: str
    connection: Mapping[str, Any]
    prefix: str
    td_id: str
    ttl: float | None = None
    cached: bool = True
    client: Any = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        backend: str,
        host: str,
        port: int,
        db: int,
        unix_socket_path: str | None,
        prefix: str,
        td_id: str | None = None,
        cache_metadata: bool = True,
        client: Any = None,
        ttl: float | None = None,
        **connection: Any,
    ) -> Address:
        """The address that the arguments of a store say; a new identifier where they say none."""
        if not backend:
            raise ValueError("backend is the name of a kind of server, such as 'redis' or 'dragonfly'")
        if td_id is not None and (not td_id or "}" in td_id):
            raise ValueError(f"td_id is a text without '}}', got {td_id!r}")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is a number of seconds above 0, or None, got {ttl!r}")
        if client is not None:
            client, connection = _taken_from(client, connection)
        elif unix_socket_path is not None:
            connection = {"unix_socket_path": str(unix_socket_path), "db": db, **connection}
        else:
            connection = {"host": host, "port": port, "db": db, **connection}
        td_id = str(uuid.uuid4()) if td_id is None else td_id
        return cls(backend, connection, prefix, td_id, ttl, cache_metadata, client)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "client": None}

    @property
    def server(self) -> str:
        """What errors call the server; no password is in it."""
        of = self.connection
        path = of.get("unix_socket_path")
        return path if path is not None else f"{of.get('host', 'localhost')}:{of.get('port', 6379)}"

    def __str__(self) -> str:
        return f"{self.prefix}:{{{self.td_id}}} at {self.server} db={self.connection.get('db', 0)}"


# Of a client, what another one to the same server is made of.
_OF_A_CLIENT = ("host", "port", "db", "username", "password", "socket_timeout", "socket_connect_timeout")


def _taken_from(client: Any, extra: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A client that waits for answers, for one that may be of `redis.asyncio`, and the arguments that make another."""
    redis = library()
    pool = getattr(client, "connection_pool", None)
    known = getattr(pool, "connection_kwargs", None)
    if not isinstance(client, (redis.Redis, redis.asyncio.Redis)) or not isinstance(known, dict):
        raise TypeError(f"client is a redis.Redis or a redis.asyncio.Redis, got {type(client).__name__}")
    connection = {name: known[name] for name in _OF_A_CLIENT if known.get(name) is not None}
    if known.get("path") is not None:
        connection["unix_socket_path"] = known["path"]
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
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    # Every request may be sent twice: what is lost on the way is sent again, for about a second.
    # Many small reads of the socket would take longer than the transfer.
    retry = Retry(ExponentialBackoff(cap=0.5, base=0.1), _TRIES)
    options = {"retry": retry, "socket_read_size": 1 << 20, **address.connection}
    key = repr(sorted(address.connection.items(), key=repr))
    pool = _POOLS.get(key)
    if pool is None:
        pool = redis.Redis(**options).connection_pool
        _POOLS[key] = pool
    return redis.Redis(connection_pool=pool)


class Request(NamedTuple):
    """What is read of a leaf: pieces of one length, at these offsets in bytes; `run` is 0 for a value."""

    path: str
    shape: bytes = b""
    dtype: bytes = b""
    run: int = 0
    offsets: bytes = b""

    @property
    def nbytes(self) -> int:
        return self.run * (len(self.offsets) // 8)


class Listing(NamedTuple):
    """What a server says of a container: its header, the paths of its leaves, what is noted of nested containers."""

    header: dict[str, bytes]
    paths: set[str]
    groups: dict[str, bytes]


HEADER = (
    "__batch_size__", "__device__", "__tensorclass__", "__type__", "__count__", "__stack_dim__", "__inner_batch_size__",
)  # fmt: skip


class Wire:
    """The keys of one container, and the requests for them; each method is one request unless it says otherwise."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.base = f"{address.prefix}:{{{address.td_id}}}:"
        self.client: Any = _client(address)

    def data(self, path: str) -> str:
        return f"{self.base}d:{path}"

    def meta(self, path: str) -> str:
        return f"{self.base}m:{path}"

    @contextlib.contextmanager
    def errors(self, key: Path = ()) -> Iterator[None]:
        """A block in which errors of the server become those of Python, which name it and the entry."""
        errors = library().exceptions
        try:
            yield
        except (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError) as error:
            if isinstance(error, errors.AuthenticationError):
                # What was refused is of no further use.
                self.client.connection_pool.disconnect()
                raise PermissionError(f"{entry_of(key)}the server at {self.address.server} refuses: {error}") from error
            raise ConnectionError(
                f"{entry_of(key)}the server at {self.address.server} does not answer ({error}). What was being written "
                "is there whole or not at all: the same call works again once the server is back"
            ) from error
        except errors.RedisError as error:
            raise SaveError(f"{entry_of(key)}of the container {self.address}: {error}") from error

    # --- reading ------------------------------------------------------------------------------------------------------

    def listing(self, requests: Sequence[Request] = ()) -> tuple[Listing, list[Any]]:
        """What there is, and what `read` gives for these requests."""
        with self.errors():
            pipe = self.client.pipeline(transaction=False)
            pipe.mget([self.base + name for name in HEADER])
            pipe.smembers(self.base + "__keys__")
            pipe.hgetall(self.base + "__groups__")
            asked = self._ask(pipe, requests)
            header, paths, groups, *replies = pipe.execute()
        listing = Listing(
            {name: value for name, value in zip(HEADER, header) if value is not None},
            {text for raw in paths if (text := _decoded(raw)) is not None},
            {text: value for raw, value in groups.items() if (text := _decoded(raw)) is not None},
        )
        return listing, _together(requests, _answers(asked, replies))

    def metas(self, paths: Sequence[str]) -> list[dict[bytes, bytes]]:
        """The hashes of leaves."""
        with self.errors():
            pipe = self.client.pipeline(transaction=False)
            for path in paths:
                pipe.hgetall(self.meta(path))
            return list(pipe.execute())

    def read(self, requests: Sequence[Request], key: Path = ()) -> list[Any]:
        """The bytes for each, for a value its text and its form; `None` where there is no such leaf any more."""
        with self.errors(key):
            pipe = self.client.pipeline(transaction=False)
            asked = self._ask(pipe, requests)
            return _together(requests, _answers(asked, pipe.execute()))

    def _ask(self, pipe: Any, requests: Sequence[Request]) -> list[Request | None]:
        """Add the requests to a pipeline, for `_answers`: many small ones as one script, many pieces as several.

        One large piece is a command of its own, as a script would copy it twice, between two looks at what it is of.
        """
        asked: list[Request | None] = []
        keys: list[str] = []
        words: list[Any] = []

        def script() -> None:
            if keys:
                pipe.eval(_READ, len(keys), *keys, *words)
                asked.append(None)
                keys.clear()
                words.clear()

        for request in requests:
            if request.run > _LARGE and len(request.offsets) == 8:
                script()
                meta, start = self.meta(request.path), int.from_bytes(request.offsets, "little")
                pipe.hmget(meta, "shape", "dtype", "is_non_tensor")
                pipe.getrange(self.data(request.path), start, start + request.run - 1)
                pipe.hmget(meta, "shape", "dtype", "is_non_tensor")
                asked.append(request)
                continue
            whole = len(request.offsets) <= 8 * _PIECES
            for offsets in [request.offsets] if whole else _cut(request.offsets):
                keys += self.meta(request.path), self.data(request.path)
                words += request.shape, request.dtype, request.run or b"", offsets
                if not whole or len(keys) >= 512:
                    script()
        script()
        return asked

    # --- writing ------------------------------------------------------------------------------------------------------

    def ahead(self) -> str:
        """A name that nothing knows, for what is uploaded ahead."""
        return f"{self.base}t:{uuid.uuid4()}"

    def upload(self, name: str, offset: int, data: memoryview, key: Path) -> None:
        """Bytes at an offset of what is uploaded ahead, in as many requests as they need."""
        step = LIMIT // 2
        with self.errors(key):
            for start in range(0, len(data), step):
                pipe = self.client.pipeline(transaction=False)
                pipe.setrange(name, offset + start, data[start : start + step])
                pipe.pexpire(name, _FORGOTTEN)
                pipe.execute()

    def write(self, checks: Sequence[Any], words: Sequence[Any], keys: Sequence[str], key: Path) -> int:
        """Run checked commands; see `_WRITE`. 0, or the number of the check that failed, or -1."""
        with self.errors(key):
            arguments: list[Any] = [len(checks) // 5, *checks, *words]
            return int(self.client.eval(_WRITE, len(keys), *keys, *arguments))

    def renew(self, paths: Sequence[str]) -> None:
        """Have the server forget the container only after its time from now on."""
        if self.address.ttl is None:
            return
        time = max(1, int(self.address.ttl * 1000))
        with self.errors():
            pipe = self.client.pipeline(transaction=True)
            for name in (*HEADER, "__keys__", "__groups__"):
                pipe.pexpire(self.base + name, time)
            for path in paths:
                for name in (self.meta(path), self.data(path), self.data(path) + ":idx"):
                    pipe.pexpire(name, time)
            pipe.execute()

    def clear(self) -> None:
        """Delete all keys of the container; two requests."""
        listing, _ = self.listing()
        names = [self.base + name for name in (*HEADER, "__keys__", "__groups__")]
        for path in listing.paths:
            names += self.meta(path), self.data(path), self.data(path) + ":idx"
        with self.errors():
            pipe = self.client.pipeline(transaction=True)
            for start in range(0, len(names), 1000):
                pipe.delete(*names[start : start + 1000])
            pipe.execute()


def _decoded(raw: bytes) -> str | None:
    """A name on the server as a text; `None` for one that is none, which this package cannot have written."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _cut(offsets: bytes) -> Iterator[bytes]:
    for start in range(0, len(offsets), 8 * _PIECES):
        yield offsets[start : start + 8 * _PIECES]


def _answers(asked: Sequence[Request | None], replies: Sequence[Any]) -> list[Sequence[Any]]:
    """The answers to what `Wire._ask` has asked, several for a script."""
    found: list[Sequence[Any]] = []
    left = iter(replies)
    for request in asked:
        if request is None:
            found.append(next(left))
            continue
        before, data, after = next(left), next(left), next(left)
        found.append([data if before == after == [request.shape, request.dtype, None] else None])
    return found


def _together(requests: Sequence[Request], answers: Sequence[Sequence[Any]]) -> list[Any]:
    """The answers of several commands, one for each request."""
    pieces = iter([piece for answer in answers for piece in answer])
    found: list[Any] = []
    for request in requests:
        count = max(1, -(-len(request.offsets) // (8 * _PIECES)))
        parts = [next(pieces) for _ in range(count)]
        found.append(parts[0] if count == 1 else None if None in parts else b"".join(parts))
    return found
