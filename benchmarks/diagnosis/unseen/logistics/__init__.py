"""Problems for logistics."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.logistics import data, losses, networks

LOGISTICS = (
    Training(
        Problem(
            "tours",
            networks.TourNetwork,
            partial(divided, data.tours, 6000),
            F.cross_entropy,
            Adam,
            rate=2e-3,
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.cosine,
        clip=1.0,
    ),
    Training(
        Problem(
            "bicycles",
            networks.BicycleNetwork,
            partial(divided, data.bicycles, 1600),
            F.mse_loss,
            AdamW,
            rate=4e-3,
            options={"weight_decay": 0.01},
            batch_size=16,
            steps=120,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "lorries",
            networks.LorryNetwork,
            partial(divided, data.lorries, 8000),
            losses.late_costs_more,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.warmed_up_linear,
        clip=2.0,
    ),
    Training(
        Problem(
            "stacks",
            networks.StackNetwork,
            partial(divided, data.stacks, 6000),
            F.smooth_l1_loss,
            Adam,
            rate=4e-3,
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.exponential,
        clip=1.0,
    ),
    Training(
        Problem(
            "warehouses",
            networks.WarehouseNetwork,
            partial(divided, data.warehouses, 4000),
            losses.exponential_pairs,
            Adam,
            rate=3e-3,
            batch_size=32,
            steps=150,
        ),
        clip=5.0,
    ),
    Training(
        Problem(
            "experts for couriers",
            networks.CourierMixture,
            partial(divided, data.couriers, 8000),
            F.l1_loss,
            RMSprop,
            rate=3e-3,
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.linear,
    ),
)
