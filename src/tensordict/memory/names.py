"""The file names of entries: percent-encoding of what the file system or the layout cannot hold as it is."""

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
# What every row of a data set is, in its folder.
SCHEMA = "schema.json"
# The folders of a data set: manifests, and shards.
DATASET_FOLDERS = ("writers", "shards")

# How a URL begins: a scheme of two letters or more, as one letter is a drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# What `pathlib.Path` makes of one has a single slash, and could be a local name but for these.
_SCHEMES = "file|https?|ftp|s3|gs|gcs|az|abfss?|adl|hdfs|webhdfs|hf|dbfs|memory|oss|r2"
_COLLAPSED = re.compile(f"({_SCHEMES}):/", re.IGNORECASE)

_SPECIAL = re.compile(r'[\x00-\x20"%*/:<>?\\|\x7f]')
_WHOLE = {"": "%", ".": "%2E", "..": "%2E%2E"}


def scheme_of(path: object) -> str:
    """The scheme of a URL; empty for a path, and for what is neither."""
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    found = _URL.match(given) if isinstance(given, str) else None
    return "" if found is None else found[1].lower()


def without_scheme(path: _PathT) -> _PathT | str:
    """A path, or that of a URL `file:///...`; other URLs stay as they are."""
    return local_path(path) if scheme_of(path) == "file" else path  # type: ignore[arg-type]


def local_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a local file or folder, which a URL `file:///...` names, too.

    Raises:
        SaveError: it is another URL, which is named: nothing is written to a folder of that name.
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
    """The name under which the entry `name` stands on disk, without suffix.

    With `robust`, control characters, space and `"%*/:<>?\\|` are percent-encoded, and so are the names `.` and `..`;
    the empty name becomes `%`, which no other name is encoded to. Without, `name` itself, which must then be one
    path component.

    Raises:
        SaveError: when the name cannot be written (lone surrogates), or would leave its folder without encoding.
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
    """The name of the folder of the nested container `name`, whose sibling leaves are stored as `leaf_files`.

    As `file_name`, except where that name is taken by `meta.json` or by the file of a sibling leaf: its last dot is
    then encoded too.
    """
    encoded = file_name(name, robust)
    if not robust and encoded in {"", ".", ".."}:
        raise SaveError(f"entry {name!r}: this name would leave its folder; use robust_key=True, which encodes it")
    if encoded == META or encoded in leaf_files:
        head, _, tail = encoded.rpartition(".")
        return f"{head}%2E{tail}"
    return encoded


def is_component(name: str) -> bool:
    """Whether `name` with a suffix behind it is a single component of a path."""
    return "/" not in name and "\0" not in name


def _escape(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"
