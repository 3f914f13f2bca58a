"""The problems that rules are developed with. Rates are measured with others, which are new."""

from benchmarks.diagnosis.development.problems import TRAININGS as TRAININGS
