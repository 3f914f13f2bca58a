"""Problems for robots."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import SGD, Adam, NAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.robots import data, losses, networks

ROBOTS = (
    Training(
        Problem(
            "turns",
            networks.TurnNetwork,
            partial(divided, data.scans, 5000),
            losses.chords,
            Adam,
            rate=3e-3,
            batch_size=64,
            steps=160,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "grips",
            networks.grip_network,
            partial(divided, data.grips, 2400),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=4e-3,
            batch_size=16,
            steps=140,
        )
    ),
    Training(
        Problem(
            "arms",
            networks.ArmNetwork,
            partial(divided, data.arms, 8000),
            F.mse_loss,
            NAdam,
            rate=4e-3,
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "ground",
            networks.ground_network,
            partial(divided, data.ground, 4000),
            F.cross_entropy,
            SGD,
            rate=0.05,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "experts for gaits",
            networks.GaitMixture,
            partial(divided, data.gaits, 10000),
            F.smooth_l1_loss,
            Adam,
            rate=1e-2,
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
)
