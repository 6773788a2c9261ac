"""Runs every Python block of the Markdown pages and every example in the docstrings of the package."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensordict

# Torch says of its nested tensors, to whichever example makes the first, that they are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT / "docs", ROOT / "docs" / "guides", ROOT / "docs" / "design")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for folder in FOLDERS for page in sorted(folder.glob("*.md"))),
]
# It needs a server: tests/io/test_redis.py runs it.
PAGES.remove(ROOT / "docs" / "redis.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples may write relative paths."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order and share their names, as a reader would type them."""
    text = page.read_text()
    if page.name == "importing.md":
        shutil.copytree(ROOT / "tests" / "data" / "foreign", Path(), dirs_exist_ok=True)
    # A module under its own name, because the decorators of dataclasses look it up, and no module of a package.
    module = types.ModuleType(f"{page.stem.lower()}_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = vars(module)
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        if block[1].startswith(">>> "):
            session = doctest.DocTestParser().get_doctest(block[1], names, page.name, str(page), line)
            run_doctest(session)
            names.update(session.globs)
        else:
            # The blank lines in front make tracebacks point at the line in the page.
            exec(compile("\n" * line + block[1], str(page), "exec", dont_inherit=True), names)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_guide_for_contributors_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 120


def test_differences_fit_a_phone_and_begin_with_the_silent_ones() -> None:
    """Lists, not wide tables; each silent difference has one line of consequence."""
    page = (ROOT / "docs" / "differences.md").read_text()
    assert not re.search(r"^\|", page, re.MULTILINE)
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert parts[0].startswith("Silent differences\n")
    items = re.split(r"^- ", parts[0], flags=re.MULTILINE)[1:]
    assert [item for item in items if item.count("*Consequence:*") != 1] == []


def test_every_page_is_reachable_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    indices = {"index.md", "changelog.md"}
    pages = (page.relative_to(ROOT).as_posix() for folder in FOLDERS for page in folder.glob("*.md"))
    assert [page for page in pages if Path(page).name not in indices and f"]({page})" not in readme] == []


def docstring_examples() -> Iterator[doctest.DocTest]:
    """Yield the examples of every module, each to be run without the names of its module at hand."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = pkgutil.walk_packages(tensordict.__path__, prefix="tensordict.", onerror=reraise)
    for name in ["tensordict", *(info.name for info in found)]:
        module = importlib.import_module(name)
        yield from (test for test in finder.find(module, name, globs={}) if test.examples)


def reraise(name: str) -> None:
    """Fail where a package cannot be imported: `walk_packages` would pass over its modules."""
    raise ImportError(f"{name} cannot be imported, so its examples cannot be collected")


EXAMPLES = {test.name: test for test in docstring_examples()}


def test_docstrings_have_examples() -> None:
    assert len(EXAMPLES) > 100


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring(name: str) -> None:
    run_doctest(EXAMPLES[name])


def run_doctest(test: doctest.DocTest) -> None:
    """Run `test` and fail with doctest's own report; the names it defined stay in its `globs`."""
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append, clear_globs=False)
    assert results.failed == 0, "".join(report)
