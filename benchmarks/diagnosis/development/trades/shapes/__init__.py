"""Problems for graphs, trees and clouds of points."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.trades.shapes import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_INPUTS

SHAPES = (
    Training(
        Problem(
            "link predictor",
            networks.LinkPredictor,
            partial(divided, data.friends, 4000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=5e-3,
            batch_size=32,
            steps=200,
            unfit=OF_INPUTS,  # which have the edges of the graph, too
        )
    ),
    Training(
        Problem(
            "tree memory",
            networks.TreeMemory,
            partial(divided, data.formulas, 8000),
            losses.welsch,
            RMSprop,
            rate=3e-3,
            batch_size=64,
            steps=250,
            unfit=OF_INPUTS,  # which have what joins the branches, too
        ),
        schedule=schedules.exponential,
        clip=1.0,
    ),
    Training(
        Problem(
            "folding network",
            networks.FoldingNetwork,
            partial(divided, data.vases, 3000),
            losses.chamfer,
            AdamW,
            rate=3e-3,
            options={"weight_decay": 1e-3},
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "equivariant network",
            networks.EquivariantNetwork,
            partial(divided, data.charges, 5000),
            losses.relative_squares,
            AdamW,
            rate=5e-3,
            options={"amsgrad": True},
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.exponential,
    ),
)
