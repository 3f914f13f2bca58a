"""Problems for graphs, interacting bodies and sets of points."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW

from benchmarks.diagnosis.controls import with_replacement
from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.domains.graphs import data, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_INPUTS

GRAPHS = (
    Training(
        Problem(
            "molecules",
            networks.IsomorphismNetwork,
            partial(divided, data.molecules, 3000),
            F.mse_loss,
            Adam,
            rate=5e-3,
            batch_size=32,
            steps=200,
            unfit=OF_INPUTS,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "bodies",
            networks.InteractionNetwork,
            partial(divided, data.bodies, 4000),
            F.mse_loss,
            AdamW,
            rate=5e-3,
            batch_size=50,
            steps=200,
        ),
        order=with_replacement,
    ),
    Training(
        Problem(
            "constellations",
            networks.SetTransformer,
            partial(divided, data.constellations, 3000),
            optimizer=Adam,
            rate=2e-3,
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=1.0,
    ),
)
