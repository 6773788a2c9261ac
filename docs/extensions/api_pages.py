"""The API reference: every public name under the path that programs import it from, with a link to its source."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from typing import Any

import public_names
from docstrings import spaced
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import tensordict


class Names(SphinxDirective):
    """`.. names:: MODULE`: a table of the names in the content, then what each of them is, from their docstrings."""

    has_content = True
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        paths = [f"{self.arguments[0]}.{name}" for name in self.content]
        table = [".. list-table::", "   :widths: auto", "   :class: names", ""]
        table += [line for path in paths for line in (f"   * - :py:obj:`~{path}`", f"     - {summary(path)}")]
        return parsed(self, [*table, "", *(line for path in paths for line in described(path))])


class Family(SphinxDirective):
    """`.. family:: PATH`: the operations of a family, from their docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines = []
        for name in public_names.operations()[self.arguments[0]]:
            kind = "autoproperty" if isinstance(member("TensorDictBase", name), property) else "automethod"
            lines += [f".. {kind}:: tensordict.TensorDictBase.{name}", ""]
        return parsed(self, lines)


class About(SphinxDirective):
    """`.. about:: PATH`: what the docstring of the module of a family says."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0].rpartition(".")[0])
        return parsed(self, inspect.getdoc(module).splitlines())


class AllOperations(SphinxDirective):
    """`.. all-operations::`: a link to each operation."""

    def run(self) -> list[nodes.Node]:
        names = sorted(name for names in public_names.operations().values() for name in names)
        return parsed(self, [f":py:obj:`{name} <tensordict.TensorDictBase.{name}>`" for name in names])


def parsed(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    """The nodes of lines of reStructuredText."""
    found = nodes.Element()
    source = directive.get_source_info()[0]
    directive.state.nested_parse(StringList(lines, source), directive.content_offset, found)
    return found.children


def summary(path: str) -> str:
    """The first paragraph of the docstring of what lies at a path."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if (home := public_names.home(path)) != path:
        return f"The same as :py:obj:`{home}`."
    written = isinstance(found, type) or inspect.isroutine(found)
    return spaced(" ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())) if written else ""


def described(path: str) -> list[str]:
    """The directive that documents what lies at a path."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    home = public_names.home(path)
    data = [f".. py:data:: {name}", f"   :module: {module}", ""]
    if home != path:
        return [*data, f"   The same as :py:obj:`{home}`.", ""]
    if isinstance(found, (dict, logging.Logger)):
        return [*data, f"   A {type(found).__name__}.", ""]
    if isinstance(found, type) and found.__module__.split(".")[0] != "tensordict":
        return [*data, f"   The class ``{found.__module__}.{found.__qualname__}``.", ""]
    if isinstance(found, type):
        members = public_names.members_of(found)
        listed = [f"   :members: {', '.join(members)}", "   :undoc-members:"] if members else []
        return [f".. autoclass:: {path}", *listed, ""]
    return [f".. {'autofunction' if inspect.isroutine(found) else 'autodata'}:: {path}", ""]


def member(cls: str, name: str) -> Any:
    return inspect.getattr_static(getattr(tensordict, cls), name)


# --- references -------------------------------------------------------------------------------------------------------


def resolve(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.Element) -> nodes.Node | None:
    """What a reference means whose path is another one than that under which the name is documented.

    Inherited members are found in the class that they are documented with, and other paths of a name lead to it. Names
    of other libraries are shown without a link, if they exist. Names in signatures, which the type checker has
    checked, need not be documented.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    candidates = [target]
    if scope := node.get("py:module"):
        candidates = [f"{scope}.{target}", target]
        if node.get("py:class"):
            candidates = [f"{scope}.{node['py:class']}.{target}", f"tensordict.TensorDictBase.{target}", *candidates]
    # Functions such as `from_arrow` are methods of containers, and their docstrings name others by the name alone.
    if node["reftype"] == "meth":
        candidates.append(f"tensordict.TensorDictBase.{target}")
    candidates += [f"{module}.{target}" for module in public_names.MODULES]
    for candidate in candidates:
        if (home := _documented(env, candidate)) is not None:
            documented = env.domains["py"].objects[home]
            builder = app.builder
            uri = builder.get_relative_uri(node.get("refdoc", env.docname), documented.docname)
            link = nodes.reference("", "", internal=True, refuri=f"{uri}#{documented.node_id}", reftitle=home)
            link += shown
            return link
    in_signature = "refexplicit" not in node
    return shown if in_signature or _exists_elsewhere(target) else None


def _documented(env: BuildEnvironment, path: str) -> str | None:
    """The path under which what can be imported by `path` is documented."""
    objects = env.domains["py"].objects
    if path in objects:
        return path
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        owner = None
        for part in parts[split:]:
            owner, found = found, getattr(found, part, None)
            if found is None:
                return None
        if isinstance(owner, type):
            names = [f"{home}.{parts[-1]}" for cls in owner.__mro__ for home in _homes(cls)]
        else:
            names = _homes(found)
        return next((name for name in names if name in objects), None)
    return None


def _homes(found: Any) -> list[str]:
    """Where a class or a function is documented."""
    name = getattr(found, "__name__", None)
    modules = (module for module in public_names.MODULES if name in public_names.names_of(module))
    return [f"{module}.{name}" for module in modules if getattr(importlib.import_module(module), name) is found]


def _exists_elsewhere(path: str) -> bool:
    """Whether a path is that of a name of Python or of another library."""
    parts = path.split(".")
    if len(parts) == 1:
        parts = ["builtins", *parts]
    if parts[0] == "tensordict":
        return False
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            found = getattr(found, part, None)
        return found is not None
    return False


# --- source links -----------------------------------------------------------------------------------------------------


@functools.cache
def written() -> dict[str, dict[str, str]]:
    """Of each module the names of what is documented of it, each with the name that it has in the source there."""
    families = {name: path.rpartition(".")[2] for path, names in public_names.operations().items() for name in names}
    found: dict[str, dict[str, str]] = {}
    for path in public_names.expected():
        module = next(module for module in public_names.MODULES[::-1] if path.startswith(f"{module}."))
        attribute = path.removeprefix(f"{module}.")
        definition: Any = importlib.import_module(module)
        for part in attribute.split("."):
            static = isinstance(definition, type)
            definition = inspect.getattr_static(definition, part) if static else getattr(definition, part)
        definition = _definition(definition)
        if definition is not None:
            # Operations say that they are of `TensorCollection`; some are functions of the package, too.
            owner, _, name = attribute.rpartition(".")
            is_operation = owner == "TensorDictBase" or definition.__qualname__ == f"TensorCollection.{name}"
            family = families[name] if is_operation else None
            own = f"{family}.{definition.__name__}" if family else definition.__qualname__
            found.setdefault(definition.__module__, {})[attribute] = own
    return found


def source_module(app: Sphinx, module: str, attribute: str) -> str | None:
    """The module where what is documented as `module.attribute` was written."""
    return next((name for name, attributes in written().items() if attribute in attributes), None)


def source(app: Sphinx, module: str) -> tuple[str, dict[str, tuple[str, int, int]]]:
    """The text of a module, and the lines of its definitions by the names that they are documented under."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.find_tags()
    documented = written().get(module, {}).items()
    return analyzer.code, {name: analyzer.tags[own] for name, own in documented if own in analyzer.tags}


def back_to_documentation(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Have pages of sources link to what they are the source of: Sphinx takes all of a module to be of one path."""
    if not page.startswith("_modules/") or "body" not in context:
        return
    objects = app.env.domains["py"].objects

    def corrected(link: re.Match[str]) -> str:
        module = next(module for module in public_names.MODULES[::-1] if link[2].startswith(f"{module}."))
        attribute = link[2].removeprefix(f"{module}.")
        paths = [path for module in public_names.MODULES if (path := f"{module}.{attribute}") in objects]
        there = [path for path in paths if link[1].endswith(f"{objects[path].docname}.html")]
        return f'class="viewcode-back" href="{link[1]}#{there[0]}"'

    context["body"] = re.sub(r'class="viewcode-back" href="([^"#]*)#([^"]*)"', corrected, context["body"])


def _definition(found: Any) -> Any:
    """The class or function that has a place in the source."""
    found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    found = inspect.unwrap(found) if callable(found) else found
    if getattr(found, "__qualname__", None) and getattr(found, "__module__", "").split(".")[0] == "tensordict":
        return found
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("names", Names)
    app.add_directive("family", Family)
    app.add_directive("about", About)
    app.add_directive("all-operations", AllOperations)
    app.connect("missing-reference", resolve)
    app.connect("viewcode-follow-imported", source_module)
    app.connect("viewcode-find-source", source)
    app.connect("html-page-context", back_to_documentation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
