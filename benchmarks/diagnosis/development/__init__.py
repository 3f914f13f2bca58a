"""The problems that rules are developed with. Rates are measured with others, which are new."""

from benchmarks.diagnosis.development.architectures import ARCHITECTURES
from benchmarks.diagnosis.development.basics import BASICS
from benchmarks.diagnosis.development.disciplines import DISCIPLINES
from benchmarks.diagnosis.development.domains import DOMAINS
from benchmarks.diagnosis.development.fields import FIELDS
from benchmarks.diagnosis.development.trades import TRADES
from benchmarks.diagnosis.training import Training

TRAININGS = (*map(Training, BASICS), *ARCHITECTURES, *DOMAINS, *FIELDS, *TRADES, *DISCIPLINES)
"""How they are usually trained."""
PROBLEMS = tuple(training.problem for training in TRAININGS)
