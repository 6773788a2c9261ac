"""Directive that runs each operation on each kind of container, and shows in a table whether the result is a view."""

from __future__ import annotations

import inspect
import re
import tempfile
import warnings
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import public_names
import torch
from api_pages import parse_rst
from calls import CALLS, LEFT_OUT
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from torch import nn

from tensordict import (
    LazyConcatenatedTensorDict,
    LazyStackedTensorDict,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    TensorDictParams,
    is_tensor_collection,
    lazy_cat,
    lazy_stack,
    set_lazy_legacy,
)


class Record(TensorClass):
    a: torch.Tensor
    b: TensorDict
    x: torch.Tensor | None = None


def dense() -> TensorDict:
    """Make the container `td` of `calls.py`: no element is zero, and some are negative."""
    a = torch.arange(-10, 14, dtype=torch.float32).add(0.5).reshape(3, 4, 2) / 50
    c = torch.arange(-5, 7, dtype=torch.float32).add(0.5).reshape(3, 4) / 25
    return TensorDict({"a": a, "b": {"c": c}}, [3, 4])


def make_transposed(folder: Path) -> Any:
    with set_lazy_legacy(True):
        return dense().transpose(0, 1).clone().transpose(0, 1)


# The columns, each with a function that makes a container of the kind in an empty folder.
KINDS: dict[str, Callable[[Path], Any]] = {
    "TensorDict": lambda folder: dense(),
    "memory-mapped": lambda folder: dense().memmap_(folder / "source"),
    "lazy stack": lambda folder: lazy_stack([row.clone() for row in dense().unbind(0)]),
    "lazy view": make_transposed,
    "lazy cat": lambda folder: lazy_cat([part.clone() for part in dense().split([1, 2])]),
    "HDF5": lambda folder: dense().to_h5(folder / "source.h5"),
    "tensorclass": lambda folder: Record.from_tensordict(dense()),
    "parameters": lambda folder: TensorDictParams(dense()).requires_grad_(False),
}


# The build makes and removes thousands of folders, which takes half the time in memory.
SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True)
class Seen:
    """The observed effect of a call: `does` in one or two words, and a note of anything unusual."""

    does: str
    note: str = ""


