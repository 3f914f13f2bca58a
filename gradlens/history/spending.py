"""What tracking has taken of the training time, where it has a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gradlens.history.coverage import few, percent
from gradlens.history.plain_data import Count


@dataclass(frozen=True)
class Spending:
    """The share of the training time that tracking has taken.

    ``share`` is the budget, and ``taken`` is what tracking has taken. ``step_seconds`` is the time
    of a step without tracking, and ``look_seconds`` what tracking takes at a step with it. All
    three are NaN before they were measured. ``turns`` says at how many steps each quantity was
    tracked.
    """

    share: float
    taken: float = math.nan
    step_seconds: float = math.nan
    look_seconds: float = math.nan
    turns: Mapping[str, Count] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """The share in words, then the cost of a look, and the turns of all quantities."""
        taken = "an unknown part" if math.isnan(self.taken) else percent(round(self.taken, 4))
        yield f"tracking took {taken} of the time, of a budget of {percent(self.share)}"
        if not math.isnan(self.look_seconds):
            yield f"a turn takes {plain_steps(self.look_seconds / self.step_seconds)}"
        groups: dict[int, list[str]] = {}
        for name, count in self.turns.items():
            groups.setdefault(count, []).append(name)
        for count, names in groups.items():
            yield f"{few(names)}: {count or 'no'} turn{'' if count == 1 else 's'}"


def plain_steps(times: float) -> str:
    """So many times the time of a plain step, in words."""
    if times < 0.01:
        return "less than 0.01 plain steps"
    return f"{times:,.0f} plain steps" if times >= 10 else f"{times:.2g} plain steps"
