"""Two summaries, or two runs of a program: where do they differ?"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

from differ.excuses import find_doubt
from differ.invariants import broken_in
from differ.programs import Construction, Line, Step
from differ.sides import Replies, Summary
from differ.stacks import dense, form_of, parts_of_both

# These kinds name a difference only where no other kind does.
MINOR = {"key order", "flags", "leaf class", "lazy or dense", "holder or value"}
# The fields of a container that do not depend on how it holds its entries.
_OF_ALL_FORMS = ("batch_size", "device", "names", "locked")
NOT_FIELDS = {"k", "entries", "members", "nontensor", "msg"}
# Kinds of differences from the newest level begin so; it counts where level 0.14.3 refuses a line.
NEWEST = "0.15.3"
# No difference: ours does what the newest level does, and level 0.14.3 goes on with other values.
AS_NEWEST = "as " + NEWEST
# Our result is broken, where the reference's is not: whatever else differs, this counts.
OURS_BREAKS = "ours breaks a rule"


class Difference(NamedTuple):
    """One difference: its kind, its place, the value of each side, and the rule that the reference breaks there."""

    kind: str
    path: str
    reference: str
    ours: str
    breaks: str = ""

    def variable(self) -> str:
        """The variable that holds the place."""
        return re.match(r"\w*", self.path)[0]

    def __str__(self) -> str:
        end = f" | the reference breaks a rule: {self.breaks}" if self.breaks else ""
        return f"{self.kind} at {self.path}: reference {self.reference} | ours {self.ours}{end}"


class Found(NamedTuple):
    """The first line of a program that differs: its number, how it differs, the exceptions of both sides."""

    line: int
    operation: str
    kind: str
    detail: str
    reference: dict[str, Any] | None = None
    ours: dict[str, Any] | None = None
    differences: list[Difference] = []
    newest: dict[str, Any] | None = None

    def is_crash(self) -> bool:
        return self.kind.startswith("crash")

    def in_results(self) -> bool:
        """Return whether both sides run, or both fail, and leave different values."""
        return _of_values(self.kind)

    def of_newest(self) -> bool:
        """Return whether ours differs from the newest level."""
        return self.kind.startswith(NEWEST)

    def same_group(self, other: Found | None) -> bool:
        """Return whether `other` shows the same fault."""
        if other is None or (self.operation, self.kind) != (other.operation, other.kind):
            return False
        if self.in_results():
            return self.detail == other.detail
        return self.detail.split(":")[0] == other.detail.split(":")[0]


# How much floats may differ in relation to their size, by dtype and otherwise.
_ROUNDING = {"torch.float16": 2e-3, "torch.bfloat16": 2e-2}
_ROUNDING_OF_OTHERS = 1e-4


def close(a: object, b: object, rounding: float = _ROUNDING_OF_OTHERS) -> bool:
    """Return whether values are equal; floats up to rounding, and NaN equals NaN."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(close(x, y, rounding) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return not differences(a, b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and float in (type(a), type(b)):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b or abs(a - b) <= rounding * max(abs(a), abs(b)) + 1e-5
    return a == b


def short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) < 120 else text[:117] + "..."