def observe(call: str, kind: str) -> Seen:
    """Run a call on a container of a kind."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = KINDS[kind](Path(folder))
        before, told, held = content(source), state(source), storages(source)
        try:
            result = evaluate(call, source, Path(folder))
            changed = not same(before, content(source)) or told != state(source)
        except (
            RuntimeError,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            NotImplementedError,
        ) as error:
            return Seen("refused", type(error).__name__)
        on_disk = (Path(folder) / "new").exists()
        if result is source:
            return Seen("in place" if changed else "itself", "on disk" if on_disk else "")
        if result is None:
            return Seen("in place" if changed else "copy" if on_disk else "none", "on disk" if on_disk else "")
        pieces = list(parts(result))
        if not pieces:
            return Seen("in place" if changed else "value", type(result).__name__)
        if changed:
            return Seen("in place", f"gives {name_class(result, source)}")
        shared = [is_shared(piece, source, held) for piece in pieces]
        does = "view" if all(shared) else "partly view" if any(shared) else "copy"
        if any(map(is_lazy, pieces)):
            does = f"lazy {does}"
        notes = ["" if type(result) is type(source) else name_class(result, source), "on disk" if on_disk else ""]
        return Seen(does, ", ".join(filter(None, notes)))


def evaluate(call: str, source: Any, folder: Path) -> Any:
    other = dense().mul_(0.5)
    names = {"td": source, "other": other, "path": folder / "new", "torch": torch, "TensorDict": TensorDict}
    if "saved" in call:
        names["saved"] = folder / "saved"
        other.memmap(names["saved"])
    if "module" in call:
        names["module"] = module = nn.Module()
        module.a, module.b = nn.Parameter(torch.zeros(3, 4, 2)), nn.Module()
        module.b.c = nn.Parameter(torch.zeros(3, 4))
    return eval(call, names)


def content(source: Any) -> dict[Any, torch.Tensor]:
    """Return copies of the entries."""
    return {key: value.detach().clone() for key, value in source.items(True, True)}


def same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        leaf.dtype is other[key].dtype and leaf.device == other[key].device and torch.equal(leaf, other[key])
        for key, leaf in one.items()
    )


def state(source: Any) -> list[Any]:
    """Return the attributes of a container: its keys, sizes, names and flags."""
    keys = list(source.keys(True, True))
    return [keys, source.batch_size, source.names, source.is_locked, source.is_memmap(), source.is_shared()]


def is_lazy(piece: Any) -> bool:
    """Tell whether a container makes its entries anew at each read: two reads then give two objects."""
    if isinstance(piece, torch.Tensor):
        return False
    return any(piece.get(key) is not piece.get(key) for key in piece.keys(True, True))


def storages(found: Any) -> set[int]:
    """Return the addresses of all tensors in memory."""
    if isinstance(found, torch.Tensor):
        return {found.untyped_storage().data_ptr()} if found.device.type == "cpu" else set()
    if isinstance(found, LazyStackedTensorDict):
        return {address for member in found.tensordicts for address in storages(member)}
    if isinstance(found, LazyConcatenatedTensorDict):
        return {address for member in found.parts for address in storages(member)}
    if isinstance(found, PersistentTensorDict):
        return set()
    return {address for value in found.values(True, True) for address in storages(value)}


def parts(result: Any) -> Iterator[Any]:
    """Yield the tensors and containers in a result."""
    if isinstance(result, torch.Tensor) or is_tensor_collection(result):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from parts(value)
    elif isinstance(result, (tuple, list, ValuesView, ItemsView, Iterator)):
        for value in result:
            yield from parts(value)


def is_shared(piece: Any, source: Any, held: set[int]) -> bool:
    """Tell whether writing to a piece of a result changes the container that the call ran on."""
    if storages(piece) & held:
        return True
    before = content(source)
    with torch.no_grad():
        try:
            piece.zero_()
        except (RuntimeError, NotImplementedError):
            return False  # a read-only piece shares no writable memory
    return not same(before, content(source))


def name_class(result: Any, source: Any) -> str:
    """Return the class name of a result; for several results, the class of the first."""
    if isinstance(result, (tuple, list, dict)) and not is_tensor_collection(result):
        inside = next(parts(result), None)
        inner = "" if inside is None or type(inside) is type(source) else f" of {type(inside).__name__}"
        return f"{type(result).__name__}{inner}"
    return type(result).__name__


def rows(family: str) -> list[str]:
    """Return the calls of a family: the lines of `CALLS`, and for other operations a call without arguments."""
    names = public_names.operations()[family]
    written = [line.strip() for lines in CALLS.values() for line in lines.strip().splitlines()]
    calls = [call for call in written if operation(call) in names]
    # Operators and indices have no names.
    calls[:0] = [call.strip() for call in CALLS.get(family.rpartition(".")[2], "").splitlines() if not operation(call)]
    done = {*map(operation, calls), *(name for left_out in LEFT_OUT.values() for name in left_out.split())}
    for name in names:
        found = inspect.getattr_static(TensorDict, name)
        if name not in done and not isinstance(found, classmethod):
            calls.append(f"td.{name}" if isinstance(found, property) else f"td.{name}()")
    return [call for call in calls if call]


def operation(call: str) -> str | None:
    """Return the name of the operation that a call tests: the last method called on the container."""
    # Remove arguments in parentheses, which may call other functions, such as `torch.ones`.
    while (plain := re.sub(r"\([^()]*\)", "", call)) != call:
        call = plain
    found = re.search(r"\b(?:td|TensorDict)(?:\[[^]]*\])?(?:\.\w+)*\.(\w+)", call)
    return found[1] if found else None


class Behaviour(SphinxDirective):
    """`.. behaviour:: PATH`: a table of the effects of a family of operations on each kind of container."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        calls = rows(self.arguments[0])
        if not calls:
            return []
        seen = {call: [observe(call, kind) for kind in KINDS] for call in calls}
        for call, found in seen.items():
            if all(one.does == "refused" for one in found):
                raise self.error(f"every kind refuses {call}: {', '.join(one.note for one in found)}")
        table = nodes.table(classes=["behaviour"])
        group = nodes.tgroup(cols=len(KINDS) + 1)
        group += [nodes.colspec(colwidth=1) for _ in range(len(KINDS) + 1)]
        head, body = nodes.thead(), nodes.tbody()
        head += _row(nodes.Text("call"), *(nodes.Text(kind) for kind in KINDS))
        body += [_row(_link_call(call, self.env.docname), *map(_show_cell, found)) for call, found in seen.items()]
        group += [head, body]
        table += group
        words = parse_rst(self, [":ref:`Meaning of the words <words>`."])
        return [nodes.container("", table, classes=["behaviour-scroll"]), *words]


def _row(*cells: nodes.Node) -> nodes.row:
    row = nodes.row()
    row += [nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells]
    return row


def _link_call(call: str, page: str) -> nodes.Node:
    """Return a call as a link to its operation."""
    shown = nodes.literal(call, call)
    if (name := operation(call)) is None:
        return shown
    target = f"tensordict.TensorDictBase.{name}"
    link = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refdoc": page, "refexplicit": True}
    return addnodes.pending_xref("", shown, **link)


def _show_cell(seen: Seen) -> nodes.Node:
    if seen.does == "value":
        return nodes.inline(seen.note, seen.note, classes=["does", "does-value"])
    cell = nodes.inline()
    cell += nodes.inline(seen.does, seen.does, classes=["does", f"does-{seen.does.split()[-1]}"])
    if seen.note:
        cell += [nodes.Text(" "), nodes.inline(seen.note, seen.note, classes=["seen"])]
    return cell


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("behaviour", Behaviour)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
