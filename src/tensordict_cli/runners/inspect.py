"""`tensordict inspect`: print the tree of a save, and on request statistics and first rows of its tensors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from tensordict.core.contract import Names
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, entry_of
from tensordict.io.formats.opening import describe_save
from tensordict.io.formats.stack_columns import split_ragged
from tensordict.io.remote.urls import Remote, is_url
from tensordict.io.saving.comparing import OPAQUE, cut_pieces, open_source, read_piece
from tensordict.io.saving.progress import Progress, count_bytes, count_disk_usage, progress_bar
from tensordict.io.specification import BrokenValue, LeafSpec, PickledValue, Specification, replace_broken, walk
from tensordict.looking.markup import shape_text
from tensordict.looking.tally import Tally, to_numbers
from tensordict.memory.names import without_scheme
from tensordict_cli.runners.heads import format_head, head_to_json, read_head
from tensordict_cli.runners.terminal import (
    BAD,
    KIND,
    NAME,
    QUIET,
    SHAPE,
    VALUE,
    Line,
    align,
    count_text,
    json_number,
    json_value,
    number_text,
    shorten,
    show,
    size_text,
)
from tensordict_cli.text import printable, suggest

Node = Specification | LeafSpec
T = TypeVar("T")
_STATISTICS = ("count", "mean", "std", "min", "max", "nan", "infinite", "zero")


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 when everything could be read, else 1."""
    problems: list[str] = []

    def complain(error: OSError) -> Specification:
        problems.append(str(error))
        return replace_broken(error)

    path = without_scheme(args.path)
    name, whole = describe_save(path, complain)
    view = _TreeSelection.of(whole, args.key or "", args.depth)
    nodes = [node for _, node in view.nodes()]
    leaves = [node for node in nodes if isinstance(node, LeafSpec)]
    values = [node for node in nodes if isinstance(node, Specification) and node.is_value and not _is_broken(node)]
    report = {
        "path": os.fspath(args.path),
        "format": name,
        "nbytes": sum(leaf.nbytes for leaf in leaves),
        "bytes_on_disk": Remote(path).nbytes() if is_url(path) else count_bytes(path),
        "bytes_allocated": None if is_url(path) else count_disk_usage(path),
        "tensors": len(leaves),
        "values": len(values),
        "containers": sum(isinstance(node, Specification) and not node.is_value for node in nodes),
        "problems": problems,
    }
    content = _TensorContents(complain)
    if args.stats:
        content.read_statistics(view)
    if args.head is not None:
        content.read_heads(view, args.head, whole=args.json)
    if args.json:
        print(json.dumps({**report, "root": _as_json(view, view.root, (), content)}))
    else:
        lines = [_format_headline(report), *align(_format_rows(view, view.root, (), view.name, "", None))]
        show([*lines, *_format_content(view, content)], paged=not args.no_pager)
        for problem in problems:
            print(printable(" ".join(problem.split())), file=sys.stderr)
    return 1 if problems else 0


# --- what is shown ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TreeSelection:
    """The printed part of a save: a node, down to `depth`, and only the keys in `shown`, relative to that node."""

    root: Node
    name: str
    depth: int | None
    shown: Collection[Path] | None = None

    @classmethod
    def of(cls, whole: Specification, key: str, depth: int | None) -> _TreeSelection:
        """Select the node at a key, written with dots, or all keys that match a pattern.

        Raises:
            SaveError: no key matches.
        """
        try:
            return cls(_find_node(whole, key), printable(key or "."), depth)
        except SaveError:
            if not any(sign in key for sign in "*?["):
                raise
        shown: set[Path] = set()
        matched: Path | None = None
        for path, _ in walk(whole):
            inside = matched is not None and path[: len(matched)] == matched
            if not inside and path and fnmatchcase(".".join(path), key):
                matched, inside = path, True
            if inside:
                shown.update(path[:end] for end in range(len(path) + 1))
        if not shown:
            raise SaveError(f"no key matches {key!r}; there are {', '.join(islice(whole.fields(), 8)) or 'no entries'}")
        return cls(whole, ".", depth, shown)

    def entries(self, node: Node, path: Path) -> dict[str, Node]:
        """Return the entries of a node that are printed."""
        if not isinstance(node, Specification) or node.is_value or self.hides_entries(path):
            return {}
        found = node.fields()
        return {name: entry for name, entry in found.items() if self.shown is None or (*path, name) in self.shown}

    def hides_entries(self, path: Path) -> bool:
        """Return whether `depth` hides the entries of the node at this path."""
        return self.depth is not None and len(path) >= self.depth

    def nodes(self) -> Iterator[tuple[Path, Node]]:
        """Yield all nodes, also those deeper than `depth`."""
        every = walk(self.root) if isinstance(self.root, Specification) else [((), self.root)]
        return ((path, node) for path, node in every if self.shown is None or path in self.shown)

    def visible_nodes(self) -> Iterator[tuple[Path, Node]]:
        """Yield the nodes that get a line of their own."""
        return ((path, node) for path, node in self.nodes() if self.depth is None or len(path) <= self.depth)

    def key_text(self, path: Path) -> str:
        """Return the key of a node in the form that `--key` takes."""
        return ".".join([*([self.name] if self.name != "." else []), *map(printable, path)]) or "."


