"""Sphinx configuration."""

import gradlens

project = "gradlens"
author = "The gradlens developers"
copyright = "2026, the gradlens developers"
version = release = gradlens.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = "gradlens"
exclude_patterns = ["_build"]
nitpicky = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
