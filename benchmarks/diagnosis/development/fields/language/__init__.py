"""Problems for text."""

from __future__ import annotations

from functools import partial

from torch.optim import SGD, Adam, AdamW, RMSprop

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.fields.language import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

LANGUAGE = (
    Training(
        Problem(
            "English characters",
            partial(networks.CharacterLSTM, len(data.CHARACTERS)),
            partial(divided, data.english, 700),
            optimizer=RMSprop,
            rate=5e-3,
            batch_size=16,
            steps=250,
        ),
        schedule=schedules.in_steps,
        clip=5.0,
    ),
    Training(
        Problem(
            "spoken numbers",
            partial(networks.AttentiveTranslator, data.START + 11, data.SPOKEN),
            partial(divided, data.numbers, 4000),
            optimizer=Adam,
            rate=1e-2,
            batch_size=40,
            steps=250,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "random field",
            partial(networks.FieldTagger, data.NAMES + data.KINDS * data.CUES),
            partial(divided, data.named_entities, 2000),
            losses.random_field,
            SGD,
            rate=0.1,
            options={"momentum": 0.9, "weight_decay": 1e-5},
            batch_size=16,
            steps=150,
        ),
        schedule=schedules.linear,
        clip=5.0,
    ),
    Training(
        Problem(
            "masked melodies",
            partial(networks.MaskedLanguageModel, data.NOTES),
            partial(divided, data.melodies, 6000),
            optimizer=AdamW,
            rate=8e-3,
            options={"betas": (0.9, 0.98), "weight_decay": 0.01},
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.warmed_up_linear,
        clip=1.0,
    ),
    Training(
        Problem(
            "retentive network",
            partial(networks.RetentiveNetwork, data.CONSONANTS + data.VOWELS + 1),
            partial(divided, data.languages, 2500),
            optimizer=AdamW,
            rate=3e-3,
            options={"betas": (0.9, 0.95), "weight_decay": 0.05},
            batch_size=24,
            steps=150,
        ),
        schedule=schedules.warmed_up_cosine,
        clip=1.0,
    ),
)
