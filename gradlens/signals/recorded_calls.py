"""Calls of layers with their reduced signals, and one value for all calls of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.numerics.host import on_host
from gradlens.signals.layer_signals import LayerSignals, merged
from gradlens.signals.signal import Request, Signal

Requests: TypeAlias = Mapping[str, frozenset[Request]]
"""What is requested of each layer, by its name."""

ForwardPass: TypeAlias = tuple[int, int]
"""The number of a forward pass, and the id of the backward pass in which it is recomputed by a
checkpoint, ``NO_BACKWARD_PASS`` if it isn't."""

SEVERAL = (
    "several backward passes went through one call of the layer, whose gradient is their sum: "
    "call backward once, on the sum of the losses"
)
MISPLACED = (
    "it isn't certain which axis of its output counts the samples: the one that does in the layers "
    "next to it has another length than there are samples in layers that define their axis"
)


@dataclass
class RecordedCall:
    """The reduced signals of one call of a layer, and what decides whether the call counts.

    ``undefined`` are the reasons why signals have no value. ``reached`` says that the backward pass
    of the step has gone through the call. ``standalone``: the layer was called outside the model,
    and its output needs no gradient, so that no backward pass can reach it. ``create_graph``: a
    backward pass with ``create_graph=True`` has gone through it, perhaps only to make the loss.
    ``samples`` is the length of the output's axis that is taken for that of the samples;
    ``axis_known`` if the layer itself defines it. ``is_over``: it was discarded, and
    counts no more.
    """

    layer: str
    forward_pass: ForwardPass
    values: dict[Request, Any] = field(default_factory=dict)
    undefined: dict[Signal, str] = field(default_factory=dict)
    reached: bool = False
    standalone: bool = False
    create_graph: bool = False
    samples: int | None = None
    axis_known: bool = False
    is_over: bool = False

    def add(self, request: Request, value: Any) -> None:
        """Store a value, or add it to that of an earlier backward pass."""
        if request in self.values:
            value = self._sum(request, value)
        self.values[request] = value

    def _sum(self, request: Request, value: Any) -> Any:
        before = self.values[request]
        if self.create_graph or isinstance(before, Undefined):
            return Undefined(SEVERAL)
        total = request.reduction.add(before, value)
        return Undefined(SEVERAL) if total is None else total


def counted(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls that belong to a step.

    Those that its backward pass has reached, those of the same forward passes, and those alone.
    """
    reached = {call.forward_pass for call in calls if call.reached}
    return [c for c in calls if c.reached or c.standalone or c.forward_pass in reached]


def signals_of(
    calls: Sequence[RecordedCall],
    wanted: Requests,
    modules: Mapping[str, nn.Module],
    reasons: Mapping[str, Mapping[Request, str]],
) -> LayerSignals:
    """One value for each layer and request; ``reasons`` are for those without any."""
    by_layer: dict[str, list[RecordedCall]] = {layer: [] for layer in modules}
    for call in _with_small_values_on_host(calls):
        by_layer[call.layer].append(call)
    values: dict[str, dict[Request, Any]] = {}
    uncalled, empty = [], []
    misplaced = _misplaced(calls)
    for layer, found in by_layer.items():
        requests, known = wanted.get(layer, frozenset()), reasons.get(layer, {})
        every = {request: _value(request, found, known.get(request, "")) for request in requests}
        if layer in misplaced:
            every |= {r: Undefined(MISPLACED) for r in requests if _needs_sample_axis(r)}
        values[layer] = {request: v for request, v in every.items() if v is not None}
        missing = {request.signal.value for request in requests - values[layer].keys()}
        if missing and not found:
            uncalled.append(layer)
        elif missing:
            empty += [f"the {signal} of {layer}" for signal in sorted(missing)]
    return LayerSignals(modules, values, tuple(_notes(uncalled, empty)))


def _value(request: Request, calls: Sequence[RecordedCall], reason: str) -> Any:
    """That of all calls together; ``None`` if there was no call, or none with a tensor."""
    found = [call.values[request] for call in calls if request in call.values]
    if found:
        return merged(request, found)
    if reason:
        return Undefined(reason)
    undefined = [c.undefined[request.signal] for c in calls if request.signal in c.undefined]
    return Undefined(undefined[0]) if undefined else None


def _with_small_values_on_host(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls with values that are moved together, and floating-point numbers in float64."""
    small = [{r: v for r, v in call.values.items() if r.reduction.small} for call in calls]
    return [
        replace(call, values=call.values | {r: _precise(v) for r, v in moved.items()})
        for call, moved in zip(calls, on_host(small), strict=True)
    ]


def _precise(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return value.double() if value.is_floating_point() else value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: _precise(getattr(value, part.name)) for part in fields(value)}
        return replace(value, **parts)
    return value


def _needs_sample_axis(request: Request) -> bool:
    """Whether a value depends on which axis of the output counts the samples."""
    return request.signal is Signal.OUTPUT and request.reduction.by_sample


def _misplaced(calls: Iterable[RecordedCall]) -> set[str]:
    """Layers with another number of samples than those whose sample axis is known."""
    found = [call for call in calls if call.samples is not None]
    known = {(call.forward_pass, call.samples) for call in found if call.axis_known}
    passes = {forward_pass for forward_pass, _ in known}
    assumed = [call for call in found if call.forward_pass in passes]
    return {call.layer for call in assumed if (call.forward_pass, call.samples) not in known}


def _notes(uncalled: Sequence[str], empty: Sequence[str]) -> Iterator[str]:
    if uncalled:
        yield f"layers that were not called have no values: {_some(uncalled)}"
    if empty:
        yield f"there are no floating-point tensors in {_some(empty)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
