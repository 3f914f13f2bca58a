"""Problems for music."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import SGD, Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unseen.music import data, losses, networks

MUSIC = (
    Training(
        Problem(
            "chords",
            networks.ChordNetwork,
            partial(divided, data.chords, 4000),
            F.cross_entropy,
            SGD,
            rate=0.05,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=32,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "tempos",
            networks.tempo_network,
            partial(divided, data.tempos, 5000),
            F.l1_loss,
            Adam,
            rate=2e-3,
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.exponential,
    ),
    Training(
        Problem(
            "transcription",
            networks.Transcriber,
            partial(divided, data.notes, 2400),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=4e-3,
            batch_size=16,
            steps=150,
        ),
        clip=3.0,
    ),
    Training(
        Problem(
            "drums",
            networks.Drummer,
            partial(divided, data.drums, 3000),
            F.binary_cross_entropy_with_logits,
            RMSprop,
            rate=3e-3,
            batch_size=32,
            steps=160,
        ),
        schedule=schedules.linear,
        clip=1.0,
    ),
    Training(
        Problem(
            "tagged sounds",
            networks.TimbreAndRhythm,
            partial(divided, data.tagged_sounds, 3000),
            losses.bounded_pairs,
            AdamW,
            rate=4e-3,
            options={"weight_decay": 0.01},
            batch_size=32,
            steps=160,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
    Training(
        Problem(
            "experts for synthesisers",
            networks.SynthesiserMixture,
            partial(divided, data.synthesisers, 8000),
            F.mse_loss,
            Adam,
            rate=1e-2,
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.cosine,
    ),
)
