"""Build the report of one save, or of two side by side: one page of HTML without other files."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tensordict.core.extras import require
from tensordict.core.keys import Path
from tensordict.io.formats.opening import describe_save
from tensordict.io.remote.urls import Remote, is_url
from tensordict.io.saving.comparing import Difference, Tolerance, find_differences
from tensordict.io.saving.progress import Progress, ShowBar, count_bytes, count_disk_usage, hide_bars, progress_bar
from tensordict.io.specification import BrokenValue, DeferredValue, LeafSpec, Specification, replace_broken, walk
from tensordict.looking.markup import (
    count_text,
    escape,
    first_values,
    note,
    number_text,
    pictures,
    read_style,
    shape_text,
    shorten,
    size_text,
    span,
    table,
)
from tensordict.looking.measuring import MEMBER, ROWS, LeafFigures, LeafGroup, collect_groups, measure_leaf
from tensordict.looking.plots import bin_edges, is_constant
from tensordict.looking.tally import Numbers, figures_html, list_figures
from tensordict.looking.texts import MOST_COUNTED, count_texts, format_values
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import without_scheme

# Limits of a page: leaves and values, listed positions, columns in the table of rows, characters of a value.
_MOST_LEAVES, _MOST_POSITIONS, _MOST_CELLS, _MOST_TEXT = 300, 20, 12, 200
# The colors of the first and the second save, as in `report.css`; both are visible on light and on dark pages.
_COLOURS = ("#3b7dd8", "#e0872b")
# A placeholder for the text color: Matplotlib draws in it, and the page replaces it by `currentColor`.
_INK = "#010203"
# The first bytes of every report. The CLI replaces only files that begin with them.
MARK = "<!doctype html>\n<!-- a report of tensordict -->\n"


@dataclass
class _ReportedSave:
    """One of the reported saves, with its leaves, values and problems."""

    path: str
    format: str
    root: Specification
    leaves: dict[Path, LeafGroup]
    values: dict[Path, list[Specification]]
    problems: list[str]
    measured: dict[Path, LeafFigures] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(group.nbytes for group in self.leaves.values())

    @staticmethod
    def at(path: PathLike) -> _ReportedSave:
        """Describe the save at a path or URL, without reading its tensors."""
        problems: list[str] = []

        def complain(error: OSError) -> Specification:
            problems.append(str(error))
            return replace_broken(error)

        place = without_scheme(path)
        format, root = describe_save(place, complain)
        return _ReportedSave(os.fspath(path), format, root, *collect_groups(root), problems)

    def measure(self, limit: int, bar: Progress) -> None:
        """Read the leaves and compute their figures."""
        for key, group in islice(self.leaves.items(), _MOST_LEAVES):
            self.measured[key] = measure_leaf(group, limit, bar)


class Page(NamedTuple):
    """A finished report.

    html: the page.
    problems: one line for each broken entry of the saves.
    """

    html: str
    problems: list[str]


def report(path: PathLike, other: PathLike | None = None, *, limit: int = 0, progress: ShowBar = None) -> Page:
    """Build a page of HTML on the content of a save, or on the differences of two.

    The page needs no other file and runs no script. It shows the structure, sizes, a histogram and figures of each
    leaf, NaN and constant elements, the first values and rows, and thumbnails of leaves that look like images. For two
    saves, it lists the differences. Tensors are read piece by piece, so that memory does not limit their size. Nothing
    is unpickled, and tensorclasses need not be known.

    Args:
        path: a folder, a file or a data set, or the URL of one, in any format that `load` and `open_dataset` take.
        other: a second save, to compare with the first.
        limit: about how many bytes of each leaf to read, in pieces of 8 MiB at equal distances; 0 reads everything.
            With a limit, the page says which figures are from a part only, and elements are not compared.
        progress: `True` shows progress bars, `False` hides them. By default, they show on a terminal, after a second.

    Raises:
        FileNotFoundError: a path does not exist.
        SaveError: a save has no known format, or cannot be opened at all. The page reports a single broken entry
            instead.
        ModuleNotFoundError: Matplotlib is not installed; the extra `report` installs it.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.looking.html_report import report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(x=torch.randn(100), batch_size=[100]).save(folder)
        ...     page = report(folder)
        >>> "<svg" in page.html, "<script" in page.html
        (True, False)
    """
    require("matplotlib", "report")
    with hide_bars(progress):
        saves = [_ReportedSave.at(place) for place in (path, other) if place is not None]
    with progress_bar(progress, "reading", None if limit else sum(save.nbytes for save in saves)) as bar:
        for save in saves:
            save.measure(limit, bar)
    found = None
    if len(saves) == 2:
        with progress_bar(progress, "comparing", None) as bar:
            found = list(_iter_differences(saves[0].root, saves[1].root, not limit, bar))
    drawn = len({key for save in saves for key in save.measured})
    with progress_bar(progress, "drawing", drawn, unit=" leaves") as bar:
        html = "".join([MARK, *_build_page(saves, found, limit, bar)])
    return Page(html, [line for save in saves for line in save.problems])


def _iter_differences(one: Specification, other: Specification, elements: bool, bar: Progress) -> Iterator[Difference]:
    """Yield the differences in structure, then the differences in values and elements."""
    yield from find_differences(one, other, None)
    others = dict(walk(other))
    for key, node in walk(one):
        theirs = others.get(key)
        leaves = isinstance(node, LeafSpec) and isinstance(theirs, LeafSpec)
        values = isinstance(node, Specification) and isinstance(theirs, Specification) and node.is_value
        if theirs is not None and ((leaves and elements) or (values and getattr(theirs, "is_value", False))):
            found = find_differences(node, theirs, Tolerance(equal_nan=True), key)
            yield from (item for item in found if item.what in ("elements", "value"))
            if isinstance(node, LeafSpec):
                bar.add(node.nbytes)


# --- the page ---------------------------------------------------------------------------------------------------------


def _build_page(
    saves: Sequence[_ReportedSave], found: list[Difference] | None, limit: int, bar: Progress
) -> Iterator[str]:
    title = " and ".join(save.path for save in saves)
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    style = read_style("style.css") + read_style("report.css")
    yield f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
    yield '<body class="tensordict">'
    yield f"<h1>{' and '.join(_path_html(saves, number) for number in range(len(saves)))}</h1>"
    yield "".join(f"<div>{_headline_html(saves, number)}</div>" for number in range(len(saves)))
    sections: list[tuple[str, Iterable[str]]] = [
        *([("Differences", _differences_html(found, bool(limit)))] if found is not None else []),
        ("Findings", _findings_html(saves)),
        ("Structure", _structure_html(saves)),
        ("Tensors", _cards_html(saves, bar)),
        ("Values", _values_html(saves)),
        ("First rows", _first_rows_html(saves)),
    ]
    made = [(name, "".join(content)) for name, content in sections]
    there = [(name, content) for name, content in made if content]
    links = " ".join(f'<a href="#{_make_anchor(name)}">{name}</a>' for name, _ in there)
    yield f"<nav>{links}</nav>"
    for name, content in there:
        yield f'<section><h2 id="{_make_anchor(name)}">{name}</h2>{content}</section>'
    yield "</body></html>\n"


def _make_anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _path_html(saves: Sequence[_ReportedSave], number: int) -> str:
    """Return the path of a save as HTML, colored when there are two saves."""
    path = escape(saves[number].path)
    return f'<span class="td-{("first", "second")[number]}">{path}</span>' if len(saves) > 1 else path


def _save_letter(saves: Sequence[_ReportedSave], number: int) -> list[str]:
    return ["AB"[number]] if len(saves) > 1 else []


def _headline_html(saves: Sequence[_ReportedSave], number: int) -> str:
    save = saves[number]
    values = sum(map(len, save.values.values()))
    on_disk = Remote(save.path).nbytes() if is_url(save.path) else count_bytes(without_scheme(save.path))
    facts = [
        save.format,
        f"{save.root.kind} of batch size {list(save.root.batch_size)}",
        count_text(sum(len(group.specs) for group in save.leaves.values()), "tensor"),
        *([count_text(values, "value")] if values else []),
        f"{size_text(save.nbytes)} of tensors",
        *([f"{size_text(on_disk)} of files"] if on_disk is not None else []),
        *([] if is_url(save.path) else [f"{size_text(count_disk_usage(without_scheme(save.path)))} on disk"]),
    ]
    letter = "".join(f"{text}: " for text in _save_letter(saves, number))
    return span("note", f"{letter}{', '.join(facts)}")


def _key_text(key: Path) -> str:
    return ".".join(key)


def _list_keys(saves: Sequence[_ReportedSave]) -> list[Path]:
    return list(dict.fromkeys(key for save in saves for key in save.leaves))


def _differences_html(found: list[Difference], is_limited: bool) -> Iterator[str]:
    if is_limited:
        yield note("Elements were not compared, as not all of them were read.")
    if not found:
        yield "<div>None: keys, kinds, shapes, dtypes, values{} are the same.</div>".format(
            "" if is_limited else " and elements"
        )
        return
    rows = []
    for item in islice(found, _MOST_LEAVES):
        what = [_format_value(value) for value in (item.one, item.other)]
        if item.what == "elements":
            by = "" if math.isnan(item.max_abs) else f", by at most {number_text(item.max_abs)}"
            what = [f"{item.differing:,} of {item.count:,} differ{by}", ""]
        rows.append([_key_text(item.key) or "(the root)", item.what, *what])
    yield table(["key", "what", "A", "B"], rows)
    yield _more_html(len(found), len(rows), "difference")


def _format_value(value: object) -> str:
    return "" if value is None else shorten(value if isinstance(value, str) else repr(value), _MOST_TEXT)


def _more_html(count: int, shown: int, what: str) -> str:
    return note(f"… {count_text(count - shown, f'more {what}')}") if count > shown else ""


# --- findings ---------------------------------------------------------------------------------------------------------


def _findings_html(saves: Sequence[_ReportedSave]) -> Iterator[str]:
    lines = [
        "".join([*(f"{letter}: " for letter in _save_letter(saves, number)), line])
        for number, save in enumerate(saves)
        for line in _find_problems(save)
    ]
    if not lines:
        yield "<div>Nothing is broken, NaN, infinite or constant.</div>"
        return
    yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in islice(lines, _MOST_LEAVES))}</ul>"
    yield _more_html(len(lines), min(len(lines), _MOST_LEAVES), "finding")


def _find_problems(save: _ReportedSave) -> Iterator[str]:
    yield from save.problems
    for key, found in save.measured.items():
        name, tally = _key_text(key), found.tally
        if found.problem:
            yield f"{name}: its elements cannot be read: {found.problem}"
        for what, count in (("NaN", tally.nan), ("infinite", tally.infinite)):
            if count:
                yield f"{name}: {count:,} of {tally.count:,} elements ({count / tally.count:.2%}) are {what}"
        if tally.is_constant and tally.count > 1:
            yield f"{name}: all {tally.count:,} elements are {number_text(tally.least)}"
        elif found.columns is not None and not found.problem:
            for what, at in (("constant", found.columns.constant()), ("NaN in some rows", found.columns.with_nan())):
                if at and found.group.shape[0] > 1:
                    places = ", ".join(str(list(place)) for place in at[:_MOST_POSITIONS])
                    more = ", …" if len(at) > _MOST_POSITIONS else ""
                    count = math.prod(found.columns.shape)
                    yield f"{name}: columns that are {what}: {len(at):,} of {count:,}, {places}{more}"
        if not found.total and not found.problem:
            yield f"{name}: it has no elements"


# --- structure, and a card for each leaf ------------------------------------------------------------------------------


def _structure_html(saves: Sequence[_ReportedSave]) -> Iterator[str]:
    keys = _list_keys(saves)
    head = ["key", *(["save"] if len(saves) > 1 else []), "dtype", "shape", "tensors", "size"]
    head += ["min", "mean", "std", "max", "NaN", "zero"]
    rows = []
    for key in islice(keys, 5 * _MOST_LEAVES):
        for number, save in enumerate(saves):
            group = save.leaves.get(key)
            if group is None:
                rows.append([_key_text(key), *_save_letter(saves, number), "missing", *[""] * (len(head) - 3)])
                continue
            facts = [group.dtype, shape_text(group.shape), f"{len(group.specs):,}", size_text(group.nbytes)]
            rows.append(
                [_key_text(key), *_save_letter(saves, number), *facts, *_format_figures(save.measured.get(key))]
            )
    yield f'<div class="td-wide">{table(head, rows, "td-numbers")}</div>'
    if any(MEMBER in key for key in keys):
        yield note(f"{MEMBER} stands for the members of a lazy stack, which are looked at together.")
    yield _more_html(len(keys), min(len(keys), 5 * _MOST_LEAVES), "key")


def _format_figures(found: LeafFigures | None) -> list[str]:
    if found is None or found.problem or not found.tally.count:
        return []
    tally = found.tally
    least, greatest = ("" if value is None else number_text(value) for value in (tally.least, tally.greatest))
    return [least, number_text(tally.mean), number_text(tally.std), greatest, f"{tally.nan:,}", f"{tally.zero:,}"]


def _cards_html(saves: Sequence[_ReportedSave], bar: Progress) -> Iterator[str]:
    keys = [key for key in _list_keys(saves) if any(key in save.measured for save in saves)]
    yield '<div class="td-cards">'
    for key in keys:
        yield _card_html([save.measured.get(key) for save in saves], key)
        bar.add(1)
    yield "</div>"
    hidden = len(_list_keys(saves)) - len(keys)
    if hidden:
        yield note(f"{count_text(hidden, 'more leaf')} in the table above were not read.")


def _card_html(both: Sequence[LeafFigures | None], key: Path) -> str:
    pieces = [f"<h3>{escape(_key_text(key))}</h3>"]
    samples = [np.zeros(0) if found is None else found.sample for found in both]
    # The histogram of a constant would be one block.
    if (edges := bin_edges(samples)) is not None and not all(map(is_constant, samples)):
        pieces.append(_draw_svg(samples, edges))
    for number, found in enumerate(both):
        if found is not None:
            mark = "" if len(both) == 1 else f'<span class="td-{("first", "second")[number]}">{"AB"[number]}</span> '
            head = " · ".join([found.group.dtype, shape_text(found.group.shape), size_text(found.group.nbytes)])
            pieces.append(f"<div>{mark}{span('note', head)}</div>{_figures_html(found)}")
    return f'<div class="td-card">{"".join(pieces)}</div>'


def _figures_html(found: LeafFigures) -> str:
    if found.problem:
        return f'<div class="td-bad">{escape(found.problem)}</div>'
    pieces = []
    if found.is_sampled:
        share = found.tally.count / max(found.total, 1)
        pieces.append(note(f"Of {share:.2%} of the elements, in pieces at equal distances:"))
    zero = {"zero": f"{found.tally.zero / found.tally.count:.1%}"} if found.tally.zero and found.tally.count > 1 else {}
    pieces.append(figures_html({**list_figures(found.tally), **zero}))
    numbers = [number for piece in found.first for number in piece.tolist()][:8]
    if found.total > 1 and numbers:
        pieces.append(first_values(numbers, found.total))
    if found.is_drawn:
        pieces.append(note(f"The histogram is of {found.sample.size:,} elements drawn at random."))
    if found.images:
        pieces.append(pictures(found.images, found.more_images))
    return "".join(pieces)


def _draw_svg(samples: Sequence[Numbers], edges: Numbers) -> str:
    """Draw the histograms of one or two samples over each other, as SVG inside the page."""
    matplotlib = require("matplotlib", "report")
    figure = require("matplotlib.figure", "report").Figure(figsize=(5, 1.7))
    # A fixed layout: automatic layout would double the time.
    axes = figure.add_axes((0.03, 0.16, 0.94, 0.82))
    for sample, colour in zip(samples, _COLOURS):
        if sample.size:
            # Heights are shares of the sample, because the two samples may differ in size.
            heights = np.histogram(sample, edges)[0] / sample.size
            axes.stairs(heights, edges, fill=True, color=colour, alpha=0.85 if len(samples) == 1 else 0.5)
    axes.yaxis.set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=bool(edges[1] - edges[0] == 1 and len(edges) > 2))
    axes.tick_params(colors=_INK, labelsize=8)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
    content = io.StringIO()
    # Keep text as text, and keep the generated ids equal between runs.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tensordict", "svg.id": None}):
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = content.getvalue()
    return drawing[drawing.index("<svg") :].replace(_INK, "currentColor")


# --- values and rows --------------------------------------------------------------------------------------------------


def _values_html(saves: Sequence[_ReportedSave]) -> Iterator[str]:
    keys = list(dict.fromkeys(key for save in saves for key in save.values))
    rows = []
    for key in islice(keys, _MOST_LEAVES):
        for number, save in enumerate(saves):
            for node in islice(save.values.get(key, []), 1):
                more = len(save.values[key]) - 1
                text = _format_saved_value(node.value, node.batch_size) + (
                    f" (and {count_text(more, 'more member')})" if more else ""
                )
                rows.append(
                    [_key_text(key), *_save_letter(saves, number), node.kind, shape_text(node.batch_size), text]
                )
    if rows:
        yield table(["key", *(["save"] if len(saves) > 1 else []), "kind", "batch size", "value"], rows)
        yield _more_html(len(keys), min(len(keys), _MOST_LEAVES), "key")


def _format_saved_value(value: Any, size: Sequence[int]) -> str:
    if isinstance(value, BrokenValue):
        return f"broken: {value.why}"
    if isinstance(value, DeferredValue):
        value = value.read(MOST_COUNTED)
    if isinstance(value, list) and len(value) > 1 and count_texts(value):
        return f"{math.prod(size):,} texts: {format_values(value, math.prod(size))}"
    if isinstance(value, list) and len(value) > ROWS:
        return f"{_format_value(value[:ROWS])[:-1]}, …], {len(value):,} in all"
    return _format_value(value)


def _first_rows_html(saves: Sequence[_ReportedSave]) -> Iterator[str]:
    for number, save in enumerate(saves):
        size = save.root.batch_size
        columns: dict[str, list[str]] = {}
        for key, found in save.measured.items():
            if found.rows and size and found.group.shape[0] == size[0]:
                columns[_key_text(key)] = found.rows
        for key, nodes in save.values.items():
            value, rows_of = nodes[0].value, nodes[0].batch_size[:1]
            if len(nodes) == 1 and size and rows_of == size[:1] and isinstance(value, (list, DeferredValue)):
                first = value.read(ROWS) if isinstance(value, DeferredValue) else value
                columns[_key_text(key)] = [_format_value(item) for item in first[:ROWS]]
        if columns and size[0]:
            shown = dict(islice(columns.items(), _MOST_CELLS))
            rows = [[str(row), *(cells[row] for cells in shown.values())] for row in range(min(ROWS, size[0]))]
            if len(saves) > 1:
                yield f"<div>{_path_html(saves, number)}</div>"
            yield f'<div class="td-wide">{table(["row", *shown], rows)}</div>'
            yield _more_html(len(columns), len(shown), "column")
