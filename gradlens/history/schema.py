"""The form that data from a file must have, declared as data; needs nothing of gradlens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

SHOWN = 40
"""So many characters of a wrong value are quoted in an error."""


class Schema(ABC):
    """The form of a value."""

    @abstractmethod
    def check(self, value: Any, where: str) -> None:
        """``ValueError`` names ``where`` and the value if it has another form."""


@final
@dataclass(frozen=True)
class Is(Schema):
    """A value of exactly this type; ``bool`` is no ``int``."""

    type: type[Any]

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` if the value has another type."""
        if type(value) is not self.type:
            raise _wrong(value, where, WORDS.get(self.type, "an array"))


@final
@dataclass(frozen=True)
class Whole(Schema):
    """A whole number between two bounds, both included."""

    least: int
    most: int

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` if the value is no such number."""
        if type(value) is not int or not self.least <= value <= self.most:
            raise _wrong(value, where, f"a whole number from {self.least} to {self.most}")


@final
@dataclass(frozen=True)
class OneOf(Schema):
    """One of some strings, numbers or ``None``."""

    allowed: tuple[Any, ...]

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` if the value is none of them."""
        if type(value) not in map(type, self.allowed) or value not in self.allowed:
            raise _wrong(value, where, f"one of {', '.join(map(repr, self.allowed))}")


@final
@dataclass(frozen=True)
class Either(Schema):
    """``None``, or a value of another form."""

    schema: Schema

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` if the value is neither."""
        if value is not None:
            self.schema.check(value, where)


@final
@dataclass(frozen=True)
class AnyOf(Schema):
    """A value of one of several forms."""

    schemas: tuple[Schema, ...]

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` of the last form if the value has none of them."""
        for schema in self.schemas[:-1]:
            try:
                schema.check(value, where)
            except ValueError:
                continue
            return
        self.schemas[-1].check(value, where)


@final
@dataclass(frozen=True)
class ListOf(Schema):
    """A list of at most ``longest`` values of one form."""

    schema: Schema
    longest: int = 100_000

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` if the value is no such list."""
        if type(value) is not list or len(value) > self.longest:
            raise _wrong(value, where, f"a list of at most {self.longest} values")
        for number, entry in enumerate(value):
            self.schema.check(entry, f"{where}[{number}]")


@final
@dataclass(frozen=True)
class MapOf(Schema):
    """An object whose values have one form."""

    schema: Schema

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` if the value is no such object."""
        if type(value) is not dict:
            raise _wrong(value, where, "an object")
        for key, entry in value.items():
            self.schema.check(entry, f"{where}.{_shown(key)}")


@final
@dataclass(frozen=True)
class Fields(Schema):
    """An object with certain keys; others are not looked at."""

    fields: Mapping[str, Schema]

    def check(self, value: Any, where: str) -> None:
        """``ValueError`` if the value is no object, or lacks a key."""
        if type(value) is not dict:
            raise _wrong(value, where, "an object")
        for key, schema in self.fields.items():
            if key not in value:
                raise ValueError(f"{where} has no {key!r}")
            schema.check(value[key], f"{where}.{key}")


WORDS: Mapping[type[Any], str] = {
    str: "a text",
    float: "a number",
    bool: "true or false",
    dict: "an object",
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
