"""Secrets in URLs, options and texts: where they stand, and the same without them.

A password, a key, a token or a signature is replaced by `***` in everything that this package writes or shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

# Parameters of a query: signatures and credentials of presigned URLs, tokens, passwords, keys of an API.
_PARAMETER = (
    r"[\w.%-]*(?:signature|credential|token|secret|passw|passphrase|api[-_]?key|access[-_]?key|auth(?!or)|jwt|session)[\w.%-]*"
    r"|sig|sas|hmac|key|pwd|pw|policy|key-pair-id|googleaccessid"
)
_QUERY = re.compile(rf"(?P<name>[?&;#](?:{_PARAMETER})=)(?P<secret>[^&;#\s'\"<>]+)", re.IGNORECASE)
# The user and the password before a host. A key of S3 may have slashes in it.
_AUTHORITY = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]+://)(?P<secret>[^\s'\"<>/?#]*|[^\s'\"<>/?#:@\[]+:(?!\d*/)[^\s'\"<>?#@]*)@"
)
# A user without a password is the name of a container (`abfss://container@account`), but for HTTP it may be a token.
_MAY_BE_A_TOKEN = ("http://", "https://")

_OPTION = re.compile(
    r"secret|passw|passphrase|pwd|token|credential|auth|signature|sas|connection_string|conn_str|private|cookie"
    r"|api[-_]?key|access[-_]?key|account[-_]?key|customer[-_]?key|(^|_)key(_id)?$|^pkey$|^pw$",
    re.IGNORECASE,
)
# Values that name the way to a secret, or say that no secret is needed.
_WAYS = frozenset({"anon", "cloud", "cache", "browser", "google_default", "default", "environment", "auto"})
# Shorter values would take innocent letters out of a text.
_SHORTEST = 4


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace the secrets of the URLs in a text, and each of `secrets`, by `***`.

    Example:
        >>> from tensordict.core.redaction import redact
        >>> redact("cannot read 'https://me:pass@host/x?part=1&sig=abc'")
        "cannot read 'https://***@host/x?part=1&sig=***'"
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _AUTHORITY.sub(_without_user, text)
    return _QUERY.sub(rf"\g<name>{HIDDEN}", text)


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found["scheme"], found["secret"]
    kept = ":" not in user and scheme.lower() not in _MAY_BE_A_TOKEN
    return found[0] if kept or not user else f"{scheme}{HIDDEN}@"


def secrets_of_url(url: str) -> list[str]:
    """The secrets in a URL, as they stand there and decoded."""
    found = [match["secret"] for match in _QUERY.finditer(url)]
    user = _AUTHORITY.match(url)
    if user is not None and _without_user(user) != user[0]:
        name, _, password = user["secret"].partition(":")
        found.append(password or name)
    return sorted({text for secret in found for text in (secret, unquote(secret))} - {"", HIDDEN})


def is_secret(name: str, value: object) -> bool:
    """Tell whether an option is a secret: its name says so, or its value is a URL with a secret in it.

    An option that says where a secret is found (`token="/home/me/key.json"`, `"google_default"`) is none.
    """
    if isinstance(value, str) and redact(value) != value:
        return True
    if not value or isinstance(value, (bool, int, float)) or not _OPTION.search(name):
        return False
    return not (isinstance(value, str) and (value in _WAYS or value.startswith(("/", "~", "./"))))


def secrets_of_options(options: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The secrets in options, also in nested ones, by names such as `client_kwargs.password`."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        path = f"{above}{name}"
        if is_secret(str(name), value):
            found[path] = value
        elif isinstance(value, Mapping):
            found |= secrets_of_options(value, f"{path}.")
    return found


def redacted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each secret in options by `***`."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        inner = redacted_options(value) if isinstance(value, Mapping) else value
        found[name] = HIDDEN if is_secret(str(name), value) else inner
    return found
