"""Signals of layers: inputs, outputs and gradients, and what they are reduced to."""

from gradlens.signals.predicates import (
    has_parameters,
    is_activation,
    is_affine,
    is_attention,
    is_batch_norm,
    is_convolution,
    is_dropout,
    is_embedding,
    is_linear,
    is_no_activation,
    is_normalization,
    is_recurrent,
)
from gradlens.signals.reductions import (
    Active,
    Copies,
    Gram,
    Maxima,
    Moments,
    SignalReduction,
    Size,
)
from gradlens.signals.selection import Selection, select, selection
from gradlens.signals.signal import LayerSignals, Request, Signal

__all__ = [
    "Active",
    "Copies",
    "Gram",
    "LayerSignals",
    "Maxima",
    "Moments",
    "Request",
    "Selection",
    "Signal",
    "SignalReduction",
    "Size",
    "has_parameters",
    "is_activation",
    "is_affine",
    "is_attention",
    "is_batch_norm",
    "is_convolution",
    "is_dropout",
    "is_embedding",
    "is_linear",
    "is_no_activation",
    "is_normalization",
    "is_recurrent",
    "select",
    "selection",
]


def __dir__() -> list[str]:
    return list(__all__)
