"""Problems for graphs, clouds of points, and binary patterns."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.fields.relations import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_INPUTS

RELATIONS = (
    Training(
        Problem(
            "graph attention",
            networks.GraphAttentionNetwork,
            partial(divided, data.traders, 3000),
            losses.logarithmic_cosine,
            AdamW,
            rate=5e-3,
            options={"weight_decay": 5e-3},
            batch_size=32,
            steps=250,
            unfit=OF_INPUTS,  # which have the edges of the graph, too
        )
    ),
    Training(
        Problem(
            "edge convolution",
            networks.PointSegmenter,
            partial(divided, data.lamps, 1500),
            partial(F.cross_entropy, label_smoothing=0.2),
            rate=0.05,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=16,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "masked autoencoder",
            networks.masked_autoencoder,
            partial(divided, data.patterns, 4000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=3e-3,
            batch_size=50,
            steps=200,
        )
    ),
)
