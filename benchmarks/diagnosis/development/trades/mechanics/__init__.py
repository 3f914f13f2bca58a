"""Problems for equations, codes, densities and control."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, Adamax, AdamW, NAdam, RAdam

from benchmarks.diagnosis.controls import with_replacement
from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.trades.mechanics import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

MECHANICS = (
    Training(
        Problem(
            "Fourier operator",
            networks.fourier_operator,
            partial(divided, data.heat, 4000),
            losses.relative_norm,
            Adam,
            rate=3e-3,
            options={"weight_decay": 1e-5},
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "symplectic network",
            networks.symplectic_network,
            partial(divided, data.wells, 5000),
            losses.geman,
            Adam,
            rate=1e-2,
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "quantised autoencoder",
            networks.quantised_autoencoder,
            partial(divided, data.spectra, 5000),
            losses.correlated,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.01},
            batch_size=50,
            steps=250,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "noise contrast",
            networks.NoiseContrast,
            partial(divided, data.bananas, 12000),
            F.binary_cross_entropy_with_logits,
            NAdam,
            rate=1e-2,
            batch_size=128,
            steps=250,
        )
    ),
    Training(
        Problem(
            "cloned pilot",
            networks.pilot,
            partial(divided, data.flights, 6000),
            losses.power,
            rate=0.03,
            options={"momentum": 0.9},
            batch_size=64,
            steps=250,
        ),
        order=with_replacement,
    ),
    Training(
        Problem(
            "learnt shrinkage",
            networks.LearntShrinkage,
            partial(divided, data.sparse_codes, 8000),
            losses.sparse_codes,
            RAdam,
            rate=1e-2,
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.linear,
        clip=1.0,
    ),
    Training(
        Problem(
            "Koopman network",
            networks.KoopmanNetwork,
            partial(divided, data.predators, 5000),
            losses.discounted,
            Adamax,
            rate=5e-3,
            batch_size=64,
            steps=250,
        ),
        clip=1.0,
    ),
)
