"""Frozen dataclasses as the plain data of a file, and back: their fields' types say what is valid.

A type may be a dataclass, ``Mapping[str, T]``, a tuple, a union, a ``Literal``, an array, or one of
``str``, ``float``, ``int`` and ``bool``. Needs nothing of gradlens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np

SHOWN = 40
"""So many characters of a wrong value are quoted in an error."""


@dataclass(frozen=True)
class Between:
    """Bounds of a whole number, or of a tuple's length, both included: for ``Annotated``."""

    least: int
    most: int


Count: TypeAlias = Annotated[int, Between(0, 2**53)]

WHOLE = Between(-(2**53), 2**53)
"""Whole numbers without other bounds, which a step axis must be able to show: such are exact as
floats."""
MANY = Between(0, 100_000)
"""Lengths of tuples without other bounds."""


def plain(value: Any) -> Any:
    """A value of such a type as plain data."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [*map(plain, value)] if isinstance(value, (tuple, list)) else value


def from_plain(kind: Any, found: Any, where: str) -> Any:
    """A value of a type from plain data; ``ValueError`` names ``where`` and data of another form.

    What a dataclass has no field for is left out.
    """
    bounds = None
    if get_origin(kind) is Annotated:
        kind, bounds = get_args(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _one_of(arguments, found, where)
    if origin is tuple:
        return _tuple(arguments, bounds or MANY, found, where)
    if origin is Literal:
        if type(found) is not str or found not in arguments:
            raise _wrong(found, where, f"one of {', '.join(map(repr, arguments))}")
        return found
    if kind is int:
        within = bounds or WHOLE
        if type(found) is not int or not within.least <= found <= within.most:
            raise _wrong(found, where, f"a whole number from {within.least} to {within.most}")
        return found
    if origin is Mapping:
        _check(dict, found, where)
        return {
            key: from_plain(arguments[1], entry, f"{where}.{_shown(key)}")
            for key, entry in found.items()
        }
    if is_dataclass(kind):
        return _dataclass(kind, found, where)
    _check(origin or kind, found, where)
    return found


def _one_of(kinds: Sequence[Any], found: Any, where: str) -> Any:
    """A value of one of several types; the ``ValueError`` of the last one that isn't ``None``."""
    if NoneType in kinds and found is None:
        return None
    *others, last = [kind for kind in kinds if kind is not NoneType]
    for kind in others:
        try:
            return from_plain(kind, found, where)
        except ValueError:
            continue
    return from_plain(last, found, where)


def _tuple(kinds: Sequence[Any], lengths: Between, found: Any, where: str) -> tuple[Any, ...]:
    if kinds[-1] is not Ellipsis:
        lengths = Between(len(kinds), len(kinds))
    if type(found) is not list or not lengths.least <= len(found) <= lengths.most:
        raise _wrong(found, where, f"a list of {lengths.least} to {lengths.most} values")
    return tuple(from_plain(kinds[0], one, f"{where}[{n}]") for n, one in enumerate(found))


def _dataclass(kind: Any, found: Any, where: str) -> Any:
    _check(dict, found, where)
    content = {}
    for name, each in _types(kind).items():
        if name not in found:
            raise ValueError(f"{where} has no {name!r}")
        content[name] = from_plain(each, found[name], f"{where}.{name}")
    return kind(**content)


@cache
def _types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def _check(kind: Any, found: Any, where: str) -> None:
    if type(found) is not kind:
        raise _wrong(found, where, WORDS[kind])


WORDS: Mapping[type[Any], str] = {
    str: "a text",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    np.ndarray: "an array",
}


def _wrong(value: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} is {_shown(value)}, not {expected}")


def _shown(value: Any) -> str:
    """A value in a few characters, whatever its size."""
    if isinstance(value, str):
        return repr(value[:SHOWN]) + ("..." if len(value) > SHOWN else "")
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, (bool, int, float, type(None))):
        return repr(value)[:SHOWN]
    return f"a {type(value).__name__}"
