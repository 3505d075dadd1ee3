"""Configures Sphinx to read the Markdown pages where they lie and to list them in the order of the README's table."""

import re
import sys
from pathlib import Path
from typing import Any

import tomllib
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for autodoc
_about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project, version = _about["name"], _about["version"]
root_doc = "README"
include_patterns = ["*.md", ".github/*.md", "safe_gpu/**.md", "tests/*.md", "tools/*.md", "tools/site/*.rst"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
highlight_language = "none"  # of code blocks that name none
smartquotes_action = "D"  # quotes stay straight, as some are code
maximum_signature_line_length = 100
napoleon_use_ivar = True
nitpicky = True  # finds a sentence of a docstring that is taken for a type
nitpick_ignore_regex = [("py:.*", r"[\w.]+")]
html_theme = "furo"
html_title = f"{project} {version}"
html_show_copyright = False
html_extra_path = ["index.html"]
html_theme_options = {"source_view_link": _about["urls"]["Source"] + "/blob/HEAD/{filename}"}


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_contents)
    app.connect("autodoc-skip-member", _skip_fields)


def _add_contents(app: Sphinx, page: str, text: list[str]) -> None:
    if page == root_doc:
        pages = re.findall(r"\(([\w./]+)\.md\)", text[0].partition("\n## Pages\n")[2])
        text[0] += "\n".join(["\n```{toctree}", ":hidden:", "tools/site/reference", *pages, "```"])


def _skip_fields(app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples: their classes' docstrings describe them."""
    return True if type(member).__name__ == "_tuplegetter" else None
