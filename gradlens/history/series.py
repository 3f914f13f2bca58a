"""The values of series, in little memory.

The values of a series almost all have the same form: the same keys, lengths and types. A form is
kept once, and of each value only its numbers, which takes a tenth of the memory. An array counts as
a number, the place of its text.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from types import NoneType
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradlens.history.json_lines import (
    MARKS,
    Value,
    array_bytes,
    array_of,
    encoded,
    inflated,
    marked,
    unmarked,
)
from gradlens.history.run_file import RunFile
from gradlens.history.undefined import Undefined

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

RECENT = 64
"""So many arrays are kept for a comparison, since the edges of histograms recur."""


@final
class Content:
    """The numbers of values, in the order of the values, and their arrays as a file has them.

    Arrays are the deflated texts of ``gradlens.history.json_lines``. Those that are in a run's file
    can be left to it, and are read from there when they are asked for.
    """

    def __init__(self) -> None:
        self.numbers = array("d")
        self._texts: list[str] = []
        """Empty for those that were left to the file."""
        self._starts = array("q")
        """Where each is in the file; -1 for one that isn't there as it is."""
        self._lengths = array("q")
        self._recent: dict[str, int] = {}
        self._left = 0
        self._file: RunFile | None = None

    def add(self, text: str, size: int) -> None:
        """Add an array of ``size`` bytes to the numbers; ``ValueError`` if its text is damaged."""
        key = f"{size} {text}"
        if key not in self._recent:
            inflated(text, size)  # which fails now rather than when it is asked for
            if len(self._recent) == RECENT:
                self._recent.clear()
            self._recent[key] = len(self._texts)
            self._texts.append(text)
        self.extend((self._recent[key],))

    def bytes_of(self, place: float, size: int) -> bytes:
        """The array with this number; ``OSError`` if it was left to a file and can't be read."""
        at = int(place)
        if self._texts[at] or self._file is None:
            return inflated(self._texts[at], size)
        try:
            return inflated(self._file.read(self._starts[at], self._lengths[at]), size)
        except ValueError as error:
            text = f"{self._file.path} has been changed, and an array that it had can't be read"
            raise OSError(text) from error

    def extend(self, numbers: Iterable[float]) -> None:
        """Add numbers."""
        try:
            self.numbers.extend(numbers)
        except BufferError:  # another thread reads them by numpy, under which they can't grow
            self.numbers = self.numbers + array("d", numbers)

    def locate(self, line: bytes, start: int) -> None:
        """Take note that the arrays added last are in this line of a file, which begins there."""
        at = 0
        for text in self._texts[len(self._starts) :]:
            found = line.find(text.encode(), at)
            self._starts.append(start + found if found >= 0 else -1)
            self._lengths.append(len(text))
            at = max(at, found)

    def leave(self, file: RunFile) -> None:
        """Leave the arrays to the file in which they were located."""
        self._file = file
        for at in range(self._left, len(self._starts)):
            if self._starts[at] >= 0:
                self._texts[at] = ""
        self._left = len(self._starts)


def copied(column: array[int]) -> Places:
    """A column as numpy has it: a copy of its bytes, since an array that numpy reads can't grow."""
    return np.frombuffer(bytearray(column.tobytes()), np.int64)


EXACT = 2**53
"""Whole numbers of at most this size are exact as floats."""


def taken_in(stored: Any, content: Content) -> Any:
    """Add a value as JSON has it; what it is apart from its numbers, which describes its ``Form``.

    ``ValueError`` or ``TypeError`` if there is no such value, or an array is damaged; a part may be
    added then.
    """
    kind = type(stored)
    if kind is float or (kind is int and abs(stored) <= EXACT):
        content.extend((stored,))
        return kind
    if kind is not list and kind is not dict:
        return kind, stored
    (mark,) = stored if kind is dict and len(stored) == 1 else ("",)
    if mark == "$array":
        dtype, shape, text = stored[mark]
        content.add(text, array_bytes(dtype, shape))
        return mark, dtype, *shape
    if mark in MARKS:
        marked(mark, stored[mark])  # which fails if there is no such value
        return mark, stored[mark]
    values = stored if kind is list else stored.values()
    if {*map(type, values)} == {float}:  # as most are
        content.extend(values)
        parts: Any = float
    else:
        parts = tuple([taken_in(one, content) for one in values])
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
            self.constant = marked(*description)
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
            found = content.bytes_of(content.numbers[start], array_bytes(dtype, shape))
            return array_of(dtype, shape, found)
        if self.is_plain:
            values = [*content.numbers[start : start + self.numbers]]
        else:
            values = [one.value(content, start + at) for one, at in self.parts]
        if self.kind is list:
            return values
        return dict(zip(self.places, values, strict=True)) if self.kind is dict else self.constant


