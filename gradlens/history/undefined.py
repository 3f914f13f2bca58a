"""A NaN that says why."""

from __future__ import annotations


class Undefined(float):
    """A NaN carrying the reason why there is no number.

    It behaves as ``float("nan")`` everywhere, so that arithmetic, plots and files need no
    special case. ``reason`` says why there is no number.
    """

    reason: str

    def __new__(cls, reason: str) -> Undefined:
        value = super().__new__(cls, "nan")
        value.reason = reason
        return value

    def __repr__(self) -> str:
        return f"Undefined({self.reason!r})"

    def __reduce__(self) -> tuple[type[Undefined], tuple[str]]:
        return Undefined, (self.reason,)
