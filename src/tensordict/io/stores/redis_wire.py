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
Of a lazy stack, leaves that it could not read are in `__groups__`, with a `_leaf`, and not in `__keys__`: those that
only some elements have, `null` being the shape of the others, and values, `d:PATH` being the list of them in JSON.
What is uploaded ahead is under `t:UUID`; `__stop__` is there for a millisecond where a check fails, see `_CHECK`.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from tensordict.core.exceptions import SaveError, ServerFullError
from tensordict.core.keys import Path, entries_of
from tensordict.io.remote.credentials import GuardedConnection
from tensordict.io.stores.redis_protocol import Parser, Word, library, pack_commands

# The largest content of one request, in bytes. Larger tensors are split.
LIMIT = 32 << 20
# The server forgets an unused upload after this time, in milliseconds.
_FORGOTTEN = 3_600_000
_TRIES = 4

# Whether the names that there are, and what is said of some leaves, are still what the seal stands for; else all of
# that with a new seal. KEYS are the header, the set of paths, the nested containers and the hashes of the leaves. What
# the unequal elements of a lazy stack have is told by a digest of their shapes.
_STATE = """
local lists = {redis.call('MGET', unpack(KEYS, 1, 7)), redis.call('SMEMBERS', KEYS[8]), redis.call('HGETALL', KEYS[9])}
for i = 10, #KEYS do
  local shape, dtype, mark, shapes = unpack(redis.call('HMGET', KEYS[i], 'shape', 'dtype', 'is_non_tensor', 'shapes'))
  lists[#lists + 1] = {shapes and redis.sha1hex(shapes) or shape, dtype, mark}
end
local seal = redis.sha1hex(cmsgpack.pack(lists))
return seal == ARGV[1] and 1 or {seal, lists}
"""

# Pieces of an array: their length, and the offsets of all of them.
_READ = """
local run, offsets, parts = tonumber(ARGV[1]), ARGV[2], {}
for k = 1, #offsets / 8 do
  local offset = struct.unpack('<I8', offsets, 8 * k - 7)
  parts[k] = redis.call('GETRANGE', KEYS[1], string.format('%.0f', offset), string.format('%.0f', offset + run - 1))
end
return table.concat(parts)
"""

# The same, written.
_WRITE = """
local run, offsets, data = tonumber(ARGV[1]), ARGV[2], ARGV[3]
for k = 1, #offsets / 8 do
  local offset = string.format('%.0f', struct.unpack('<I8', offsets, 8 * k - 7))
  redis.call('SETRANGE', KEYS[1], offset, string.sub(data, (k - 1) * run + 1, k * run))
end
return 0
"""

# Write pieces that were uploaded ahead, and lie behind one another under the second key.
_PLACE = _WRITE.replace("ARGV[3]", "redis.call('GET', KEYS[2])")

# Check that leaves (hash, data) still have a shape (see `_STATE`), a dtype (a value: its form) and a length, or are not
# there; or, without a shape, that an upload (its name, the name that it is for) is still there. Returns 0, or the
# number of the first check that fails. Then the first key is written to, which the transaction behind this script
# watches, so that the transaction is not carried out. A full server refuses SET. It takes RENAME, which touches that
# key as well.
_CHECK = """
for i = 1, #KEYS / 2 do
  local one, other, at, fits = KEYS[2 * i], KEYS[2 * i + 1], 3 * i - 2, nil
  if ARGV[at] == '' then
    fits = redis.call('EXISTS', one) == 1
  else
    local size = redis.call('STRLEN', other) == tonumber(ARGV[at + 2])
    local shape, dtype, shapes, form = unpack(redis.call('HMGET', one, 'shape', 'dtype', 'shapes', '_form'))
    shape = shapes and redis.sha1hex(shapes) or shape or 'none'
    fits = size and shape == ARGV[at] and (dtype or form or '') == ARGV[at + 1]
  end
  if not fits then
    for _, key in ipairs({one, other}) do
      if redis.call('EXISTS', key) == 1 then
        redis.call('RENAME', key, KEYS[1])
        redis.call('RENAME', KEYS[1], key)
        return i
      end
    end
    redis.call('SET', KEYS[1], '', 'PX', 1)
    return i
  end
end
return 0
"""