def value_of(stored: Any) -> Value:
    """The value that JSON has in this form; ``ValueError`` or ``TypeError`` if there is none."""
    content = Content()
    return Form(taken_in(stored, content)).value(content, 0)


FLOAT = Form(float)

NOTHING = Form((NoneType, None))


SHOWN = 20
"""Values that the text of a series has, at most."""

NO_VALUE = "no value at step {step}: keys are steps, and next(reversed(series)) is the latest one"


@final
class Series(Mapping[int, Value]):
    """Values by ascending step, as a dict has them, which would take ten times the memory.

    A value is made when it is asked for. ``numbers`` gives all at once, ``column`` and ``having``
    an entry of all dicts.
    """

    def __init__(self, content: Content, forms: Sequence[Form] = (FLOAT,)) -> None:
        self._content = content
        self._forms = [*forms]
        self._places = {form.description: place for place, form in enumerate(forms)}
        self._steps = array("q")
        self._parts = array("q")
        """For each value the place of its form in ``_forms``, and of its first number in the
        content."""
        self._is_ordered = True

    @classmethod
    def of(cls, values: Mapping[int, Value]) -> Series:
        """A series with these values by step; ``TypeError`` for what can't be stored."""
        found = cls(Content())
        for step, value in values.items():
            found.add(step, encoded(value))
        return found

    # As a mapping --------------------------------------------------------------------------

    def __len__(self) -> int:
        self._order()
        return len(self._steps)

    def __iter__(self) -> Iterator[int]:
        self._order()
        return iter(self._steps.tolist())

    def __getitem__(self, step: int) -> Value:
        if step not in self:
            raise KeyError(NO_VALUE.format(step=step))
        place = 2 * bisect_left(self._steps, step)
        form, start = self._parts[place : place + 2]
        return self._forms[form].value(self._content, start)

    def __contains__(self, step: object) -> bool:
        self._order()
        if not isinstance(step, int):
            return False
        place = bisect_left(self._steps, step)
        return place < len(self._steps) and self._steps[place] == step

    def __repr__(self) -> str:
        """As a dict, of at most ``SHOWN`` values."""
        shown = [f"{step}: {self[step]!r}" for step in islice(self, SHOWN)]
        rest = [f"... ({len(self)} values)"] if len(self) > SHOWN else []
        return f"{{{', '.join([*shown, *rest])}}}"

    def __reversed__(self) -> Iterator[int]:
        self._order()
        return reversed(self._steps.tolist())

    # Adding values -------------------------------------------------------------------------

    def add(self, step: int, stored: Any) -> None:
        """Add a value as JSON has it; ``ValueError`` for what is none."""
        start = len(self._content.numbers)
        self.append(step, taken_in(stored, self._content), start)

    def append(self, step: int, description: Any, start: int) -> None:
        """Add a value that the content has taken in, whose numbers begin at ``start`` there."""
        place = self._places.setdefault(description, len(self._forms))
        if place == len(self._forms):
            self._forms.append(Form(description))
        if self._steps and step <= self._steps[-1]:
            self._is_ordered = False
        self._steps.append(step)
        self._parts.extend((place, start))

    def _order(self) -> None:
        """Sort the values by step, of which the last one counts if there are several."""
        if self._is_ordered:
            return
        steps = copied(self._steps)
        order = np.argsort(steps, kind="stable")
        last = np.append(np.diff(steps[order]) > 0, True)
        self._is_ordered = True
        self._choose(order[last])

    def _choose(self, places: Places) -> None:
        self._steps = array("q", copied(self._steps)[places].tobytes())
        self._parts = array("q", self._table[places].tobytes())

    @property
    def _table(self) -> Places:
        """``[K, 2]``: the places of the values' forms and first numbers, by ascending step."""
        self._order()
        return copied(self._parts).reshape(-1, 2)

    # All at once ---------------------------------------------------------------------------

    def only(self, steps: Sequence[int]) -> Series:
        """The values at these steps."""
        found = self._like(self._forms, self._table)
        found._choose(np.flatnonzero(np.isin(copied(self._steps), steps)))
        return found

    def thinned(self) -> Series:
        """The values without every second one of the older three quarters, in their own memory."""
        older = 3 * len(self) // 4
        content = Content()
        found = Series(content, self._forms)
        for place in [*range(0, older, 2), *range(older, len(self))]:
            form, start = self._parts[2 * place : 2 * place + 2]
            found._steps.append(self._steps[place])
            found._parts.extend((form, len(content.numbers)))
            content.extend(self._content.numbers[start : start + self._forms[form].numbers])
        return found

    @property
    def steps(self) -> Floats:
        """``[K]``"""
        self._order()
        return copied(self._steps).astype(np.float64)

    def numbers(self) -> Floats:
        """The values ``[K]``; NaN for those that are no numbers."""
        form, start = self._table.T
        found: Floats = np.array([_constant(one) for one in self._forms])[form]
        are_numbers = np.array([one.is_number for one in self._forms])[form]
        if are_numbers.any():
            # The view lasts no longer than this statement, since the numbers can't grow meanwhile.
            found[are_numbers] = np.frombuffer(self._content.numbers)[start[are_numbers]]
        return found

    def column(self, name: str, whole: bool = False) -> Series:
        """One entry of each dict, ``None`` where there is none, and all other values themselves.

        With ``whole``, dicts without the entry stay themselves, too.
        """
        entries = [_entry(form, name, whole) for form in self._forms]
        form = [form for form, _ in entries]
        before = np.array([numbers for _, numbers in entries])
        parts = self._table
        parts[:, 1] += before[parts[:, 0]]
        return self._like(form, parts)

    def having(self, name: str) -> Series:
        """One entry of the dicts that have it."""
        have = np.array([name in form.places for form in self._forms])
        found = self.column(name)
        found._choose(np.flatnonzero(have[self._table[:, 0]]))
        return found

    @property
    def kinds(self) -> set[type[Any]]:
        """The types of the values."""
        return {form.kind for form in self._used()}

    @property
    def entries(self) -> tuple[str, ...]:
        """The keys of all dicts, in the order of their first appearance."""
        return tuple(dict.fromkeys(key for form in self._used() for key in form.places))

    @property
    def reason(self) -> str:
        """The reason of the last value that has one; empty if none has."""
        last = np.flatnonzero(self.explained)[-1:]
        return self._forms[self._table[last[0], 0]].reason if last.size else ""

    @property
    def explained(self) -> NDArray[np.bool_]:
        """``[K]``, where a value has a reason."""
        found: NDArray[np.bool_] = np.array([bool(form.reason) for form in self._forms])
        return found[self._table[:, 0]]

    def _used(self) -> list[Form]:
        """The forms of the values, by their first appearance."""
        places, first = np.unique(self._table[:, 0], return_index=True)
        return [self._forms[place] for place in places[np.argsort(first)]]

    def _like(self, forms: Sequence[Form], parts: Places) -> Series:
        """A series of the same steps, whose values have other forms or places."""
        found = Series(self._content, forms)
        found._steps, found._parts = array("q", self._steps), array("q", parts.tobytes())
        return found


def _constant(form: Form) -> float:
    return float(form.constant) if isinstance(form.constant, (bool, int, float)) else math.nan


def _entry(form: Form, name: str, whole: bool) -> tuple[Form, int]:
    if form.kind is not dict:
        return form, 0
    return form.places.get(name, (form if whole else NOTHING, 0))
