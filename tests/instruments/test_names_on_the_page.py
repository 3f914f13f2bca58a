"""Panels have the same names in the figure and on the page that explains them."""

from __future__ import annotations

import re
from pathlib import Path

from gradlens.instruments import BUILT_IN

PAGE = Path(__file__).parents[2] / "docs" / "instruments.rst"
OF_SEVERAL = {"Maps of layers × steps"}
"""Headings of instruments whose titles are those of their quantities."""


def test_panels_have_the_names_of_the_page() -> None:
    headings = set(re.findall(r"^(.+)\n~+$", PAGE.read_text("utf-8"), flags=re.MULTILINE))
    assert headings - OF_SEVERAL == {one.title for one in BUILT_IN if one.title}
