"""A check of errors that rules excuse: is the input what the error says?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from differ.sides import Summary

# A line of several operations, whose last operands nobody sees.
_SEVERAL = re.compile(
    r"[)\]][.\[]|TensorDict\(|from_dict_instance\(|list\(\w+\.unbind\(|\b(select|exclude|empty|copy|clone|new_\w+)\("
)
_ROWS_OF_ONE = re.compile(r"(?:stack(?:_tds)?|cat)\((\w+|\(\w+\))[,)]")
_LOCKS = re.compile(r"lock|memmap|share_memory|consolidate|Params|frozen")


def find_doubt(error: dict[str, Any], code: str, operands: list[Summary]) -> str:
    """Return what an error says about the operands of a line that is not so; an empty string if nothing is known."""
    nodes = [node for operand in operands for node in _walk(operand)]
    containers = [node for node in nodes if node["k"] == "td"]
    name, message = error["cls"], error["msg"]
    if not containers or _SEVERAL.search(code):
        return ""
    if name == "LockedError" and not _LOCKS.search(code) and not any(node["locked"] for node in containers):
        return "no operand is locked"
    if name == "KeyMismatchError" and len({_given_keys(node) for node in nodes if "keys" in node}) < 2:
        return "all operands have the same keys"
    if name == "NamesError" and "name" not in code and not any(any(node["names"] or ()) for node in containers):
        return "no operand has names"
    ranks = [len(node["batch_size"]) for node in containers]
    if _ROWS_OF_ONE.search(code):
        ranks += [rank - 1 for rank in ranks]
    if name == "DimError":
        return _doubt_dim(message, ranks)
    if found := re.match(r"(\d+) names .* do not fit (\d+) batch dims", message):
        known = int(found[2]) in ranks or re.search(r"batch_size=|batch_dims=|\bfrom_\w+\(", code)
        return "" if found[1] != found[2] and known else "the names fit, or nothing has so many dims"
    if found := re.match(r"index -?\d+ is out of bounds for dim\w* \d+ with size (\d+)", message):
        sizes = {size for node in nodes for size in node.get("batch_size", node.get("shape", []))}
        return "" if int(found[1]) in sizes else "no operand has this size"
    return ""


def _doubt_dim(message: str, ranks: list[int]) -> str:
    if message.startswith("dim") and "no batch dims" in message:
        return "" if 0 in ranks else "every operand has batch dims"
    found = re.match(r"dim (-?\d+) is out of range: (a dim added to|the container has) (\d+) batch dims", message)
    if not found:
        return ""
    dim, rank = int(found[1]), int(found[3])
    places = rank + found[2].startswith("a dim")
    if -places <= dim < places:
        return "the dim is in range"
    return "" if rank in ranks else "no operand has this number of batch dims"


def _given_keys(node: Summary) -> frozenset[str]:
    """The keys of a container; of a tensorclass those of the fields that are not `None`."""
    return frozenset(key for key, entry in zip(node["keys"], node["entries"]) if entry.get("cls") != "NoneType")


def _walk(summary: Any) -> Iterator[Summary]:
    """Yield a summary and those of all its parts, without the values of holders."""
    if not isinstance(summary, dict) or "k" not in summary:
        return
    yield summary
    for part in [*summary.get("entries", []), *summary.get("members", [])]:
        yield from _walk(part)
