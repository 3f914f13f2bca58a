"""Problems for images."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, NAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.domains.images import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_TARGETS

IMAGES = (
    Training(
        Problem(
            "excited ResNet",
            networks.excited_resnet,
            partial(divided, data.fabrics, 2500),
            rate=0.05,
            options={"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            batch_size=24,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "ShuffleNet",
            networks.shuffle_net,
            partial(divided, data.pieces, 1600),
            optimizer=Adam,
            rate=5e-3,
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "cell counter",
            networks.counter,
            partial(divided, data.cells, 1200),
            F.smooth_l1_loss,
            AdamW,
            rate=5e-3,
            batch_size=24,
            steps=200,
        )
    ),
    Training(
        Problem(
            "dilated segmentation",
            networks.dilated_network,
            partial(divided, data.roads, 1000),
            losses.entropy_and_overlap,
            NAdam,
            rate=3e-3,
            batch_size=8,
            steps=120,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "super-resolution",
            networks.upscaler,
            partial(divided, data.landscapes, 1500),
            F.l1_loss,
            Adam,
            rate=4e-3,
            batch_size=16,
            steps=150,
        )
    ),
    Training(
        Problem(
            "Perceiver",
            networks.Perceiver,
            partial(divided, data.bar_charts, 1600),
            optimizer=AdamW,
            rate=3e-3,
            options={"weight_decay": 0.02, "betas": (0.9, 0.98)},
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=1.0,
    ),
    Training(
        Problem(
            "sum of digits",
            networks.PairSum,
            partial(divided, data.digit_pairs, 4000),
            partial(F.cross_entropy, label_smoothing=0.05),
            rate=0.03,
            options={"momentum": 0.9},
            batch_size=48,
            steps=250,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "contrasted views",
            networks.TwoViews,
            partial(divided, data.oscillograms, 2000),
            losses.contrasted,
            rate=0.1,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=64,
            steps=150,
            unfit=OF_TARGETS,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
)
