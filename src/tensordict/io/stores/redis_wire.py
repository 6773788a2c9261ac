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
What is uploaded ahead is under `t:UUID`; `__stop__` is there for a millisecond where a check fails, see `own.CHECK`.

The package redis does all else: connections, their pools, addresses, passwords, encryption, the protocol, trying again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from tensordict.core import extras
from tensordict.core.exceptions import SaveError, ServerFullError
from tensordict.core.keys import Path, entries_of
from tensordict.io.remote.credentials import GuardedConnection

# What one request carries at most, in bytes: larger tensors go in several.
LIMIT = 32 << 20
# What was uploaded ahead and never taken over is forgotten by the server after this time, in milliseconds.
FORGOTTEN = 3_600_000
_TRIES = 4
_LARGE = 1 << 14
# The length of a digest, as the script has it.
_DIGEST = 40
_LOOKED_AT = ("shape", "dtype", "is_non_tensor", "_form", "shapes")

# What transactions of plain commands cannot do, the server does in a script. It carries out commands, each given by the
# number of its words and the words, and returns the answers. The first word is a command of the server, or one of these
# functions:
#
# - LOOK: the shape of a leaf (of elements with unequal shapes the digest of all shapes), its dtype and its form.
# - READ, WRITE: pieces of an array: their length, and the offsets of all of them.
# - PLACE: as WRITE, of pieces that were uploaded ahead, and lie behind one another under a name.
# - TAKE: take over an upload, and leave an empty one: the same request, sent again as its answer was lost, finds it.
# - SPLICE: put bytes in the place of others, from the first to the last, of any number.
# - CHECK: whether a leaf (hash, data) is what it was, and as long; or, without a shape, whether an upload is there.
#   What fails is written to, so that the transaction behind this, which watches it, is not carried out. A full server
#   refuses SET. It takes RENAME. 2 where it fails as the write with this token was carried out before.
#
# A full server refuses transactions and carries out scripts, which are slow with large data.
_FUNCTIONS = {
    "LOOK": """
function own.LOOK(hash)
  local look = redis.call('HMGET', hash, 'shape', 'dtype', 'is_non_tensor', '_form', 'shapes')
  local shapes = table.remove(look)
  look[1] = shapes and redis.sha1hex(shapes) or look[1]
  return look
end
""",
    "READ": """
function own.READ(name, run, offsets)
  local parts = {}
  for k = 1, #offsets, 8 do
    local first = struct.unpack('<I8', offsets, k)
    local last = string.format('%.0f', first + run - 1)
    parts[#parts + 1] = redis.call('GETRANGE', name, string.format('%.0f', first), last)
  end
  return table.concat(parts)
end
""",
    "WRITE": """
function own.WRITE(name, run, offsets, data)
  for k = 1, #offsets, 8 do
    local first, at = struct.unpack('<I8', offsets, k), (k - 1) / 8 * run
    redis.call('SETRANGE', name, string.format('%.0f', first), string.sub(data, at + 1, at + run))
  end
  return 0
end
""",
    "PLACE": """
function own.PLACE(ahead, name, run, offsets)
  return own.WRITE(name, run, offsets, redis.call('GET', ahead))
end
""",
    "TAKE": """
function own.TAKE(ahead, name, time)
  if redis.call('STRLEN', ahead) > 0 then
    redis.call('RENAME', ahead, name)
    redis.call('PERSIST', name)
    redis.call('SET', ahead, '', 'PX', time)
  end
  return 0
end
""",
    "SPLICE": """
function own.SPLICE(name, first, last, data)
  local old = redis.call('GET', name) or ''
  local parts = string.sub(old, 1, first) .. data .. string.sub(old, last + 1)
  return redis.call('SET', name, parts, 'KEEPTTL')
end
""",
    "CHECK": """
function own.CHECK(stop, token, hash, data, shape, dtype, size)
  local fits
  if shape == '' then
    fits = redis.call('EXISTS', hash) == 1
  else
    local look = own.LOOK(hash)
    fits = look[1] == shape and look[2] == dtype and redis.call('STRLEN', data) == tonumber(size)
  end
  if fits then
    return 0
  end
  local is_done = token ~= '' and redis.call('HGET', hash, '_write') == token
  if redis.call('EXISTS', hash) == 1 then
    redis.call('RENAME', hash, stop)
    redis.call('RENAME', stop, hash)
  else
    redis.call('SET', stop, '', 'PX', 1)
  end
  return is_done and 2 or 1
end
""",
}
_NEEDS = {"PLACE": "WRITE", "CHECK": "LOOK"}
_LOOP = """
local at, answers = 1, {}
while at <= #ARGV do
  local last, name = at + tonumber(ARGV[at]), ARGV[at + 1]
  answers[#answers + 1] = (own[name] or redis.call)(unpack(ARGV, own[name] and at + 2 or at + 1, last))
  at = last + 1
end
return answers
"""
_FREEING = {"DEL", "HDEL", "SREM"}
Word = bytes | str | int | memoryview


