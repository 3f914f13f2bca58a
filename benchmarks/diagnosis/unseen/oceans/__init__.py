"""Problems for the oceans."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import SGD, Adam, AdamW

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.oceans import data, losses, networks

OCEANS = (
    Training(
        Problem(
            "eddies",
            networks.EddyNetwork,
            partial(divided, data.eddies, 1600),
            F.cross_entropy,
            SGD,
            rate=0.05,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=16,
            steps=120,
        ),
        schedule=schedules.polynomial,
    ),
    Training(
        Problem(
            "buoys",
            networks.buoy_network,
            partial(divided, data.buoys, 5000),
            losses.turned,
            AdamW,
            rate=4e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=160,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "mixed layers",
            networks.layer_network,
            partial(divided, data.layers, 5000),
            F.huber_loss,
            Adam,
            rate=3e-3,
            batch_size=64,
            steps=150,
        )
    ),
    Training(
        Problem(
            "plankton",
            networks.plankton_network,
            partial(divided, data.plankton, 4000),
            F.cross_entropy,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "floats",
            networks.FloatNetwork,
            partial(divided, data.floats, 5000),
            losses.laplace_likelihood,
            Adam,
            rate=3e-3,
            batch_size=64,
            steps=160,
        ),
        schedule=schedules.exponential,
        clip=1.0,
    ),
)
