"""Ranks the samples of a run: mislabelled and outlying ones come first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradlens.diagnosis.numbers import deviation, finite, median
from gradlens.history.records import Samples
from gradlens.history.spikes import SampleId


@dataclass(frozen=True)
class Ranked:
    """A sample worth a look.

    ``score`` is how far its mean loss above those of its batches is from the median sample's, in
    robust standard deviations of all samples, or how far its norm is where no losses are known.
    ``label`` and ``predicted`` are its class and the network's answer, ``None`` where there are no
    classes; see ``Samples`` for the rest.
    """

    id: SampleId
    score: float
    visits: int
    mean_loss: float
    last_loss: float
    norm: float
    label: int | None
    predicted: int | None

    @property
    def is_contradicted(self) -> bool:
        """Whether the network's answer is another class than the sample's."""
        return self.label is not None and self.label != self.predicted


def have_losses(samples: Samples) -> bool:
    """Whether samples are ranked by their losses, and not by the norms of their gradients."""
    return bool(np.isfinite(samples.excess).any())


def scores(samples: Samples) -> NDArray[Any]:
    """The score of each sample ``[K]``; minus infinity without the loss, or norm, for it."""
    values = (samples.excess if have_losses(samples) else samples.norm).astype(float)
    known = finite(values)
    middle = median(known)
    found = (values - middle) / (deviation(known, middle) or float(known.std()) or 1.0)
    return np.where(np.isfinite(found), found, -math.inf)


def rank(samples: Samples, top: int | None = None) -> list[Ranked]:
    """The samples with the highest scores first; all of them, or the ``top`` ones."""
    found = scores(samples)
    return [
        Ranked(
            samples.ids[place],
            float(found[place]),
            int(samples.visits[place]),
            float(samples.mean_loss[place]),
            float(samples.last_loss[place]),
            float(samples.norm[place]),
            *(int(n) if n >= 0 else None for n in (samples.label[place], samples.predicted[place])),
        )
        for place in np.argsort(-found, kind="stable")[:top].tolist()
    ]
