"""The documentation site: `make docs` builds it into build/docs; every warning is an error there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))  # for generated_pages, beside this file

import generated_pages

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "halfserve"
copyright = "The halfserve authors"  # noqa: A001  (the name is Sphinx's)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "reference/generated"]

html_theme = "furo"
html_title = "halfserve"
html_show_sphinx = False
html_use_index = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"


def setup(app: Sphinx) -> None:
    """Write the tables that come from the code before Sphinx reads the folder."""
    app.connect("builder-inited", lambda _: generated_pages.write(Path(__file__).parent / "reference" / "generated"))
