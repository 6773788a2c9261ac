"""`tensordict inspect`: the tree of a save."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any

from tensordict.core.contract import Names
from tensordict.core.errors import SaveError
from tensordict.io.formats import describe_save
from tensordict.io.progress import bytes_allocated, bytes_on_disk
from tensordict.io.remote import is_url
from tensordict.io.remote_saves import remote_bytes
from tensordict.io.specification import Broken, LeafSpec, Pickled, Specification, broken, walk
from tensordict.memory.names import without_scheme
from tensordict_cli.runners.terminal import (
    BAD,
    KIND,
    NAME,
    QUIET,
    SHAPE,
    VALUE,
    Line,
    aligned,
    count_text,
    json_value,
    shortened,
    show,
    size_text,
)
from tensordict_cli.text import printable


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 when all could be read, else 1."""
    problems: list[str] = []

    def complain(error: OSError) -> Specification:
        problems.append(str(error))
        return broken(error)

    path = without_scheme(args.path)
    name, whole = describe_save(path, complain)
    root = _found(whole, args.key or "")
    nodes = [node for _, node in walk(root)] if isinstance(root, Specification) else [root]
    leaves = [node for node in nodes if isinstance(node, LeafSpec)]
    values = [node for node in nodes if isinstance(node, Specification) and node.is_value and not _is_broken(node)]
    report = {
        "path": os.fspath(args.path),
        "format": name,
        "nbytes": sum(leaf.nbytes for leaf in leaves),
        "bytes_on_disk": remote_bytes(path) if is_url(path) else bytes_on_disk(path),
        "bytes_allocated": None if is_url(path) else bytes_allocated(path),
        "tensors": len(leaves),
        "values": len(values),
        "containers": sum(isinstance(node, Specification) and not node.is_value for node in nodes),
        "problems": problems,
    }
    if args.json:
        print(json.dumps({**report, "root": _as_json(root, args.depth)}))
    else:
        show([_headline(report), *aligned(_rows(root, printable(args.key or "."), "", None, args.depth))])
        for problem in problems:
            print(printable(" ".join(problem.split())), file=sys.stderr)
    return 1 if problems else 0


def _found(node: Specification | LeafSpec, key: str, above: str = "") -> Specification | LeafSpec:
    """What is at a nested key that is written with dots, which names may have too.

    Raises:
        SaveError: there is nothing.
    """
    if not key:
        return node
    entries = node.fields() if isinstance(node, Specification) else {}
    missing: SaveError | None = None
    for name, entry in entries.items():
        if key == name or key.startswith(f"{name}."):
            try:
                return _found(entry, key[len(name) + 1 :], f"{above}{name}.")
            except SaveError as error:
                missing = error
    if missing is not None:
        raise missing
    close = difflib.get_close_matches(key.partition(".")[0], entries, 1)
    hint = (
        f"did you mean {above + close[0]!r}?" if close else f"there are {', '.join(islice(entries, 8)) or 'no entries'}"
    )
    raise SaveError(f"there is nothing at the key {above + key!r}; {hint}")


# --- for people -------------------------------------------------------------------------------------------------------


def _headline(report: dict[str, Any]) -> Line:
    counts = [
        count_text(report["tensors"], "tensor"),
        *([count_text(report["values"], "value")] if report["values"] else []),
        count_text(report["containers"], "container"),
        f"{size_text(report['nbytes'])} of tensors",
        *([f"{size_text(report['bytes_on_disk'])} of files"] if report["bytes_on_disk"] is not None else []),
        *([f"{size_text(report['bytes_allocated'])} on disk"] if report["bytes_allocated"] is not None else []),
    ]
    return [(printable(report["path"]), NAME), (f": {report['format']}, {', '.join(counts)}", "")]


def _rows(
    node: Specification | LeafSpec, branch: str, below: str, outer: Names | None, depth: int | None
) -> list[list[tuple[str, str]]]:
    """The cells of a node and of all in it: name, what it is, shape, size, and the rest.

    branch: the lines of the tree and the name; `below` begins the lines of what is in the node. `outer` are the names
    of the dims of the container that it is in, which are not shown again. `depth` is how many levels to go down.
    """
    if isinstance(node, LeafSpec):
        kind = str(node.dtype).removeprefix("torch.") + (", ragged" if node.ragged else "")
        return [[(branch, NAME), (kind, ""), (_shape(node.shape), SHAPE), (size_text(node.nbytes), QUIET)]]
    if _is_broken(node):
        return [[(branch, NAME), ("broken", BAD)]]
    rows = [
        [(branch, NAME), (printable(node.kind), KIND), (_shape(node.batch_size), SHAPE), ("", ""), _note(node, outer)]
    ]
    entries = node.fields()
    if depth == 0:
        if entries:
            rows[0][3] = (size_text(sum(leaf.nbytes for _, leaf in walk(node) if isinstance(leaf, LeafSpec))), QUIET)
        return rows
    for position, (name, entry) in enumerate(entries.items(), 1):
        last = position == len(entries)
        branch = below + ("└─ " if last else "├─ ") + printable(name)
        further = None if depth is None else depth - 1
        rows += _rows(entry, branch, below + ("   " if last else "│  "), node.names, further)
    return rows


def _is_broken(node: Specification | LeafSpec) -> bool:
    return isinstance(node, Specification) and isinstance(node.value, Broken)


def _note(form: Specification, outer: Names | None) -> tuple[str, str]:
    if form.is_value:
        return shortened(form.value), VALUE
    notes = [] if form.stack_dim is None else [f"stack dim {form.stack_dim}"]
    if form.missing:
        notes.append("None: " + ", ".join(map(printable, form.missing)))
    if form.names is not None and form.names != outer:
        notes.append("names " + ", ".join("-" if name is None else printable(name) for name in form.names))
    return ", ".join(notes), QUIET


def _shape(shape: Iterable[int]) -> str:
    return f"[{', '.join('*' if size == -1 else str(size) for size in shape)}]"


# --- for programs -----------------------------------------------------------------------------------------------------


def _as_json(node: Specification | LeafSpec, depth: int | None) -> dict[str, Any]:
    if isinstance(node, LeafSpec):
        return {
            "type": "tensor",
            "dtype": str(node.dtype),
            "shape": list(node.shape),
            "nbytes": node.nbytes,
            "ragged": node.ragged,
        }
    if isinstance(node.value, Broken):
        return {"type": "broken", "problem": node.value.why}
    form = {
        "type": "value" if node.is_value else "container",
        "kind": node.kind,
        "batch_size": list(node.batch_size),
        "names": None if node.names is None else list(node.names),
        "stack_dim": node.stack_dim,
    }
    if not node.is_value:
        if depth == 0:
            return form
        further = None if depth is None else depth - 1
        return {**form, "entries": {name: _as_json(entry, further) for name, entry in node.fields().items()}}
    return {**form, "value": json_value(node.value), "pickled": _holds_pickled(node.value)}


def _holds_pickled(value: object) -> bool:
    """Whether a value, or one in the lists of a stack of values, was pickled."""
    return isinstance(value, Pickled) or (isinstance(value, list) and any(map(_holds_pickled, value)))
