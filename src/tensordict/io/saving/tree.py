"""`print_directory_tree`, which prints the files of a folder."""

from __future__ import annotations

import os
import pathlib


def print_directory_tree(path: str | os.PathLike[str], indent: str = "", display_metadata: bool = True) -> str:
    """Print the tree of files under a folder, folders first, each level sorted by name.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.utils import print_directory_tree
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(a=torch.zeros(4), b={"c": torch.zeros(4)}).memmap(folder + "/saved")
        ...     text = print_directory_tree(folder + "/saved", display_metadata=False)
        saved/
            b/
                c.memmap
                meta.json
            a.memmap
            meta.json

    Args:
        path: the folder.
        indent: a prefix for every line.
        display_metadata: print the summed size of the files as first line.

    Returns:
        The printed text.

    Raises:
        NotADirectoryError: `path` is not a folder.
    """
    root = pathlib.Path(path)
    if not root.is_dir():
        raise NotADirectoryError(f"{str(root)!r} is not a folder")
    lines: list[str] = []
    size = _list_folder(root, root.resolve().name, indent, lines)
    if display_metadata:
        lines.insert(0, f"{indent}Directory size: {_format_size(size)}")
    text = "\n".join(lines)
    print(text)
    return text


def _list_folder(folder: pathlib.Path, name: str, indent: str, lines: list[str]) -> int:
    """Append the lines of a folder, and return the size of its files in bytes."""
    lines.append(f"{indent}{name}/")
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: (not entry.is_dir(follow_symlinks=False), entry.name))
    inner = indent + "    "
    size = 0
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            size += _list_folder(folder / entry.name, entry.name, inner, lines)
        else:
            lines.append(inner + entry.name)
            size += entry.stat(follow_symlinks=False).st_size
    return size


def _format_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
