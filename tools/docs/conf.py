"""Settings of Sphinx for the site."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.addnodes import desc, pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]

project = "onnxarchive"
author = copyright = "The onnxarchive developers"
(version,) = re.findall('__version__ = "(.*)"', (ROOT / "onnxarchive" / "__init__.py").read_text())
release = version

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4  # as GitHub makes them
highlight_language = "text"
maximum_signature_line_length = 70  # a longer one has a line for each argument
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"onnxarchive {version}"
html_baseurl = "https://onnxarchive.github.io/onnxarchive/"
html_copy_source = False
html_show_sphinx = False
html_use_index = False
pygments_style = "default"
pygments_dark_style = "github-dark"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", link_names)
    app.add_lexer("hex", TextLexer)  # dumps in the specification


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Makes links of the public names in docstrings, such as `Archive.fetch` in backticks."""
    for literal in list(document.findall(nodes.literal)):
        if re.fullmatch(r"[A-Za-z_][\w.]*", literal.astext()) and _is_in_docstring(literal):
            link = pending_xref("", refdomain="py", reftype="obj", reftarget=literal.astext())
            link["refdoc"] = app.env.docname
            link["py:module"], link["py:class"] = "onnxarchive", None
            literal.replace_self(link)
            link += literal


def _is_in_docstring(node: nodes.Node) -> bool:
    while node.parent is not None and not isinstance(node, desc):
        node = node.parent
    return isinstance(node, desc)
