"""docs/guides/errors.md shows the messages of the usual mistakes (tests/mistakes.py), and its corrections work."""

from __future__ import annotations

import json

import pytest

from mistakes import MISTAKES, PAGE, PROGRAM, ROOT, Mistake, page, said, shown
from reference import Reference

ROWS = [(topic == "Files", mistake) for topic, rows in MISTAKES.items() for mistake in rows]
WRITTEN = PAGE.read_text()


@pytest.mark.parametrize(("files", "mistake"), ROWS, ids=lambda value: getattr(value, "wrong", ""))
def test_the_message_is_that_of_the_page(files: bool, mistake: Mistake) -> None:
    message = said(mistake.wrong, files)
    assert message, "nothing is raised"
    cells = f"| {shown(mistake.wrong)} | {shown(message)} | {shown(mistake.right)} |"
    assert cells in WRITTEN, "run `python tests/mistakes.py`, and look at what has changed"


@pytest.mark.parametrize(("files", "mistake"), ROWS, ids=lambda value: getattr(value, "right", ""))
def test_what_works_works(files: bool, mistake: Mistake) -> None:
    assert said(mistake.right, files) == ""


@pytest.mark.reference
def test_the_page_is_whole_and_says_what_the_reference_says(behaviour: Reference) -> None:
    theirs = json.loads(behaviour.run(PROGRAM, ROOT / "tests"))
    ours = {mistake.wrong: said(mistake.wrong, files) for files, mistake in ROWS}
    assert page(ours, theirs) == WRITTEN
