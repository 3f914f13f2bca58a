"""Problems for equations, operators, families of functions and decisions."""

from __future__ import annotations

from functools import partial

from torch.optim import Adam, AdamW, NAdam, RMSprop

from benchmarks.diagnosis.controls import with_replacement
from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.fields.science import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

SCIENCE = (
    Training(
        Problem(
            "physics-informed network",
            networks.PhysicsInformed,
            partial(divided, data.membrane, 4000),
            losses.poisson,
            Adam,
            rate=5e-3,
            batch_size=128,
            steps=250,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "operator",
            networks.DeepOperator,
            partial(divided, data.antiderivatives, 6000),
            losses.relative,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 1e-3},
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "dueling network",
            networks.DuelingNetwork,
            partial(divided, data.moves, 6000),
            losses.temporal_difference,
            RMSprop,
            rate=2e-3,
            options={"alpha": 0.95},
            batch_size=64,
            steps=250,
        ),
        order=with_replacement,
        clip=10.0,
    ),
    Training(
        Problem(
            "hypernetwork",
            networks.HyperNetwork,
            partial(divided, data.resonators, 6000),
            losses.cauchy,
            NAdam,
            rate=5e-3,
            batch_size=64,
            steps=250,
        )
    ),
)
