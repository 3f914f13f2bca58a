"""A step of a training loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradlens import Cockpit


def tracked_backward(cockpit: Cockpit, step: int, loss: Tensor, **given: Any) -> None:
    """Run the backward pass of a loss in the cockpit's context."""
    with cockpit(step, loss=loss, **given):
        loss.backward()
