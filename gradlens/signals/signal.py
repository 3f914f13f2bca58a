"""Tensors at a layer, requests for them, and what they were reduced to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.signals.reductions import SignalReduction


class Signal(Enum):
    """The inputs and outputs of a layer, the gradients at them, and the attention inside of it."""

    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "gradient at the output"
    INPUT_GRADIENT = "gradient at the input"
    ATTENTION = "attention"

    @property
    def of_input(self) -> bool:
        """Whether it belongs to the input of the layer."""
        return self in (Signal.INPUT, Signal.INPUT_GRADIENT)

    @property
    def needs_backward(self) -> bool:
        """Whether it exists only once the backward pass has reached the layer."""
        return self in (Signal.OUTPUT_GRADIENT, Signal.INPUT_GRADIENT)

    @property
    def needs_graph(self) -> bool:
        """Whether it exists only in forward passes of which autograd keeps the graph."""
        return self.needs_backward or self is Signal.ATTENTION


@dataclass(frozen=True)
class Request:
    """A signal and its reduction; equal requests of several quantities are computed once a step.

    ``channel_last`` says whether the features are in the last axis; with ``None`` this depends on
    the layer, as in ``gradlens.signals.axes.find_axes``.
    """

    signal: Signal
    reduction: SignalReduction[Any]
    channel_last: bool | None = None


@dataclass(frozen=True)
class LayerSignals:
    """Reduced signals by layer and request, small ones in float64 on the host.

    A value is an ``Undefined`` with its reason where there was nothing to reduce; layers that were
    not called, or have no such tensor, have no entry. ``notes`` are for the user.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    values: Mapping[str, Mapping[Request, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def and_also(self, other: LayerSignals) -> LayerSignals:
        """These and those of further calls together, with the notes of the others."""
        values = {layer: dict(found) for layer, found in self.values.items()}
        for layer, found in other.values.items():
            known = values.setdefault(layer, {})
            for request, value in found.items():
                before = [known[request]] if request in known else []
                known[request] = merged(request, [*before, value])
        return LayerSignals(other.modules, values, other.notes)


def merged(request: Request, values: Sequence[Any]) -> Any:
    """One value for several; the reason why there is none, if one of them has one."""
    undefined = next((value for value in values if isinstance(value, Undefined)), None)
    return request.reduction.merge(values) if undefined is None else undefined


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = [*value.values()]
    for part in value if isinstance(value, (tuple, list)) else ():
        yield from tensors_in(part)


def first_tensor(value: Any) -> Tensor | None:
    """The first dense floating-point tensor in nested tuples, lists and dicts, if there is one."""
    dense = (t for t in tensors_in(value) if t.layout == torch.strided and not t.is_nested)
    return next((tensor for tensor in dense if tensor.is_floating_point()), None)
