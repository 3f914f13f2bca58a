"""Problems for text."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adagrad, Adam, AdamW, RAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.trades.writing import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

WRITING = (
    Training(
        Problem(
            "text to text",
            networks.TextToText,
            partial(divided, data.spellings, 6000),
            optimizer=Adam,
            rate=5e-3,
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=1.0,
    ),
    Training(
        Problem(
            "receptance",
            networks.ReceptanceModel,
            partial(divided, data.recipes, 3000),
            optimizer=AdamW,
            rate=4e-3,
            options={"betas": (0.9, 0.99), "weight_decay": 0.01},
            batch_size=16,
            steps=150,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=1.0,
    ),
    Training(
        Problem(
            "selective state spaces",
            networks.SelectiveModel,
            partial(divided, data.marked, 3000),
            optimizer=AdamW,
            rate=4e-3,
            options={"weight_decay": 0.01},
            batch_size=32,
            steps=200,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "dual encoder",
            networks.DualEncoder,
            partial(divided, data.questions, 6000),
            losses.retrieved,
            RAdam,
            rate=5e-3,
            batch_size=32,
            steps=250,
        )
    ),
    Training(
        Problem(
            "skip-gram",
            networks.SkipGram,
            partial(divided, data.neighbours, 20000),
            F.binary_cross_entropy_with_logits,
            Adagrad,
            rate=0.2,
            batch_size=256,
            steps=250,
        )
    ),
    Training(
        Problem(
            "span reader",
            networks.SpanReader,
            partial(divided, data.facts, 6000),
            losses.span,
            Adam,
            rate=2e-3,
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.linear,
        clip=5.0,
    ),
    Training(
        Problem(
            "experts for posts",
            networks.PostMixture,
            partial(divided, data.posts, 8000),
            losses.liked,
            Adam,
            rate=5e-3,
            batch_size=64,
            steps=250,
        ),
        schedule=schedules.cosine,
    ),
)