def _find_node(node: Node, key: str, above: str = "") -> Node:
    """Find the node at a nested key written with dots. Names may contain dots themselves, so every split is tried.

    Raises:
        SaveError: the key does not exist.
    """
    if not key:
        return node
    entries = node.fields() if isinstance(node, Specification) else {}
    missing: SaveError | None = None
    for name, entry in entries.items():
        if key == name or key.startswith(f"{name}."):
            try:
                return _find_node(entry, key[len(name) + 1 :], f"{above}{name}.")
            except SaveError as error:
                missing = error
    if missing is not None:
        raise missing
    hint = suggest(key.partition(".")[0], entries, above)
    raise SaveError(f"there is nothing at the key {above + key!r}; {hint}")


class _TensorContents:
    """The statistics and first rows that were read, by key."""

    def __init__(self, complain: Callable[[OSError], object]) -> None:
        self._complain = complain
        self.statistics: dict[Path, dict[str, Any] | None] | None = None
        self.heads: dict[Path, list[Any]] | None = None

    def read_statistics(self, view: _TreeSelection) -> None:
        """Read all printed tensors, piece by piece, and compute their statistics."""
        self.statistics = {}
        leaves = {path: node for path, node in view.visible_nodes() if isinstance(node, LeafSpec)}
        with progress_bar(None, "reading", sum(leaf.nbytes for leaf in leaves.values())) as shown:
            for path, leaf in leaves.items():
                self.statistics[path] = self._read(path, partial(_compute_statistics, leaf, shown))

    def read_heads(self, view: _TreeSelection, count: int, whole: bool) -> None:
        """Read the first rows of the printed tensors and the first printed values."""
        self.heads = {}
        for path, node in view.visible_nodes():
            if isinstance(node, LeafSpec) or (node.is_value and not _is_broken(node)):
                self.heads[path] = self._read(path, partial(read_head, node, count, whole)) or []

    def _read(self, path: Path, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except OSError as error:
            self._complain(OSError(f"{entry_of(path)}{error}"))
            return None


def _compute_statistics(leaf: LeafSpec, progress: Progress) -> dict[str, Any] | None:
    """Compute the statistics of a tensor, piece by piece; `None` when torch cannot compute with its dtype."""
    if leaf.dtype in OPAQUE:
        return None
    source = open_source(leaf)
    if leaf.ragged:
        source = split_ragged(source)[0]
    tally = Tally()
    for index in cut_pieces(tuple(source.shape), leaf.dtype.itemsize):
        piece = read_piece(source, index)
        tally.add(to_numbers(piece))
        progress.add(piece.nbytes)
    found = {"count": tally.count, "mean": tally.mean, "std": tally.std, "min": tally.least, "max": tally.greatest}
    return {**found, "nan": tally.nan, "infinite": tally.infinite, "zero": tally.zero}


# --- for people -------------------------------------------------------------------------------------------------------


def _format_headline(report: dict[str, Any]) -> Line:
    counts = [
        count_text(report["tensors"], "tensor"),
        *([count_text(report["values"], "value")] if report["values"] else []),
        count_text(report["containers"], "container"),
        f"{size_text(report['nbytes'])} of tensors",
        *([f"{size_text(report['bytes_on_disk'])} of files"] if report["bytes_on_disk"] is not None else []),
        *([f"{size_text(report['bytes_allocated'])} on disk"] if report["bytes_allocated"] is not None else []),
    ]
    return [(printable(report["path"]), NAME), (f": {report['format']}, {', '.join(counts)}", "")]


def _format_rows(
    view: _TreeSelection, node: Node, path: Path, branch: str, below: str, outer: Names | None
) -> list[list[tuple[str, str]]]:
    """Return the cells of a node and of everything in it: name, kind, shape, size, and notes.

    branch: the tree lines and the name. `below` is the prefix of the lines of its entries. `outer` holds the dim names
    of
        the parent container, which are not printed again.
    """
    if isinstance(node, LeafSpec):
        kind = str(node.dtype).removeprefix("torch.") + (", ragged" if node.ragged else "")
        return [[(branch, NAME), (kind, ""), (shape_text(node.shape), SHAPE), (size_text(node.nbytes), QUIET)]]
    if _is_broken(node):
        return [[(branch, NAME), ("broken", BAD)]]
    rows = [
        [
            (branch, NAME),
            (printable(node.kind), KIND),
            (shape_text(node.batch_size), SHAPE),
            ("", ""),
            _describe_container(node, outer),
        ]
    ]
    if view.hides_entries(path) and node.fields():
        rows[0][3] = (size_text(sum(leaf.nbytes for _, leaf in walk(node) if isinstance(leaf, LeafSpec))), QUIET)
    entries = view.entries(node, path)
    for position, (name, entry) in enumerate(entries.items(), 1):
        last = position == len(entries)
        branch = below + ("└─ " if last else "├─ ") + printable(name)
        rows += _format_rows(view, entry, (*path, name), branch, below + ("   " if last else "│  "), node.names)
    return rows


def _format_content(view: _TreeSelection, content: _TensorContents) -> list[Line]:
    """Return the lines with statistics and first rows, which are printed below the tree."""
    lines: list[Line] = []
    if content.statistics:
        rows: list[list[tuple[str, str]]] = [[("", ""), *((title, QUIET) for title in _STATISTICS)]]
        for path, found in content.statistics.items():
            cells = [("" if found is None else number_text(found[title]), "") for title in _STATISTICS]
            rows.append([(view.key_text(path), NAME), *cells])
        lines += [[], *align(rows)]
    for path, node in view.visible_nodes():
        if content.heads is not None and path in content.heads:
            lines += [[], [(view.key_text(path), NAME)], *align(format_head(node, content.heads[path]))]
    return lines


def _is_broken(node: Node) -> bool:
    return isinstance(node, Specification) and isinstance(node.value, BrokenValue)


def _describe_container(form: Specification, outer: Names | None) -> tuple[str, str]:
    if form.is_value:
        return shorten(form.value), VALUE
    notes = [] if form.stack_dim is None else [f"stack dim {form.stack_dim}"]
    if form.missing:
        notes.append("None: " + ", ".join(map(printable, form.missing)))
    if form.names is not None and form.names != outer:
        notes.append("names " + ", ".join("-" if name is None else printable(name) for name in form.names))
    return ", ".join(notes), QUIET


# --- for programs -----------------------------------------------------------------------------------------------------


def _as_json(view: _TreeSelection, node: Node, path: Path, content: _TensorContents) -> dict[str, Any]:
    read: dict[str, Any] = {}
    if content.statistics is not None and isinstance(node, LeafSpec) and path in content.statistics:
        found = content.statistics[path]
        read["stats"] = found and {name: json_number(value) for name, value in found.items()}
    if content.heads is not None and path in content.heads:
        read["head"] = head_to_json(node, content.heads[path])
    if isinstance(node, LeafSpec):
        return {
            "type": "tensor",
            "dtype": str(node.dtype),
            "shape": list(node.shape),
            "nbytes": node.nbytes,
            "ragged": node.ragged,
            **read,
        }
    if isinstance(node.value, BrokenValue):
        return {"type": "broken", "problem": node.value.why}
    form = {
        "type": "value" if node.is_value else "container",
        "kind": node.kind,
        "batch_size": list(node.batch_size),
        "names": None if node.names is None else list(node.names),
        "stack_dim": node.stack_dim,
    }
    if not node.is_value:
        if view.hides_entries(path):
            return form
        entries = view.entries(node, path)
        return {
            **form,
            "entries": {name: _as_json(view, entry, (*path, name), content) for name, entry in entries.items()},
        }
    return {**form, "value": json_value(node.value), "pickled": _contains_pickle(node.value), **read}


def _contains_pickle(value: object) -> bool:
    """Return whether a value is pickled, or one of the values in its nested lists."""
    return isinstance(value, PickledValue) or (isinstance(value, list) and any(map(_contains_pickle, value)))
