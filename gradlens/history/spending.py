"""What tracking has taken of the training time, where it has a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gradlens.history.coverage import few, percent
from gradlens.history.plain_data import Count


@dataclass(frozen=True)
class Turns:
    """At how many steps a quantity was tracked, and the seconds that such a step has cost.

    ``seconds`` is ``None`` as long as that wasn't measured.
    """

    count: Count
    seconds: float | None = None


@dataclass(frozen=True)
class Spending:
    """The share of the training time that tracking has taken.

    ``share`` is the budget, and ``taken`` is what tracking has taken; it is a NaN before that was
    measured. ``step_seconds`` is the time of a step without tracking. ``turns`` are those of the
    quantities that were not tracked at each step of their schedules.
    """

    share: float
    taken: float = math.nan
    step_seconds: float = math.nan
    turns: Mapping[str, Turns] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """The share in words, and then the turns of all quantities with their costs."""
        taken = "an unknown part" if math.isnan(self.taken) else percent(round(self.taken, 4))
        yield f"tracking took {taken} of the time, of a budget of {percent(self.share)}"
        groups: dict[str, list[str]] = {}
        for name, turns in self.turns.items():
            groups.setdefault(self._in_words(turns), []).append(name)
        for words, names in groups.items():
            yield f"{few(names)}: {words}"

    def _in_words(self, turns: Turns) -> str:
        count = "1 turn" if turns.count == 1 else f"{turns.count or 'no'} turns"
        if turns.seconds is None:
            return f"{count}, the cost of one isn't known yet"
        times = max(turns.seconds, 0.0) / self.step_seconds
        return f"{count}, each as long as {plain_steps(times)}"


def plain_steps(times: float) -> str:
    """So many times the time of a plain step, in words."""
    if times < 0.01:
        return "less than 0.01 plain steps"
    return f"{times:,.0f} plain steps" if times >= 10 else f"{times:.2g} plain steps"
