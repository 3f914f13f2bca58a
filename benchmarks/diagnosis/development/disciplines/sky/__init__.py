"""Problems for astronomy."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, NAdam, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.disciplines.sky import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

SKY = (
    Training(
        Problem(
            "transits",
            networks.TransitNetwork,
            partial(divided, data.transits, 3000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=2e-3,
            batch_size=32,
            steps=180,
        )
    ),
    Training(
        Problem(
            "stellar spectra",
            networks.spectral_network,
            partial(divided, data.stellar_spectra, 3000),
            F.mse_loss,
            rate=0.03,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "redshifts",
            networks.DenseRows,
            partial(divided, data.redshifts, 6000),
            losses.earth_movers,
            RMSprop,
            rate=2e-3,
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.linear,
    ),
    Training(
        Problem(
            "lenses",
            networks.TurnedViews,
            partial(divided, data.lenses, 2000),
            F.binary_cross_entropy_with_logits,
            AdamW,
            rate=2e-3,
            options={"weight_decay": 0.01},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "supernovae",
            networks.TimeAttention,
            partial(divided, data.supernovae, 5000),
            optimizer=Adam,
            rate=3e-3,
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.warmed_up,
    ),
    Training(
        Problem(
            "dirty images",
            networks.cleaner,
            partial(divided, data.dirty_images, 1000),
            losses.several_scales,
            NAdam,
            rate=2e-3,
            batch_size=8,
            steps=150,
        ),
        schedule=schedules.in_steps,
    ),
)
