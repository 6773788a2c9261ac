"""URLs and storage options that hold secrets, and neither show nor pickle them.

Both are made at the door, by `as_url` and `GuardedOptions.of`. `Remote` alone reads the secrets, to reach a server. A
text made of such a URL has no secret in it, so code that shows or writes it needs no care. The arguments of a
connection to a Redis server are guarded in the same way.

A pickle may be stored or sent to another machine, so pickling what holds secrets is an error. Processes that
`multiprocessing` starts or sends to are given them. The option `allow_secrets=True` lets all pickles have them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tensordict.core.redaction import redact, redact_options, secrets_of_options, secrets_of_url
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import scheme_of

StorageOptions = Mapping[str, Any]

ALLOW_SECRETS, REDIRECT_HOSTS = "allow_secrets", "redirect_hosts"
# Options of this package, which no library is given.
_OWN = (ALLOW_SECRETS, REDIRECT_HOSTS)
# Where a connection to a Redis server finds its password, unless its arguments have one of these.
REDIS_PASSWORD, _LOGINS = "TENSORDICT_REDIS_PASSWORD", {"password", "credential_provider"}


class _Constant:
    """Copies of it are the object itself."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self


class Url(_Constant, str):
    """A URL whose text is without its secrets, which `with_secrets` gives.

    F-strings, JSON and parts of the text are plain `str`s without secrets.
    """

    _full: str
    _allowed: bool

    @property
    def with_secrets(self) -> str:
        """The whole URL, to reach the server."""
        return self._full

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._allowed:
            raise _refusal(f"the URL {str(self)!r} holds a secret")
        return as_url, (self._full, True)


def as_url(path: PathLike, allowed: bool = False) -> str:
    """A path or URL as text; a `Url` where it holds secrets.

    Args:
        path: what a caller has given.
        allowed: whether pickles have the secrets.
    """
    full = path.with_secrets if isinstance(path, Url) else os.fspath(path)
    shown = redact(full) if scheme_of(full) else full
    if shown == full:
        return full
    found = Url(shown)
    found._full, found._allowed = full, allowed or (isinstance(path, Url) and path._allowed)
    return found


def full_url(url: str) -> str:
    """A URL with its secrets."""
    return url.with_secrets if isinstance(url, Url) else url


class GuardedOptions(_Constant, Mapping[str, Any]):
    """The `storage_options` of a caller: shown without secrets, and pickled only where these may go along.

    Attributes:
        allow_secrets: whether pickles have the secrets.
        redirect_hosts: the hosts that a server of HTTP may redirect to, beside itself.
    """

    _what = "storage_options hold"
    # Where else each machine may find them, and how a caller has them pickled.
    _where = "environment (AWS_PROFILE, ...) or in the configuration of fsspec (~/.config/fsspec/, FSSPEC_S3_KEY, ...)"
    _allow = f"storage_options={{..., {ALLOW_SECRETS!r}: True}}"

    def __init__(self, options: StorageOptions) -> None:
        self._options = dict(options)

    @staticmethod
    def of(options: StorageOptions | None) -> GuardedOptions:
        """Those of a caller, who may have given none."""
        return options if isinstance(options, GuardedOptions) else GuardedOptions(options or {})

    @property
    def allow_secrets(self) -> bool:
        """See the class."""
        return bool(self._options.get(ALLOW_SECRETS, False))

    @property
    def redirect_hosts(self) -> tuple[str, ...]:
        """See the class; the environment variable `TENSORDICT_REDIRECT_HOSTS` names more of them."""
        given = self._options.get(REDIRECT_HOSTS, ())
        hosts = [given] if isinstance(given, str) else [*given]
        hosts += os.environ.get("TENSORDICT_REDIRECT_HOSTS", "").split(",")
        return tuple(dict.fromkeys(host.strip().lower() for host in hosts if host.strip()))

    def for_library(self) -> dict[str, Any]:
        """The options without those of this package, for the library that reaches the server."""
        return {name: value for name, value in self._options.items() if name not in _OWN}

    def secrets(self) -> list[str]:
        """The secret texts, to take them out of messages of libraries."""
        found: list[str] = []
        for value in secrets_of_options(self._options).values():
            found += [value] if isinstance(value, str) and redact(value) == value else []
            found += secrets_of_url(value) if isinstance(value, str) else []
            found += [part for part in value if isinstance(part, str)] if isinstance(value, tuple) else []
        return found

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr(redact_options(self._options))

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.allow_secrets and (found := secrets_of_options(self._options)):
            raise _refusal(f"{self._what} secrets ({', '.join(map(repr, found))})", type(self))
        return type(self), (self._options,)


class GuardedConnection(GuardedOptions):
    """The arguments of a connection to a Redis server: shown without secrets, and pickled as `storage_options` are."""

    _what = "the arguments of the connection to the Redis server hold"
    _where, _allow = f"environment variable {REDIS_PASSWORD}", f"{ALLOW_SECRETS}=True"

    def for_library(self) -> dict[str, Any]:
        """The arguments of `redis.Redis`; the environment gives the password when they give none."""
        found, password = super().for_library(), os.environ.get(REDIS_PASSWORD)
        return found if not password or found.keys() & _LOGINS else {**found, "password": password}


def _refusal(what: str, kind: type[GuardedOptions] = GuardedOptions) -> pickle.PicklingError:
    return pickle.PicklingError(
        f"{what}, and pickles are given none. Leave it out, and have each machine find its own: in the {kind._where}. "
        f"Or pass {kind._allow}, and keep the pickle as you keep the secret"
    )


ForkingPickler.register(Url, lambda url: (as_url, (url._full, url._allowed)))
for _kind in (GuardedOptions, GuardedConnection):
    ForkingPickler.register(_kind, lambda options: (type(options), (options._options,)))
