"""Find secrets in URLs, options and texts, and replace them by `***`.

Everything that this package prints, logs or writes goes through here: passwords, keys, tokens and signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"

# Query parameters with secrets: signatures and credentials of presigned URLs, tokens, passwords, API keys.
_PARAMETER = (
    r"[\w.%-]*(?:signature|credential|token|secret|passw|passphrase|api[-_]?key|access[-_]?key|auth(?!or)|jwt|session)[\w.%-]*"
    r"|sig|sas|hmac|key|pwd|pw|policy|key-pair-id|googleaccessid"
)
_QUERY = re.compile(rf"(?P<name>[?&;#](?:{_PARAMETER})=)(?P<secret>[^&;#\s'\"<>]+)", re.IGNORECASE)
# User and password before a host. A key of S3 may contain slashes.
_AUTHORITY = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]+://)(?P<secret>[^\s'\"<>/?#]*|[^\s'\"<>/?#:@\[]+:(?!\d*/)[^\s'\"<>?#@]*)@"
)
# A user without a password is usually the name of a container (`abfss://container@account`). In HTTP it may be a token.
_MAY_BE_A_TOKEN = ("http://", "https://")

_OPTION = re.compile(
    r"secret|passw|passphrase|pwd|token|credential|auth|signature|sas|connection_string|conn_str|private|cookie"
    r"|api[-_]?key|access[-_]?key|account[-_]?key|customer[-_]?key|(^|_)key(_id)?$|^pkey$|^pw$",
    re.IGNORECASE,
)
# Option values that name a way to find a secret, or say that no secret is needed.
_WAYS = frozenset({"anon", "cloud", "cache", "browser", "google_default", "default", "environment", "auto"})
# Shorter secrets are not replaced, because they would match ordinary text.
_SHORTEST = 4


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace the secrets in all URLs of a text, and each of `secrets`, by `***`.

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
    """Return the secrets in a URL, both as written and decoded."""
    found = [match["secret"] for match in _QUERY.finditer(url)]
    user = _AUTHORITY.match(url)
    if user is not None and _without_user(user) != user[0]:
        name, _, password = user["secret"].partition(":")
        found.append(password or name)
    return sorted({text for secret in found for text in (secret, unquote(secret))} - {"", HIDDEN})


def is_secret(name: str, value: object) -> bool:
    """Return whether an option is a secret: by its name, or because its value is a URL with a secret.

    The location of a secret is not a secret itself (`token="/home/me/key.json"`, `"google_default"`).
    """
    if isinstance(value, str) and redact(value) != value:
        return True
    if not value or isinstance(value, (bool, int, float)) or not _OPTION.search(name):
        return False
    return not (isinstance(value, str) and (value in _WAYS or value.startswith(("/", "~", "./"))))


def secrets_of_options(options: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the secrets in options by name, including nested options, such as `client_kwargs.password`."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        path = f"{above}{name}"
        if is_secret(str(name), value):
            found[path] = value
        elif isinstance(value, Mapping):
            found |= secrets_of_options(value, f"{path}.")
    return found


def redact_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each secret in options by `***`."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        inner = redact_options(value) if isinstance(value, Mapping) else value
        found[name] = HIDDEN if is_secret(str(name), value) else inner
    return found
