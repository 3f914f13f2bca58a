"""Panels have the same names in figures, reports and comparisons, and on the page of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradlens import quantities
from gradlens.instruments import BUILT_IN
from gradlens.plotting.comparison import numbers
from gradlens.plotting.screen import Screen
from gradlens.plotting.summary import summarize
from tests.instruments.test_instruments import realistic

PAGE = Path(__file__).parents[2] / "docs" / "instruments.rst"
OF_QUANTITIES = {
    *("Maps of layers × steps", "Active and dead units"),
    "Attention logits and attention entropy",
    "Activation outliers, output entropy and weight spectrum",
}
"""Headings of instruments whose titles are those of their quantities."""


def test_panels_have_the_names_of_the_page() -> None:
    headings = set(re.findall(r"^(.+)\n~+$", PAGE.read_text("utf-8"), flags=re.MULTILINE))
    own = {one.title for one in BUILT_IN if one.title}
    kinds = {one.kinds[0] for one in BUILT_IN if not one.title and len(one.kinds) == 1}
    views = {vars(quantities)[kind].view.title for kind in kinds & {*vars(quantities)}}
    assert own <= headings - OF_QUANTITIES <= own | views
    assert all(title.lower() in " ".join(headings).lower() for title in views)


def test_a_report_has_the_names_of_the_figure() -> None:
    pytest.importorskip("bokeh")
    from gradlens.report.content import cards as report_cards

    history = realistic(20)
    panels = [*Screen("").panels(history), *Screen("", layers=True).panels(history)]
    headings = {panel.title for panel in panels}
    found = {card.panel.title for card in report_cards({"run": history})}
    assert {panel.title for panel in Screen("").panels(history)} <= found
    # A number that shares no panel has a card of its own, named after the panel and what it is.
    assert {title.split(": ")[0] for title in found - headings} <= {
        name.split(": ")[0] for name in headings
    }


def test_logged_series_are_named_after_their_panel_in_a_comparison() -> None:
    history = realistic(5, ("train_loss", "test_accuracy", "learning_rate", "batch_size"))
    shown = {one.title for one in numbers({"a": history, "b": history})}
    assert shown == {"Losses: train", "Accuracy: test", "Learning rate", "Batch size"}


def test_the_summary_has_the_names_of_the_figure() -> None:
    history = realistic(5, ("Loss", "GradNorm", "HessTrace"))
    titles = {row.scalar.view.title for row in summarize(history).rows}
    assert titles == {one.title for each in BUILT_IN for one in each.panels(history)
                      if not each.secondary}  # fmt: skip
