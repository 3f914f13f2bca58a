"""Problems for medicine."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, NAdam, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.disciplines.medicine import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

MEDICINE = (
    Training(
        Problem(
            "nodules",
            networks.volume_network,
            partial(divided, data.nodules, 1200),
            rate=0.03,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=16,
            steps=120,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "ultrasound",
            networks.SegNet,
            partial(divided, data.ultrasound, 1000),
            losses.logarithmic_dice,
            Adam,
            rate=3e-3,
            batch_size=8,
            steps=150,
        )
    ),
    Training(
        Problem(
            "blood values",
            networks.ColumnTransformer,
            partial(divided, data.blood_values, 3000),
            losses.asymmetric,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=1.0,
    ),
    Training(
        Problem(
            "risks",
            networks.risk_network,
            partial(divided, data.follow_ups, 4000),
            losses.partial_likelihood,
            NAdam,
            rate=4e-3,
            options={"weight_decay": 1e-4},
            batch_size=64,
            steps=200,
        ),
    ),
    Training(
        Problem(
            "glucose",
            networks.ShortAndLong,
            partial(divided, data.glucose, 2000),
            losses.low_matters,
            Adam,
            rate=4e-3,
            batch_size=16,
            steps=150,
        ),
        clip=5.0,
    ),
    Training(
        Problem(
            "experts for doses",
            networks.DoseMixture,
            partial(divided, data.doses, 6000),
            F.mse_loss,
            RMSprop,
            rate=5e-3,
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.linear,
    ),
)
