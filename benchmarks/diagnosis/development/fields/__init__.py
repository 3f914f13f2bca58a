"""Problems of six fields, each with the order, schedule and clipping that are usual there.

Rates were measured with them after those with the problems of ``domains``. Since then, rules have
been developed with them, too.
"""

from __future__ import annotations

from benchmarks.diagnosis.development.fields.language import LANGUAGE
from benchmarks.diagnosis.development.fields.relations import RELATIONS
from benchmarks.diagnosis.development.fields.science import SCIENCE
from benchmarks.diagnosis.development.fields.signals import SIGNALS
from benchmarks.diagnosis.development.fields.tables import TABLES
from benchmarks.diagnosis.development.fields.vision import VISION
from benchmarks.diagnosis.training import Training

FIELDS: tuple[Training, ...] = (
    *(*VISION, *LANGUAGE, *SIGNALS),
    *(*TABLES, *RELATIONS, *SCIENCE),
)
