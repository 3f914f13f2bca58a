"""The problems that rates are measured with, which no rule was developed with.

Those of the latest rates are in ``development.domains`` now, as those before them are in
``development.architectures``. These were written by someone who doesn't know the rules, and new
ones are to be written in the same way:

- at least thirty, of which no network, data set or loss is one of those in ``development``;
- each a ``Training`` in ``TRAININGS``, with the order of samples, the schedule and the clipping
  that such networks are usually trained with; ``Problem`` says what it must have, so that faults
  can be injected;
- tried with ``tests/benchmarks/test_diagnosis_problems.py``, which trains them without a diagnosis.

``python -m benchmarks.diagnosis --unseen --seeds 30 --networks 2 --controls 120 --live --write
docs/diagnosis/rates.csv`` measures the rates, with a seed that is new as well. The first look
counts; the problems move to ``development`` before a rule is changed because of it.
"""

from __future__ import annotations

from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.language import LANGUAGE
from benchmarks.diagnosis.unseen.relations import RELATIONS
from benchmarks.diagnosis.unseen.science import SCIENCE
from benchmarks.diagnosis.unseen.signals import SIGNALS
from benchmarks.diagnosis.unseen.tables import TABLES
from benchmarks.diagnosis.unseen.vision import VISION

TRAININGS: tuple[Training, ...] = (
    *(*VISION, *LANGUAGE, *SIGNALS),
    *(*TABLES, *RELATIONS, *SCIENCE),
)