def library() -> Any:
    """The package redis; a clear error when it is not installed."""
    return extras.require("redis", "redis")


@dataclass(frozen=True)
class Address:
    """Where a container is: the server, as arguments of `redis.Redis`, and its identifier there.

    ttl: after how many seconds without a write the server forgets it; `None` for never.
    connection: the arguments of `redis.Redis`, whose secrets no pickle has.
    cached: whether the shapes and dtypes of its leaves are kept between calls.
    client: a client to use; it is not pickled, the arguments that it was made of are.
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
        """The address that the arguments of a store say; a new identifier where they say none."""
        if not backend:
            raise ValueError("backend is the name of a kind of server, such as 'redis' or 'dragonfly'")
        if td_id is not None and (not td_id or "}" in td_id):
            raise ValueError(f"td_id is a text without '}}', got {td_id!r}")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is a number of seconds above 0, or None, got {ttl!r}")
        if client is not None:
            client, connection = _taken_from(client, connection)
        else:
            known = {"unix_socket_path": str(unix_socket_path)} if unix_socket_path else {"host": host, "port": port}
            connection = {**known, "db": db, **connection}
        td_id = td_id or str(uuid.uuid4())
        return cls(backend, GuardedConnection(connection), prefix, td_id, ttl, cache_metadata, client)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "client": None}

    @property
    def server(self) -> str:
        """What errors call the server; no password is in it."""
        of = self.connection
        return of.get("unix_socket_path") or f"{of.get('host', 'localhost')}:{of.get('port', 6379)}"

    def missing(self) -> KeyError:
        """The error for the case that there is no such container."""
        return KeyError(
            f"there is no container {self}: it was never written, was cleared or has expired, or the server is another "
            "one"
        )

    def __str__(self) -> str:
        return f"{self.prefix}:{{{self.td_id}}} at {self.server} db={self.connection.get('db', 0)}"


# The settings of a client that another one to the same server is made with; an argument has another name.
_OF_A_CLIENT = ("path", "host", "port", "db", "username", "password", "socket_timeout", "socket_connect_timeout")
_NAMES = {"path": "unix_socket_path"}


def _taken_from(client: Any, extra: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A client that waits for answers, for one that may be of `redis.asyncio`, and the arguments that make another."""
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
    from redis.backoff import ExponentialBackoff
    from redis.retry import Retry

    arguments = address.connection.for_library()
    pool = _POOLS.get(key := repr(sorted(arguments.items(), key=repr)))
    if pool is None:
        # Every request may be sent twice: what is lost on the way is sent again, for about a second.
        retry = Retry(ExponentialBackoff(cap=0.5, base=0.1), _TRIES)
        pool = _POOLS[key] = redis.Redis(**{"retry": retry, "protocol": 2, **arguments}).connection_pool
    return redis.Redis(connection_pool=pool)