def differences(a: Summary, b: Summary, path: str = "") -> list[Difference]:
    """List where our summary `b` differs from the reference's `a`."""
    broken = [x["k"] == "broken" for x in (a, b)]
    if all(broken):
        return []
    if any(broken):
        kind = "unreadable on " + ("the reference" if broken[0] else "ours")
        texts = [f"{short(x.get('exc', x.get('cls', '')))} {x.get('msg', '')[:100]}" for x in (a, b)]
        return [Difference(kind, path, *texts)]
    if a["k"] != b["k"]:
        # The value of a field of a tensorclass: one for all elements, or a list of the same for each.
        if path.endswith("]") and (_fills(a, b) or _fills(b, a)):
            return [Difference("one value or a stack", path, short(a), short(b))]
        kind = "holder or value" if _value_of(a) == _value_of(b) else "type"
        return [Difference(kind, path, a.get("cls", a["k"]), b.get("cls", b["k"]))]
    if a["k"] == "td" and ("nontensor" in a) != ("nontensor" in b):
        return [_classes(a, b, path)]  # the other differences follow from this one
    if a["k"] == "td" and "nontensor" not in a and form_of(a) != form_of(b):
        x, y = dense(a), dense(b)
        if x is not None and y is not None:
            return [Difference("lazy or dense", path, form_of(a), form_of(b)), *differences(x, y, path)]
        if (parts := parts_of_both(a, b)) is not None:
            out = [Difference("lazy or dense", path, form_of(a), form_of(b))]
            out += [d for field in _OF_ALL_FORMS for d in _in_field(field, a, b, path)]
            return out + [d for i, pair in enumerate(parts) for d in differences(*pair, f"{path}<{i}>")]
    if a.get("cls") == b.get("cls") == "UnbatchedTensor" and a["shape"] in _ends_of(b["shape"]):
        return [Difference("unbatched cut by reference", path, short(a["shape"]), short(b["shape"]))]
    out = [d for field in a if field not in NOT_FIELDS for d in _in_field(field, a, b, path)]
    if "flags" in b and "flags" not in a:
        out.append(Difference("flags", path, "none", short(b["flags"])))
    if "nontensor" in a:
        out += _in_values(a, b, path)
    if "members" in a:
        out += _in_members(a, b, path)
    if "entries" in a and "entries" in b:
        out += _in_entries(a, b, path)
    return out


def _value_of(summary: Summary) -> Summary:
    """Return the summary of the value that a holder holds; any other summary itself."""
    return summary.get("nontensor", summary) if summary["k"] == "td" else summary


def _ends_of(shape: list[int]) -> list[list[int]]:
    """The shapes of the parts of a tensor along leading dims."""
    return [shape[i:] for i in range(1, len(shape) + 1)]


def _classes(a: Summary, b: Summary, path: str) -> Difference:
    return Difference("type", path, a.get("cls", ""), b.get("cls", ""))


def _in_field(field: str, a: Summary, b: Summary, path: str) -> list[Difference]:
    x, y = a[field], b.get(field)
    if field == "keys":
        return _in_keys(a, b, path)
    if field in ("values", "value"):
        # A printed container whose fields come in another order is a matter of the order.
        same_lines = isinstance(x, str) and isinstance(y, str) and _sort_lines(x) == _sort_lines(y)
        rounding = _ROUNDING.get(a.get("dtype", ""), _ROUNDING_OF_OTHERS)
        return (
            []
            if close(x, y, rounding)
            else [Difference("key order" if same_lines else "values", path, short(x), short(y))]
        )
    if x == y:
        return []
    if field == "dtype" and x.startswith("[") and sorted(x) == sorted(y):
        return [Difference("key order", path, short(x), short(y))]  # the fields of a structured array
    if field == "cls":
        return [Difference("leaf class" if a["k"] == "tensor" else "type", path, x, str(y))]
    return [Difference(_field_kind(field, x, y), path, short(x), short(y))]


def _sort_lines(text: str) -> list[str]:
    return sorted(line.rstrip() for line in text.split("\n"))


def _field_kind(field: str, x: Any, y: Any) -> str:
    if field == "rg":
        return "requires_grad"
    if field == "names" and None not in (x, y) and len(x) == len(y):
        if not any(x) or not any(y):
            return "names lost by reference" if not any(x) else "names lost by ours"
        return "names fewer in reference" if all(p in (None, q) for p, q in zip(x, y)) else "names"
    if field == "locked":
        return "locked in ours only" if y else "locked in reference only"
    if field == "dtype" and sorted(_fields_of(x)) == sorted(_fields_of(y)) != []:
        return "key order"
    if field == "device" and None not in (x, y) and "None" in (x, y):
        return "device lost by reference" if x == "None" else "device lost by ours"
    return field


def _fields_of(dtype: str | None) -> list[str]:
    """Return the fields of the dtype of a structured array without nested ones."""
    return re.findall(r"\('[^']*', '[^']*'(?:, \([^)]*\))?\)", dtype or "")


def _in_keys(a: Summary, b: Summary, path: str) -> list[Difference]:
    if "keys" not in b:
        return [_classes(a, b, path)]
    x, y = a["keys"], b["keys"]
    if x == y:
        return []
    kind = "keys"
    if sorted(x) == sorted(y):
        kind = "key order"
    elif set(x) < set(y):
        kind = "keys fewer in reference"
    elif set(y) < set(x):
        kind = "keys fewer in ours"
    return [Difference(kind, path, short(x), short(y))]