# Take over an upload, and leave an empty one: the same request, sent again after its answer was lost, finds that.
_TAKE = """
if redis.call('STRLEN', KEYS[1]) > 0 then
  redis.call('RENAME', KEYS[1], KEYS[2])
  redis.call('PERSIST', KEYS[2])
  redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
end
return 0
"""

# Carry out commands that only free memory: for each the number of its words, and the words. A full server refuses
# transactions, and runs this.
_FREE = """
local at = 1
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + count))
  at = at + count + 1
end
return 0
"""
_FREEING = {"DEL", "HDEL", "SREM"}

# Have the server forget keys after a time, in milliseconds. A full server runs this, too.
_RENEW = """
for i = 1, #KEYS do
  redis.call('PEXPIRE', KEYS[i], ARGV[1])
end
return 0
"""


@dataclass(frozen=True)
class Address:
    """The address of a container: the server, as arguments of `redis.Redis`, and its identifier there.

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
        """Return the name of the server for errors, without the password."""
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
        pool = redis.Redis(**{"retry": retry, "protocol": 2, **arguments}).connection_pool
        if "protocol" not in arguments:
            pool.connection_kwargs["parser_class"] = Parser
        _POOLS[key] = pool
    return redis.Redis(connection_pool=pool)


class Request(NamedTuple):
    """A read of a leaf: pieces of one length at offsets in bytes (little-endian, 64 bits each).

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


# What has to be so for a write: a hash, its data, the shape and dtype (of a value its form) of the one, the length of
# the other (`ABSENT` where neither is there); or the name of an upload, the name that it is for, nothing twice, and 0.
Check = tuple[str, str, bytes, bytes, int]
ABSENT = (b"none", b"", 0)


