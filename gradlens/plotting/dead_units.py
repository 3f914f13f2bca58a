"""Which units of which layers are dead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradlens.history.history import History

KIND = "OutputActivation"


@dataclass(frozen=True)
class DeadUnits:
    """The indices of a layer's dead units, by the latest record of a series."""

    series: str
    step: int
    layer: str
    units: tuple[int, ...]


def dead_units(history: History) -> tuple[DeadUnits, ...]:
    """The layers with dead units, where ``OutputActivation(units=True)`` was tracked."""
    return tuple(one for name in history.of_kind(KIND) for one in _of_series(name, history))


def _of_series(name: str, history: History) -> list[DeadUnits]:
    records = history[name]
    step = max(records, default=0)
    record = records.get(step)
    layers = record.get("layers") if isinstance(record, Mapping) else None
    if not isinstance(layers, Mapping):
        return []
    found = ((layer, _units(value)) for layer, value in layers.items())
    return [DeadUnits(name, step, layer, units) for layer, units in found if units]


def _units(value: object) -> tuple[int, ...]:
    """The indices in a layer's record; none if it has none, or something else."""
    units = value.get("dead_units") if isinstance(value, Mapping) else None
    if not isinstance(units, np.ndarray) or units.dtype.kind not in "iu":
        return ()
    return tuple(units.ravel().tolist())
