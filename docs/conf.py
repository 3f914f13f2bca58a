"""Sphinx configuration."""

import re
import sys
from pathlib import Path

import gradlens

sys.path[:0] = [str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1])]

project = "gradlens"
author = "The gradlens developers"
copyright = "2026, the gradlens developers"
version = release = gradlens.__version__

extensions = [
    "cells",
    "curves",
    "fault_pages",
    "mathml",
    "run_gallery",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
]
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "gradlens"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
exclude_patterns = ["_build"]
nitpicky = False
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_typehints = "signature"
# Types are written by their names: a reader looks up "Closure", and not what it stands for.
ALIAS = re.compile(r"^([A-Z]\w*): TypeAlias =", re.MULTILINE)
autodoc_type_aliases = {
    name: name
    for file in Path(gradlens.__file__).parent.rglob("*.py")
    for name in ALIAS.findall(file.read_text("utf-8"))
}
python_maximum_signature_line_length = 140
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