def _in_values(a: Summary, b: Summary, path: str) -> list[Difference]:
    if "nontensor" not in b:
        return [_classes(a, b, path)]
    x, y = a["nontensor"], b["nontensor"]
    if x != y and (_all_are(x, y) or _all_are(y, x)):
        return [Difference("one value or a stack", path, short(x), short(y))]
    found = differences(x, y, path)
    return [d._replace(kind="non-tensor " + d.kind) for d in found]


def _all_are(values: Summary, value: Summary) -> bool:
    """Return whether (nested) lists hold one value only, at least once."""
    if values == value or values["k"] != "list" or not values["entries"]:
        return values == value
    return all(_all_are(entry, value) for entry in values["entries"])


def _fills(values: Summary, value: Summary) -> bool:
    """Return whether a list holds only one value."""
    return values["k"] == "list" and value["k"] == "plain" and _all_are(values, value)


def _in_members(a: Summary, b: Summary, path: str) -> list[Difference]:
    if "members" not in b:
        return [_classes(a, b, path)]
    x, y = a["members"], b["members"]
    if len(x) != len(y):
        return [Difference("members", path, str(len(x)), str(len(y)))]
    return [d for i, pair in enumerate(zip(x, y)) for d in differences(*pair, f"{path}<{i}>")]


def _in_entries(a: Summary, b: Summary, path: str) -> list[Difference]:
    if "keys" not in a:
        if a.get("cls") == "view" and a["entries"] != b["entries"]:
            x, y = (sorted(json.dumps(entry, sort_keys=True) for entry in side["entries"]) for side in (a, b))
            if x == y:
                return [Difference("key order", path, short(a["entries"]), short(b["entries"]))]
        pairs = enumerate(zip(a["entries"], b["entries"]))
        return [d for i, pair in pairs for d in differences(*pair, f"{path}({i})")]
    mine = dict(zip(b.get("keys", []), b["entries"]))
    items = zip(a["keys"], a["entries"])
    return [d for key, x in items if key in mine for d in differences(x, mine[key], f"{path}[{key}]")]


def in_states(a: dict[str, Summary], b: dict[str, Summary]) -> list[Difference]:
    """List the differences between variables."""
    out = []
    for name, summary in a.items():
        out += differences(summary, b[name], name) if name in b else [Difference("missing variable", name, "", "")]
    return out


def kinds_of(found: list[Difference]) -> str:
    kinds = {d.kind for d in found}
    return "+".join(sorted(kinds - MINOR or kinds))


def described(error: dict[str, Any]) -> str:
    """An exception without what differs from program to program."""
    message = error["msg"].split("\n")[0]
    message = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'..'", message)
    message = re.sub(r"\[[^\]]*\]|\([^)]*\)", "[..]", message)
    return f"{error['cls']}: {re.sub(r'-?[0-9]+', '#', message)[:70]}"


def first_difference(program: list[Step], replies: Replies) -> Found | None:
    """The first line of a program whose replies differ."""
    reference, ours, newest = replies
    if isinstance(ours, dict):
        return Found(len(program) - 1, "process", "crash of ours", ours["dead"])
    if isinstance(reference, dict):
        return None
    for i, (step, a, b) in enumerate(zip(program, reference, ours)):
        before = ours[i - 1]["state"] if i else {}
        c = newest[i] if i < len(newest) else None
        if c and a["exc"] and (a["exc"]["cls"] == "NameError" or not c["exc"]):
            comparable = _alike(step, newest[i - 1]["state"] if i else {}, before)
            kind, detail, differing = _beside_newest(step, (a, b, c)) if comparable else (AS_NEWEST, "", [])
        else:
            kind, detail, differing = _in_step(step, a, b, before if i else None)
        if kind:
            theirs = c if c and (kind.startswith(NEWEST) or kind == AS_NEWEST) else a
            states = [theirs["state"], b["state"]]
            if rules := _broken_by_ours(before, *states):
                kind, detail, differing = OURS_BREAKS, rules[0].kind, rules
            elif kind != AS_NEWEST:
                earlier = reference if theirs is a else newest
                differing = _beside_broken(differing, earlier[i - 1]["state"] if i else {}, theirs["state"])
                differing = [_beside_operands(d, step, before) for d in differing]
                operands = [summary for name, summary in before.items() if step.uses(name)]
                if kind.endswith("ours raises") and (doubt := find_doubt(b["exc"], step.code(), operands)):
                    differing.append(Difference("unfounded", step.result or "line", "runs", doubt))
                if _of_values(kind):
                    mine = [d for d in differing if d.variable() == step.result]
                    detail = kinds_of(mine or differing)
            return Found(i, step.operation(), kind, detail, a["exc"], b["exc"], differing[:40], c and c["exc"])
    return None


