"""Problems for sounds and time series."""

from __future__ import annotations

from functools import partial

from torch.optim import Adam, AdamW

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.fields.signals import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

SIGNALS = (
    Training(
        Problem(
            "speech recogniser",
            networks.Recogniser,
            partial(divided, data.phones, 2000),
            losses.alignment,
            rate=0.05,
            options={"momentum": 0.9, "nesterov": True},
            batch_size=20,
            steps=200,
        ),
        schedule=schedules.exponential,
        clip=5.0,
    ),
    Training(
        Problem(
            "N-BEATS",
            networks.NBeats,
            partial(divided, data.sales, 5000),
            losses.scaled_error,
            Adam,
            rate=2e-3,
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "visitors",
            networks.CountForecaster,
            partial(divided, data.visits, 2500),
            losses.count_likelihood,
            Adam,
            rate=1e-2,
            batch_size=32,
            steps=200,
        ),
        clip=10.0,
    ),
    Training(
        Problem(
            "state spaces",
            networks.StateSpaceClassifier,
            partial(divided, data.chirps, 2500),
            optimizer=AdamW,
            rate=1e-2,
            options={"weight_decay": 0.01},
            batch_size=24,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
    Training(
        Problem(
            "Wave-U-Net",
            networks.WaveUNet,
            partial(divided, data.hums, 1500),
            losses.spectral,
            Adam,
            rate=3e-3,
            options={"betas": (0.8, 0.99)},
            batch_size=16,
            steps=150,
        )
    ),
)
