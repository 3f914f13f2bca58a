"""Problems for laboratories."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, NAdam

from benchmarks.diagnosis.development import schedules
from benchmarks.diagnosis.development.disciplines.laboratory import data, losses, networks
from benchmarks.diagnosis.draws import divided
from benchmarks.diagnosis.problem import Problem
from benchmarks.diagnosis.training import Training
from benchmarks.diagnosis.unfit import OF_TARGETS

LABORATORY = (
    Training(
        Problem(
            "motifs",
            networks.MotifNetwork,
            partial(divided, data.motifs, 4000),
            F.binary_cross_entropy_with_logits,
            Adam,
            rate=4e-3,
            batch_size=32,
            steps=200,
        ),
        clip=1.0,
    ),
    Training(
        Problem(
            "proteins",
            networks.Conformer,
            partial(divided, data.proteins, 3000),
            optimizer=AdamW,
            rate=4e-3,
            options={"weight_decay": 0.01},
            batch_size=32,
            steps=120,
        ),
        schedule=schedules.warmed_up_cosine,
    ),
    Training(
        Problem(
            "reactions",
            networks.TensorNetwork,
            partial(divided, data.reactions, 6000),
            F.mse_loss,
            NAdam,
            rate=5e-3,
            batch_size=64,
            steps=200,
        )
    ),
    Training(
        Problem(
            "isotopes",
            networks.IsotopeNetwork,
            partial(divided, data.isotopes, 2000),
            losses.two_counts,
            AdamW,
            rate=5e-3,
            options={"weight_decay": 0.01},
            batch_size=16,
            steps=150,
        ),
        schedule=schedules.cosine,
    ),
    Training(
        Problem(
            "recordings",
            networks.TwinNetwork,
            partial(divided, data.recordings, 5000),
            losses.twins,
            Adam,
            rate=2e-3,
            options={"weight_decay": 1e-5},
            batch_size=128,
            steps=150,
            unfit=OF_TARGETS,  # for the loss has no use for the substances
        ),
        schedule=schedules.warmed_up_cosine,
    ),
    Training(
        Problem(
            "free energies",
            networks.ConvexNetwork,
            partial(divided, data.free_energies, 5000),
            F.mse_loss,
            Adam,
            rate=4e-2,
            batch_size=64,
            steps=180,
        ),
        schedule=schedules.cosine,
    ),
)
