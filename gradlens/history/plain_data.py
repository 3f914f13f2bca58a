"""Frozen dataclasses from the plain data of a file: their fields' types say what is valid.

A type may be a dataclass, ``Mapping[str, T]``, ``tuple[T, ...]``, a union, a ``Literal``, an array,
or one of ``str``, ``float``, ``int`` and ``bool``. Needs nothing of gradlens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SHOWN = 60
"""So many characters of a wrong value are quoted in an error."""


def from_plain(kind: Any, found: Any, where: str) -> Any:
    """A value of a type from plain data; ``ValueError`` names ``where`` and data of another form.

    What a dataclass has no field for is left out.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        others = [each for each in arguments if each is not NoneType]
        if found is None and NoneType in arguments:
            return None
        simple = [each for each in others[:-1] if each is type(found)]
        return from_plain([*simple, others[-1]][0], found, where)
    if origin is Literal:
        if found not in arguments:
            raise _wrong(found, where, f"one of {', '.join(map(repr, arguments))}")
        return found
    if origin is tuple:
        entries = _of_kind(list, found, where)
        kinds = arguments[:1] * len(entries) if arguments[-1] is Ellipsis else arguments
        places = enumerate(zip(kinds, entries, strict=True))
        return tuple(from_plain(each, entry, f"{where}[{n}]") for n, (each, entry) in places)
    if origin is Mapping:
        entries = _of_kind(dict, found, where)
        return {k: from_plain(arguments[1], entry, f"{where}.{k}") for k, entry in entries.items()}
    types, content = _types(kind), {}
    if not types:
        return _of_kind(kind, found, where)
    for name, each in types.items():
        if name not in _of_kind(dict, found, where):
            raise ValueError(f"{where} has no {name!r}")
        content[name] = from_plain(each, found[name], f"{where}.{name}")
    return kind(**content)


@cache
def _types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; empty for other types."""
    if not is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _of_kind(kind: Any, found: Any, where: str) -> Any:
    if type(found) is not kind:
        raise _wrong(found, where, f"of the type {kind.__name__}")
    return found


def _wrong(found: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} is {repr(found)[:SHOWN]}, not {expected}")
