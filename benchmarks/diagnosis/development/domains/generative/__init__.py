"""Problems of generative models and autoencoders."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW

from benchmarks.diagnosis.controls import with_replacement
from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.domains.generative import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training

GENERATIVE = (
    Training(
        Problem(
            "flow",
            networks.Flow,
            partial(divided, data.moons, 5000),
            losses.flow_likelihood,
            Adam,
            rate=3e-3,
            batch_size=128,
            steps=250,
        ),
        schedule=schedules.cosine,
        clip=5.0,
    ),
    Training(
        Problem(
            "denoiser",
            networks.Denoiser,
            partial(divided, data.noised_roll, 20000),
            F.mse_loss,
            AdamW,
            rate=3e-3,
            batch_size=256,
            steps=200,
        ),
        schedule=schedules.warmed_up,
        order=with_replacement,
    ),
    Training(
        Problem(
            "PixelCNN",
            networks.pixel_cnn,
            partial(divided, data.black_digits, 1400),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=5e-3,
            batch_size=16,
            steps=150,
        )
    ),
    Training(
        Problem(
            "sparse autoencoder",
            networks.SparseAutoencoder,
            partial(divided, data.superposed, 5000),
            losses.sparse_reconstruction,
            Adam,
            rate=3e-3,
            batch_size=128,
            steps=200,
        ),
        order=with_replacement,
    ),
)
