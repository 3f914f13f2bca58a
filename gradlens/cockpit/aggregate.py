"""Statistics of a quantity, recorded instead of its single values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gradlens.history.records import Source
from gradlens.numerics.running_statistics import STATISTICS, Statistic
from gradlens.quantities.quantity import Quantity


@dataclass(frozen=True, eq=False)
class Aggregate:
    """A quantity of which statistics are recorded, ``over`` an epoch or a number of its values.

    It takes the quantity's place in the list that a cockpit is given. ``cockpit.tick_epoch()`` ends
    an epoch. In the record, each number of the quantity's value is replaced by a dict of its
    ``statistics``, with the ``"count"`` of the numbers, and of those that are NaN, if any, as
    ``"undefined"``. An index, such as ``"least_unit"``, is that of the least value, and is recorded
    if ``"min"`` is among the statistics. Arrays and lists are left out. With ``raw``, single values
    are recorded as well. The series is called ``name``, by default "OutputNorm (epoch)" or
    "OutputNorm (window)".

    ``TypeError`` if ``quantity`` isn't one; ``ValueError`` if ``over`` or ``statistics`` aren't
    among those above.
    """

    quantity: Quantity
    over: Literal["epoch"] | int = "epoch"
    statistics: Sequence[Statistic] = STATISTICS
    raw: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.quantity, Quantity):
            raise TypeError(
                f"{self.quantity!r} is not a quantity: pass one, as in Aggregate(Loss())"
            )
        if self.over != "epoch" and (type(self.over) is not int or self.over < 1):
            raise ValueError(f"over={self.over!r}: use 'epoch', or a number of values from 1 on")
        listed = isinstance(self.statistics, Iterable) and not isinstance(self.statistics, str)
        chosen = tuple(self.statistics) if listed else ()
        if not chosen or any(name not in STATISTICS for name in chosen):
            raise ValueError(
                f"statistics={self.statistics!r}: choose some of {', '.join(STATISTICS)}"
            )
        object.__setattr__(self, "statistics", chosen)
        what = "epoch" if self.over == "epoch" else "window"
        object.__setattr__(self, "name", self.name or f"{self.quantity.name} ({what})")

    @property
    def source(self) -> Source:
        """The source of its series, with the quantity's view."""
        view = self.quantity.view
        what = "epoch" if self.over == "epoch" else f"{self.over} values"
        return Source(
            ("Aggregate",), replace(view, title=f"{view.title or self.quantity.name} ({what})")
        )
