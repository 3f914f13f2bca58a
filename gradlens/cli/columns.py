"""Tables of texts for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

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
    """A text from a file in one line, without control signs."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def in_short(text: str) -> str:
    """The same in few characters."""
    return printable(text[:LONGEST]) + ("..." if len(text) > LONGEST else "")
