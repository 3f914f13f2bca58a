"""Well-known architectures, with the schedule and the clipping that they are usually trained with.

Rates were measured with them before rules were developed with them.
"""

from __future__ import annotations

import math
from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
)

from benchmarks.diagnosis.development import (
    image_networks,
    images,
    row_networks,
    rows,
    sequence_networks,
    sequences,
)
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_INPUTS


def warmed_up(step: int, steps: int) -> float:
    """A tenth of the steps to warm up, then half a cosine to a tenth of the rate."""
    first = steps / 10
    if step < first:
        return (step + 1) / (first + 1)
    return 0.55 + 0.45 * math.cos(math.pi * (step - first) / (steps - first))


def halved(step: int, steps: int) -> float:
    """Half the rate after each third of the steps."""
    return 0.5 ** (3 * step // steps)


def one_cycle(step: int, steps: int) -> float:
    """Up to the full rate in 0.3 of the steps and down again (Smith, 2018)."""
    progress = step / steps
    if progress < 0.3:
        return 0.2 + 0.8 * progress / 0.3
    return 1.02 - progress


IMAGES = (
    Training(
        Problem(
            "U-Net",
            image_networks.UNet,
            partial(divided, images.discs_and_squares, 800),
            optimizer=Adam,
            rate=2e-3,
            batch_size=8,
            steps=120,
        )
    ),
    Training(
        Problem(
            "vision transformer",
            image_networks.VisionTransformer,
            partial(divided, images.clocks, 1500),
            partial(F.cross_entropy, label_smoothing=0.1),
            AdamW,
            rate=3e-3,
            options={"weight_decay": 0.05},
            steps=200,
        ),
        schedule=warmed_up,
        clip=1.0,
    ),
    Training(
        Problem(
            "MobileNet",
            image_networks.mobile_net,
            partial(divided, images.polygons, 1500),
            optimizer=RMSprop,
            rate=5e-3,
            options={"weight_decay": 4e-5},
            steps=150,
        ),
        schedule=warmed_up,
    ),
    Training(
        Problem(
            "DenseNet",
            image_networks.dense_net,
            partial(divided, images.crops, 1500),
            rate=0.05,
            options={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
            steps=150,
        ),
        schedule=halved,
    ),
    Training(
        Problem(
            "ConvNeXt",
            image_networks.conv_next,
            partial(divided, images.seven_segments, 2000),
            optimizer=AdamW,
            rate=3e-3,
            options={"weight_decay": 0.05},
            batch_size=64,
            steps=150,
        ),
        schedule=warmed_up,
    ),
    Training(
        Problem(
            "siamese",
            image_networks.Siamese,
            partial(divided, images.glyph_pairs, 2000),
            F.binary_cross_entropy_with_logits,
            Adagrad,
            rate=0.02,
            batch_size=64,
            steps=200,
        )
    ),
    Training(
        Problem(
            "variational autoencoder",
            image_networks.VariationalAutoencoder,
            partial(divided, images.crosses, 1500),
            image_networks.evidence_bound,
            Adam,
            rate=3e-3,
            steps=220,
        )
    ),
    Training(
        Problem(
            "MLP-Mixer",
            image_networks.mixer,
            partial(divided, images.moving_dots, 4000),
            optimizer=Adadelta,
            rate=1.0,
            batch_size=64,
            steps=200,
        )
    ),
    Training(
        Problem(
            "mixture of convolutions",
            image_networks.ConvolutionMixture,
            partial(divided, images.galaxies, 1500),
            optimizer=Adamax,
            rate=5e-3,
            options={"weight_decay": 1e-3},
            batch_size=16,
            steps=200,
        )
    ),
    Training(
        Problem(
            "SIREN",
            image_networks.siren,
            partial(divided, images.coordinates, 4000),
            F.mse_loss,
            Adam,
            rate=1e-3,
            batch_size=256,
            steps=250,
        )
    ),
)
"""Those for images."""

SEQUENCES = (
    Training(
        Problem(
            "tagger",
            sequence_networks.Tagger,
            partial(divided, sequences.tagged_sentences, 1500),
            optimizer=Adam,
            rate=1e-2,
            batch_size=32,
            steps=150,
        ),
        clip=5.0,
    ),
    Training(
        Problem(
            "gated language model",
            partial(sequence_networks.GatedLanguageModel, len(sequences.ALPHABET)),
            partial(divided, sequences.generated_text, 1000),
            optimizer=SGD,
            rate=0.5,
            options={"momentum": 0.9, "nesterov": True},
            batch_size=16,
            steps=200,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "Llama",
            partial(sequence_networks.Llama, 11),
            partial(divided, sequences.sorted_numbers, 4000),
            optimizer=AdamW,
            rate=5e-3,
            options={"betas": (0.9, 0.95), "weight_decay": 0.1},
            batch_size=32,
            steps=200,
        ),
        schedule=warmed_up,
        clip=1.0,
    ),
    Training(
        Problem(
            "WaveNet",
            sequence_networks.WaveNet,
            partial(divided, sequences.mackey_glass, 1000),
            F.mse_loss,
            NAdam,
            rate=3e-3,
            batch_size=16,
            steps=150,
        )
    ),
    Training(
        Problem(
            "event detector",
            sequence_networks.event_detector,
            partial(divided, sequences.events, 1500),
            F.binary_cross_entropy_with_logits,
            rate=0.1,
            options={"momentum": 0.9},
            batch_size=32,
            steps=200,
        ),
        schedule=one_cycle,
    ),
    Training(
        Problem(
            "character CNN",
            sequence_networks.CharacterCnn,
            partial(divided, sequences.formal_languages, 2000),
            optimizer=RAdam,
            rate=5e-3,
            batch_size=50,
            steps=200,
        )
    ),
    Training(
        Problem(
            "differential equation",
            sequence_networks.DifferentialEquation,
            partial(divided, sequences.pendulum, 1000),
            F.smooth_l1_loss,
            Adam,
            rate=1e-2,
            batch_size=32,
            steps=150,
        ),
        clip=1.0,
    ),
)
"""Those for sequences."""

ROWS = (
    Training(
        Problem(
            "PointNet",
            row_networks.PointNet,
            partial(divided, rows.solids, 1500),
            optimizer=RAdam,
            rate=3e-3,
            options={"weight_decay": 1e-4},
            batch_size=32,
            steps=150,
        )
    ),
    Training(
        Problem(
            "deep sets",
            row_networks.DeepSets,
            partial(divided, rows.distinct_tokens, 2000),
            F.huber_loss,
            Adam,
            rate=2e-3,
            batch_size=64,
            steps=150,
        )
    ),
    Training(
        Problem(
            "graph convolution",
            row_networks.GraphNetwork,
            partial(divided, rows.communities, 600),
            optimizer=Adamax,
            rate=1e-2,
            options={"weight_decay": 5e-4},
            batch_size=4,
            steps=200,
            unfit=OF_INPUTS,  # which have the edges of the graph, too
        )
    ),
    Training(
        Problem(
            "wide and deep",
            partial(row_networks.WideAndDeep, rows.CATEGORIES),
            partial(divided, rows.click_log, 8000),
            F.binary_cross_entropy_with_logits,
            Adagrad,
            rate=0.05,
            batch_size=256,
            steps=200,
            unfit=OF_INPUTS,  # which have the numbers of categories, too
        )
    ),
    Training(
        Problem(
            "matrix factorisation",
            partial(row_networks.Factorisation, rows.PEOPLE, rows.FILMS),
            partial(divided, rows.ratings, 2000),
            F.mse_loss,
            AdamW,
            rate=3e-2,
            batch_size=100,
            steps=200,
        )
    ),
    Training(
        Problem(
            "quantiles",
            row_networks.self_normalising,
            partial(divided, rows.rentals, 3000),
            row_networks.pinball,
            SGD,
            rate=0.05,
            options={"momentum": 0.9},
            batch_size=64,
            steps=250,
        )
    ),
    Training(
        Problem(
            "critic",
            row_networks.critic,
            partial(divided, rows.resonance, 4000),
            F.soft_margin_loss,
            Adam,
            rate=1e-2,
            options={"betas": (0.5, 0.999)},
            batch_size=128,
            steps=250,
        )
    ),
    Training(
        Problem(
            "policy",
            row_networks.Policy,
            partial(divided, rows.decisions, 5000),
            row_networks.rewarded,
            RMSprop,
            rate=5e-3,
            batch_size=128,
            steps=200,
        )
    ),
    Training(
        Problem(
            "multi-task",
            row_networks.MultiTask,
            partial(divided, rows.encounters, 3000),
            row_networks.collision_and_distance,
            AdamW,
            rate=5e-3,
            options={"amsgrad": True},
            batch_size=32,
            steps=200,
        )
    ),
    Training(
        Problem(
            "ensemble",
            row_networks.Ensemble,
            partial(divided, rows.throws, 2000),
            row_networks.members_likelihood,
            NAdam,
            rate=5e-3,
            batch_size=20,
            steps=150,
        )
    ),
)
"""Those for tables, sets and graphs."""

ARCHITECTURES = IMAGES + SEQUENCES + ROWS
