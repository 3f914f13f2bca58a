"""Problems of six trades, each with the order, schedule and clipping that are usual there.

Rates were measured with them after those with the problems of ``fields``. Since then, rules have
been developed with them, too.
"""

from __future__ import annotations

from benchmarks.diagnosis.development.trades.mechanics import MECHANICS
from benchmarks.diagnosis.development.trades.pictures import PICTURES
from benchmarks.diagnosis.development.trades.records import RECORDS
from benchmarks.diagnosis.development.trades.series import SERIES
from benchmarks.diagnosis.development.trades.shapes import SHAPES
from benchmarks.diagnosis.development.trades.writing import WRITING
from benchmarks.diagnosis.training import Training

TRADES: tuple[Training, ...] = (
    *(*PICTURES, *WRITING, *SERIES),
    *(*RECORDS, *SHAPES, *MECHANICS),
)
