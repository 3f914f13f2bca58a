"""Problems of five domains, each with the order, schedule and clipping that are usual there.

Rates were measured with them after those with ``architectures``. Since then, rules have been
developed with them, too.
"""

from __future__ import annotations

from benchmarks.diagnosis.development.domains.generative import GENERATIVE
from benchmarks.diagnosis.development.domains.graphs import GRAPHS
from benchmarks.diagnosis.development.domains.images import IMAGES
from benchmarks.diagnosis.development.domains.rows import ROWS
from benchmarks.diagnosis.development.domains.sequences import SEQUENCES
from benchmarks.diagnosis.training import Training

DOMAINS: tuple[Training, ...] = (*ROWS, *IMAGES, *SEQUENCES, *GRAPHS, *GENERATIVE)
