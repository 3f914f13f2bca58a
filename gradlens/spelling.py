"""Suggestions for misspelt names, and for those of other libraries, in the messages of errors."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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


def unknown_name(
    module: str, name: str, names: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> AttributeError:
    """What a module raises for a name that it doesn't have; ``elsewhere`` says what to use."""
    found = (elsewhere or {}).get(name)
    hint = near(name, names) if found is None else f": use {found}"
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def unknown_attribute(owner: object, name: str, elsewhere: Mapping[str, str]) -> AttributeError:
    """What an object raises for a name that it doesn't have; ``elsewhere`` says what to use."""
    kind, hint = type(owner).__name__, ""
    if name in elsewhere:
        hint = f": use {elsewhere[name]}"
    elif not name.startswith("_"):
        found = similar(name, (each for each in dir(type(owner)) if not each.startswith("_")), 0.7)
        hint = f": did you mean {' or '.join(found)}?" if found else ""
    return AttributeError(f"{kind!r} object has no attribute {name!r}{hint}")


def suggests(
    elsewhere: Mapping[str, str],
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """A decorator whose functions raise a ``TypeError`` for arguments that they don't have.

    The error says what to use instead: what ``elsewhere`` has for the name, which is one of another
    library, or otherwise the arguments with the most similar names.
    """

    def explained(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        known = [*inspect.signature(function).parameters]
        names = {*known}

        @wraps(function)
        def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            for name in () if names.issuperset(kwargs) else kwargs.keys() - names:
                hint = f": use {elsewhere[name]}" if name in elsewhere else near(name, known[1:])
                raise TypeError(f"{function.__qualname__} has no argument {name!r}{hint}")
            return function(*args, **kwargs)

        return called

    return explained
