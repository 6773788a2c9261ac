"""Checks that the package keeps to `house.toml`: the order of its rooms, the budgets of each, and one class a name.

python tests/house/check.py            # prints what is against the plan, and fails when anything is
python tests/house/check.py --figures  # prints the figures of now, as JSON: what the budgets can be lowered to

A room is a folder directly under `src/tensordict`, or another package under `src`; modules beside the folders are the
room `public`. Lines of code are those with more than comments and docstrings. A hook is a private name of
`TensorCollection` that classes of containers define again, and a site is one of these definitions. A lookup is a place
that asks `registry` for a class by its name, and a maker is a constructor that `core/makers.py` has for all rooms.

Code that compiled functions run asks with `in`, `get`, `getattr` or `hasattr` whether there is an entry or attribute:
Dynamo guards these. It sets no guard where an error is caught, in `__dict__`, or in what a `Mapping` inherits, so each
of these lines says in a comment how it is `guarded:`, or why it is `not compiled:`.

Only `core/torch_internals.py` names what is private in torch: `torch._foreach_add`, `from torch.utils import _pytree`,
`tensor._base`. A subclass of a class of torch may use what its base has for it, by `self`, `super()` or the class.

The calls of common flows (`flows.py`) are printed, and limited in the table `flows`.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import pkgutil
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = "tensordict"
PUBLIC = "public"
# How far a room may exceed its figure, so that nobody packs lines to stay below it.
SLACK = 1.03
# The rooms whose code compiled functions run, and the errors that stand there for what is absent.
COMPILED = ("core", "ops", "containers", "nn")
MAKERS = Path(PACKAGE, "core", "makers.py")
_ABSENT = {"KeyError", "AttributeError", "LookupError"}
_EXPLAINED = ("# guarded: ", "# not compiled: ")
# The module that names what is private in torch, and private members of objects of torch that others must not use.
INTERNALS = Path(PACKAGE, "core", "torch_internals.py")
_MEMBERS = {
    "_base", "_cdata", "_is_view", "_make_subclass", "_make_wrapper_subclass", "_nested_tensor_size", "_new_shared",
    "_new_shared_fd_cpu", "_ragged_idx", "_share_fd_cpu_", "_untyped_storage", "_version",
}  # fmt: skip
# Private members of torch's modules that subclasses may extend.
_FOR_SUBCLASSES = {"_apply", "_load_from_state_dict", "_save_to_state_dict"}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """How many lines of a program have code on them."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            doc = node.body[0]
            found.difference_update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return len(found)


def imported(node: ast.AST) -> Iterator[str]:
    """The dotted names that a program imports when it runs, wherever in it; what only type checkers see is left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imported(other)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imported(child)


class House:
    """The files of the packages under a folder, and the rooms that they are in."""

    def __init__(self, src: Path) -> None:
        self.files = {path.relative_to(src): path.read_text() for path in sorted(src.rglob("*.py"))}
        self.entries = {path.parts[1].removesuffix(".py") for path in self.files if path.parts[0] == PACKAGE}

    def room(self, path: Path) -> str:
        """The room of a file, given by its path under `src`."""
        if path.parts[0] != PACKAGE:
            return path.parts[0]
        return path.parts[1] if len(path.parts) > 2 else PUBLIC

    def room_of_name(self, name: str) -> str | None:
        """Return the room of a module; `None` if it belongs to another package."""
        first, _, rest = name.partition(".")
        if first != PACKAGE:
            return first if any(path.parts[0] == first for path in self.files) else None
        entry = rest.partition(".")[0]
        return entry if any(len(path.parts) > 2 and path.parts[:2] == (first, entry) for path in self.files) else PUBLIC

    def lines(self) -> dict[str, int]:
        """The lines of code of each room."""
        found: Counter[str] = Counter()
        for path, text in self.files.items():
            found[self.room(path)] += code_lines(text)
        return dict(found)

    def lookups(self) -> int:
        """How many places look up a class of containers by its name."""
        return sum(
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("registry.lookup", "lookup")
            for text in self.files.values()
            for node in ast.walk(ast.parse(text))
        )

    def makers(self) -> int:
        """How many constructors of containers the rooms below these may call."""
        text = self.files.get(MAKERS, "")
        return sum(isinstance(node, ast.AnnAssign) for node in ast.parse(text).body)

    def circle(self) -> int:
        """How many files the largest circle of imports has; imports for type checkers count."""
        files = {
            ".".join(path.with_suffix("").parts).removesuffix(".__init__"): text for path, text in self.files.items()
        }
        below: dict[str, set[str]] = {}
        for module, text in files.items():
            names: set[str] = set()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    names.update(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        name = f"{node.module}.{alias.name}"
                        names.add(name if name in files else node.module)
            below[module] = names & files.keys()
        reached: dict[str, set[str]] = {}
        for module, names in below.items():
            reached[module], waiting = set(), [*names]
            while waiting:
                name = waiting.pop()
                if name not in reached[module]:
                    reached[module].add(name)
                    waiting += below[name]
        return max((sum(module in reached[other] for other in names) for module, names in reached.items()), default=0)

    def shared_names(self) -> Iterator[str]:
        """Names that several classes have."""
        where: dict[str, list[str]] = {}
        for path, text in self.files.items():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    where.setdefault(node.name, []).append(str(path))
        for name, paths in where.items():
            if len(paths) > 1:
                yield f"{len(paths)} classes are called {name}, in {', '.join(paths)}"

    def wrong_imports(self, order: list[str]) -> Iterator[str]:
        """List imports from a room that is not below the importing room."""
        for path, text in self.files.items():
            own = self.room(path)
            # The modules at the root, and `__init__.py` among them, show what is in all rooms.
            if own == PUBLIC or own not in order:
                continue
            allowed = order[: order.index(own) + 1]
            for name in imported(ast.parse(text)):
                room = self.room_of_name(name)
                if room is not None and room not in allowed:
                    yield f"{path} imports {name}: {own}/ must not import {room}/ (see house.toml)"

    def unguarded_reads(self) -> Iterator[str]:
        """List reads that may miss and that Dynamo does not guard, in rooms whose code is compiled."""
        for path, text in self.files.items():
            if self.room(path) not in COMPILED:
                continue
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                form = unguarded_form(node)
                if form and not any(word in lines[node.lineno - 1] for word in _EXPLAINED):
                    yield (
                        f"{path}:{node.lineno} {form}, which compiled code does not guard: ask with `in`, `get`, "
                        f"`getattr` or `hasattr`, or say {' or '.join(map(repr, _EXPLAINED))} and how, on this line"
                    )

    def private_names(self) -> Iterator[str]:
        """Names that are private in torch, outside of the one module that may use them."""
        for path, text in self.files.items():
            if path != INTERNALS:
                for line, name in private_torch_names(ast.parse(text)):
                    yield f"{path}:{line} uses {name}, which is private in torch: give it a name in {INTERNALS}"


def private_torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each private name of torch; skip code for type checkers only."""
    modules = {"torch"}
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    name = f"{prefix}{alias.name}"
                    if name.startswith("torch."):
                        modules.add(alias.asname or alias.name)
                        if _is_private(name):
                            yield node.lineno, name
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                name = ast.unparse(node)
                if node.attr in _MEMBERS or (name.partition(".")[0] in modules and node.attr not in _FOR_SUBCLASSES):
                    yield node.lineno, name
                    continue
            waiting.append(node)


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def unguarded_form(node: ast.AST) -> str:
    """Return the form of a read that may miss and that Dynamo does not guard; "" for other code."""
    if isinstance(node, ast.ExceptHandler) and node.type is not None and _named(node.type) & _ABSENT:
        return "catches a KeyError or an AttributeError"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "suppress" and set().union(*map(_named, node.args)) & _ABSENT:
            return "suppresses a KeyError or an AttributeError"
        if node.func.attr == "get" and ast.unparse(node.func.value) == "self.__dict__":
            return "reads from __dict__"
    if isinstance(node, ast.Compare) and any(ast.unparse(other) == "self.__dict__" for other in node.comparators):
        return "looks into __dict__"
    if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base.value) for base in node.bases if isinstance(base, ast.Subscript)}
        defined = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        if bases & {"Mapping", "MutableMapping"} and not {"get", "__contains__"} <= defined:
            return "inherits `get` or `in` from Mapping"
    return ""


