"""The citation, the security policy and the templates agree with the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import tensordict

ROOT = Path(__file__).parent.parent


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the format asks for
    assert citation["version"] == tensordict.__version__
    assert citation["license"] == "MIT" and (ROOT / "LICENSE").read_text().startswith("MIT License")


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_the_forms_of_issues(form: str) -> None:
    found = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert {"name", "description", "body"} <= found.keys()
    fields = [field["id"] for field in found["body"]]
    assert len(set(fields)) == len(fields)
    assert all(field["type"] in ("textarea", "checkboxes") and "attributes" in field for field in found["body"])


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md", "CHANGELOG.md"]
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_command_of_the_bug_form_runs() -> None:
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    found = re.search(r'python -c "(.+?)"', form)
    assert found is not None
    exec(found[1], {})
