"""Suggestions for misspelt names, for the messages of errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def similar(word: object, words: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """At most three words that are spelled like ``word``, the most similar first.

    ``cutoff`` is the least similarity, as in ``difflib.get_close_matches``. Case makes no
    difference.
    """
    by_lower_case = {other.lower(): other for other in reversed([*words])}
    found = difflib.get_close_matches(str(word).lower(), by_lower_case, n=3, cutoff=cutoff)
    return [by_lower_case[other] for other in found]


def near(word: object, words: Iterable[str]) -> str:
    """The end of an error message: known words that are spelled like an unknown one."""
    known = list(dict.fromkeys(words))
    if not known:
        return " (there is none)"
    found = similar(word, known)
    if found:
        return f": did you mean {' or '.join(found)}?"
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f" (there is {shown})"


def unknown_name(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """What a module raises for a name that it doesn't have."""
    return AttributeError(f"module {module!r} has no attribute {name!r}{near(name, names)}")
