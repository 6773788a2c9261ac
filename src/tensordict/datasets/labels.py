"""Labels and digests, which tell whether a shard is the one that a manifest lists.

A label is a JSON array, `[WRITER, NAME]`, or `[WRITER, NAME, GENERATION, HOLDS]` in a merged shard (see `manifest.py`).
A folder or an archive has it as `"_shard"` in its outermost `meta.json`, or in the `meta.json` below the class if the
rows are of a tensorclass. A Zarr group has it in an attribute. The description of a shard consists of all its documents
`meta.json` and `zarr.json`. These contain the label, so every shard has another digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable

from tensordict.core.exceptions import SaveError
from tensordict.datasets.lines import Line, parse_label
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.meta import LABEL
from tensordict.io.specification import WRAPPED
from tensordict.memory.names import META

GROUP = "zarr.json"
# The documents that may hold the label of a folder or an archive, and of a Zarr group.
DOCUMENTS, GROUPS = (META, f"{WRAPPED}/{META}"), (GROUP,)
# The name of the label among the notes of a Zarr group.
GROUP_LABEL = LABEL.removeprefix("_")


def find_label(read: Callable[[str], bytes], names: tuple[str, ...]) -> Line | None:
    """Return the label in the first of some documents that has one; `None` if no document has a label.

    Args:
        read: returns the content of a file of the shard; raises `FileNotFoundError` if the file is missing.
        names: the names of the documents: `DOCUMENTS` or `GROUPS`.
    """
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if (found := _parse_document(read(name))) is not None:
                return found
    return None


def _parse_document(document: bytes) -> Line | None:
    try:
        content = json.loads(document)
        if isinstance(attributes := content.get("attributes"), dict):
            return parse_label(json.loads(attributes["__tensordict__"][GROUP_LABEL]))
        return parse_label(content.get(LABEL))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def describe_shard(path: str) -> tuple[int | None, str]:
    """Return the length of all files of a local shard (`None` for Zarr), and the digest of its description.

    Raises:
        OSError: the shard cannot be read.
    """
    documents: dict[str, bytes] = {}
    nbytes = 0
    if not os.path.isdir(path):
        archive = Archive(path)
        names = [name for name in archive.entries if name.rpartition("/")[2] == META]
        documents = {name: archive.read(f"{path}/{name}") for name in names}
        nbytes = os.path.getsize(path)
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            nbytes += os.lstat(file).st_size
            if name in (META, GROUP):
                with open(file, "rb") as opened:
                    documents[os.path.relpath(file, path).replace(os.sep, "/")] = opened.read()
    digest = hashlib.sha256()
    for name, content in sorted(documents.items()):
        digest.update(f"{len(name.encode())} {len(content)} {name}".encode())
        digest.update(content)
    return None if GROUP in documents else nbytes, digest.hexdigest()


def check_label(label: Line | None, path: str, shown: str) -> None:
    """Refuse a shard whose label names another shard.

    Args:
        label: the label in the shard.
        path: the path of the shard in the data set.
        shown: its full path or URL, for the error.

    Raises:
        SaveError: the label is missing, or names another shard.
    """
    if label is None:
        raise SaveError(f"{shown!r} has no label: it is no shard of a data set, or was replaced by another save")
    if label.path != path:
        raise SaveError(
            f"{shown!r} says that it is the shard {os.path.basename(label.path)!r} of the writer {label.writer!r}: "
            "another shard lies in its place"
        )
