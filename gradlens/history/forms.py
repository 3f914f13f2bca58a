"""What a stored value is apart from its numbers: its keys, lengths and types.

The values of a series almost all have the same form. A form is kept once, and of each value only
its numbers, which takes a tenth of the memory. An array counts as a number, the place of its text.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    array_size,
    check_size,
    unmarked,
    value_of,
)
from gradlens.history.undefined import Undefined

EXACT = 2**53
"""Whole numbers of at most this size are exact as floats."""

RECORD = 2
"""Levels of a record around its values."""


def taken_in(stored: Any, content: Content, depth: int = RECORD) -> Any:
    """Add a value as JSON has it; what it is apart from its numbers, which describes its ``Form``.

    ``ValueError`` if there is no such value, or an array is damaged; a part may be added then.
    """
    kind = type(stored)
    if kind is float or (kind is int and abs(stored) <= EXACT):
        content.append(stored)
        return kind
    if kind is int:
        check_size(stored)
    if kind is not list and kind is not dict:
        return kind, stored
    if depth == DEEPEST:
        raise ValueError(TOO_DEEP)
    (mark,) = stored if kind is dict and len(stored) == 1 else ("",)
    if mark == "$array":
        size = array_bytes(stored[mark])
        dtype, shape, text = stored[mark]
        content.add(text, size)
        return mark, dtype, *shape
    if mark in MARKS:
        value_of(stored)  # which fails if there is no such value
        return mark, stored[mark]
    values = stored if kind is list else stored.values()
    if {*map(type, values)} == {float}:  # as most are
        content.extend([*values])
        parts: Any = float
    else:
        parts = tuple([taken_in(one, content, depth + 1) for one in values])
    return kind, len(stored) if kind is list else tuple(stored), parts


@final
class Form:
    """The form of values of the type ``kind``, for each of which there are ``numbers`` numbers.

    ``description`` is what ``taken_in`` has returned of one. ``constant`` is the value itself where
    it has no numbers, such as a text, a truth value, or a NaN with its reason. ``parts`` are the
    forms of a list's or dict's values, with how many numbers are before each, ``places`` the same
    by the keys of a dict, and ``is_plain`` says that all of them are finite floats.
    """

    def __init__(self, description: Any) -> None:
        self.description = description
        self.is_number = description in (float, int)
        self.kind: type[Any] = description if self.is_number else description[0]
        self.numbers = int(self.is_number)
        self.constant: Value = None
        self.parts: tuple[tuple[Form, int], ...] = ()
        self.places: Mapping[str, tuple[Form, int]] = {}
        self.is_plain = False
        if self.is_number:
            return
        if self.kind is list or self.kind is dict:
            _, keys, parts = description
            self.is_plain = parts is float
            count = keys if self.kind is list else len(keys)
            forms = [FLOAT] * count if self.is_plain else [Form(part) for part in parts]
            starts = [*accumulate((form.numbers for form in forms), initial=0)]
            self.numbers = starts[-1]
            self.parts = tuple(zip(forms, starts, strict=False))
            if self.kind is dict:
                self.places = dict(zip(map(unmarked, keys), self.parts, strict=True))
        elif description[0] == "$array":
            self.kind, self.numbers = np.ndarray, 1
        elif description[0] in MARKS:
            self.constant = value_of({description[0]: description[1]})
            self.kind = type(self.constant)
        else:
            self.constant = description[1]

    @property
    def reason(self) -> str:
        """Of a NaN; empty for others."""
        return self.constant.reason if isinstance(self.constant, Undefined) else ""

    def value(self, content: Content, start: int) -> Value:
        """The value whose numbers begin at this place."""
        if self.is_number:
            return self.kind(content.numbers[start])
        if self.kind is np.ndarray:
            _, dtype, *shape = self.description
            size = array_size(dtype, shape) * np.dtype(dtype).itemsize
            return array_of(dtype, shape, content.bytes_of(content.numbers[start], size))
        if self.is_plain:
            values = [*content.numbers[start : start + self.numbers]]
        else:
            values = [one.value(content, start + at) for one, at in self.parts]
        if self.kind is list:
            return values
        return dict(zip(self.places, values, strict=True)) if self.kind is dict else self.constant


FLOAT = Form(float)
