"""Problems for series."""

from __future__ import annotations

from functools import partial

from torch.optim import Adam, AdamW, NAdam, RAdam, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.trades.series import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

SERIES = (
    Training(
        Problem(
            "InceptionTime",
            networks.inception_time,
            partial(divided, data.movements, 2500),
            optimizer=RAdam,
            rate=3e-3,
            batch_size=32,
            steps=200,
        )
    ),
    Training(
        Problem(
            "returns",
            networks.ReturnForecaster,
            partial(divided, data.returns, 6000),
            losses.student,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.linear,
        clip=5.0,
    ),
    Training(
        Problem(
            "patches of series",
            networks.PatchForecaster,
            partial(divided, data.tides, 3000),
            losses.value_and_slope,
            AdamW,
            rate=2e-3,
            options={"weight_decay": 0.01},
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
    Training(
        Problem(
            "trend and rest",
            networks.TrendAndRest,
            partial(divided, data.traffic, 4000),
            losses.near_huber,
            Adam,
            rate=5e-3,
            batch_size=32,
            steps=250,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "commands",
            networks.command_network,
            partial(divided, data.commands, 3000),
            rate=0.05,
            options={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "sleep stages",
            networks.SleepStager,
            partial(divided, data.nights, 2500),
            losses.balanced_stages,
            NAdam,
            rate=4e-3,
            batch_size=32,
            steps=150,
        ),
        clip=5.0,
    ),
    Training(
        Problem(
            "experts for pumps",
            networks.PumpExperts,
            partial(divided, data.pumps, 6000),
            losses.distance,
            Adam,
            rate=1e-2,
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "vibrations",
            networks.vibration_autoencoder,
            partial(divided, data.vibrations, 3000),
            losses.explained,
            RMSprop,
            rate=3e-3,
            batch_size=32,
            steps=250,
        ),
        schedule=schedules.linear,
    ),
)
