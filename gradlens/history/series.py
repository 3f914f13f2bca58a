"""The values of one series, in little memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import NoneType
from typing import Any, TypeAlias, final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gradlens.history.content import Content, grown
from gradlens.history.forms import FLOAT, Form, taken_in
from gradlens.history.json_lines import Value, encoded

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

Column: TypeAlias = "array[int]"

NOTHING = Form((NoneType, None))


SHOWN = 20
"""Values that the text of a series has, at most."""


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
        self._form = array("q")
        """For each value the place of its form in ``_forms``."""
        self._start = array("q")
        """For each value the place of its first number in the content."""
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
            raise KeyError(step)
        place = bisect_left(self._steps, step)
        return self._forms[self._form[place]].value(self._content, self._start[place])

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
        self._steps = grown(self._steps, step)
        self._form = grown(self._form, place)
        self._start = grown(self._start, start)

    def _order(self) -> None:
        """Sort the values by step, of which the last one counts if there are several."""
        if self._is_ordered:
            return
        steps = np.array(self._steps)
        order = np.argsort(steps, kind="stable")
        last = np.append(np.diff(steps[order]) > 0, True)
        self._choose(order[last])
        self._is_ordered = True

    def _choose(self, places: Places) -> None:
        self._steps, self._form, self._start = (
            _taken(column, places) for column in (self._steps, self._form, self._start)
        )

    # All at once ---------------------------------------------------------------------------

    def only(self, steps: Sequence[int]) -> Series:
        """The values at these steps."""
        self._order()
        found = self._like(self._forms, self._steps, self._form, self._start)
        found._choose(np.flatnonzero(np.isin(np.array(self._steps), steps)))
        return found

    @property
    def steps(self) -> Floats:
        """``[K]``"""
        self._order()
        return np.array(self._steps, dtype=np.float64)

    def numbers(self) -> Floats:
        """The values ``[K]``; NaN for those that are no numbers."""
        self._order()
        form = np.array(self._form)
        found: Floats = np.array([_constant(one) for one in self._forms])[form]
        are_numbers = np.array([one.is_number for one in self._forms])[form]
        if are_numbers.any():
            # The view lasts no longer than this statement, since the numbers can't grow meanwhile.
            found[are_numbers] = np.frombuffer(self._content.numbers)[
                np.array(self._start)[are_numbers]
            ]
        return found

    def table(self) -> Floats | None:
        """All entries ``[R, K]`` of dicts of floats with the same keys; ``None`` for others.

        This is much faster than one column after the other.
        """
        used = self._used()
        if len(used) != 1 or used[0].kind is not dict or not used[0].is_plain:
            return None
        # The view lasts no longer than this statement, since the numbers can't grow meanwhile.
        rows = sliding_window_view(np.frombuffer(self._content.numbers), used[0].numbers)[
            np.array(self._start)
        ]
        return np.ascontiguousarray(rows.T)

    def column(self, name: str, whole: bool = False) -> Series:
        """One entry of each dict, ``None`` where there is none, and all other values themselves.

        With ``whole``, dicts without the entry stay themselves, too.
        """
        entries = [_entry(form, name, whole) for form in self._forms]
        form = [form for form, _ in entries]
        before = np.array([numbers for _, numbers in entries])
        self._order()
        start = np.array(self._start) + before[np.array(self._form)]
        return self._like(form, self._steps, self._form, array("q", start.tobytes()))

    def having(self, name: str) -> Series:
        """One entry of the dicts that have it."""
        have = np.array([name in form.places for form in self._forms])
        found = self.column(name)
        found._choose(np.flatnonzero(have[np.array(self._form)]))
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
        reasons = [form.reason for form in self._forms]
        self._order()
        form = np.array(self._form)
        last = np.flatnonzero(np.array(list(map(bool, reasons)))[form])[-1:]
        return reasons[form[last[0]]] if last.size else ""

    def _used(self) -> list[Form]:
        """The forms of the values, by their first appearance."""
        self._order()
        places, first = np.unique(np.array(self._form), return_index=True)
        return [self._forms[place] for place in places[np.argsort(first)]]

    def _like(self, forms: Sequence[Form], steps: Column, form: Column, start: Column) -> Series:
        found = Series(self._content, forms)
        found._steps, found._form, found._start = steps, form, start
        return found


def _taken(column: Column, places: Places) -> Column:
    return array("q", np.array(column)[places].tobytes())


def _constant(form: Form) -> float:
    return float(form.constant) if isinstance(form.constant, (bool, int, float)) else math.nan


def _entry(form: Form, name: str, whole: bool) -> tuple[Form, int]:
    if form.kind is not dict:
        return form, 0
    return form.places.get(name, (form if whole else NOTHING, 0))