def _of_values(kind: str) -> bool:
    return kind.removeprefix(NEWEST + ": ") in ("result", "state")


def _beside_operands(difference: Difference, step: Step, before: dict[str, Summary]) -> Difference:
    """A leaf that requires grad on the reference only: its own kind where no operand of that key requires grad."""
    if difference.kind != "requires_grad" or difference.reference != "true":
        return difference
    key = re.findall(r"\[([^\]]*)\]", difference.path)[-1:]
    operands = [leaf for name, summary in before.items() if step.uses(name) for leaf in _with_grad(summary, None)]
    lost = any(not key or name in (None, *key) for name in operands)
    return difference if lost else difference._replace(kind="requires_grad of nothing")


def _with_grad(summary: Summary, key: str | None) -> list[str | None]:
    """The keys of the leaves that require grad."""
    if summary.get("rg"):
        return [key]
    keys = summary.get("keys") or [key] * len(summary.get("entries", []))
    parts = [*zip(keys, summary.get("entries", [])), *[(key, part) for part in summary.get("members", [])]]
    return [found for name, part in parts for found in _with_grad(part, name)]


def _broken(state: dict[str, Summary]) -> dict[str, str]:
    """The rule that is broken, by the place where it is."""
    return {path: rule for name, summary in state.items() for path, rule in broken_in(summary, name)}


def _broken_by_ours(
    before: dict[str, Summary], theirs: dict[str, Summary], ours: dict[str, Summary]
) -> list[Difference]:
    """List the places that a line has broken on our side only. A size of -1 stands for unequal members on all sides."""
    known = {**_broken(before), **_broken(theirs)}
    new = {path: rule for path, rule in _broken(ours).items() if path not in known and "-1" not in rule}
    return [Difference(rule.split(" ")[0], path, "whole", rule) for path, rule in new.items()]


def _beside_broken(found: list[Difference], before: dict[str, Summary], after: dict[str, Summary]) -> list[Difference]:
    """Differences with the rule that the reference breaks at their place; where ours raises, what a line has broken."""
    broken = _broken(after)
    if not found:
        known = _broken(before)
        return [Difference("whole", path, rule, "raises") for path, rule in broken.items() if path not in known]
    out = []
    for difference in found:
        rules = [rule for path, rule in broken.items() if difference.path.startswith(path)]
        out.append(difference._replace(breaks="; ".join(rules)))
    return out


def _alike(step: Step, newest: dict[str, Summary], ours: dict[str, Summary]) -> bool:
    """Return whether what a line uses is the same on both sides before it."""
    used = [name for name in {*newest, *ours} if step.uses(name)]
    return all(name in newest and name in ours and not differences(newest[name], ours[name]) for name in used)


def _beside_newest(step: Step, replies: tuple[dict[str, Any], ...]) -> tuple[str, str, list[Difference]]:
    """How ours differs from the newest level, in a line that level 0.14.3 refuses."""
    a, b, c = replies
    ours, newest = b["exc"], c["exc"]
    if ours and not newest:
        return f"{NEWEST} runs, ours raises", described(ours), []
    if newest and not ours:
        return f"{NEWEST} raises", described(newest), []
    mine = [name for name in c["state"] if name == step.result or step.uses(name)]
    if newest:  # what a failing call leaves is nothing to follow
        left = any(d.variable() in mine for d in in_states(c["state"], b["state"]))
        return (AS_NEWEST, "", []) if left else ("", "", [])
    if found := [d for d in in_states(c["state"], b["state"]) if d.variable() in mine]:
        return f"{NEWEST}: {_place(step, found)}", kinds_of(found), found
    return (AS_NEWEST, "", []) if in_states(a["state"], b["state"]) else ("", "", [])


