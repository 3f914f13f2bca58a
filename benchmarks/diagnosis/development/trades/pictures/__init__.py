"""Problems for images."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, NAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.trades.pictures import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_TARGETS

PICTURES = (
    Training(
        Problem(
            "GhostNet",
            networks.ghost_net,
            partial(divided, data.road_signs, 2000),
            rate=0.05,
            options={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "ConvMixer",
            networks.conv_mixer,
            partial(divided, data.tiles, 2000),
            losses.polynomial_entropy,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.02},
            batch_size=32,
            steps=120,
        ),
        schedule=schedules.warmed_up_linear,
    ),
    Training(
        Problem(
            "LinkNet",
            networks.LinkNet,
            partial(divided, data.coins, 1200),
            losses.jaccard,
            Adam,
            rate=3e-3,
            batch_size=16,
            steps=120,
        ),
        schedule=schedules.polynomial,
    ),
    Training(
        Problem(
            "locator",
            networks.locator,
            partial(divided, data.gauges, 1500),
            losses.wing,
            NAdam,
            rate=3e-3,
            batch_size=16,
            steps=150,
        )
    ),
    Training(
        Problem(
            "capsules",
            networks.Capsules,
            partial(divided, data.dice, 2500),
            losses.margins,
            Adam,
            rate=3e-3,
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "triplets",
            networks.TripletNetwork,
            partial(divided, data.signatures, 2000),
            losses.triplets,
            rate=0.05,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=32,
            steps=150,
            unfit=OF_TARGETS,  # for the loss has no use for the writers
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "DnCNN",
            networks.noise_finder,
            partial(divided, data.noisy_waves, 1500),
            F.mse_loss,
            Adam,
            rate=3e-3,
            batch_size=16,
            steps=120,
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "patch discriminator",
            networks.patch_discriminator,
            partial(divided, data.skins, 2000),
            losses.hinge,
            Adam,
            rate=2e-3,
            options={"betas": (0.5, 0.999)},
            batch_size=32,
            steps=150,
        )
    ),
)
