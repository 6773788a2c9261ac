"""Makes the search box find the tasks that `guides/index.md` lists: each becomes an index entry of its section.

Sphinx ranks an index entry that equals the query above words in the text of a page. It forgets the index entries
of pages that it does not write, so the pages of tasks are written in every build.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

_PAGE = "guides/index"
_TASK = re.compile(r"^- \[([^\]]+)\]\(([^)#]+)\.(?:md|rst)(?:#([^)]+))?\)", re.MULTILINE)


@functools.cache
def read_tasks(source: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the tasks of each page, as pairs of a phrase and an anchor (empty: the top of the page).

    Args:
        source: the folder of the pages, `docs/`.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for phrase, page, anchor in _TASK.findall((source / f"{_PAGE}.md").read_text()):
        name = posixpath.normpath(posixpath.join(posixpath.dirname(_PAGE), page))
        found.setdefault(name, []).append((phrase.lower(), anchor))
    return found


def add_entries(app: Sphinx, doctree: nodes.document) -> None:
    """Add an index entry to the section of each task of the page that was read."""
    for phrase, anchor in read_tasks(Path(app.srcdir)).get(app.env.docname, []):
        sections = list(doctree.findall(nodes.section))
        matching = [part for part in sections if not anchor or anchor in (*part["ids"], part.get("slug"))]
        if not matching:
            raise ValueError(f"{_PAGE}.md links to the section {anchor!r}, which {app.env.docname} does not have")
        section = matching[0]
        section.insert(0, addnodes.index(entries=[("single", phrase, section["ids"][0], "main", None)]))


def find_changed_pages(app: Sphinx, env: BuildEnvironment, *changes: set[str]) -> list[str]:
    """Return the pages whose tasks have changed since the last build, for Sphinx to read them again."""
    tasks = read_tasks(Path(app.srcdir))
    before = getattr(env, "tensordict_tasks", {})
    env.tensordict_tasks = tasks
    return [page for page in tasks if tasks[page] != before.get(page)]


def list_pages(app: Sphinx, env: BuildEnvironment) -> Iterable[str]:
    """Return the pages of tasks, for Sphinx to write them again."""
    return read_tasks(Path(app.srcdir)).keys()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", add_entries)
    app.connect("env-get-outdated", find_changed_pages)
    app.connect("env-updated", list_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
