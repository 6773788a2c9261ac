"""Containers drawn at random: descriptions as plain data, which are written out as code and made simpler."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

Spec = dict[str, Any]
# Conversions of a new container, each with its share of the draws; `#` marks a function.
MADE_INTO = [
    (0.12, "lock_()"),
    (0.16, "memmap_()"),
    (0.19, "memmap(P())"),
    (0.21, "share_memory_()"),
    (0.23, "consolidate()"),
    (0.25, 'to_h5(P(".h5"))'),
    (0.29, "#TensorDictParams"),
]
DTYPES = ["f32"] * 10 + ["f64", "i64", "i64", "i64", "i32", "bl", "bl", "u8", "bf16", "f16", "c64", "i16", "i8"]
KEYS = ["a", "b", "c", "d", "x.y", "obs"]
VALUES = ['"text"', "7", "None", '["l", 1]', '{"k": 1}', "(1, 2)", "3.5", '{"s"}', "torch.float32", "True", "b'raw'"]
NAMES = ["t", "u", "v", "w"]


def plain_leaf(shape: list[int], s: int = 0) -> Spec:
    return {"k": "leaf", "shape": list(shape), "dt": "f32", "s": s, "rg": False}


def value(text: str, wrap: bool = False) -> Spec:
    return {"k": "value", "v": text, "wrap": wrap}


class Containers:
    """Draws containers with `random`."""

    def __init__(self, rng: random.Random) -> None:
        self.r = rng

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def batch_size(self) -> list[int]:
        count = self.r.choice([0, 1, 1, 1, 2, 2, 2, 3])
        sizes = []
        for _ in range(count):
            odd = self.chance(0.3)
            sizes.append(self.r.choice([1, 2, 2, 3, 3, 4, 0] if odd else [1, 2, 3, 4]))
        return sizes

    def container(self, batch_size: list[int] | None = None) -> Spec:
        p = self.r.random()
        if p < 0.66:
            return self.dense(0, batch_size)
        return self.lazy(batch_size) if p < 0.83 else self.tensorclass(batch_size)

    def leaf(self, batch_size: list[int]) -> Spec:
        r = self.r
        p = r.random()
        if p < 0.04 and len(batch_size) == 1 and batch_size[0] > 0:
            features, dt, s = r.choice([[], [2]]), r.choice(["f32", "f32", "i64"]), r.randrange(6)
            return {"k": "jagged", "rows": batch_size[0], "feat": features, "dt": dt, "s": s}
        if p < 0.055:
            return {"k": "unbatched", "shape": [2]}
        feature = [2, 1, 2] if self.chance(0.05) else r.choice([[], [], [1], [2], [3], [2, 3], [0]])
        dt = r.choice(DTYPES)
        s = r.randrange(6)
        return {
            "k": "leaf",
            "shape": batch_size + feature,
            "dt": dt,
            "s": s,
            "rg": dt in ("f32", "f64") and self.chance(0.08),
        }

    def dense(self, depth: int = 0, batch_size: list[int] | None = None, plain: bool = False) -> Spec:
        """A `TensorDict`; `plain` ones hold tensors and others of their kind only."""
        r = self.r
        bs = self.batch_size() if batch_size is None else batch_size
        counts = [1, 1, 2, 2, 2, 3, 3] + [0] * (depth > 0 or self.chance(0.2))
        entries = [[key, self._entry(bs, depth, plain)] for key in r.sample(KEYS, r.choice(counts))]
        spec: Spec = {"k": "td", "bs": bs, "entries": entries, "names": None, "device": None, "post": []}
        if bs and self.chance(0.15) and depth == 0:
            spec["names"] = [name if self.chance(0.8) else None for name in r.sample(NAMES, len(bs))]
        if self.chance(0.12):
            spec["device"] = "cpu"
        if depth == 0:
            p = r.random()
            spec["post"] = next(([call] for share, call in MADE_INTO if p < share), [])
        return spec

    def _entry(self, bs: list[int], depth: int, plain: bool) -> Spec:
        p = self.r.random()
        if p < 0.25 and depth < 2:
            child = self._child(bs, depth + 1, plain)
            if self.chance(0.1):
                child["dict"] = True
            return child
        if p < 0.36 and not plain:
            if self.chance(0.3) and bs and bs[0] > 0:
                return {"k": "nts", "n": bs[0], "rest": bs[1:]}
            return value(self.r.choice(VALUES), self.chance(0.4))
        return self.leaf(bs)

    def _child(self, batch_size: list[int], depth: int, plain: bool) -> Spec:
        r = self.r
        bs = batch_size + ([] if self.chance(0.7) else [r.choice([1, 2, 3])])
        if self.chance(0.12) and depth == 1 and self.chance(0.1):
            bs = bs[: r.randrange(len(bs) + 1)]
        p = r.random()
        if p < 0.7 or plain:
            return self.dense(depth, bs, plain)
        if p < 0.85:
            return self.lazy(bs, depth) if bs else self.dense(depth, bs)
        return self.tensorclass(bs, depth)

    def lazy(self, batch_size: list[int] | None = None, depth: int = 0) -> Spec:
        """A lazy stack, whose members may differ."""
        r = self.r
        bs = (self.batch_size() if batch_size is None else batch_size) or [2]
        dim = r.randrange(len(bs))
        first = self.dense(depth + 1, bs[:dim] + bs[dim + 1 :])
        first["device"] = None
        members = [first]
        for _ in range(1, bs[dim]):
            member = json.loads(json.dumps(first))
            if self.chance(0.3):
                self._vary(member)
            members.append(member)
        spec: Spec = {"k": "lazy", "dim": dim, "members": members, "post": []}
        if depth == 0 and self.chance(0.15):
            spec["post"] = [r.choice(["lock_()", "lock_()", "memmap_()"])]
        return spec

    def _vary(self, spec: Spec) -> None:
        """Make a member of a lazy stack differ: another feature size, key or value."""
        r, entries = self.r, spec["entries"]
        more = ["z", plain_leaf([*spec["bs"], 2], s=1)]
        if not entries:
            entries.append(more)
            return
        i = r.randrange(len(entries))
        entry = entries[i][1]
        if entry["k"] == "leaf":
            p = r.random()
            if p < 0.4:
                entry["s"] += 1
            elif p < 0.8 and len(entry["shape"]) > len(spec["bs"]):
                entry["shape"][-1] += 1
            else:
                entries.append(more)
        elif entry["k"] == "value":
            entry["v"] = r.choice(VALUES)
        else:
            del entries[i]

    def tensorclass(self, batch_size: list[int] | None = None, depth: int = 0) -> Spec:
        r = self.r
        bs = self.batch_size() if batch_size is None else batch_size
        name = r.choice(["TCA", "TCA", "TCA", "TCB", "TCB", "TCB", "TCN", "TCC", "TCO", "TCF", "TCS", "TCM", "TCE"])
        entries = [["a", self.leaf(bs)], *self._fields(name, bs, depth)]
        device = "cpu" if self.chance(0.1) else None
        spec: Spec = {"k": "tc", "cls": name, "bs": bs, "entries": entries, "device": device, "names": None, "post": []}
        if depth == 0 and self.chance(0.2):
            spec["post"] = [r.choice(["lock_()", "lock_()", "memmap_()", "memmap(P())"])]
        return spec

    def _fields(self, name: str, bs: list[int], depth: int) -> list[list[Any]]:
        """The optional fields of a tensorclass of the prelude."""
        r, fields = self.r, []
        if name == "TCA":
            if self.chance(0.6):
                fields.append(["b", r.choice([self.leaf(bs), value(r.choice(VALUES))])])
            if self.chance(0.5):
                fields.append(["s", value('"text"')])
        elif name == "TCB":
            if self.chance(0.6):
                fields.append(["x", self.leaf(bs)])
            if self.chance(0.4) and depth < 2:
                inner = [self.dense(depth + 1, list(bs)), self.tensorclass(list(bs), depth + 2)]
                fields.append(["child", r.choice(inner)])
        elif name in ("TCN", "TCC"):
            if self.chance(0.5):
                fields.append(["s", value('"text"')])
            if self.chance(0.5):
                fields.append(["n", value(r.choice(["7", "3.5", '"8"']))])
        elif name == "TCS":
            if self.chance(0.6):
                fields.append(["keys", r.choice([self.leaf(bs), value(r.choice(VALUES))])])
        elif name == "TCM":
            if self.chance(0.6):
                fields.append(["i", value(r.choice(["7", "3.5", '"8"', "T(1)"]))])
            if self.chance(0.4):
                fields.append(["d", self.dense(depth + 1, list(bs))])
        elif self.chance(0.6):
            fields.append(["b", self.leaf(bs)])
        return fields


def shape_text(shape: list[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def render(spec: Spec) -> str:
    """The code that makes what a spec describes."""
    if spec["k"] in ("leaf", "jagged"):
        return _render_tensor(spec)
    if spec["k"] == "unbatched":
        return f"UnbatchedTensor(T({', '.join(map(str, spec['shape']))}))"
    if spec["k"] == "value":
        return f"NonTensorData({spec['v']})" if spec["wrap"] else spec["v"]
    if spec["k"] == "nts":
        return _render_values([spec["n"], *spec["rest"]])
    if spec["k"] == "td" and spec.get("dict") and not spec.get("post"):
        return _render_entries(spec)
    out = _render_container(spec)
    for call in spec.get("post", []):
        out = f"{call[1:]}({out})" if call.startswith("#") else f"{out}.{call}"
    return out


def _render_tensor(spec: Spec) -> str:
    ragged = spec["k"] == "jagged"
    args = [str(n) for n in ([spec["rows"], *spec["feat"]] if ragged else spec["shape"])]
    if spec["dt"] != "f32":
        args.append(f"dt={spec['dt']}")
    if spec["s"]:
        args.append(f"s={spec['s']}")
    if spec.get("rg"):
        args.append("rg=True")
    return f"{'J' if ragged else 'T'}({', '.join(args)})"


def _render_values(sizes: list[int]) -> str:
    """A stack of texts, which tell its rows apart; one without elements cannot say how many dims it has."""
    if not all(sizes):
        return f'"v{sizes[0]}"'

    def stack(parts: list[str]) -> str:
        return f"NonTensorStack({', '.join(parts)})"

    def row(text: str, rest: list[int]) -> str:
        return stack([row(text, rest[1:])] * rest[0]) if rest else text

    return stack([row(f'"v{i}"', sizes[1:]) for i in range(sizes[0])])


def _render_entries(spec: Spec) -> str:
    return "{" + ", ".join(f'"{key}": {render(entry)}' for key, entry in spec["entries"]) + "}"


def _render_container(spec: Spec) -> str:
    if spec["k"] == "lazy":
        return f"lazy_stack([{', '.join(map(render, spec['members']))}], {spec['dim']})"
    options = [f"batch_size={shape_text(spec['bs'])}"]
    if spec.get("names"):
        options.append(f"names={spec['names']}")
    if spec.get("device"):
        options.append(f'device="{spec["device"]}"')
    if spec["k"] == "td":
        return f"TensorDict({_render_entries(spec)}, {', '.join(options)})"
    fields = ", ".join(f"{key}={render(entry)}" for key, entry in spec["entries"])
    return f"{spec['cls']}({fields}, {', '.join(options)})"


def simpler(spec: Spec) -> Iterator[Spec]:
    """Specs that are simpler in one respect, the most drastic first."""
    if spec.get("post"):
        yield {**copy.deepcopy(spec), "post": []}
    for option in ("names", "device", "dict"):
        if spec.get(option):
            yield {**copy.deepcopy(spec), option: None}
    if spec["k"] == "lazy":
        yield from _simpler_stacks(spec)
    if spec["k"] in ("td", "tc"):
        yield from _simpler_containers(spec)
    if spec["k"] == "leaf":
        for option, plain in (("rg", False), ("dt", "f32"), ("s", 0)):
            if spec[option] != plain:
                yield {**copy.deepcopy(spec), option: plain}
    if spec["k"] == "value" and spec["v"] != '"text"':
        yield {**spec, "v": '"text"'}


def _simpler_stacks(spec: Spec) -> Iterator[Spec]:
    members = spec["members"]
    if len(members) > 1:
        for i in range(len(members)):
            yield {**copy.deepcopy(spec), "members": copy.deepcopy(members[:i] + members[i + 1 :])}
    for gone in sorted({key for member in members for key, _ in member["entries"]}):
        other = copy.deepcopy(spec)
        for member in other["members"]:
            member["entries"] = [entry for entry in member["entries"] if entry[0] != gone]
        yield other
    for i, member in enumerate(members):
        for small in simpler(member):
            other = copy.deepcopy(spec)
            other["members"][i] = small
            yield other


def _simpler_containers(spec: Spec) -> Iterator[Spec]:
    entries, bs = spec["entries"], spec["bs"]
    needed = 1 if spec["k"] == "tc" else 0
    for i in range(needed, len(entries)):
        yield {**copy.deepcopy(spec), "entries": copy.deepcopy(entries[:i] + entries[i + 1 :])}
    for i, (_, entry) in enumerate(entries):
        others = list(simpler(entry))
        if entry["k"] == "leaf" and entry["shape"] != bs:
            others.append({**entry, "shape": list(bs)})
        if entry["k"] != "leaf":
            others.append(plain_leaf(bs))
        for small in others:
            other = copy.deepcopy(spec)
            other["entries"][i][1] = small
            yield other
    if spec["k"] == "tc" and spec["cls"] != "TCA":
        kept = [entry for entry in entries if entry[0] in ("a", "b", "s")]
        yield {**copy.deepcopy(spec), "cls": "TCA", "entries": copy.deepcopy(kept)}
    if bs and all(entry["k"] in ("leaf", "value") for _, entry in entries):
        yield from _fewer_dims(spec)


def _fewer_dims(spec: Spec) -> Iterator[Spec]:
    for i in range(len(spec["bs"])):
        other = copy.deepcopy(spec)
        del other["bs"][i]
        if other.get("names"):
            del other["names"][i]
        for _, entry in other["entries"]:
            if entry["k"] == "leaf":
                del entry["shape"][i]
        yield other
