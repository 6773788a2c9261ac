"""The files of checkpoints: their descriptions, folders of checkpoints, and the removal of old ones.

A checkpoint is an archive whose entry `_checkpoint` describes it, or, for sharded modules, a folder with
`checkpoint.json` (`parallel/sharded_checkpoints.py`). `save_checkpoint(keep=)` adds checkpoints to a folder, as
`step-00000100.tdz` or `step-00000100`, and numbers them in the order of their saves.
"""

from __future__ import annotations

import os
import re
import warnings
from typing import Any, NamedTuple

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.io.formats.archive import load_archive
from tensordict.io.formats.loading import LoadOptions
from tensordict.io.saving import commit

ENTRY, FILE = "_checkpoint", "checkpoint.json"
FORMAT, VERSION = "tensordict checkpoint", 1
_NAME = re.compile(r"step-\d{8,}(\.tdz)?")
# The files of a checkpoint that is a folder.
_PARTS = re.compile(r"(shards|rank)-\d{5,}\.tdz")


def make_name(step: int, is_sharded: bool) -> str:
    """Return the name of a checkpoint in a folder of checkpoints."""
    return f"step-{step:08d}{'' if is_sharded else '.tdz'}"


def read_header(path: str) -> dict[str, Any]:
    """Read the description of a checkpoint.

    Raises:
        FileNotFoundError: the path does not exist.
        SaveError: it is not a checkpoint, or its description is broken.
    """
    file = f"{path}/{FILE}" if os.path.isdir(path) else path
    header: Any
    try:
        if file != path:
            with open(file, "rb") as opened:
                header = parse_json(opened.read())
        else:
            header = load_archive(path, LoadOptions(keys=[ENTRY]))[ENTRY]
    except FileNotFoundError:
        if not os.path.lexists(path):
            raise
        raise SaveError(f"{path!r} is not a checkpoint: it has no {FILE!r}") from None
    except (KeyError, ValueError) as error:
        raise SaveError(f"{file!r} is not a checkpoint, or it is broken: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise SaveError(f"{path!r} is not a checkpoint: save_checkpoint has not written its description")
    if header.get("version") != VERSION:
        raise SaveError(
            f"{path!r} is a checkpoint of version {header.get('version')!r}, and this package reads {VERSION}"
        )
    if not all(isinstance(header.get(name), dict) for name in ("kinds", "shapes")):
        raise SaveError(f"{path!r} is a broken checkpoint: its description lists no entries")
    return dict(header)


def check_free(path: str, replaces: bool) -> None:
    """Raise an error if there is something at `path` that a new checkpoint may not replace.

    Args:
        path: where the new checkpoint will be.
        replaces: allow to replace a checkpoint.
    """
    if not os.path.lexists(path):
        return
    if not replaces:
        raise SaveError(
            f"{path!r} exists: pass overwrite=True to replace a checkpoint, or keep=3 for a folder of the last three"
        )
    try:
        read_header(path)
    except OSError as error:
        raise SaveError(f"a checkpoint replaces only a checkpoint: {error}; remove it, or save elsewhere") from error


class Kept(NamedTuple):
    """A checkpoint in a folder of checkpoints. `order` counts the saves."""

    order: int
    path: str


def list_kept(folder: str, strict: bool = False) -> list[Kept]:
    """Return the checkpoints in a folder of checkpoints, the oldest first. Links and other files are left out.

    Args:
        folder: the folder; a missing one has no checkpoints.
        strict: raise an error for a checkpoint that cannot be read. By default it is left out.

    Raises:
        SaveError: a checkpoint cannot be read.
    """
    try:
        with os.scandir(folder) as scan:
            names = sorted(entry.name for entry in scan if _NAME.fullmatch(entry.name) and not entry.is_symlink())
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        path = f"{folder}/{name}"
        if os.path.isdir(path) and not os.path.lexists(f"{path}/{FILE}"):
            continue  # Files of others, which stayed when the checkpoint was removed.
        try:
            header = read_header(path)
        except OSError as error:
            if strict:
                raise SaveError(f"{error}; name the checkpoint to load, or remove that file") from error
            continue
        # A checkpoint that was copied or renamed into the folder has another name, or no number.
        order, step = header.get("order"), header.get("step")
        if type(order) is int and type(step) is int and name in (make_name(step, False), make_name(step, True)):
            found.append(Kept(order, path))
    return sorted(found)


def find_checkpoint(path: str) -> str:
    """Return the path of the checkpoint itself: in a folder of checkpoints, of the one that was saved last.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        SaveError: the folder has no checkpoint, or one of its checkpoints cannot be read.
    """
    if not os.path.isdir(path) or os.path.lexists(f"{path}/{FILE}"):
        return path
    if not (found := list_kept(path, strict=True)):
        raise SaveError(f"{path!r} is a folder without checkpoints: save_checkpoint(keep=...) adds them")
    return found[-1].path


def remove_old(folder: str, keep: int, saved: str) -> None:
    """Remove the oldest checkpoints of a folder, so that `keep` remain. The one at `saved` is not removed."""
    for _, path in list_kept(folder)[:-keep]:
        if path != saved:
            try:
                _remove(path)
            except OSError as error:
                warnings.warn(f"the old checkpoint {path!r} cannot be removed: {error}", stacklevel=2)


def _remove(path: str) -> None:
    if not os.path.isdir(path):
        os.unlink(path)
        return
    # Remove the description last, so that the next call continues if this process is killed. Files of others stay.
    with os.scandir(path) as scan:
        names = [
            entry.name for entry in scan if _PARTS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
        ]
    for name in (*names, FILE):
        os.unlink(f"{path}/{name}")
    commit.try_to(os.rmdir, path)
