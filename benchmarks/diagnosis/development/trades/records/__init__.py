"""Problems for tables."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adagrad, Adam, Adamax, AdamW, NAdam, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.trades.records import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_TARGETS

RECORDS = (
    Training(
        Problem(
            "TabNet",
            networks.TabNet,
            partial(divided, data.plants, 8000),
            optimizer=Adam,
            rate=1e-2,
            batch_size=128,
            steps=250,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "interest network",
            networks.InterestNetwork,
            partial(divided, data.shoppers, 16000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=1e-2,
            batch_size=128,
            steps=300,
        )
    ),
    Training(
        Problem(
            "durations",
            networks.durations,
            partial(divided, data.machines, 6000),
            losses.weibull,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.warmed_up,
    ),
    Training(
        Problem(
            "hurdle",
            networks.spending,
            partial(divided, data.purchases, 8000),
            losses.hurdle,
            RMSprop,
            rate=2e-3,
            options={"weight_decay": 1e-5},
            batch_size=64,
            steps=250,
        ),
        clip=2.0,
    ),
    Training(
        Problem(
            "list scorer",
            networks.ListScorer,
            partial(divided, data.hotels, 5000),
            losses.list_divergence,
            NAdam,
            rate=3e-3,
            batch_size=32,
            steps=250,
        ),
        schedule=schedules.linear,
    ),
    Training(
        Problem(
            "experts for two tasks",
            networks.SharedExperts,
            partial(divided, data.drivers, 8000),
            losses.two_tasks,
            Adam,
            rate=5e-3,
            batch_size=100,
            steps=250,
        ),
        schedule=schedules.linear,
    ),
    Training(
        Problem(
            "shares",
            networks.share_network,
            partial(divided, data.shares, 6000),
            losses.beta_likelihood,
            Adam,
            rate=1e-2,
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.cosine,
        clip=3.0,
    ),
    Training(
        Problem(
            "song taste",
            networks.SongTaste,
            partial(divided, data.plays, 16000),
            losses.preferred,
            Adagrad,
            rate=0.2,
            batch_size=256,
            steps=300,
            unfit=OF_TARGETS,  # which are all the same
        )
    ),
    Training(
        Problem(
            "curve network",
            networks.curve_network,
            partial(divided, data.alloys, 5000),
            F.huber_loss,
            Adamax,
            rate=1e-2,
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "additive network",
            networks.AdditiveNetwork,
            partial(divided, data.loans, 8000),
            F.binary_cross_entropy_with_logits,
            rate=0.1,
            options={"momentum": 0.9},
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.in_steps,
    ),
)
