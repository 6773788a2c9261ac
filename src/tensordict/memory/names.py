"""File names of entries, with percent-encoding of unsafe characters, and local paths out of `file:` URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Container
from typing import TypeVar
from urllib.parse import unquote

from tensordict.core.exceptions import SaveError
from tensordict.core.redaction import redact

_PathT = TypeVar("_PathT")

META = "meta.json"
LEAF_SUFFIX = ".memmap"
TABLE_SUFFIX = ".shape.memmap"
# The file of a data set that describes its rows.
SCHEMA = "schema.json"
# The folders of a data set: one for manifests, one for shards.
DATASET_FOLDERS = ("writers", "shards")

# A URL begins with a scheme of two letters or more. A single letter is a drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# `pathlib.Path` turns `s3://x` into `s3:/x`, which looks like a local path. These schemes mark it as a broken URL.
_SCHEMES = "file|https?|ftp|s3|gs|gcs|az|abfss?|adl|hdfs|webhdfs|hf|dbfs|memory|oss|r2"
_COLLAPSED = re.compile(f"({_SCHEMES}):/", re.IGNORECASE)

_SPECIAL = re.compile(r'[\x00-\x20"%*/:<>?\\|\x7f]')
_WHOLE = {"": "%", ".": "%2E", "..": "%2E%2E"}


def scheme_of(path: object) -> str:
    """Return the scheme of a URL, or an empty string for anything else."""
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    found = _URL.match(given) if isinstance(given, str) else None
    return "" if found is None else found[1].lower()


def without_scheme(path: _PathT) -> _PathT | str:
    """Turn a URL `file:///...` into a path. Return paths and other URLs unchanged."""
    return local_path(path) if scheme_of(path) == "file" else path  # type: ignore[arg-type]


def local_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local file or folder, given as a path or as a URL `file:///...`.

    Raises:
        SaveError: the argument is another URL. A local folder of that name would surprise the user.
    """
    given = os.fspath(path)
    found = _URL.match(given) or _COLLAPSED.match(given)
    if found is None:
        return os.path.abspath(given)
    scheme = found[1].lower()
    if scheme == "file" and _URL.match(given):
        host, slash, rest = unquote(given[len("file://") :]).partition("/")
        if host in ("", "localhost"):
            return os.path.abspath(slash + rest)
    advice = "save and load take URLs as strings, which pathlib breaks; anything else takes local paths"
    raise SaveError(
        f"{redact(given)!r} is a URL ({scheme}:), and this takes the path of a local file or folder: {advice}"
    )


def file_name(name: str, robust: bool) -> str:
    """Return the file name of the entry `name`, without suffix.

    Args:
        name: the name of the entry.
        robust: percent-encode control characters, space, `"%*/:<>?\\|` and the names `.` and `..`. The empty name
            becomes `%`, which no other name is encoded to. With `False`, the name is used unchanged and must be a
            single path component.

    Raises:
        SaveError: the name has no UTF-8 form (lone surrogates), or would leave its folder without encoding.
    """
    if robust:
        encoded = _WHOLE.get(name)
        if encoded is None:
            encoded = _SPECIAL.sub(_escape, name) if _SPECIAL.search(name) else name
    else:
        encoded = name
        if not is_component(name):
            raise SaveError(
                f"entry {name!r}: this name would leave its folder or is no file name; use robust_key=True, "
                "which encodes it"
            )
    if not encoded.isascii():
        try:
            encoded.encode()
        except UnicodeEncodeError as error:
            raise SaveError(f"entry {name!r}: this name has no UTF-8 form and cannot be a file name") from error
    return encoded


def folder_name(name: str, robust: bool, leaf_files: Container[str]) -> str:
    """Return the folder name of the nested container `name`, whose sibling leaves are stored as `leaf_files`.

    Usually `file_name` gives the name. If `meta.json` or the file of a sibling leaf has this name already, the last dot
    is encoded, too.
    """
    encoded = file_name(name, robust)
    if not robust and encoded in {"", ".", ".."}:
        raise SaveError(f"entry {name!r}: this name would leave its folder; use robust_key=True, which encodes it")
    if encoded == META or encoded in leaf_files:
        head, _, tail = encoded.rpartition(".")
        return f"{head}%2E{tail}"
    return encoded


def is_component(name: str) -> bool:
    """Return True if `name` plus a suffix is a single component of a path."""
    return "/" not in name and "\0" not in name


def _escape(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"
