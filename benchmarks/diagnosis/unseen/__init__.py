"""The problems that rates are measured with, which no rule was developed with.

The scores of problems that rates were measured with before are in ``scores.csv``. New problems are
written by someone who doesn't know the rules:

- at least thirty, of which no network, data set or loss is one of those in ``development``;
- each a ``Training`` in ``TRAININGS``, with the order of samples, the schedule and the clipping
  that such networks are usually trained with; ``Problem`` says what it must have, so that faults
  can be injected;
- tried with ``tests/benchmarks/test_diagnosis_problems.py``, which trains them without a diagnosis.

``python -m benchmarks.diagnosis --unseen --seeds 30 --networks 2 --controls 120 --live --write
docs/diagnosis/rates.csv`` measures the rates, with a seed that is new as well. The first look
counts; before a rule is changed because of it, what is new about the problems goes into the table
of ``development``, and their scores into ``scores.csv``.
"""

from benchmarks.diagnosis.unseen.problems import TRAININGS as TRAININGS
