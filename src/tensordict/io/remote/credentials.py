"""URLs, storage options and Redis connections with secrets that neither their text nor their pickles contain.

Public functions wrap their arguments by `as_url` and `GuardedOptions.of`. Only `Remote` reads the secrets, to reach a
server. The text of such a URL has no secret, so code can show and write it safely.

A pickle may be stored or sent to another machine, so pickling secrets is an error. Processes of `multiprocessing` on
this machine receive them. The option `allow_secrets=True` includes them in all pickles.
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
# Options of this package, which are not passed to libraries.
_OWN = (ALLOW_SECRETS, REDIRECT_HOSTS)
# Variable with the password of Redis connections, and the arguments that override it.
REDIS_PASSWORD, _LOGINS = "TENSORDICT_REDIS_PASSWORD", {"password", "credential_provider"}


class _Constant:
    """An immutable object, whose copies are the object itself."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self


class Url(_Constant, str):
    """A URL whose text omits its secrets; `with_secrets` includes them.

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
    """Convert a path or URL to text; to a `Url` if it has secrets.

    Args:
        path: the path or URL.
        allowed: include the secrets in pickles.
    """
    full = path.with_secrets if isinstance(path, Url) else os.fspath(path)
    shown = redact(full) if scheme_of(full) else full
    if shown == full:
        return full
    found = Url(shown)
    found._full, found._allowed = full, allowed or (isinstance(path, Url) and path._allowed)
    return found


def full_url(url: str) -> str:
    """Return a URL with its secrets."""
    return url.with_secrets if isinstance(url, Url) else url


class GuardedOptions(_Constant, Mapping[str, Any]):
    """The `storage_options` of a caller. Their repr omits secrets, and pickling secrets is an error by default.

    Attributes:
        allow_secrets: include the secrets in pickles.
        redirect_hosts: the other hosts that an HTTP server may redirect to.
    """

    _what = "storage_options hold"
    # For the error: other sources of the secrets, and the option that allows to pickle them.
    _where = "environment (AWS_PROFILE, ...) or in the configuration of fsspec (~/.config/fsspec/, FSSPEC_S3_KEY, ...)"
    _allow = f"storage_options={{..., {ALLOW_SECRETS!r}: True}}"

    def __init__(self, options: StorageOptions) -> None:
        self._options = dict(options)

    @staticmethod
    def of(options: StorageOptions | None) -> GuardedOptions:
        """Wrap options; `None` becomes empty options."""
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
        """Return the options for the library that reaches the server, without the options of this package."""
        return {name: value for name, value in self._options.items() if name not in _OWN}

    def secrets(self) -> list[str]:
        """Return the secret texts, which are removed from messages of libraries."""
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
    """The arguments of a connection to a Redis server, guarded like `storage_options`."""

    _what = "the arguments of the connection to the Redis server hold"
    _where, _allow = f"environment variable {REDIS_PASSWORD}", f"{ALLOW_SECRETS}=True"

    def for_library(self) -> dict[str, Any]:
        """Return the arguments of `redis.Redis`, with the password of the environment by default."""
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
