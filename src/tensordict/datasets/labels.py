"""The label that stands in every shard, and what a manifest says of a shard that cannot be true of another one.

A label is a JSON array, `[WRITER, NAME]`, or `[WRITER, NAME, GENERATION, HOLDS]` in a merged shard (see
`manifest.py`). It stands in the outermost `meta.json` of a folder or an archive, as `"_shard"`, below the class where
the rows are of a tensorclass, and in an attribute of a Zarr group. The description of a shard is all its documents
`meta.json` and `zarr.json`, the label among them, so its digest differs from that of every other shard.
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
    """Return the shard that the label in the first of some documents names; `None` when none has a label.

    Args:
        read: returns the content of a file of the shard; raises `FileNotFoundError` when there is none.
        names: of the documents: `DOCUMENTS` or `GROUPS`.
    """
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if (found := _label_in(read(name))) is not None:
                return found
    return None


def _label_in(document: bytes) -> Line | None:
    try:
        content = json.loads(document)
        if isinstance(attributes := content.get("attributes"), dict):
            return parse_label(json.loads(attributes["__tensordict__"][GROUP_LABEL]))
        return parse_label(content.get(LABEL))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def describe_shard(path: str) -> tuple[int | None, str]:
    """Return the length of all files of a shard on this machine (`None` for Zarr), and the digest of its description.

    Raises:
        OSError: it cannot be read.
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
    """Refuse a shard that says it is another one.

    Args:
        label: what the label in the shard names.
        path: where the shard is, in the data set.
        shown: its path or URL, for the error.

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
