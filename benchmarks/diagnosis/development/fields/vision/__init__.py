"""Problems for images."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.fields.vision import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Batch, Training

MIXED = 0.2
"""Both parameters of the beta distribution of the weights (Zhang et al., 2018)."""


def mixed_up(step: int, batch: Batch) -> Batch:
    """Means of samples and others, with the same weight for a whole batch (Zhang et al., 2018)."""
    other = torch.randperm(len(batch.ids), generator=torch.Generator().manual_seed(step))
    share = random.Random(step).betavariate(MIXED, MIXED)
    return replace(
        batch,
        inputs=share * batch.inputs + (1 - share) * batch.inputs[other],
        targets=share * batch.targets + (1 - share) * batch.targets[other],
    )


VISION = (
    Training(
        Problem(
            "SqueezeNet with mixed letters",
            networks.squeeze_net,
            partial(divided, data.letters, 3000),
            F.cross_entropy,
            rate=0.05,
            options={"momentum": 0.9, "weight_decay": 2e-4},
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.linear,
        change=mixed_up,
    ),
    Training(
        Problem(
            "ResNeXt for faces",
            networks.res_next,
            partial(divided, data.faces, 2400),
            losses.focal,
            rate=0.04,
            options={"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "detector",
            networks.detector,
            partial(divided, data.shapes, 2500),
            losses.detection,
            Adam,
            rate=5e-3,
            batch_size=24,
            steps=200,
        ),
        schedule=schedules.in_steps,
    ),
    Training(
        Problem(
            "hourglass",
            networks.StackedHourglass,
            partial(divided, data.figures, 1200),
            losses.heatmaps,
            Adam,
            rate=5e-3,
            batch_size=16,
            steps=150,
        )
    ),
    Training(
        Problem(
            "Swin transformer",
            networks.swin,
            partial(divided, data.fields, 3000),
            optimizer=AdamW,
            rate=3e-3,
            options={"weight_decay": 0.05},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=5.0,
    ),
    Training(
        Problem(
            "radar",
            networks.ConvolutionalMemory,
            partial(divided, data.radar, 1000),
            losses.charbonnier,
            RMSprop,
            rate=4e-3,
            options={"alpha": 0.9},
            batch_size=16,
            steps=150,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "feature pyramid",
            networks.FeaturePyramid,
            partial(divided, data.leaves, 1200),
            losses.tversky,
            rate=0.3,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=12,
            steps=150,
        ),
        schedule=schedules.polynomial,
    ),
)
