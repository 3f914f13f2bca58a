"""The problems that rates are measured with: none of the rules was written with these.

Neither a network nor a data set is one of those that rules are developed with. Each stands with
the order of samples, the schedule and the clipping that such networks are usually trained with.
"""

from __future__ import annotations

from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.generative import GENERATIVE
from benchmarks.diagnosis.unseen.graphs import GRAPHS
from benchmarks.diagnosis.unseen.images import IMAGES
from benchmarks.diagnosis.unseen.rows import ROWS
from benchmarks.diagnosis.unseen.sequences import SEQUENCES

TRAININGS: tuple[Training, ...] = (*ROWS, *IMAGES, *SEQUENCES, *GRAPHS, *GENERATIVE)
