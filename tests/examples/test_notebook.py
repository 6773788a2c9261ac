"""Runs `examples/first_look.ipynb` in a kernel, as a notebook does, and looks at what its cells show."""

from __future__ import annotations

import pathlib
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "first_look.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells that have run; an exception in one is raised here."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = str(tmp_path_factory.mktemp("notebook"))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any], code: str) -> dict[str, str]:
    """Return the output of the cell that ends with this line, by media type."""
    (cell,) = [cell for cell in cells if cell.source.splitlines()[-1] == code]
    found: dict[str, str] = {}
    for output in cell.outputs:
        found.update(output.get("data", {}))
        if output.output_type == "stream":
            found[output.name] = found.get(output.name, "") + output.text
    return found


pytestmark = [
    pytest.mark.seconds,
    # Jupyter's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning"),
]


def test_containers_are_trees(cells: list[Any]) -> None:
    for code, name in (("data", "TensorDict"), ("runs", "LazyStackedTensorDict"), ("state", "State")):
        output = shown(cells, code)
        assert "<details" in output["text/html"] and name in output["text/html"]
        assert output["text/plain"].startswith(f"{name}(")
    assert "data:image/png;base64," in shown(cells, "data")["text/html"]


def test_statistics_are_a_table(cells: list[Any]) -> None:
    output = shown(cells, "data.describe()")
    assert "<table" in output["text/html"] and "meta.weight" in output["text/plain"]


def test_errors_name_what_is_like_it(cells: list[Any]) -> None:
    assert "'label'" in shown(cells, "    print(error)")["stdout"]


def test_a_save_shows_its_progress_and_loads(cells: list[Any]) -> None:
    output = shown(cells, "loaded")
    bar = output.get("stderr", "") + output.get("text/plain", "")
    # Without ipywidgets, tqdm warns of a bar of text.
    assert "saving" in bar and "Warning" not in bar
    assert "caption" in output["text/html"]


def test_plots_are_pictures(cells: list[Any]) -> None:
    assert "image/png" in shown(cells, "figure")
