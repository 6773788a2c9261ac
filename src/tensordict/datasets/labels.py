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
from dataclasses import dataclass
from typing import Any

from tensordict.core.errors import SaveError
from tensordict.datasets.lines import Line, Run, holds_to_json, is_id, is_shard_name, parse_holds
from tensordict.io.archive_reader import Archive
from tensordict.io.meta import LABEL
from tensordict.io.specification import WRAPPED
from tensordict.memory.names import META

GROUP = "zarr.json"
# The documents that may hold the label of a folder or an archive, and of a Zarr group.
DOCUMENTS, GROUPS = (META, f"{WRAPPED}/{META}"), (GROUP,)
# The name of the label among the notes of a Zarr group.
GROUP_LABEL = LABEL.removeprefix("_")


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a shard, as it stands in the shard.

    Args:
        writer: the id of its writer.
        name: its name in the folder of the writer.
        generation: of a merged shard.
        holds: the lines that a merged shard stands for.
    """

    writer: str
    name: str
    generation: int = 0
    holds: tuple[Run, ...] = ()

    def to_json(self) -> list[Any]:
        """Return the label as it stands in the shard."""
        short: list[Any] = [self.writer, self.name]
        return [*short, self.generation, holds_to_json(self.holds)] if self.holds else short

    def to_line(self, path: str, rows: int) -> Line:
        """Return the line of a manifest that has such a shard, without what only the manifest knows."""
        return Line(path, rows, None, "", self.generation, self.holds)


def parse_label(value: Any) -> Label | None:
    """Return the label that a JSON value describes; `None` when it describes none."""
    if type(value) is not list or len(value) not in (2, 4):
        return None
    writer, name = value[:2]
    if type(writer) is not str or not is_id(writer) or type(name) is not str or not is_shard_name(name):
        return None
    if len(value) == 2:
        return Label(writer, name)
    try:
        rows = sum(sum(run[2]) for run in value[3])
        generation = value[2] if type(value[2]) is int and value[2] > 0 else 0
        return Label(writer, name, generation, parse_holds(value[3], rows)) if generation else None
    except (ValueError, TypeError, LookupError):
        return None


def find_label(read: Callable[[str], bytes], names: tuple[str, ...]) -> Label | None:
    """Return the label in the first of some documents that has one; `None` when none has.

    Args:
        read: returns the content of a file of the shard; raises `FileNotFoundError` when there is none.
        names: of the documents: `DOCUMENTS` or `GROUPS`.
    """
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if (found := _label_in(read(name))) is not None:
                return found
    return None


def _label_in(document: bytes) -> Label | None:
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
    if not os.path.isdir(path):
        archive = Archive(path)
        names = [name for name in archive.entries if name.rpartition("/")[2] == META]
        documents = {name: archive.read(f"{path}/{name}") for name in names}
        return os.path.getsize(path), _digest(documents)
    nbytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            nbytes += os.lstat(file).st_size
            if name in (META, GROUP):
                with open(file, "rb") as opened:
                    documents[os.path.relpath(file, path).replace(os.sep, "/")] = opened.read()
    return None if GROUP in documents else nbytes, _digest(documents)


def _digest(documents: dict[str, bytes]) -> str:
    found = hashlib.sha256()
    for name in sorted(documents):
        content = documents[name]
        found.update(f"{len(name.encode())} {len(content)} {name}".encode())
        found.update(content)
    return found.hexdigest()


def check_label(label: Label | None, path: str, shown: str) -> None:
    """Refuse a shard that says it is another one.

    Args:
        label: read from the shard.
        path: where the shard is, in the data set.
        shown: its path or URL, for the error.

    Raises:
        SaveError: the label is missing, or names another shard.
    """
    _, writer, name = path.split("/")
    if label is None:
        raise SaveError(f"{shown!r} has no label: it is no shard of a data set, or was replaced by another save")
    if (label.writer, label.name) != (writer, name):
        raise SaveError(
            f"{shown!r} says that it is the shard {label.name!r} of the writer {label.writer!r}: another shard lies in "
            "its place"
        )
