"""Problems for sequences."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.domains.sequences import data, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

SEQUENCES = (
    Training(
        Problem(
            "temporal convolutions",
            networks.temporal_network,
            partial(divided, data.heartbeats, 2000),
            rate=0.005,
            options={"momentum": 0.9},
            batch_size=32,
            steps=250,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "translator",
            partial(
                networks.Translator,
                len(data.CHARACTERS),
                data.WRITTEN + data.STANDARD,
                data.WRITTEN,
            ),
            partial(divided, data.dates, 2000),
            optimizer=Adam,
            rate=5e-3,
            options={"betas": (0.9, 0.98), "eps": 1e-9},
            batch_size=24,
            steps=150,
        ),
        schedule=schedules.inverse_root,
    ),
    Training(
        Problem(
            "brackets",
            networks.LinearBiasDecoder,
            partial(divided, data.brackets, 2000),
            optimizer=AdamW,
            rate=4e-3,
            options={"betas": (0.9, 0.95), "weight_decay": 0.1},
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=1.0,
    ),
    Training(
        Problem(
            "reviews",
            networks.PooledLSTM,
            partial(divided, data.reviews, 4000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=1e-2,
            batch_size=32,
            steps=250,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "forecaster",
            networks.Forecaster,
            partial(divided, data.consumption, 3000),
            F.huber_loss,
            AdamW,
            rate=3e-3,
            batch_size=32,
            steps=200,
        )
    ),
    Training(
        Problem(
            "instruments",
            networks.SoundClassifier,
            partial(divided, data.instruments, 1000),
            optimizer=RMSprop,
            rate=1e-3,
            options={"alpha": 0.9},
            batch_size=16,
            steps=150,
        )
    ),
)