def _named(node: ast.AST) -> set[str]:
    """The names in an expression, without the modules that they are in."""
    found = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
    return found | {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}


def redefined() -> dict[str, int]:
    """How much of `TensorCollection` the containers define again."""
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    root: Any = package.TensorCollection
    classes: list[type] = []
    for cls in (waiting := [root]):
        new = [sub for sub in cls.__subclasses__() if sub not in waiting and sub.__module__.startswith(f"{PACKAGE}.")]
        waiting += dict.fromkeys(new)
        classes += dict.fromkeys(new)
    sites: Counter[str] = Counter()
    for cls in classes:
        for name, value in vars(cls).items():
            if name.startswith("__") or not hasattr(root, name):
                continue
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                sites[name] += 1
    hooks = [count for name, count in sites.items() if name.startswith("_")]
    methods = [count for name, count in sites.items() if not name.startswith("_")]
    return {
        "hooks": len(hooks),
        "hook_sites": sum(hooks),
        "methods_again": len(methods),
        "method_sites": sum(methods),
    }


def figures(house: House) -> dict[str, Any]:
    """Compute the figures that `house.toml` limits."""
    flows = {name: count.calls for name, count in importlib.import_module("flows").count_flows().items()}
    return {
        "entries": len(house.entries),
        "lookups": house.lookups(),
        "makers": house.makers(),
        "circle": house.circle(),
        **redefined(),
        "rooms": house.lines(),
        "flows": flows,
    }


def problems(house: House, plan: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each violation of the plan."""
    order = list(plan["rooms"])
    for name, limit in plan.items():
        if not isinstance(limit, dict) and found[name] > limit:
            yield f"{name}: {found[name]}, and house.toml allows {limit}"
    for name, calls in found["flows"].items():
        if calls > plan["flows"].get(name, 0):
            yield f"{name}: {calls} calls, and house.toml allows {plan['flows'].get(name, 0)}"
    for room, lines in found["rooms"].items():
        if room not in order:
            yield f"{room} is no room of house.toml"
        elif lines > plan["rooms"][room] * SLACK:
            yield f"{room}/ has {lines} lines of code, and house.toml allows {plan['rooms'][room]} and 3 % more"
    yield from house.wrong_imports(order)
    yield from house.shared_names()
    yield from house.unguarded_reads()
    yield from house.private_names()


def main() -> int:
    house = House(ROOT / "src")
    found = figures(house)
    if "--figures" in sys.argv:
        print(json.dumps(found))
        return 0
    plan = tomllib.loads((ROOT / "house.toml").read_text())
    print("\n".join(f"{name}: {calls} calls" for name, calls in found["flows"].items()))
    wrong = list(problems(house, plan, found))
    print("\n".join(wrong) or "the package keeps to house.toml")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
