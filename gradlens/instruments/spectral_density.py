"""Distribution of all eigenvalues of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Floats, line
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines, Ruler, Shape, Shapes
from gradlens.instruments.scales import padded, step_label
from gradlens.instruments.style import BLUE, FAINT, Entry, tint

FLOOR = 1e-4
"""Smallest density that is shown, as a fraction of the largest; estimates below are inaccurate."""
ARRAYS = ("grid", "density", "low", "high")


class SpectralDensityInstrument(Instrument):
    """Density of the Hessian's eigenvalues at the latest step, with its error, and the first."""

    kinds: ClassVar[tuple[str, ...]] = ("SpectralDensity",)
    title: ClassVar[str] = "Hessian spectral density"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines | Shapes:
        records = history[self.names[0]]
        steps = [step for step, value in records.items() if _usable(value)]
        if not steps:
            return Lines((Curve("", line(records)),))
        last, before = _arrays(records, steps[-1]), steps[:-1][:1]
        first = _arrays(records, steps[0])
        floor = FLOOR * float(last["density"].max())
        # What is below the axis ends there, because zero isn't on a logarithmic one.
        shown = {name: np.maximum(last[name], floor / 10) for name in ARRAYS[1:]}
        band = Shape("band", last["grid"], shown["high"], tint(BLUE, 0.2), "area", shown["low"])
        behind = [
            Shape("first", first["grid"], np.maximum(first["density"], floor / 10), FAINT)
            for _ in before
        ]
        front = Shape("density", last["grid"], shown["density"], BLUE, width=1.4)
        grid = np.concatenate([one["grid"][one["density"] > floor] for one in (first, last)])
        pad = 0.04 * float(grid.max() - grid.min()) or 0.5
        top = max(float(one.max()) for one in (first["density"], last["density"], last["high"]))
        return Shapes(
            (band, *behind, front),
            Ruler("eigenvalue", (float(grid.min()) - pad, float(grid.max()) + pad)),
            Ruler("density", (floor, padded(floor, top, log=True)[1]), log=True),
            (
                Entry(f"step {step_label(steps[-1])}", BLUE),
                *(Entry(f"step {step_label(step)}", FAINT, "thin") for step in before),
                Entry("error", tint(BLUE, 0.2), "box"),
            ),
        )


def _arrays(records: Series, step: int) -> dict[str, Floats]:
    return {name: np.asarray(records[step][name], dtype=np.float64) for name in ARRAYS}


def _usable(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {*ARRAYS} <= {*value}:
        return False
    density = np.asarray(value["density"], dtype=np.float64)
    return bool(density.size and np.isfinite(density).all() and density.max() > 0)
