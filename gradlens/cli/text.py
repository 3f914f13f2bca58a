"""Texts for a terminal, and JSON for other programs."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

LONGEST = 40
"""Characters of a text from a file that are shown."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, in columns flush right, without those that have a heading alone."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]


def printable(text: str) -> str:
    """A text from a file without control signs."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def in_short(text: str) -> str:
    """The same in few characters."""
    return printable(text[:LONGEST]) + ("..." if len(text) > LONGEST else "")


def wrapped(text: str, width: int, indent: str = "", hanging: str = "") -> list[str]:
    """A text, printable, in lines of at most this width."""
    shown = printable(" ".join(text.split()))
    later = indent + hanging
    return textwrap.wrap(
        shown, width, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False
    )


def as_line(value: Any) -> str:
    """A value as one line of strict JSON."""
    return json.dumps(strict(value), allow_nan=False)


def strict(value: Any) -> Any:
    """Plain data, with ``None`` for a NaN, and ``"inf"`` for an infinity, as ``float`` reads it.

    Dataclasses are dicts.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return strict(asdict(value))
    if isinstance(value, dict):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
