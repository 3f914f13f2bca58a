"""Problems for games."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.disciplines.games import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

GAMES = (
    Training(
        Problem(
            "boards",
            networks.BoardNetwork,
            partial(divided, data.positions, 3500),
            losses.moves_and_worth,
            rate=0.05,
            options={"momentum": 0.9, "weight_decay": 1e-4},
            batch_size=64,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "tricks",
            networks.TrickTaker,
            partial(divided, data.tricks, 20000),
            optimizer=Adam,
            rate=6e-3,
            batch_size=128,
            steps=200,
        ),
        schedule=schedules.warmed_up,
    ),
    Training(
        Problem(
            "automata",
            networks.CellularAutomaton,
            partial(divided, data.automata, 1000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=3e-3,
            batch_size=8,
            steps=180,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "matches",
            networks.BladeAndChest,
            partial(divided, data.matches, 16000),
            losses.davidson,
            AdamW,
            rate=0.03,
            options={"weight_decay": 0.01},
            batch_size=128,
            steps=200,
        ),
        schedule=schedules.linear,
    ),
    Training(
        Problem(
            "mazes",
            networks.ValueIteration,
            partial(divided, data.mazes, 4000),
            optimizer=Adam,
            rate=8e-3,
            batch_size=32,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
    Training(
        Problem(
            "landings",
            networks.DecisionTransformer,
            partial(divided, data.landings, 2000),
            F.mse_loss,
            AdamW,
            rate=2e-3,
            options={"weight_decay": 1e-3},
            batch_size=16,
            steps=150,
        ),
        schedule=schedules.warmed_up,
        clip=0.5,
    ),
    Training(
        Problem(
            "experts for races",
            networks.RaceMixture,
            partial(divided, data.races, 8000),
            optimizer=AdamW,
            rate=4e-3,
            options={"weight_decay": 0.01},
            batch_size=64,
            steps=200,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
)