class State(NamedTuple):
    """The answer of a server about a container, and the seal that identifies this state.

    Attributes:
        header: what is noted of it as a whole.
        paths: the leaves.
        groups: what is noted of nested containers.
        leaves: of some leaves their shape (see `_STATE`), dtype, and the mark of a value.
    """

    seal: Any
    header: dict[str, bytes]
    paths: set[str]
    groups: dict[str, bytes]
    leaves: Sequence[Sequence[bytes | None]]


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

    @contextlib.contextmanager
    def errors(self, keys: Sequence[Path] = ()) -> Iterator[None]:
        """Turn errors of the server into Python's, which name the server and the entries."""
        errors, entries = library().exceptions, entries_of(keys)
        try:
            yield
        except (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError) as error:
            if isinstance(error, errors.AuthenticationError):
                # A rejected upload is useless now.
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

    def state(self, requests: Sequence[Request], known: State | None) -> tuple[State, list[Any]]:
        """Return the current state, `known` itself if it did not change, and the results of `read` for the requests.

        `known` is what was given for requests for the same leaves.
        """
        asked = _paths_of(requests)
        keys = [*self._names, *map(self.meta, asked)]
        look = ("EVAL", _STATE, len(keys), *keys, "" if known is None else bytes(known.seal))
        found, *replies = self._look_up([look, *self._asking(requests)])
        if found != 1:
            seal, (header, paths, groups, *leaves) = found
            texts = [(_text(raw), bytes(value)) for raw, value in zip(groups[::2], groups[1::2], strict=True)]
            known = State(
                seal,
                {name: bytes(value) for name, value in zip(HEADER, header) if value is not None},
                {text for raw in paths if (text := _text(raw)) is not None},
                {text: value for text, value in texts if text is not None},
                [_plain(leaf) for leaf in leaves],
            )
        assert known is not None
        return known, _answers(requests, dict(zip(asked, known.leaves, strict=True)), replies)

    def metas(self, paths: Sequence[str]) -> list[dict[bytes, bytes]]:
        """The hashes of leaves."""
        replies = self.send([("HGETALL", self.meta(path)) for path in paths])
        # A list of names and values, or a mapping, as the version of the protocol has it.
        return [
            reply if isinstance(reply, dict) else dict(zip(reply[::2], map(bytes, reply[1::2]), strict=True))
            for reply in replies
        ]

    def read(self, requests: Sequence[Request], key: Path = ()) -> list[Any]:
        """Return the bytes of each leaf, for a value its text and form; `None` for a removed leaf."""
        paths = _paths_of(requests)
        replies = self._look_up([*map(self._look, paths), *self._asking(requests)], key)
        return _answers(requests, dict(zip(paths, map(_plain, replies))), replies[len(paths) :])

    def _look_up(self, commands: Sequence[Sequence[Word]], key: Path = ()) -> list[Any]:
        """Send commands that only read, and return their answers, which are of one state of the server.

        A full server refuses every command of a transaction, even a read, and accepts a read by itself. So the reads
        are sent alone, while their keys are watched, and sent again if another client wrote to a key meanwhile. (A
        single script would work in both cases, and takes 105 ms for 32 MiB. A transaction takes 27.)
        """
        if len(commands) == 1:
            return self.send(commands, [key])
        watch = ("WATCH", *dict.fromkeys(itertools.chain.from_iterable(map(_keys_of, commands))))
        while True:
            try:
                answers: list[Any] = self.send([("MULTI",), *commands, ("EXEC",)], [key])[-1]
                return answers
            except ServerFullError:
                _, *answers, _, done = self.send([watch, *commands, ("MULTI",), ("EXEC",)], [key])
                if done is not None:
                    return answers

    def _look(self, path: str) -> Sequence[Word]:
        """The command that asks what a leaf is, as `State.leaves` tell it."""
        return "HMGET", self.meta(path), "shape", "dtype", "is_non_tensor"

    def _asking(self, requests: Sequence[Request]) -> list[Sequence[Word]]:
        """The commands for the content that requests ask for: two for a value, else one."""
        commands: list[Sequence[Word]] = []
        for path, _, _, run, offsets in requests:
            data = self.data(path)
            if not run:
                commands += ("GET", data), ("HGET", self.meta(path), "_form")
            elif len(offsets) == 8:
                start = int.from_bytes(offsets, "little")
                commands.append(("GETRANGE", data, start, start + run - 1))
            else:
                commands.append(("EVAL", _READ, 1, data, run, offsets))
        return commands

    # --- writing ------------------------------------------------------------------------------------------------------

    def ahead(self) -> str:
        """A name that nothing knows, for what is uploaded ahead."""
        return f"{self.base}t:{uuid.uuid4()}"

    def upload(self, name: str, offset: int, data: memoryview, key: Path, held: int) -> None:
        """Send bytes at an offset of an upload, in as many requests as they need; `held` bytes were sent earlier.

        Raises:
            SaveError: the server has fewer. It would fill the gap with zeros.
        """
        step = LIMIT // 2
        for start in range(0, len(data), step):
            piece, at = data[start : start + step], offset + start
            write = ("SETRANGE", name, at, piece)
            before, *_ = self.send([("STRLEN", name), write, ("PEXPIRE", name, _FORGOTTEN)], [key])
            if before < held:
                raise self.lost_upload(key)
            held = max(held, at + len(piece))

    def lost_upload(self, key: Path) -> SaveError:
        """Return the error of a write whose upload is not there any more."""
        return SaveError(
            f"{entries_of([key])}of the container {self.address}: the server has lost what was uploaded, as when it is "
            "started anew; nothing was written: the same call works again"
        )

    def put(self, name: str, run: int, offsets: bytes, data: memoryview) -> Sequence[Word]:
        """The command that writes pieces of an array, all of one length, behind one another in `data`."""
        if len(offsets) == 8:
            return "SETRANGE", name, int.from_bytes(offsets, "little"), data
        return "EVAL", _WRITE, 1, name, run, offsets, data

    def place(self, ahead: str, name: str, run: int, offsets: bytes) -> Sequence[Word]:
        """Return the command that writes pieces of an array which were uploaded ahead; otherwise as `put`."""
        return "EVAL", _PLACE, 2, name, ahead, run, offsets

    def take(self, ahead: str, name: str) -> Sequence[Word]:
        """The command that has a name stand for what was uploaded ahead."""
        return "EVAL", _TAKE, 2, ahead, name, _FORGOTTEN

    def discard(self, names: Sequence[str]) -> None:
        """Delete what was uploaded ahead."""
        self.send([("DEL", *names)])

    def write(self, checks: Sequence[Check], commands: Sequence[Sequence[Word]], written: Sequence[Path]) -> int:
        """Carry out commands, all or none: 0, or the number of the check that failed.

        Sent twice, as when an answer was lost, they do the same. A full server carries out what only frees memory.
        Errors name the keys in `written`.
        """
        if not checks and only_frees(commands):
            names = dict.fromkeys(command[1] for command in commands)
            words = itertools.chain.from_iterable((len(command), *command) for command in commands)
            self.send([("EVAL", _FREE, len(names), *names, *words)], written)
            return 0
        transaction: list[Sequence[Word]] = [("MULTI",), *commands, ("EXEC",)]
        if not checks:
            self.send(transaction, written)
            return 0
        stop = self.base + "__stop__"
        keys = [stop, *(name for check in checks for name in check[:2])]
        known = [word for check in checks for word in check[2:]]
        watch = ("WATCH", stop, *(check[0] for check in checks))
        while True:
            _, failed, *_, done = self.send([watch, ("EVAL", _CHECK, len(keys), *keys, *known), *transaction], written)
            if failed or done is not None:
                return int(failed)
            # Another client wrote to a watched key right after the check.

    def renew(self) -> None:
        """Have the server forget the container, what others have added too, only after its time; two requests."""
        if self.address.ttl is None:
            return
        names = self._all()
        self.send([("EVAL", _RENEW, len(names), *names, max(1, int(self.address.ttl * 1000)))])

    def clear(self) -> None:
        """Delete all keys of the container; two requests."""
        self.send([("DEL", *self._all())])

    def _all(self) -> list[str]:
        """The names of all keys of the container; what is among the nested containers may be a leaf."""
        state, _ = Wire.state(self, (), None)
        paths = [*state.paths, *state.groups]
        leaves = ((self.meta(path), self.data(path), self.data(path) + ":idx") for path in paths)
        return [*self._names, *itertools.chain.from_iterable(leaves)]


