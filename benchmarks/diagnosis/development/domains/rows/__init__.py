"""Problems for tables."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.domains.rows import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

ROWS = (
    Training(
        Problem(
            "softplus",
            networks.softplus_network,
            partial(divided, data.iris, 120),
            rate=0.05,
            batch_size=8,
            steps=200,
        )
    ),
    Training(
        Problem(
            "deep residual",
            networks.deep_residual,
            partial(divided, data.shells, 6000),
            F.binary_cross_entropy_with_logits,
            RAdam,
            rate=3e-3,
            options={"weight_decay": 1e-4},
            batch_size=128,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "without biases",
            networks.without_biases,
            partial(divided, data.prototypes, 6000),
            F.cross_entropy,
            Muon,
            rate=5e-3,
            options={"weight_decay": 0.05, "nesterov": True},
            batch_size=64,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "topics",
            networks.regularised,
            partial(divided, data.topics, 4000),
            F.multilabel_soft_margin_loss,
            Adagrad,
            rate=0.03,
            batch_size=50,
            steps=200,
        )
    ),
    Training(
        Problem(
            "claims",
            partial(networks.FeatureTransformer, data.FACTORS),
            partial(divided, data.claims, 8000),
            F.poisson_nll_loss,
            AdamW,
            rate=2e-3,
            options={"weight_decay": 0.01},
            batch_size=128,
            steps=200,
        ),
        schedule=schedules.warmed_up,
        clip=1.0,
    ),
    Training(
        Problem(
            "sparse mixture",
            networks.SparseMixture,
            partial(divided, data.regimes, 6000),
            losses.balanced_regression,
            Adam,
            rate=1e-2,
            batch_size=100,
            steps=250,
        )
    ),
    Training(
        Problem(
            "mixture density",
            networks.mixture_density,
            partial(divided, data.arm_positions, 5000),
            losses.mixture_likelihood,
            NAdam,
            rate=2e-3,
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.exponential,
        clip=5.0,
    ),
    Training(
        Problem(
            "ranking",
            networks.scorer,
            partial(divided, data.search_results, 2000),
            losses.pairwise_logistic,
            RMSprop,
            rate=2e-3,
            options={"momentum": 0.5},
            batch_size=20,
            steps=200,
        )
    ),
    Training(
        Problem(
            "cross network",
            networks.CrossNetwork,
            partial(divided, data.transactions, 12000),
            losses.weighted_classes,
            Adamax,
            rate=1e-2,
            batch_size=256,
            steps=200,
        )
    ),
)
