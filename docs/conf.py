"""Configures Sphinx for `make docs`. Warnings are errors, and every name that a page refers to must exist."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))
sys.path.insert(0, str(DOCS.parent / "src"))

import tensordict  # noqa: E402

# Millions of nodes live as long as the build. Collecting garbage less often saves a seventh of the time.
gc.set_threshold(100_000, 50, 100)

project = "tensordict"
version = release = tensordict.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "benchmark_plots",
    "docstrings",
    "api_pages",
    "behaviour",
    "tasks",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# sphinx-gallery reads the scripts of the gallery and writes pages into `auto_gallery`.
exclude_patterns = ["gallery", "_static", "_templates", "extensions", "design/generated"]
templates_path = ["_templates"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist", "substitution"]
myst_substitutions = {"version": release}
myst_heading_anchors = 3

default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
add_module_names = False
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
viewcode_follow_imported_members = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/plot_",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "write_computation_times": False,
    "min_reported_time": 2,
}

# The copy button leaves out prompts and outputs.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "tensordict"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_favicon = "_static/mark.svg"
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "tensordict", "image_light": "_static/mark.svg", "image_dark": "_static/mark.svg"},
    "navbar_align": "left",
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "navbar_end": ["version-and-source", "theme-switcher", "navbar-icon-links"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}
