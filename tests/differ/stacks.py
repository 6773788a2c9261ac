"""Lazy stacks as dense summaries or as parts, so that the values of a lazy and of a dense container compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from differ.sides import Summary

LARGEST = 400


def form_of(summary: Summary) -> str:
    """Return how a container holds its entries."""
    return f"a stack along dim {summary['stack_dim']}" if "members" in summary else "dense"


def dense(summary: Summary) -> Summary | None:
    """The summary of a container whose lazy stacks are dense; `None` where one cannot be."""
    if summary["k"] != "td" or "nontensor" in summary:
        return summary
    if "entries" in summary:
        entries = [dense(entry) for entry in summary["entries"]]
        return None if None in entries else {**summary, "entries": entries}
    members = [dense(member) for member in summary["members"]]
    if not members or None in members:
        return None
    return _stack_containers(members, summary["stack_dim"], summary)


def _stack_entries(parts: Sequence[Any], dim: int) -> Summary | None:
    """Entries of all members under one key, stacked."""
    first = parts[0]
    if any(part["k"] != first["k"] or part["cls"] != first["cls"] for part in parts):
        return None
    if first["cls"] == "UnbatchedTensor":
        return first if all(part == first for part in parts) else None
    if "nontensor" in first:
        longer = {**first, "batch_size": _longer(first["batch_size"], dim, len(parts))}
        if first["cls"] == "NonTensorStack":
            values = _stack_values([part["nontensor"] for part in parts], dim)
            return values and {**longer, "nontensor": values}
        return longer if all(part == first for part in parts) else None
    if first["k"] == "td":
        if any(part["batch_size"] != first["batch_size"] for part in parts):
            return None
        head = {**first, "batch_size": _longer(first["batch_size"], dim, len(parts))}
        head["names"] = _longer(first["names"], dim, None) if first["names"] else first["names"]
        return _stack_containers(parts, dim, head)
    return _stack_tensors(parts, dim) if first["k"] == "tensor" else None


def _stack_values(values: Sequence[Any], dim: int) -> Summary | None:
    """Nested lists of values, as one list that is a level deeper at `dim`."""
    if dim == 0:
        return {"k": "list", "cls": "list", "entries": list(values), "len": len(values)}
    if any(value["k"] != "list" or value["len"] != len(value["entries"]) for value in values):
        return None
    columns = [_stack_values(column, dim - 1) for column in zip(*(value["entries"] for value in values))]
    return None if None in columns else {**values[0], "entries": columns}


def _longer(sizes: list[Any], dim: int, item: Any) -> list[Any]:
    return [*sizes[:dim], item, *sizes[dim:]]


def _stack_containers(parts: Sequence[Any], dim: int, head: Summary) -> Summary | None:
    first = parts[0]
    if any("keys" not in part or {*part["keys"]} != {*first["keys"]} or part["cls"] != first["cls"] for part in parts):
        return None
    columns = [dict(zip(part["keys"], part["entries"])) for part in parts]
    entries = [_stack_entries([column[key] for column in columns], dim) for key in first["keys"]]
    if None in entries:
        return None
    about = {field: head[field] for field in ("k", "batch_size", "device", "names", "locked")}
    return {**about, "cls": first["cls"], "keys": first["keys"], "entries": entries}


def _stack_tensors(parts: Sequence[Any], dim: int) -> Summary | None:
    first, shape = parts[0], parts[0]["shape"]
    if any(part[field] != first[field] for part in parts for field in ("shape", "dtype", "device")):
        return None
    values: Any = [part["values"] for part in parts]
    if values[0] != "meta":
        count = int(np.prod(shape)) * len(parts)
        if values[0][:1] == ["sum"]:
            values = ["sum", sum(value[1] for value in values)]
        else:
            rows = [np.array(value).reshape([*shape, -1] if value else [*shape, 1]) for value in values]
            values = np.stack(rows, dim).flatten().tolist()
            values = ["sum", float(sum(values))] if count > LARGEST else values
    requires_grad = any(part["rg"] for part in parts)
    longer = _longer(shape, dim, len(parts))
    return {**first, "shape": longer, "rg": requires_grad, "values": "meta" if "meta" in values else values}


def parts_of_both(a: Summary, b: Summary) -> list[tuple[Summary, Summary]] | None:
    """Pair the parts of two containers along the stack dim of one of them; `None` where one cannot be split."""
    dim = (a if "members" in a else b)["stack_dim"]
    if not isinstance(dim, int) or not 0 <= dim < min(len(a["batch_size"]), len(b["batch_size"])):
        return None
    x, y = _split(a, dim), _split(b, dim)
    return None if x is None or y is None or len(x) != len(y) else list(zip(x, y))


def _split(summary: Summary, dim: int) -> list[Summary] | None:
    """The parts of a container or a leaf along a batch dim; `None` where its values do not tell."""
    if summary["k"] == "td":
        return _split_container(summary, dim)
    if summary["k"] != "tensor" or summary["cls"] == "UnbatchedTensor":
        return None
    shape, values = summary["shape"], summary["values"]
    rest = _without(shape, dim)
    if values == "meta":
        return [{**summary, "shape": rest}] * shape[dim]
    if values[:1] == ["sum"]:
        return None
    per_element = [len(values) // int(np.prod(shape))] if values else [1]  # a complex number is two
    rows = np.moveaxis(np.array(values).reshape([*shape, *per_element]), dim, 0)
    return [{**summary, "shape": rest, "values": row.flatten().tolist()} for row in rows]


def _split_container(summary: Summary, dim: int) -> list[Summary] | None:
    size = summary["batch_size"]
    cut = {"batch_size": _without(size, dim)}
    if summary.get("names"):
        cut["names"] = _without(summary["names"], dim)
    if "nontensor" in summary:
        if summary["cls"] != "NonTensorStack":
            return [{**summary, **cut}] * size[dim]
        if not cut["batch_size"]:
            cut["cls"] = "NonTensorData"
        values = _split_values(summary["nontensor"], dim)
        return values and [{**summary, **cut, "nontensor": value} for value in values]
    if "members" not in summary:
        columns = [_split_entry(entry, dim, size[dim]) for entry in summary["entries"]]
        if None in columns or any(len(column) != size[dim] for column in columns):
            return None
        return [{**summary, **cut, "entries": [column[i] for column in columns]} for i in range(size[dim])]
    if dim == summary["stack_dim"]:
        return summary["members"]
    inside = dim - (dim > summary["stack_dim"])
    columns = [_split(member, inside) for member in summary["members"]]
    if not columns or None in columns or len({len(column) for column in columns}) > 1:
        return None
    cut["stack_dim"] = summary["stack_dim"] - (dim < summary["stack_dim"])
    return [{**summary, **cut, "members": list(row), "batch_size": _size_of_stack(row, cut)} for row in zip(*columns)]


def _size_of_stack(members: Sequence[Summary], stack: dict[str, Any]) -> list[Any]:
    """The batch size of a stack: that of its members, where they agree, and their number."""
    first = members[0]["batch_size"]
    if any(member["batch_size"] != first for member in members):
        return stack["batch_size"]
    return _longer(first, stack["stack_dim"], len(members))


def _split_entry(entry: Summary, dim: int, count: int) -> list[Summary] | None:
    return [entry] * count if entry.get("cls") == "UnbatchedTensor" else _split(entry, dim)


def _split_values(values: Summary, dim: int) -> list[Summary] | None:
    """The parts of nested lists of values along a dim."""
    if values["k"] != "list" or values["len"] != len(values["entries"]):
        return None
    if dim == 0:
        return list(values["entries"])
    columns = [_split_values(value, dim - 1) for value in values["entries"]]
    if None in columns:
        return None
    return [{**values, "entries": list(row)} for row in zip(*columns)]


def _without(sizes: list[Any], dim: int) -> list[Any]:
    return [*sizes[:dim], *sizes[dim + 1 :]]