def only_frees(commands: Sequence[Sequence[Word]]) -> bool:
    """Return whether commands free memory, and take none."""
    return all(command[0] in _FREEING for command in commands)


def _keys_of(command: Sequence[Word]) -> Sequence[Word]:
    """The keys that a command reads."""
    return command[3 : 3 + int(command[2])] if command[0] == "EVAL" else command[1:2]


def _exchanged(connection: Any, commands: Sequence[Sequence[Word]]) -> list[Any]:
    errors = library().exceptions
    connection.send_packed_command(pack_commands(commands))
    answers: list[Any] = []
    for _ in commands:
        try:
            answers.append(connection.read_response(disable_decoding=True))
        except errors.ResponseError as error:
            answers.append(error)
    return answers


def _text(raw: Any) -> str | None:
    """Decode a name on the server; `None` if it is not text. This package writes only text."""
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        return None


def _paths_of(requests: Sequence[Request]) -> list[str]:
    """The paths of the leaves, each once."""
    return list(dict.fromkeys([request.path for request in requests]))


def _answers(
    requests: Sequence[Request], leaves: Mapping[str, Sequence[bytes | None]], replies: Sequence[Any]
) -> list[Any]:
    """Return the results of requests from the metadata of their leaves and the answers to `Wire._asking`."""
    left = iter(replies)
    found: list[Any] = []
    for request in requests:
        shape, dtype, mark = leaves[request.path]
        data = next(left)
        if request.run:
            found.append(data if mark is None and shape == request.shape and dtype == request.dtype else None)
            continue
        form = next(left)
        found.append(None if mark is None or data is None else (bytes(data), bytes(form or b"")))
    return found


def _plain(texts: Sequence[Any]) -> list[bytes | None]:
    """Return texts; large ones as arrays."""
    return [None if text is None else bytes(text) for text in texts]
