"""What a batch is: how many samples it has, how that is known, and what its loss sums over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

LossReduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True)
class Batch:
    """The batch of one backward pass.

    ``samples`` is N, ``None`` where it isn't known, and ``known_by`` how it is known, or why it
    isn't. ``loss_reduction`` is whether the loss is a mean or a sum over the samples, and
    ``factor`` the ratio of the tensor that backward is called on to the loss.
    """

    samples: int | None = None
    known_by: str = ""
    loss_reduction: LossReduction = "mean"
    factor: float = 1.0

    @property
    def scale(self) -> float:
        """The factor that makes gₙ of a sample's contribution to the gradient."""
        samples = (self.samples or 1) if self.loss_reduction == "mean" else 1
        return samples / self.factor
