"""What is known of single samples over a whole run, by the ids that the user gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradlens.history.schema import Fields, Is, ListOf, Whole
from gradlens.history.spikes import SAMPLE_ID, SampleId

MOST_SAMPLES = 100_000
"""No more ids than this are kept."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Losses and gradient norms of single samples until a ``step``, each of shape ``[K]``.

    ``visits`` counts the losses of a sample, whose mean is ``mean_loss``; ``last_loss`` is the
    latest. ``excess`` is the mean of the losses minus the medians of their batches, so that it
    matters little when a sample came. All three are NaN without losses. ``norm`` is the mean, over
    the tracked steps that it was in, of its ‖gₙ‖ over the root mean square of those of its batch;
    NaN if it was in none. ``label`` is its class, and ``predicted`` the network's answer when it
    came last; -1 where there are no classes.
    ``left_out`` counts further ids, of which nothing is known.
    """

    step: int
    ids: tuple[SampleId, ...]
    visits: NDArray[Any]
    mean_loss: NDArray[Any]
    last_loss: NDArray[Any]
    excess: NDArray[Any]
    norm: NDArray[Any]
    label: NDArray[Any]
    predicted: NDArray[Any]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        """How many there are, in one line."""
        return f"Samples({len(self)}, until step {self.step})"

    def plain(self) -> dict[str, Any]:
        """For a file."""
        arrays = {name: getattr(self, name).astype(kind) for name, kind in ARRAYS.items()}
        ids = list(self.ids)
        return {"ids": ids, **arrays, "until": self.step, "left_out": self.left_out}

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> Samples:
        """The inverse of ``plain``; ``ValueError`` for arrays of other shapes."""
        ids = tuple(found["ids"])
        if len({*ids}) < len(ids):
            raise ValueError("the samples have an id twice")
        for name, kind in ARRAYS.items():
            if found[name].shape != (len(ids),) or found[name].dtype != kind:
                raise ValueError(f"the samples' {name} is no array of {len(ids)} {kind}")
        arrays = {name: found[name] for name in ARRAYS}
        return cls(found["until"], ids, **arrays, left_out=found["left_out"])


ARRAYS = {
    "visits": "int32",
    "mean_loss": "float32",
    "last_loss": "float32",
    "excess": "float32",
    "norm": "float32",
    "label": "int32",
    "predicted": "int32",
}
SAMPLES = Fields(
    {
        "until": Whole(-(2**53), 2**53),
        "ids": ListOf(SAMPLE_ID, MOST_SAMPLES),
        **dict.fromkeys(ARRAYS, Is(np.ndarray)),
        "left_out": Whole(0, 2**53),
    }
)