class Request(NamedTuple):
    """What is read of a leaf: pieces of one length, at these offsets in bytes (little-endian, of 64 bits each).

    `run` is 0 for a value. `shape` and `dtype` are what the leaf is known to have.
    """

    path: str
    shape: bytes = b""
    dtype: bytes = b""
    run: int = 0
    offsets: bytes = b""

    @property
    def nbytes(self) -> int:
        return self.run * (len(self.offsets) // 8)

    def answered(self, look: Sequence[bytes | None], data: bytes | None) -> Any:
        """What is given for it, of what the server says of the leaf and has answered."""
        shape, dtype, mark, form, *shapes = look
        if not self.run:
            return None if mark is None or data is None else (data, form or b"")
        same = mark is None and shape == self.shape and dtype == self.dtype and not any(shapes)
        return data if same else None


# What has to be so for a write: a hash, its data, the shape and dtype of the one, the length of the other; or the name
# of an upload, the name that it is for, nothing twice, and 0.
Check = tuple[str, str, bytes, bytes, int]


class Contents(NamedTuple):
    """What a server says that a container has: its header, the paths of the leaves, what is noted of nested ones."""

    header: list[bytes | None]
    paths: Any
    groups: Any

    def parsed(self) -> tuple[dict[str, bytes], set[str], dict[str, bytes]]:
        """The same; names that are no text, which this package cannot have written, are left out."""
        header = {name: value for name, value in zip(HEADER, self.header, strict=True) if value is not None}
        groups = {text: raw for name, raw in _pairs(self.groups).items() if (text := _text(name)) is not None}
        return header, {text for name in self.paths if (text := _text(name)) is not None}, groups


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

    def send(self, commands: Sequence[Sequence[Word]], keys: Sequence[Path] = ()) -> list[Any]:
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
                    lambda: _exchanged(connection, commands), lambda error: connection.disconnect()
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

    def script(self, commands: Sequence[Sequence[Word]]) -> Sequence[Word]:
        """The command that has the script carry out commands."""
        words = list(itertools.chain.from_iterable((len(command), *command) for command in commands))
        names = dict.fromkeys(word for word in words if type(word) is str and word.startswith(self.base))
        return "EVAL", _script_of(frozenset(command[0] for command in commands)), len(names), *names, *words

    @contextlib.contextmanager
    def errors(self, keys: Sequence[Path] = ()) -> Iterator[None]:
        """Turn errors of the server into Python's, which name the server and the entries."""
        errors, entries = library().exceptions, entries_of(keys)
        try:
            yield
        except (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError) as error:
            if isinstance(error, errors.AuthenticationError):
                # What was refused is of no further use.
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

    def state(self, requests: Sequence[Request] = ()) -> tuple[Contents, list[Any]]:
        """What there is, and what `read` gives for the requests."""
        header, paths, groups, *answers = self._look_up(
            [("MGET", *self._names[:-2]), ("SMEMBERS", self._names[-2]), ("HGETALL", self._names[-1])], requests
        )
        return Contents(header, paths, groups), answers

    def metas(self, paths: Sequence[str]) -> list[dict[bytes, bytes]]:
        """The hashes of leaves."""
        return [_pairs(reply) for reply in self.send([("HGETALL", self.meta(path)) for path in paths])]

    def read(self, requests: Sequence[Request], key: Path = ()) -> list[Any]:
        """The bytes for each, for a value its text and its form; `None` where there is no such leaf any more."""
        return self._look_up([], requests, key)

    def _look_up(self, commands: Sequence[Sequence[Word]], requests: Sequence[Request], key: Path = ()) -> list[Any]:
        """The answers to commands that only read, and those to requests, all of one state of the server."""
        # The shapes of all elements are compared by their digest, and others as they are.
        leaves = {request.path: len(request.shape) == _DIGEST for request in requests}
        looks = [
            ("LOOK", self.meta(path)) if is_digest else ("HMGET", self.meta(path), *_LOOKED_AT)
            for path, is_digest in leaves.items()
        ]
        asked = [*commands, *looks, *map(self._asking, requests)]
        try:
            sent = [self.script([command]) if command[0] in _FUNCTIONS else command for command in asked]
            answers: list[Any] = self.send([("MULTI",), *sent, ("EXEC",)], [key])[-1]
            answers = [answer[0] if word[0] in _FUNCTIONS else answer for word, answer in zip(asked, answers)]
        except ServerFullError:
            (answers,) = self.send([self.script(asked)], [key])
        found = dict(zip(leaves, answers[len(commands) :]))
        replies = zip(requests, answers[len(commands) + len(leaves) :], strict=True)
        return answers[: len(commands)] + [request.answered(found[request.path], answer) for request, answer in replies]

    def _asking(self, request: Request) -> Sequence[Word]:
        """The command for the content that a request asks for."""
        path, _, _, run, offsets = request
        data = self.data(path)
        if not run:
            return "GET", data
        if len(offsets) == 8:
            start = int.from_bytes(offsets, "little")
            return "GETRANGE", data, start, start + run - 1
        return "READ", data, run, offsets

    # --- writing ------------------------------------------------------------------------------------------------------

    def upload(self, name: str, data: memoryview, key: Path) -> None:
        """Send bytes under a new name, in as many requests as they need.

        Raises:
            SaveError: the server has lost what it was sent earlier. It would fill the gap with zeros.
        """
        step = LIMIT // 2
        for at in range(0, len(data), step):
            write = ("SETRANGE", name, at, data[at : at + step])
            before, *_ = self.send([("STRLEN", name), write, ("PEXPIRE", name, FORGOTTEN)], [key])
            if before < at:
                raise self.lost_upload(key)

    def lost_upload(self, key: Path) -> SaveError:
        """Return the error of a write whose upload is not there any more."""
        return SaveError(
            f"{entries_of([key])}of the container {self.address}: the server has lost what was uploaded, as when it is "
            "started anew; nothing was written: the same call works again"
        )

    def write(
        self, checks: Sequence[Check], commands: Sequence[Sequence[Word]], written: Sequence[Path], token: str = ""
    ) -> int:
        """Carry out commands, all or none: 0, or the number of the check that failed.

        Sent twice, as when an answer was lost, they do the same; those that would not say a `token` in the hash of the
        leaf. A full server carries out what only frees memory. Errors name the keys in `written`.
        """
        if not checks and only_frees(commands):
            self.send([self.script(commands)], written)
            return 0
        sent = [self.script([command]) if command[0] in _FUNCTIONS else command for command in commands]
        transaction: list[Sequence[Word]] = [("MULTI",), *sent, ("EXEC",)]
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
            # Another one has written to what is watched, right behind the check.

    def renew(self) -> None:
        """Have the server forget the container, what others have added too, only after its time; two requests."""
        if self.address.ttl is not None:
            time = max(1, int(self.address.ttl * 1000))
            self.send([self.script([("PEXPIRE", name, time) for name in self._all()])])

    def clear(self) -> None:
        """Delete all keys of the container; two requests."""
        self.send([("DEL", *self._all())])

    def _all(self) -> list[str]:
        """The names of all keys of the container; what is among the nested containers may be a leaf."""
        _, paths, groups = self.state()[0].parsed()
        leaves = ((self.meta(path), self.data(path), self.data(path) + ":idx") for path in (*paths, *groups))
        return [*self._names, *itertools.chain.from_iterable(leaves)]


@functools.cache
def _script_of(words: frozenset[Word]) -> str:
    """The script for commands with these first words."""
    needed = words | {_NEEDS[word] for word in words if word in _NEEDS}
    return "local own = {}" + "".join(text for name, text in _FUNCTIONS.items() if name in needed) + _LOOP


def only_frees(commands: Sequence[Sequence[Word]]) -> bool:
    """Return whether commands free memory, and take none."""
    return all(command[0] in _FREEING for command in commands)


def _exchanged(connection: Any, commands: Sequence[Sequence[Word]]) -> list[Any]:
    pack, library_ = extras.require("hiredis", "redis").pack_command, library()
    # hiredis copies large words, and this one does not.
    packer = library_.connection.PythonRespSerializer(_LARGE, connection.encoder.encode)
    sent: list[Any] = []
    for is_large, group in itertools.groupby(commands, _is_large):
        if is_large:
            sent += itertools.chain.from_iterable(itertools.starmap(packer.pack, group))
        else:
            sent.append(b"".join(map(pack, map(tuple, group))))
    connection.send_packed_command(sent)
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(connection.read_response(disable_decoding=True))
        except library_.exceptions.ResponseError as error:
            answers.append(error)
    return answers


def _is_large(command: Sequence[Word]) -> bool:
    return type(command[-1]) is memoryview and len(command[-1]) > _LARGE


def _text(raw: bytes) -> str | None:
    """A name on the server; `None` for one that is no text, which this package cannot have written."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _pairs(reply: Any) -> dict[bytes, bytes]:
    """A hash, which is a list of names and values, or a mapping, as the version of the protocol has it."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
