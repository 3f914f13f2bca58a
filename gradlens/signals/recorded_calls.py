"""Calls of layers with their reduced signals, and one value for all calls of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from gradlens.history.coverage import few
from gradlens.history.undefined import Undefined
from gradlens.numerics.tensors import on_host
from gradlens.signals.signal import LayerSignals, Request, Signal, merged

Requests: TypeAlias = Mapping[str, frozenset[Request]]
"""What is requested of each layer, by its name."""

ForwardPass: TypeAlias = tuple[int, int]
"""The number of a forward pass, and the id of the backward pass in which it is recomputed by a
checkpoint, ``NO_BACKWARD_PASS`` if it isn't."""


@dataclass
class Recording:
    """What was recorded for a step, or in an evaluation, without backward passes.

    ``requests`` are those of its first forward pass. Calls are ``open`` until the layer returns.
    Some layers were called ``without_gradients``, or were reached by a backward pass of a call that
    is ``over``. ``axes`` count the samples of outputs two axes of which may do so. It is
    ``in_backward`` inside of the step's context. A ``failure`` is why none of it counts.
    """

    requests: Requests = field(default_factory=dict)
    is_evaluation: bool = False
    calls: list[RecordedCall] = field(default_factory=list)
    open: dict[str, list[RecordedCall]] = field(default_factory=dict)
    without_gradients: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    axes: dict[Made, int] = field(default_factory=dict)
    in_backward: bool = False
    failure: str = ""


SEVERAL = (
    "several backward passes went through one call of the layer, whose gradient is their sum: "
    "call backward once, on the sum of the losses"
)
Made: TypeAlias = tuple[int, int]
"""The sequence number of the node that has made a tensor, and the number of its output."""

MISPLACED = (
    "it isn't certain which axis of its output counts the samples: none that may do so has as many "
    "entries as there are samples in the layers that define their axis"
)
EITHER_AXIS = (
    "two axes of its output have {length} entries, and it can't be followed which of them counts "
    "the samples: use a batch of another size"
)

PACKED = (
    "its output is a packed sequence, in which the rows of a sample are not next to each other: "
    "call the layer with a padded tensor"
)


@dataclass
class RecordedCall:
    """The reduced signals of one call of a layer, and what decides whether the call counts.

    ``undefined`` are the reasons why signals have no value. ``reached`` says that the backward pass
    of the step has gone through the call. ``standalone``: the layer was called outside the model,
    and its output needs no gradient, so that no backward pass can reach it.
    ``lengths`` are those of the output's axes that may count samples, of which the layer itself
    defines one if ``axis_known``; if there are two, ``by_axis`` has what depends on them for each,
    and ``axis`` is the one that counts samples in the layers next to it. An output that
    ``is_packed`` has samples, but no axis of theirs. ``made`` says which node has made the output,
    and the call has made the nodes from the sequence number ``first_node`` on. ``sizes`` are the
    lengths of the axes of what the model was called with. ``is_over``: the call was discarded, and
    counts no more.
    """

    layer: str
    forward_pass: ForwardPass
    values: dict[Request, Any] = field(default_factory=dict)
    undefined: dict[Signal, str] = field(default_factory=dict)
    reached: bool = False
    standalone: bool = False
    lengths: tuple[int, ...] = ()
    axis_known: bool = False
    is_packed: bool = False
    axis: int = 0
    by_axis: dict[Request, tuple[Any, Any]] = field(default_factory=dict)
    made: Made | None = None
    first_node: int = 0
    sizes: tuple[int, ...] = ()
    is_over: bool = False

    def add(self, request: Request, value: Any) -> None:
        """Store a value, the only one of its request."""
        self.values[request] = Undefined(SEVERAL) if request in self.values else value


def counted(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls that belong to a step.

    Those that its backward pass has reached, those of the same forward passes, and those alone of
    layers without any of these.
    """
    reached = {call.forward_pass for call in calls if call.reached}
    inside = {c.layer for c in calls if c.reached or c.forward_pass in reached}
    return [
        call
        for call in calls
        if call.reached
        or call.forward_pass in reached
        or (call.standalone and call.layer not in inside)
    ]


def signals_of(
    calls: Sequence[RecordedCall],
    wanted: Requests,
    modules: Mapping[str, nn.Module],
    reasons: Mapping[str, Mapping[Request, str]],
    axes: Mapping[Made, int],
) -> LayerSignals:
    """One value for each layer and request; ``reasons`` are for those without any.

    ``axes`` count the samples of outputs two axes of which may do so.
    """
    by_layer: dict[str, list[RecordedCall]] = {layer: [] for layer in modules}
    for call in _with_small_values_on_host(_placed(calls, axes)):
        by_layer[call.layer].append(call)
    values: dict[str, dict[Request, Any]] = {}
    uncalled, empty = [], []
    for layer, found in by_layer.items():
        requests, known = wanted.get(layer, frozenset()), reasons.get(layer, {})
        every = {request: _value(request, found, known.get(request, "")) for request in requests}
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


def needs_sample_axis(request: Request) -> bool:
    """Whether a value depends on which axis of the output counts the samples."""
    return request.signal is Signal.OUTPUT and request.reduction.by_sample


def _placed(calls: Sequence[RecordedCall], axes: Mapping[Made, int]) -> list[RecordedCall]:
    """The calls with the values that depend on the axis of samples, or the reason against them."""
    known: dict[ForwardPass, set[int]] = {}
    for call in calls:
        if call.axis_known:
            known.setdefault(call.forward_pass, set()).update(call.lengths)
    return [_with_axis(call, known.get(call.forward_pass, set()), axes) for call in calls]


def _with_axis(call: RecordedCall, known: Set[int], axes: Mapping[Made, int]) -> RecordedCall:
    """A call's values by the axis that counts the samples, ``known`` numbers of which there are."""
    if not call.lengths:  # a single sample
        return call
    axis = None if call.is_packed else _sample_axis(call, known, axes)
    if axis is not None:
        chosen = {request: values[axis] for request, values in call.by_axis.items()}
        return replace(call, values=call.values | chosen) if chosen else call
    square = len(call.lengths) == 2 and len({*call.lengths}) == 1
    either = EITHER_AXIS.format(length=call.lengths[0]) if square else MISPLACED
    reason = PACKED if call.is_packed else either
    depending = [*call.by_axis, *filter(needs_sample_axis, call.values)]
    return replace(call, values=call.values | dict.fromkeys(depending, Undefined(reason)))


def _sample_axis(call: RecordedCall, known: Set[int], axes: Mapping[Made, int]) -> int | None:
    """The place of the axis that counts the samples; ``None`` if it isn't certain."""
    fitting = [axis for axis, length in enumerate(call.lengths) if not known or length in known]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    if call.made is not None and call.made in axes:
        return axes[call.made]
    return None if known or len({*call.lengths}) == 1 else call.axis


def _notes(uncalled: Sequence[str], empty: Sequence[str]) -> Iterator[str]:
    if uncalled:
        yield f"layers that were not called have no values: {few(uncalled)}"
    if empty:
        yield f"there are no floating-point tensors in {few(empty)}"
