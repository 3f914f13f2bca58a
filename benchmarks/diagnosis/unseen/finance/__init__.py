"""Problems for finance and insurance."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, NAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.finance import data, losses, networks

FINANCE = (
    Training(
        Problem(
            "options",
            networks.OptionNetwork,
            partial(divided, data.options, 6000),
            F.mse_loss,
            Adam,
            rate=3e-3,
            batch_size=64,
            steps=160,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "repairs",
            networks.RepairNetwork,
            partial(divided, data.repairs, 6000),
            losses.gamma_deviance,
            AdamW,
            rate=5e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.cosine,
        clip=5.0,
    ),
    Training(
        Problem(
            "volatilities",
            networks.Volatility,
            partial(divided, data.volatilities, 6000),
            losses.quasi_likelihood,
            NAdam,
            rate=3e-3,
            batch_size=64,
            steps=150,
        ),
        clip=5.0,
    ),
    Training(
        Problem(
            "order books",
            networks.OrderBookNetwork,
            partial(divided, data.order_books, 4000),
            F.cross_entropy,
            Adam,
            rate=3e-3,
            batch_size=32,
            steps=160,
        ),
        clip=2.0,
    ),
    Training(
        Problem(
            "experts for mortgages",
            networks.MortgageMixture,
            partial(divided, data.mortgages, 10000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=8e-3,
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
)
