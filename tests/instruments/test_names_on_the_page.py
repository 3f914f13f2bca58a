"""Panels have the same names in figures, reports and comparisons, and on the page of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradlens import quantities
from gradlens.instruments import BUILT_IN, Instrument
from gradlens.plotting.comparison import numbers
from gradlens.plotting.screen import Screen
from gradlens.plotting.summary import summarize
from gradlens.quantities import Quantity
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
    assert headings - OF_QUANTITIES == {one.title for one in BUILT_IN if one.title}


SHARED = {"GradientTestsInstrument", "TICInstrument"}
"""Instruments of several kinds, whose titles cover all of them."""


def titled() -> list[tuple[Instrument, type[Quantity]]]:
    """Instruments with a title of their own, each with the quantity that it draws."""
    classes = [one for one in vars(quantities).values() if isinstance(one, type)]
    found = {one.__name__: one for one in classes if issubclass(one, Quantity)}
    return [
        (one, found[kind])
        for one in BUILT_IN
        if one.title and not one.secondary and type(one).__name__ not in SHARED
        for kind in one.kinds
    ]


@pytest.mark.parametrize(("instrument", "quantity"), titled(), ids=lambda each: repr(each)[:30])
def test_a_quantity_and_its_panel_have_the_same_name(
    instrument: Instrument, quantity: type[Quantity]
) -> None:
    # Of a quantity with several panels, the first one has its name.
    first = next(one for one in BUILT_IN if set(one.kinds) & set(instrument.kinds))
    assert first.title == quantity.view.title


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
