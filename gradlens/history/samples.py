"""What is known of single samples over a whole run, by the ids that the user gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradlens.history.plain_data import Count
from gradlens.history.spikes import SampleId

MOST_SAMPLES = 100_000
"""No more ids than this are kept."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Losses and gradient norms of single samples ``until`` a step, each of shape ``[K]``.

    ``visits`` counts the losses of a sample, whose mean is ``mean_loss``; ``last_loss`` is the
    latest. ``excess`` is the mean of the losses minus the medians of their batches, so that it
    matters little when a sample came. All three are NaN without losses. ``norm`` is the mean, over
    the tracked steps that it was in, of its ‖gₙ‖ over the root mean square of those of its batch;
    NaN if it was in none. ``label`` is its class, and ``predicted`` the network's answer when it
    came last; -1 where there are no classes.
    ``left_out`` counts further ids, of which nothing is known.
    """

    until: int
    ids: tuple[SampleId, ...]
    visits: np.ndarray
    mean_loss: np.ndarray
    last_loss: np.ndarray
    excess: np.ndarray
    norm: np.ndarray
    label: np.ndarray
    predicted: np.ndarray
    left_out: Count = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        """How many there are, in one line."""
        return f"Samples({len(self)}, until step {self.until})"

    def __post_init__(self) -> None:
        if len({*self.ids}) < len(self.ids):
            raise ValueError("the samples have an id twice")
        for name, kind in ARRAYS.items():
            array = getattr(self, name)
            if array.shape != (len(self.ids),) or array.dtype.kind != np.dtype(kind).kind:
                raise ValueError(f"the samples' {name} is no array of {len(self.ids)} {kind}")


ARRAYS = {
    "visits": "int32",
    "mean_loss": "float32",
    "last_loss": "float32",
    "excess": "float32",
    "norm": "float32",
    "label": "int32",
    "predicted": "int32",
}
"""Names and types of the arrays."""
