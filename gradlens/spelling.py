"""Suggestions for misspelt names in the messages of errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: object, words: Iterable[str]) -> str:
    """The end of an error message: known words that are spelled like an unknown one."""
    known = list(dict.fromkeys(words))
    found = difflib.get_close_matches(str(word), known, cutoff=0.5)
    if found:
        return f": did you mean {' or '.join(found)}?"
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f" (there is {shown or 'none'})"
