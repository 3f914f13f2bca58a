"""Which fault's name answers which question, and which ones are true, though not the cause."""

from __future__ import annotations

ANSWERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