def _place(step: Step, found: list[Difference]) -> str:
    """Return whether the result of a line differs, or another variable."""
    return "result" if any(d.variable() == step.result for d in found) else "state"


def _in_step(
    step: Step, a: dict[str, Any], b: dict[str, Any], before: dict[str, Summary] | None
) -> tuple[str, str, list[Difference]]:
    """How the replies to one line differ, if they do; `before` is what our variables held."""
    theirs, ours = a["exc"], b["exc"]
    changed = []
    if ours and before is not None and not (isinstance(step, Line) and step.is_several()):
        changed = in_states(before, b["state"])
    if ours and ours["cls"] == "Hang":
        return "hang of ours", "", []
    if ours and not theirs:
        return "ours raises and has changed something" if changed else "ours raises", described(ours), []
    if theirs and not ours:
        return "reference raises", described(theirs), []
    if changed:
        return "failing call of ours changed something", kinds_of(changed), []
    found = in_states(a["state"], b["state"])
    if found and theirs:
        return "reference changed something when both raise", kinds_of(found), found
    if found:
        mine = [d for d in found if d.variable() == step.result]
        return _place(step, found), kinds_of(mine or found), found
    if theirs and ours and not set(theirs["mro"]) & set(ours["mro"]):
        return "exception class", f"{theirs['mro'][0]} | {ours['mro'][0]}", []
    return "", "", []


def receiver(program: list[Step], found: Found, replies: Replies) -> str:
    """Return the kind of container that the operation was called on."""
    step = program[found.line]
    if isinstance(step, Construction):
        return kind_of_spec(step.spec)
    if not isinstance(step, Line):
        name = re.match(r"\w+\((\w+)", step.code())
        source = next((p for p in program if name and p.result == name[1]), None)
        if not isinstance(source, Line):
            return ""
        step = source
    if (variable := step.receiver()) is None:
        return "-"
    i = program.index(step)
    sides = [side for side in (replies.newest, replies.reference) if isinstance(side, list) and 0 < i <= len(side)]
    state = {name: summary for side in sides for name, summary in side[i - 1]["state"].items()}
    summary = state.get(re.match(r"\w+", variable)[0])
    for part in re.findall(r"\[(\d+)\]", variable):
        if summary and summary["k"] == "list" and int(part) < len(summary["entries"]):
            summary = summary["entries"][int(part)]
    return kind_of(summary) if summary else "?"


def kind_of_spec(spec: dict[str, Any]) -> str:
    kind = {"td": "TensorDict", "lazy": "lazy", "tc": "tensorclass"}.get(spec["k"], "?")
    return kind + "".join("+" + call.split("(")[0].strip("#_") for call in spec.get("post", []))


def kind_of(summary: Summary) -> str:
    """The kind of container, and the content in it that often causes differences."""
    if summary["k"] != "td":
        return summary["k"]
    kind = "tensorclass" if summary["cls"].startswith("TC") else summary["cls"]
    if kind == "LazyStackedTensorDict":
        shapes = [_shape_of(member) for member in summary["members"]]
        kind = "lazy" if all(shape == shapes[0] for shape in shapes) else "lazy-het"
    features = _features(summary, top=True) | {flag.replace("is_", "") for flag in summary.get("flags", [])}
    return kind + "".join("+" + feature for feature in sorted(features))


def _features(summary: Summary, top: bool) -> set[str]:
    found = set()
    if summary["k"] == "nested":
        found.add("ragged")
    if summary["k"] == "td":
        if "nontensor" in summary:
            found.add("value")
        elif not top and summary["cls"] == "LazyStackedTensorDict":
            found.add("nested lazy")
        elif not top and summary["cls"].startswith("TC"):
            found.add("nested tensorclass")
    if summary.get("cls") == "UnbatchedTensor":
        found.add("unbatched")
    for part in summary.get("entries", []) + summary.get("members", []):
        found |= _features(part, top=False)
    return found


def _shape_of(summary: Summary) -> object:
    if summary["k"] != "td":
        return [summary.get("shape"), summary.get("dtype")]
    if "nontensor" in summary:
        return "v"
    parts = summary.get("entries", []) + summary.get("members", [])
    return [summary["batch_size"], summary.get("keys"), [_shape_of(part) for part in parts]]
