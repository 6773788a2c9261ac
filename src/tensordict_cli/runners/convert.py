"""`tensordict convert`: write a save in another format."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from tensordict.core import registry
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.formats.opening import (
    ARCHIVE,
    DIRECTORY,
    SUFFIXES,
    describe_save,
    format_of_name,
    open_save,
    write_save,
)
from tensordict.io.remote.remote_saves import is_saved_at
from tensordict.io.remote.urls import Remote, is_url
from tensordict.io.saving.progress import count_bytes
from tensordict.io.specification import PickledValue, Specification, walk
from tensordict.io.stores.backends import BACKENDS, backend_at, backend_of
from tensordict.memory.names import META, without_scheme
from tensordict_cli.runners import tables
from tensordict_cli.runners.terminal import GOOD, key_text, show, size_text
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command and return 0."""
    source, target = without_scheme(args.source), without_scheme(args.target)
    if args.fill or args.nulls or tables.kind_of(source) or (tables.kind_of(target) and not args.to):
        if not is_url(source):
            _check_apart(source, target)
        _import_all(args.modules)
        return tables.run(args)
    to = args.to or _guess_format(target)
    if not is_url(source) and not os.path.lexists(source):
        raise FileNotFoundError(2, "no such file or folder", source)
    _check_target(source, target, to, args.force)
    _import_all(args.modules)
    _check_known(describe_save(source)[1], args.allow_pickle)
    saved = write_save(
        open_save(source, allow_pickle=args.allow_pickle),
        target,
        to,
        compression=args.compression,
        checksum=args.checksum,
        num_threads=args.num_threads,
        allow_pickle=args.allow_pickle and to in (DIRECTORY, ARCHIVE),
        overwrite=args.force,
    )
    if to in BACKENDS:
        saved.close()
    nbytes = size_text(Remote(target).nbytes() or 0) if is_url(target) else f"{size_text(count_bytes(target))} on disk"
    show([[(f"{printable(target)}: {to}, {nbytes}", GOOD)]])
    return 0


def _guess_format(path: str) -> str:
    """Return the format that belongs to the suffix of a path.

    Raises:
        SaveError: no format has this suffix.
    """
    if (found := format_of_name(path)) is None:
        known = ", ".join(f"{suffix or 'none'} ({name})" for suffix, name in SUFFIXES.items())
        suffix = os.path.splitext(path)[1]
        raise SaveError(f"{path!r}: the suffix {suffix!r} stands for no format; use --to, or one of {known}")
    return found


def _check_target(source: str, target: str, to: str, force: bool) -> None:
    """Refuse to replace anything that the user may not want to lose."""
    if is_url(target):
        if not force and is_saved_at(target):
            raise SaveError(f"{target!r} exists already; use --force to replace it")
        return
    if not is_url(source):
        _check_apart(source, target)
    if not os.path.lexists(target):
        return
    is_folder = os.path.isdir(target)
    becomes_folder = to == "directory" or (to in BACKENDS and backend_of(to).is_folder(target))
    if is_folder and becomes_folder and not os.listdir(target):
        return
    if not force:
        raise SaveError(f"{target!r} exists already; use --force to replace it")
    if is_folder != becomes_folder:
        what = "a folder" if is_folder else "a file"
        raise SaveError(f"{target!r} is {what} and cannot become a save of the format {to!r}; remove it first")
    if is_folder and not os.path.lexists(os.path.join(target, META)) and not backend_at(target):
        raise SaveError(f"{target!r} is a folder with other content than a save; choose another one, or empty it")


def _check_apart(source: str, target: str) -> None:
    mine, theirs = os.path.realpath(source), os.path.realpath(target)
    if os.path.commonpath((mine, theirs)) in (mine, theirs):
        raise SaveError(f"{source!r} and {target!r} are the same, or one is in the other; choose another target")


def _import_all(modules: list[str]) -> None:
    if modules and "" not in sys.path:
        # `python -m` does the same, so that modules of the project in the current folder can be imported.
        sys.path.insert(0, "")
    for module in modules:
        importlib.import_module(module)


def _check_known(root: Specification, allow_pickle: bool) -> None:
    """Raise an error for entries that only a missing option would load, and name that option."""
    for key, node in walk(root):
        if not isinstance(node, Specification):
            continue
        if node.is_tensorclass and registry.declared(node.kind) is None:
            module = node.kind.rpartition(".")[0]
            hint = "it was defined in a script, not in a module" if module == "__main__" else f"use --import {module}"
            raise UnsupportedEntryError(
                f"{key_text(key)} is of the tensorclass {node.kind!r}, which is not known here; {hint}"
            )
        if isinstance(node.value, PickledValue) and not allow_pickle:
            raise UnsupportedEntryError(
                f"the value at {key_text(key)} is pickled, and unpickling runs any code that is in it; use "
                "--allow-pickle if you trust who wrote it"
            )
