"""Problems for tables."""

from __future__ import annotations

from functools import partial

from torch.optim import Adagrad, Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.fields.tables import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

TABLES = (
    Training(
        Problem(
            "factorisation machine",
            partial(networks.FactorisationMachine, data.FIELDS),
            partial(divided, data.opinions, 8000),
            losses.ordinal,
            Adagrad,
            rate=0.1,
            batch_size=128,
            steps=250,
        )
    ),
    Training(
        Problem(
            "two towers",
            networks.TwoTowers,
            partial(divided, data.choices, 5000),
            losses.list_likelihood,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.warmed_up_linear,
    ),
    Training(
        Problem(
            "survival",
            networks.survival_network,
            partial(divided, data.patients, 4000),
            losses.hazards,
            Adam,
            rate=5e-3,
            options={"weight_decay": 1e-4},
            batch_size=64,
            steps=200,
        )
    ),
    Training(
        Problem(
            "mean and deviation",
            networks.MeanAndDeviation,
            partial(divided, data.impedances, 3000),
            losses.ranked_probability,
            RMSprop,
            rate=5e-3,
            batch_size=50,
            steps=200,
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "soft trees",
            networks.SoftTrees,
            partial(divided, data.applications, 6000),
            optimizer=Adam,
            rate=3e-2,
            batch_size=64,
            steps=250,
        )
    ),
    Training(
        Problem(
            "mixture for damages",
            networks.DamageMixture,
            partial(divided, data.damages, 6000),
            losses.tweedie,
            AdamW,
            rate=1e-2,
            options={"weight_decay": 0.01},
            batch_size=100,
            steps=250,
        ),
        schedule=schedules.warmed_up,
        clip=5.0,
    ),
    Training(
        Problem(
            "metric learning",
            networks.Embedder,
            partial(divided, data.gestures, 3000),
            losses.contrastive,
            rate=0.1,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=48,
            steps=200,
        ),
        order=data.in_groups,
        schedule=schedules.cosine,
    ),
)
