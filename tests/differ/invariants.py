"""Rules that every container keeps on every side, and the search for places that break one."""

from __future__ import annotations

from collections.abc import Iterator

from differ.sides import Summary


def broken_in(summary: Summary, path: str) -> Iterator[tuple[str, str]]:
    """Yield the place of each container or leaf that breaks a rule, and the rule."""
    if summary["k"] == "list":
        for i, part in enumerate(summary["entries"]):
            yield from broken_in(part, f"{path}({i})")
    elif summary["k"] == "dict":
        for key, part in zip(summary["keys"], summary["entries"]):
            yield from broken_in(part, f"{path}[{key}]")
    elif summary["k"] == "broken":
        yield path, "cannot be read"
    elif summary["k"] == "td":
        yield from _broken_in_container(summary, path)


def _broken_in_container(summary: Summary, path: str) -> Iterator[tuple[str, str]]:
    size = summary["batch_size"]
    if any(isinstance(length, int) and length < 0 for length in size):
        yield path, f"batch size {size}"
    if "nontensor" in summary:
        return
    names = summary["names"]
    if names is not None and len(names) != len(size):
        yield path, f"names {names} of batch size {size}"
    if "members" in summary:
        yield from _broken_stack(summary, path)
        parts = [(f"{path}<{i}>", part) for i, part in enumerate(summary["members"])]
    else:
        parts = [(f"{path}[{key}]", part) for key, part in zip(summary["keys"], summary["entries"])]
        for place, part in parts:
            yield from _broken_entry(summary, part, place)
    for place, part in parts:
        if summary["locked"] and part.get("locked") is False:
            yield place, "unlocked in a locked container"
        yield from broken_in(part, place)


def _broken_stack(summary: Summary, path: str) -> Iterator[tuple[str, str]]:
    dim, size = summary["stack_dim"], summary["batch_size"]
    if not isinstance(dim, int) or not 0 <= dim < len(size) or size[dim] != len(summary["members"]):
        yield path, f"batch size {size} of {len(summary['members'])} members along dim {dim}"
        return
    rest = size[:dim] + size[dim + 1 :]
    for i, member in enumerate(summary["members"]):
        if "nontensor" not in member and member.get("batch_size", rest) != rest:
            yield f"{path}<{i}>", f"batch size {member['batch_size']} in a stack of {size} along dim {dim}"


def _broken_entry(parent: Summary, part: Summary, place: str) -> Iterator[tuple[str, str]]:
    size, names = parent["batch_size"], parent["names"]
    if part["k"] == "tensor":
        own = part["shape"] if part["cls"] != "UnbatchedTensor" else size
        if parent["device"] not in ("None", part["device"]):
            yield place, f"device {part['device']} in a container on {parent['device']}"
    elif part["k"] == "td":
        own = part["batch_size"]
        if names and part.get("names") and part["names"][: len(names)] != names:
            yield place, f"names {part['names']} in a container with {names}"
    else:
        return
    if own[: len(size)] != size:
        yield place, f"shape {own} in a container of batch size {size}"
