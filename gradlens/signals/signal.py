"""Tensors at a layer, and requests for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gradlens.signals.reductions import SignalReduction


class Signal(Enum):
    """The inputs and outputs of a layer, and the gradients at them."""

    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "gradient at the output"
    INPUT_GRADIENT = "gradient at the input"

    @property
    def of_input(self) -> bool:
        """Whether it belongs to the input of the layer."""
        return self in (Signal.INPUT, Signal.INPUT_GRADIENT)

    @property
    def needs_backward(self) -> bool:
        """Whether it exists only once the backward pass has reached the layer."""
        return self in (Signal.OUTPUT_GRADIENT, Signal.INPUT_GRADIENT)


@dataclass(frozen=True)
class Request:
    """A signal and its reduction; equal requests of several quantities are computed once a step.

    ``channel_last`` says whether the features are in the last axis; with ``None`` this depends on
    the layer, as in ``gradlens.signals.axes.find_axes``.
    """

    signal: Signal
    reduction: SignalReduction[Any]
    channel_last: bool | None = None


def first_tensor(value: Any) -> Tensor | None:
    """The first dense floating-point tensor in nested tuples, lists and dicts, if there is one."""
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided and not value.is_nested
        return value if dense and value.is_floating_point() else None
    parts: Sequence[Any] = ()
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = value
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)
