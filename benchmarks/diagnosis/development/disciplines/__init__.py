"""Problems of six disciplines, each with the order, schedule and clipping that are usual there.

Rates were measured with them after those with the problems of ``trades``. Since then, rules have
been developed with them, too.
"""

from __future__ import annotations

from benchmarks.diagnosis.development.disciplines.energy import ENERGY
from benchmarks.diagnosis.development.disciplines.farming import FARMING
from benchmarks.diagnosis.development.disciplines.games import GAMES
from benchmarks.diagnosis.development.disciplines.laboratory import LABORATORY
from benchmarks.diagnosis.development.disciplines.medicine import MEDICINE
from benchmarks.diagnosis.development.disciplines.sky import SKY
from benchmarks.diagnosis.training import Training

DISCIPLINES: tuple[Training, ...] = (
    *(*MEDICINE, *ENERGY, *SKY),
    *(*GAMES, *LABORATORY, *FARMING),
)
