"""What was found at a step whose loss has jumped, or isn't finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SampleId: TypeAlias = int | str
"""What the user calls a sample: ``info={"ids": ...}``."""

Origin: TypeAlias = Literal["jump", "weights", "input", "target", "forward", "backward"]
"""Where the first number came up that isn't finite; "jump" if all are."""

NEVER = -1
"""``Spike.back`` of a loss that wasn't back as long as this was watched for."""


@dataclass(frozen=True)
class Position:
    """One of the values that a sample's loss is the sum of, such as that of a word.

    ``index`` is its place among these, ``target`` its label, and ``share`` that of the loss.
    """

    index: int
    target: int
    share: float


@dataclass(frozen=True)
class Suspect:
    """One sample of the batch.

    ``index`` is its place in the batch and ``id`` what the user calls it. ``share`` is that of
    Σₙ‖gₙ‖², ``loss`` is ℓₙ and ``loss_share`` its share of Σₙ|ℓₙ|. ``input_ratio`` and
    ``target_ratio`` are the root mean square of the sample's row over that of the median row, of
    what the model was called with and of real targets. ``loss_without`` is the mean of the other
    samples' losses, and ``norm_without`` the norm of their mean gradient over that of all samples.
    What isn't known is a NaN. ``positions`` are those with the largest losses of a sample that has
    several labels.
    """

    index: int
    id: SampleId | None = None
    share: float = math.nan
    loss: float = math.nan
    loss_share: float = math.nan
    input_ratio: float = math.nan
    target_ratio: float = math.nan
    loss_without: float = math.nan
    norm_without: float = math.nan
    positions: tuple[Position, ...] = ()

    @property
    def name(self) -> SampleId:
        """What the user calls the sample; otherwise its place in the batch."""
        return self.index if self.id is None else self.id


@dataclass(frozen=True)
class Spike:
    """A step whose loss has jumped, or isn't finite.

    Of the losses before, ``median`` and ``deviation`` are the median and the median absolute
    deviation, and ``start`` is the median at the start of the run. ``part`` is the number of the
    micro-batch from one on, 0 where a step has one alone, and ``samples`` is N; 0 if it isn't
    known. ``suspects`` are the samples with the largest ‖gₙ‖², or whose numbers aren't finite, and
    ``without_norms`` is the reason why there are no norms. ``place`` is the first layer or
    operation with a number that isn't finite; ``hint`` is the term of the loss that it is in, or
    the operations that may have made it in the backward pass. ``layers`` gives Σₙ‖gₙ‖² by layer,
    and ``layers_before`` its median at the last tracked steps.
    ``rate`` is the largest learning rate, and ``rate_before`` its median at the steps before.
    ``sharpness`` is the largest eigenvalue of the Hessian that was recorded last, at
    ``sharpness_step``, and ``threshold`` what it must stay below. ``back`` is the number of steps
    after which the loss was back; ``None`` if that isn't known, ``NEVER`` if it wasn't in time.
    """

    loss: float
    median: float = math.nan
    deviation: float = math.nan
    start: float = math.nan
    origin: Origin = "jump"
    place: str = ""
    hint: str = ""
    part: int = 0
    samples: int = 0
    suspects: tuple[Suspect, ...] = ()
    without_norms: str = ""
    layers: Mapping[str, float] = field(default_factory=dict)
    layers_before: Mapping[str, float] = field(default_factory=dict)
    rate: float = math.nan
    rate_before: float = math.nan
    sharpness: float = math.nan
    threshold: float = math.nan
    sharpness_step: int | None = None
    back: int | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss has jumped, and all numbers are finite."""
        return self.origin == "jump"

    @property
    def jump(self) -> float:
        """How far the loss is above the median of the losses before."""
        return self.loss - self.median

    @property
    def ratios(self) -> dict[str, float]:
        """Of each layer, Σₙ‖gₙ‖² over its median before."""
        before = self.layers_before
        return {
            name: total / before[name] if before[name] else math.inf
            for name, total in self.layers.items()
            if name in before
        }
