"""Steps of training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradlens import Cockpit


def tracked_backward(cockpit: Cockpit | None, step: int, loss: Tensor, **given: Any) -> None:
    """Run the backward pass of a loss in the cockpit's context, or without any cockpit."""
    with nullcontext() if cockpit is None else cockpit(step, loss=loss, **given):
        loss.backward()


def take_steps(
    cockpit: Cockpit | None,
    optimizer: Optimizer,
    loss_of: Callable[[int], Tensor],
    steps: Iterable[int] = range(3),
    /,
    **given: Any,
) -> None:
    """Train for some steps, whose losses ``loss_of(step)`` computes, and close the cockpit.

    The context gets the optimizer, unless another one is ``given``, or ``None``.
    """
    for step in steps:
        optimizer.zero_grad()
        tracked_backward(cockpit, step, loss_of(step), **{"optimizer": optimizer, **given})
        optimizer.step()
    if cockpit is not None:
        cockpit.close()
