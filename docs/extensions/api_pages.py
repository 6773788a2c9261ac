"""Directives that write the API reference: every public name under its import path, with a link to its source."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import public_names
from docstrings import add_spaces
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import tensordict

_FAMILY = re.compile(r"^\.\. family:: (\S+)", re.MULTILINE)


class Names(SphinxDirective):
    """`.. names:: MODULE`: a table of the names in the content, then the description of each, from their docstrings."""

    has_content = True
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        paths = [f"{self.arguments[0]}.{name}" for name in self.content]
        table = tabulate((f":py:obj:`~{path}`", summary(path)) for path in paths) if len(paths) > 1 else []
        return parse_rst(self, [*table, "", *(line for path in paths for line in describe(path))])


class Methods(SphinxDirective):
    """`.. methods:: PAGE ...`: for each page of operations a table of its methods, with the first line of each."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines = []
        for page in self.arguments[0].split():
            text = Path(self.env.srcdir, "operations", f"{page}.rst").read_text()
            names = [name for path in _FAMILY.findall(text) for name in public_names.operations()[path]]
            lines += [f".. rubric:: :doc:`../operations/{page}`", ""]
            docs = ((name, inspect.getdoc(getattr(tensordict.TensorDictBase, name))) for name in names)
            lines += tabulate(
                (f":py:obj:`{name} <tensordict.TensorDictBase.{name}>`", first_paragraph(doc)) for name, doc in docs
            )
        return parse_rst(self, lines)


class Family(SphinxDirective):
    """`.. family:: PATH`: describes the operations of a family, from their docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines = []
        for name in public_names.operations()[self.arguments[0]]:
            kind = "autoproperty" if isinstance(member("TensorDictBase", name), property) else "automethod"
            lines += [f".. {kind}:: tensordict.TensorDictBase.{name}", ""]
        return parse_rst(self, lines)


class About(SphinxDirective):
    """`.. about:: PATH`: shows the docstring of the module of a family."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0].rpartition(".")[0])
        return parse_rst(self, inspect.getdoc(module).splitlines())


class AllOperations(SphinxDirective):
    """`.. all-operations::`: links to every operation."""

    def run(self) -> list[nodes.Node]:
        names = sorted(name for names in public_names.operations().values() for name in names)
        return parse_rst(self, [f":py:obj:`{name} <tensordict.TensorDictBase.{name}>`" for name in names])


def parse_rst(directive: SphinxDirective, lines: list[str]) -> list[nodes.Node]:
    """Parse lines of reStructuredText into nodes."""
    found = nodes.Element()
    source = directive.get_source_info()[0]
    directive.state.nested_parse(StringList(lines, source), directive.content_offset, found)
    return found.children


def tabulate(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the lines of a table of names and what they are."""
    table = [".. list-table::", "   :widths: auto", "   :class: names", ""]
    return [*table, *(line for name, text in rows for line in (f"   * - {name}", f"     - {text}")), ""]


def first_paragraph(doc: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return add_spaces(" ".join((doc or "").partition("\n\n")[0].split()))


def summary(path: str) -> str:
    """Return the first paragraph of the docstring of the object at a path."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if (home := public_names.home(path)) != path:
        return f"The same as :py:obj:`{home}`."
    written = isinstance(found, type) or inspect.isroutine(found)
    return first_paragraph(inspect.getdoc(found)) if written else ""


def describe(path: str) -> list[str]:
    """Return the directive that documents the object at a path."""
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
    """Resolve a reference whose path differs from the path under which the name is documented.

    Inherited members lead to the class that documents them, and other import paths of a name lead to its page. An
    existing name of another library is shown without a link. Names in signatures need not be documented, because the
    type checker has checked them.
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
    if node["reftype"] in ("meth", "attr"):
        candidates.append(f"tensordict.TensorDictBase.{target}")
    candidates += [f"{module}.{target}" for module in public_names.MODULES]
    for candidate in candidates:
        if (home := _find_documented(env, candidate)) is not None:
            documented = env.domains["py"].objects[home]
            builder = app.builder
            uri = builder.get_relative_uri(node.get("refdoc", env.docname), documented.docname)
            link = nodes.reference("", "", internal=True, refuri=f"{uri}#{documented.node_id}", reftitle=home)
            link += shown
            return link
    in_signature = "refexplicit" not in node
    return shown if in_signature or _exists_elsewhere(target) else None


def _find_documented(env: BuildEnvironment, path: str) -> str | None:
    """Return the path under which the object at `path` is documented, or `None`."""
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
    """Return the paths under which a class or a function is documented."""
    name = getattr(found, "__name__", None)
    modules = (module for module in public_names.MODULES if name in public_names.names_of(module))
    return [f"{module}.{name}" for module in modules if getattr(importlib.import_module(module), name) is found]


def _exists_elsewhere(path: str) -> bool:
    """Tell whether a path names an object of Python or of another library."""
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
def source_names() -> dict[str, dict[str, str]]:
    """Return for each module the documented names, each with its name in the source of that module."""
    families = {name: path.rpartition(".")[2] for path, names in public_names.operations().items() for name in names}
    found: dict[str, dict[str, str]] = {}
    for path in public_names.iter_paths():
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
    """Return the module whose source defines the name documented as `module.attribute`."""
    return next((name for name, attributes in source_names().items() if attribute in attributes), None)


def source(app: Sphinx, module: str) -> tuple[str, dict[str, tuple[str, int, int]]]:
    """Return the text of a module and the lines of its definitions, by documented name."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.find_tags()
    documented = source_names().get(module, {}).items()
    return analyzer.code, {name: analyzer.tags[own] for name, own in documented if own in analyzer.tags}


def back_to_documentation(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Correct the links from source pages to the documentation: Sphinx assumes one path for a whole module."""
    if not page.startswith("_modules/") or "body" not in context:
        return
    objects = app.env.domains["py"].objects

    def correct(link: re.Match[str]) -> str:
        module = next(module for module in public_names.MODULES[::-1] if link[2].startswith(f"{module}."))
        attribute = link[2].removeprefix(f"{module}.")
        paths = [path for module in public_names.MODULES if (path := f"{module}.{attribute}") in objects]
        there = [path for path in paths if link[1].endswith(f"{objects[path].docname}.html")]
        return f'class="viewcode-back" href="{link[1]}#{there[0]}"'

    context["body"] = re.sub(r'class="viewcode-back" href="([^"#]*)#([^"]*)"', correct, context["body"])


def _definition(found: Any) -> Any:
    """Return the underlying class or function, which has a place in the source."""
    found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    found = inspect.unwrap(found) if callable(found) else found
    if getattr(found, "__qualname__", None) and getattr(found, "__module__", "").split(".")[0] == "tensordict":
        return found
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("names", Names)
    app.add_directive("methods", Methods)
    app.add_directive("family", Family)
    app.add_directive("about", About)
    app.add_directive("all-operations", AllOperations)
    app.connect("missing-reference", resolve)
    app.connect("viewcode-follow-imported", source_module)
    app.connect("viewcode-find-source", source)
    app.connect("html-page-context", back_to_documentation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
