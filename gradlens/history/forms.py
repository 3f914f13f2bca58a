"""What a stored value is apart from its numbers: its keys, lengths and types.

The values of a series almost all have the same form. A form is kept once, and of each value only
its numbers, which takes a tenth of the memory. An array counts as a number, the place of its text.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import numpy as np

from gradlens.history.content import Content
from gradlens.history.json_lines import (
    DEEPEST,
    MARKS,
    TOO_DEEP,
    Value,
    array_bytes,
    array_of,
    check_size,
    unmarked,
    value_of,
)
from gradlens.history.undefined import Undefined

EXACT = 2**53
"""Whole numbers of at most this size are exact as floats."""

RECORD = 2
"""Levels of a record around its values."""


class Form(ABC):
    """The form of values of the type ``kind``, for each of which there are ``numbers`` numbers.

    Forms of the same class with the same ``key`` are equal.
    """

    def __init__(self, key: Hashable, kind: type[Any], numbers: int) -> None:
        self._key = key
        self._hash = hash(key)
        self.kind = kind
        self.numbers = numbers

    @abstractmethod
    def take(self, stored: Any, content: Content) -> bool:
        """Add a value as JSON has it. False if it has another form; a part may be added then.

        ``ValueError`` if it has an array that is damaged.
        """

    @abstractmethod
    def value(self, content: Content, start: int) -> Value:
        """The value whose numbers begin at this place."""

    @final
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Form) and other._key == self._key

    @final
    def __hash__(self) -> int:
        return self._hash


@final
class Number(Form):
    """A finite float, or a whole number that a float can hold."""

    def __init__(self, kind: type[float] | type[int]) -> None:
        super().__init__(kind.__name__, kind, 1)

    def take(self, stored: Any, content: Content) -> bool:
        if type(stored) is not self.kind or (self.kind is int and abs(stored) > EXACT):
            return False
        content.append(stored)
        return True

    def value(self, content: Content, start: int) -> Value:
        return self.kind(content.numbers[start])


FLOAT, INT = Number(float), Number(int)


@final
class Constant(Form):
    """One and the same value, such as a text, a truth value, or a NaN with its reason."""

    def __init__(self, stored: Any, constant: Value) -> None:
        super().__init__(json.dumps(stored), type(constant), 0)
        self._stored = stored
        self.constant = constant

    @property
    def reason(self) -> str:
        """Of a NaN; empty for others."""
        return self.constant.reason if isinstance(self.constant, Undefined) else ""

    def take(self, stored: Any, content: Content) -> bool:
        return type(stored) is type(self._stored) and bool(stored == self._stored)

    def value(self, content: Content, start: int) -> Value:
        return self.constant


@final
class Array(Form):
    """An array of one type and shape, of ``size`` bytes."""

    def __init__(self, dtype: str, shape: list[int], size: int) -> None:
        super().__init__((dtype, *shape), np.ndarray, 1)
        self.dtype = dtype
        self.shape = shape
        self.size = size

    def take(self, stored: Any, content: Content) -> bool:
        if _mark(stored) != "$array":
            return False
        entry = stored["$array"]
        if type(entry) is not list or entry[:-1] != [self.dtype, self.shape]:
            return False
        if type(entry[-1]) is not str:
            return False
        content.add(entry[-1], self.size)
        return True

    def value(self, content: Content, start: int) -> Value:
        return array_of(self.dtype, self.shape, content.bytes_of(content.numbers[start], self.size))


class _Collection(Form):
    """Several values, of which each has a form of its own."""

    def __init__(self, key: Hashable, kind: type[Any], forms: tuple[Form, ...]) -> None:
        super().__init__(key, kind, sum(form.numbers for form in forms))
        self.forms = forms
        starts = accumulate((form.numbers for form in forms), initial=0)
        self.parts = tuple(zip(forms, starts, strict=False))
        """Each form, and how many numbers are before it."""
        self.is_plain = {*forms} <= {FLOAT}
        """Whether all are finite floats."""
        self._packed = struct.Struct(f"{self.numbers}d")

    def _take_all(self, stored: Collection[Any], content: Content) -> bool:
        if self.is_plain:
            if not {*map(type, stored)} <= {float}:
                return False
            content.extend(self._packed.pack(*stored))
            return True
        for form, one in zip(self.forms, stored, strict=True):
            if form is FLOAT and type(one) is float:  # as most are
                content.append(one)
            elif not form.take(one, content):
                return False
        return True

    def _values(self, content: Content, start: int) -> Iterable[Value]:
        if self.is_plain:
            return content.numbers[start : start + self.numbers]
        return [one.value(content, start + at) for one, at in self.parts]


@final
class List(_Collection):
    """A list of values with these forms."""

    def __init__(self, forms: tuple[Form, ...]) -> None:
        super().__init__(forms, list, forms)

    def take(self, stored: Any, content: Content) -> bool:
        fits = type(stored) is list and len(stored) == len(self.forms)
        return fits and self._take_all(stored, content)

    def value(self, content: Content, start: int) -> Value:
        return [*self._values(content, start)]


@final
class Dict(_Collection):
    """A dict whose values have these forms; ``keys`` are those in the file."""

    def __init__(self, keys: tuple[str, ...], forms: tuple[Form, ...]) -> None:
        super().__init__((keys, forms), dict, forms)
        self._keys = keys
        self._names = tuple(map(unmarked, keys))

    @cached_property
    def places(self) -> dict[str, tuple[Form, int]]:
        """The form of each entry, and how many numbers are before it."""
        return dict(zip(self._names, self.parts, strict=True))

    def take(self, stored: Any, content: Content) -> bool:
        fits = type(stored) is dict and tuple(stored) == self._keys
        return fits and self._take_all(stored.values(), content)

    def value(self, content: Content, start: int) -> Value:
        return dict(zip(self._names, self._values(content, start), strict=True))


def form_of(stored: Any, depth: int = RECORD) -> Form:
    """The form of a value as JSON has it; ``ValueError`` if there is no such value."""
    kind = type(stored)
    if kind is float:
        return FLOAT
    if kind is int and abs(stored) <= EXACT:
        return INT
    if kind is int:
        check_size(stored)
    if kind is not list and kind is not dict:
        return Constant(stored, stored)
    if depth == DEEPEST:
        raise ValueError(TOO_DEEP)
    mark = _mark(stored)
    if mark == "$array":
        size = array_bytes(stored[mark])
        return Array(stored[mark][0], stored[mark][1], size)
    if mark:
        return Constant(stored, value_of(stored))
    if kind is list:
        return List(tuple(form_of(one, depth + 1) for one in stored))
    return Dict(tuple(stored), tuple(form_of(one, depth + 1) for one in stored.values()))


def _mark(stored: Any) -> str:
    """The mark of a value that JSON has no word for; empty for others."""
    if type(stored) is not dict or len(stored) != 1:
        return ""
    (key,) = stored
    return key if key in MARKS else ""
