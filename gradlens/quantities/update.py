"""The parameter update between two steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """The parameter update d = pₙ₊₁ − pₙ that followed a tracked step.

    ``direction`` is d ``[*P]`` and ``norms`` are ‖d‖₂ by parameter name. ``projections`` are
    ⟨gₙ, d⟩ ``[N]`` at the start point, and ``end_projections`` those at the end point with the next
    step's batch, summed over the covered parameters and in float64 on the host. They are ``None``
    unless a quantity retains gradients.
    ``without_projections`` is a reason why there are none.
    """

    direction: Mapping[str, Tensor]
    norms: Mapping[str, float]
    projections: Tensor | None = None
    end_projections: Tensor | None = None
    without_projections: str = ""

    def norm(self) -> float:
        """‖d‖₂ of all parameters together."""
        return math.hypot(*self.norms.values())
