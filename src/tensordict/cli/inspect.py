"""`tensordict inspect`: the tree of a save."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from tensordict.cli.terminal import (
    KIND,
    NAME,
    QUIET,
    SHAPE,
    VALUE,
    Line,
    aligned,
    count_text,
    json_value,
    printable,
    shortened,
    show,
    size_text,
)
from tensordict.contract import Names
from tensordict.io.describe import LeafSpec, Pickled, entries_of, walk
from tensordict.io.formats import describe_save
from tensordict.io.forms import Form
from tensordict.io.progress import bytes_on_disk

DESCRIPTION = """\
Print what a save holds, of any format: its nested keys with dtypes, shapes and sizes, batch sizes, names of dims,
the kinds of its containers, and the values that are no tensors. No tensor is read, nothing is unpickled, and the
tensorclasses that it names need not be known.

With --json, one object: "path", "format", "nbytes" (of all tensors), "bytes_on_disk", "tensors", "values" and
"containers" (their numbers), and "root", a node. Every node has a "type":
  "tensor"      "dtype", "shape" (-1 for ragged dims), "nbytes", "ragged"
  "container"   "kind" (the class), "batch_size", "names" (or null), "stack_dim" (or null), "entries" (name -> node)
  "value"       "kind", "batch_size", "names", "stack_dim", "value" (null when JSON cannot hold it), "pickled"
"""

EXAMPLES = """\
examples:
  tensordict inspect runs/1
  tensordict inspect data.tdz | head -20
  tensordict inspect --json data.tdz | jq .nbytes
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="print the tree of a save",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="the save: a folder or a file")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; always 0."""
    name, root = describe_save(args.path)
    nodes = [node for _, node in walk(root)]
    leaves = [node for node in nodes if isinstance(node, LeafSpec)]
    values = [node for node in nodes if isinstance(node, Form) and node.is_value]
    report = {
        "path": os.fspath(args.path),
        "format": name,
        "nbytes": sum(leaf.nbytes for leaf in leaves),
        "bytes_on_disk": bytes_on_disk(args.path),
        "tensors": len(leaves),
        "values": len(values),
        "containers": len(nodes) - len(leaves) - len(values),
    }
    if args.json:
        print(json.dumps({**report, "root": _as_json(root)}))
        return 0
    show([_headline(report), *aligned(_rows(root, ".", "", None))])
    return 0


# --- for people -------------------------------------------------------------------------------------------------------


def _headline(report: dict[str, Any]) -> Line:
    counts = [
        count_text(report["tensors"], "tensor"),
        *([count_text(report["values"], "value")] if report["values"] else []),
        count_text(report["containers"], "container"),
        f"{size_text(report['nbytes'])} of tensors",
        f"{size_text(report['bytes_on_disk'])} on disk",
    ]
    return [(printable(report["path"]), NAME), (f": {report['format']}, {', '.join(counts)}", "")]


def _rows(node: Form | LeafSpec, lead: str, below: str, outer: Names | None) -> list[list[tuple[str, str]]]:
    """The cells of a node and of all in it: name, what it is, shape, size, and the rest.

    lead: the branch of the tree and the name; `below` begins the lines of what is in the node. `outer` are the names of
    the dims of the container that it is in, which are not shown again.
    """
    if isinstance(node, LeafSpec):
        kind = str(node.dtype).removeprefix("torch.") + (", ragged" if node.ragged else "")
        return [[(lead, NAME), (kind, ""), (_shape(node.shape), SHAPE), (size_text(node.nbytes), QUIET)]]
    rows = [
        [(lead, NAME), (printable(node.kind), KIND), (_shape(node.batch_size), SHAPE), ("", ""), _note(node, outer)]
    ]
    entries = entries_of(node)
    for position, (name, entry) in enumerate(entries.items(), 1):
        last = position == len(entries)
        branch = below + ("└─ " if last else "├─ ") + printable(name)
        rows += _rows(entry, branch, below + ("   " if last else "│  "), node.names)
    return rows


def _note(form: Form, outer: Names | None) -> tuple[str, str]:
    if form.is_value:
        return shortened(form.value), VALUE
    notes = [] if form.stack_dim is None else [f"stack dim {form.stack_dim}"]
    if form.missing:
        notes.append("None: " + ", ".join(map(printable, form.missing)))
    if form.names is not None and form.names != outer:
        notes.append("names " + ", ".join("-" if name is None else printable(name) for name in form.names))
    return ", ".join(notes), QUIET


def _shape(shape: Any) -> str:
    return f"[{', '.join('*' if size == -1 else str(size) for size in shape)}]"


# --- for programs -----------------------------------------------------------------------------------------------------


def _as_json(node: Form | LeafSpec) -> dict[str, Any]:
    if isinstance(node, LeafSpec):
        return {
            "type": "tensor",
            "dtype": str(node.dtype),
            "shape": list(node.shape),
            "nbytes": node.nbytes,
            "ragged": node.ragged,
        }
    form = {
        "type": "value" if node.is_value else "container",
        "kind": node.kind,
        "batch_size": list(node.batch_size),
        "names": None if node.names is None else list(node.names),
        "stack_dim": node.stack_dim,
    }
    if not node.is_value:
        return {**form, "entries": {name: _as_json(entry) for name, entry in entries_of(node).items()}}
    return {**form, "value": json_value(node.value), "pickled": _holds_pickled(node.value)}


def _holds_pickled(value: Any) -> bool:
    """Whether a value, or one in the lists of a stack of values, was pickled."""
    return isinstance(value, Pickled) or (isinstance(value, list) and any(map(_holds_pickled, value)))
