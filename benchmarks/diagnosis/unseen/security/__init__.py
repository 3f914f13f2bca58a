"""Problems for security."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.security import data, losses, networks

SECURITY = (
    Training(
        Problem(
            "hosts",
            networks.HostNetwork,
            partial(divided, data.hosts, 5000),
            F.cross_entropy,
            Adam,
            rate=4e-3,
            batch_size=32,
            steps=160,
        ),
        schedule=schedules.exponential,
        clip=1.0,
    ),
    Training(
        Problem(
            "logs",
            networks.LogNetwork,
            partial(divided, data.logs, 4000),
            F.cross_entropy,
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
            "power traces",
            networks.trace_network,
            partial(divided, data.power_traces, 5000),
            F.cross_entropy,
            Adam,
            rate=2e-3,
            batch_size=32,
            steps=160,
        )
    ),
    Training(
        Problem(
            "connections",
            networks.ConnectionNetwork,
            partial(divided, data.connections, 8000),
            losses.generalised_cross_entropy,
            Adam,
            rate=3e-3,
            batch_size=64,
            steps=160,
        )
    ),
    Training(
        Problem(
            "experts for packets",
            networks.PacketMixture,
            partial(divided, data.packets, 10000),
            F.cross_entropy,
            AdamW,
            rate=4e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.cosine,
    ),
)
