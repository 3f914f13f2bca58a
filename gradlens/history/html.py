"""Tables for notebooks, as HTML with colours of the notebook's own theme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from typing import Any

import numpy as np

from gradlens.history.undefined import Undefined

MOST_ROWS = 40
"""Rows of a table; a page of a notebook has about as many lines."""
FEW = 3
"""Entries of a dict or list that are shown."""
LONGEST = 60
"""Characters of a text in a cell."""

WHOLE = 1e5
"""Numbers from here on, and below ``LARGEST_WHOLE``, are shown without decimals."""
LARGEST_WHOLE = 1e15

TABLE = "color: inherit; font: inherit; border-collapse: collapse"
CELL = "text-align: left; padding: 0.1em 1em 0.1em 0"


def table(
    heading: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: Sequence[str] = (),
    findings: Sequence[str] = (),
    short: Sequence[str] = (),
) -> str:
    """A table with a heading, a run in ``short``, what is wrong, and notes that can be folded out.

    All texts are escaped.
    """
    shown = [_row("td", row) for row in rows[:MOST_ROWS]]
    more = f"<div>and {len(rows) - MOST_ROWS} more</div>" if len(rows) > MOST_ROWS else ""
    head = _row("th", columns)
    body = f'<table style="{TABLE}"><thead>{head}</thead><tbody>{"".join(shown)}</tbody></table>'
    wrong = f"<div>What is wrong:</div>{_list(findings)}" if findings else ""
    count_of = f"<summary>{count(len(notes), 'note')}</summary>"
    folded = f"<details>{count_of}{_list(notes)}</details>" if notes else ""
    summed_up = _list(short) if short else ""
    return f"<div><div><b>{escape(heading)}</b></div>{summed_up}{wrong}{body}{more}{folded}</div>"


def in_short(value: Any) -> str:
    """A recorded value in a few characters."""
    if isinstance(value, Undefined):
        return f"NaN: {value.reason}" if value.reason else "NaN"
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (int, float)):
        is_large = WHOLE <= abs(value) < LARGEST_WHOLE
        return f"{value:,.0f}" if is_large else f"{value:.4g}"
    if isinstance(value, np.ndarray):
        return f"array of shape {list(value.shape)}" if value.ndim else in_short(value.item())
    if isinstance(value, Mapping):
        return _first(len(value), (f"{name} {in_short(each)}" for name, each in value.items()))
    if isinstance(value, (list, tuple)):
        return _first(len(value), map(in_short, value))
    return str(value)


def count(number: int, noun: str) -> str:
    """A number of things, such as ``"1 step"`` or ``"2 steps"``; ``noun`` is the singular."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else noun if noun == "series" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _first(number: int, texts: Iterable[str]) -> str:
    shown = ", ".join(islice(texts, FEW))
    return f"{shown}, ... ({number:,})" if number > FEW else shown


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(_cell(tag, str(cell)) for cell in cells)}</tr>"


def _cell(tag: str, text: str) -> str:
    if len(text) <= LONGEST:
        return f'<{tag} style="{CELL}">{escape(text)}</{tag}>'
    short = f"{text[: LONGEST - 3]}..."
    return f'<{tag} style="{CELL}" title="{escape(text)}">{escape(short)}</{tag}>'


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
