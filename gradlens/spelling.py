"""Suggestions for misspelt names, for the messages of errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: object, words: Iterable[str]) -> str:
    """The end of an error message: known words that are spelled like an unknown one."""
    known = list(dict.fromkeys(words))
    if not known:
        return " (there is none)"
    by_lower_case = {other.lower(): other for other in reversed(known)}
    found = difflib.get_close_matches(str(word).lower(), by_lower_case, n=3, cutoff=0.5)
    if found:
        return f": did you mean {' or '.join(by_lower_case[other] for other in found)}?"
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f" (there is {shown})"


def unknown_name(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """What a module raises for a name that it doesn't have."""
    return AttributeError(f"module {module!r} has no attribute {name!r}{near(name, names)}")
