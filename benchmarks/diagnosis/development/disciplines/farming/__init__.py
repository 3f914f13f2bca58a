"""Problems for farms."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, Adamax, AdamW, NAdam, RAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.disciplines.farming import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

FARMING = (
    Training(
        Problem(
            "weeds",
            networks.PyramidPooling,
            partial(divided, data.weeds, 1000),
            optimizer=Adam,
            rate=4e-3,
            batch_size=8,
            steps=120,
        ),
        schedule=schedules.polynomial,
    ),
    Training(
        Problem(
            "fruit",
            networks.network_in_network,
            partial(divided, data.fruit, 2000),
            losses.one_peaked,
            Adam,
            rate=2e-3,
            batch_size=16,
            steps=180,
        )
    ),
    Training(
        Problem(
            "cows",
            networks.MemoryAndConvolutions,
            partial(divided, data.cows, 1800),
            optimizer=RAdam,
            rate=5e-3,
            batch_size=16,
            steps=150,
        ),
        clip=5.0,
    ),
    Training(
        Problem(
            "muzzles",
            networks.MuzzleNetwork,
            partial(divided, data.muzzles, 3000),
            losses.large_margin,
            rate=0.05,
            options={"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "harvests",
            networks.HarvestNetwork,
            partial(divided, data.harvests, 6000),
            F.mse_loss,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.linear,
    ),
    Training(
        Problem(
            "experts for soils",
            networks.SoilMixture,
            partial(divided, data.soils, 4000),
            F.mse_loss,
            Adamax,
            rate=1e-2,
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "hives",
            networks.HiveNetwork,
            partial(divided, data.hives, 2000),
            optimizer=NAdam,
            rate=3e-3,
            batch_size=16,
            steps=150,
        ),
        schedule=schedules.warmed_up,
        clip=1.0,
    ),
)
