"""Listings of S3 and GCS: they are asked for page by page, and a server that never comes to an end is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require

T = TypeVar("T")
# A listing has so many names at most: `TENSORDICT_REMOTE_NAMES` says otherwise.
_MOST_NAMES = 1_000_000
# Neither S3 nor GCS allows longer names, in bytes.
_LONGEST_NAME = 1024
# Servers may send pages without names before others; so many at most in a row.
_BARREN_PAGES = 100


@dataclass
class Listing(Generic[T]):
    """The contents of a folder.

    Attributes:
        files: by the path below the folder.
        folders: the names of the folders in it; none in a listing at any depth.
    """

    files: dict[str, T] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


@dataclass
class _Page:
    files: Iterable[tuple[str, dict[str, Any]]]
    folders: Iterable[str]
    token: str | None


def is_listed_by_pages(files: Any) -> bool:
    """Return whether a file system of fsspec belongs to s3fs or gcsfs."""
    return hasattr(files, "_call_s3") or hasattr(files, "_process_object")


async def list_below(files: Any, path: str, keep: Callable[[str, dict[str, Any]], T], *, deep: bool) -> Listing[T]:
    """List a folder.

    Args:
        files: the file system of s3fs or gcsfs.
        path: of the folder, with the bucket.
        keep: takes the path of a file below the folder and the fields of the server's answer, and returns the value
            that is kept.
        deep: whether all files at any depth are listed, and not the files and folders in the folder.

    Raises:
        AnswerError: the server lists more names than are allowed, names that were not asked for, or pages without end.
    """
    most = int(os.environ.get("TENSORDICT_REMOTE_NAMES", _MOST_NAMES))
    ask = _ask_s3 if hasattr(files, "_call_s3") else _ask_gcs
    bucket, key, _ = files.split_path(path)
    prefix = f"{key.rstrip('/')}/" if key else ""
    found: Listing[T] = Listing()
    count, barren, token = 0, 0, None
    while True:
        page = await ask(files, bucket, prefix, "" if deep else "/", token)
        for name, info in page.files:
            below = _below(name, prefix)
            # An empty object may stand for a folder.
            if below and not below.endswith("/"):
                found.files[below] = keep(below, info)
        found.folders.update(_below(name, prefix).rstrip("/") for name in page.folders)
        before, count = count, len(found.files) + len(found.folders)
        if count > most:
            raise _refuse(f"more than {most:,} names: set TENSORDICT_REMOTE_NAMES to a larger number if it has them")
        if page.token is None:
            return found
        barren = barren + 1 if count == before else 0
        if page.token == token or barren > _BARREN_PAGES:
            raise _refuse("the same names again and again, and says that there are more")
        token = page.token


def _below(name: str, prefix: str) -> str:
    if not name.startswith(prefix) or len(name.encode()) > _LONGEST_NAME:
        raise _refuse(f"{name[:100]!r}, which was not asked for")
    return name[len(prefix) :]


def _refuse(what: str) -> SaveError:
    error: SaveError = require("tensordict.io.remote.web", "remote").AnswerError(f"the server lists {what}")
    return error


async def _ask_s3(files: Any, bucket: str, prefix: str, delimiter: str, token: str | None) -> _Page:
    more = {"ContinuationToken": token} if token is not None else {}
    answer = await files._call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter=delimiter, **more)
    return _Page(
        ((item["Key"], {**item, "size": item["Size"]}) for item in answer.get("Contents", ())),
        [item["Prefix"] for item in answer.get("CommonPrefixes", ())],
        answer.get("NextContinuationToken", "") if answer.get("IsTruncated") else None,
    )


async def _ask_gcs(files: Any, bucket: str, prefix: str, delimiter: str, token: str | None) -> _Page:
    which = {"prefix": prefix or None, "delimiter": delimiter or None, "pageToken": token, "maxResults": 1000}
    answer = await files._call("GET", "b/{}/o", bucket, json_out=True, **which)
    return _Page(
        ((item["name"], files._process_object(bucket, item)) for item in answer.get("items", ())),
        answer.get("prefixes", ()),
        answer.get("nextPageToken"),
    )
