"""Problems for energy."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, Adamax, AdamW, RAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.disciplines.energy import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

ENERGY = (
    Training(
        Problem(
            "wind farms",
            networks.InvertedTransformer,
            partial(divided, data.wind_farms, 2000),
            F.mse_loss,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=16,
            steps=150,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
    Training(
        Problem(
            "batteries",
            networks.BatteryNetwork,
            partial(divided, data.batteries, 2400),
            F.mse_loss,
            Adam,
            rate=3e-3,
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.exponential,
        clip=1.0,
    ),
    Training(
        Problem(
            "appliances",
            networks.sequence_to_point,
            partial(divided, data.appliances, 3000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=3e-3,
            batch_size=32,
            steps=180,
        )
    ),
    Training(
        Problem(
            "power flows",
            networks.GridNetwork,
            partial(divided, data.power_flows, 3000),
            F.mse_loss,
            RAdam,
            rate=4e-3,
            batch_size=32,
            steps=200,
        )
    ),
    Training(
        Problem(
            "experts for turbines",
            networks.TurbineMixture,
            partial(divided, data.turbines, 6000),
            F.huber_loss,
            Adam,
            rate=6e-3,
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "sunshine",
            networks.maxout_network,
            partial(divided, data.sunshine, 5000),
            losses.expectiles,
            Adamax,
            rate=5e-3,
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.in_steps,
    ),
)
