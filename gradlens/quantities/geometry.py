"""Norms of tensors, and their correlations with those of the step tracked before."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.norms import inner, norms
from gradlens.numerics.shards import over_parts, own_part, whole
from gradlens.numerics.tensors import on_host
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.parameter_quantity import (
    OfParameters,
    ParameterQuantity,
    gradient_of,
    real_parts,
)
from gradlens.quantities.quantity import OfParts, SingleStepQuantity, UpdateQuantity, mean
from gradlens.quantities.step import NO_ELEMENTS, Step, explained
from gradlens.quantities.update import Update
from gradlens.signals.predicates import is_no_activation
from gradlens.signals.reductions import Copies, Norms, Size
from gradlens.signals.selection import Selection
from gradlens.signals.signal import Signal

FIRST = "there is no step before to compare with"


class ComparesSteps(OfParts):
    """A quantity that compares tensors of each step with those of the step tracked before.

    It takes as much memory as the tensors of one step, and of two while a step is computed.
    """

    state = ("before", "now")  # tensors, which are never changed in place

    def __post_init__(self) -> None:
        super().__post_init__()
        self._before: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}

    def end_step(self) -> None:
        self._before, self._now = self._now, {}

    def before(self, name: str, tensor: Tensor) -> Tensor | Undefined:
        """The tensor of this name at the step before.

        ``tensor``, that of the present step, is kept without a copy.
        """
        self._now[name] = tensor
        before = self._before.get(name)
        if before is None:
            return Undefined(FIRST)
        if before.shape != tensor.shape:
            return Undefined("its shape differs from that at the step before")
        return before.to(tensor.device)

    def correlations(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Cosines of the angles between tensors and those of the step before, as ``before``."""
        found = {name: self.before(name, tensor) for name, tensor in tensors.items()}
        unknown: dict[str, float] = {n: o for n, o in found.items() if isinstance(o, Undefined)}
        pairs = {n: (o, tensors[n]) for n, o in found.items() if isinstance(o, Tensor)}
        return unknown | dict(zip(pairs, cosines([*pairs.values()]), strict=True))


def cosines(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """⟨a, b⟩/(‖a‖·‖b‖) of each pair of tensors, which may be distributed."""
    lengths = norms([one for pair in pairs for one in pair])
    both = [*zip(lengths[::2], lengths[1::2], strict=True)]
    places = [place for place, each in enumerate(on_host(both)) if all(map(float, each))]
    own = [_product_of_units(pairs[place], both[place]) for place in places]
    found = over_parts([pairs[place][0] for place in places], own, lambda parts: parts.sum(0))
    values: list[float] = [Undefined("one of the two steps is zero")] * len(pairs)
    for place, value in zip(places, map(float, on_host(found)), strict=True):
        is_known = not math.isnan(value)
        why = "one of the two steps has NaN or Inf"
        values[place] = min(max(value, -1.0), 1.0) if is_known else Undefined(why)
    return values


def _product_of_units(pair: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]) -> Tensor:
    """The part of this process in the product of two tensors that are divided by their lengths."""
    dtype = torch.promote_types(*(length.dtype for length in lengths))
    first, second = (own_part(tensor).flatten().to(dtype) for tensor in pair)
    return inner(first / lengths[0], second / lengths[1])


@dataclass(eq=False)
class _Geometry(ComparesSteps):
    summaries: ClassVar = {"correlation": ("correlation", mean)}

    normalize: bool = False
    correlation: bool = True

    def geometries(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """``"norm"`` of each tensor, or ``"rms"`` with ``normalize``, and its ``"correlation"``.

        The correlation of complex numbers is computed from their real and imaginary parts.
        """
        parts = {name: real_parts(tensor) for name, tensor in tensors.items()}
        found: dict[str, dict[str, Any]] = {}
        for (name, tensor), size in zip(tensors.items(), norms([*parts.values()]), strict=True):
            root = max(tensor.numel(), 1) ** 0.5
            found[name] = {"rms": size / root} if self.normalize else {"norm": size}
        correlations = self.correlations(parts) if self.correlation else {}
        for name, correlation in correlations.items():
            found[name]["correlation"] = correlation
        return found


@dataclass(eq=False)
class _SignalGeometry(_Geometry, LayerQuantity, ABC):
    default_layers = Selection((is_no_activation,))

    # Norms and correlations don't depend on which axis is that of the features.
    channel_last: bool | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduction = Copies() if self.correlation else Size()

    def layer_value(self, layer: str, module: nn.Module, reduced: Tensor | Norms) -> dict[str, Any]:
        if isinstance(reduced, Tensor):
            return self.geometries({layer: reduced})[layer]
        size = reduced.norm / max(reduced.elements, 1) ** 0.5 if self.normalize else reduced.norm
        return {"rms" if self.normalize else "norm": size}


class OutputGradientGeometry(_SignalGeometry):
    """‖∂L/∂out‖₂ of each layer, and its correlation with that of the step tracked before.

    For each layer, ``"norm"`` is that of the gradient at the whole output, or with ``normalize``
    ``"rms"``, the root mean square of its elements. ``"correlation"`` is ⟨a, b⟩/(‖a‖·‖b‖) of the
    gradients a and b at two consecutive tracked steps, or a NaN with the reason: at the first step,
    after a batch of another size, or if one of the two is zero. It needs the gradients of one step
    to be kept until the next one; ``correlation=False`` leaves it out. A record also has the mean
    ``"correlation"`` over layers. By default, all layers but activations have values.
    """

    signal = Signal.OUTPUT_GRADIENT
    view = View("Output gradient", group="layers", yscale="log", label="‖∂L/∂output‖")


class InputGradientGeometry(_SignalGeometry):
    """‖∂L/∂in‖₂ of each layer, and its correlation, as in ``OutputGradientGeometry``.

    It is the whole gradient at the layer's input, including the parts from other uses of this
    tensor, such as a residual branch.
    """

    signal = Signal.INPUT_GRADIENT
    view = View("Input gradient", group="layers", yscale="log", label="‖∂L/∂input‖")


@dataclass(eq=False)
class GradientGeometry(_Geometry, OfParameters, SingleStepQuantity):
    """‖p.grad‖₂ of each parameter, and its correlation with that of the step tracked before.

    Values, ``normalize`` and ``correlation`` are those of ``OutputGradientGeometry``. With
    ``correlation``, a copy of the gradients is kept until the next tracked step.
    """

    part = "gradient of"
    view = View("Gradient geometry", group="layers", yscale="log", label="‖∇L‖")

    def compute(self, step: Step) -> dict[str, Any]:
        found = {name: gradient_of(step.parameters[name], step) for name in self.present(step)}
        gradients = {n: each for n, each in found.items() if not isinstance(each, Undefined)}
        if self.correlation:
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        return self.record({**found, **self.geometries(gradients)})


@dataclass(eq=False)
class UpdateGeometry(_Geometry, OfParameters, UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂ of each parameter, and its correlation with the update tracked before.

    Values, ``normalize`` and ``correlation`` are those of ``OutputGradientGeometry``, recorded as
    ``{"parameters": {name: value}}``. With ``correlation``, an update is kept until the next one.
    ``parameters``, ``layers`` and ``exclude`` are those of ``ParameterQuantity``.
    """

    part = "update of"
    view = View("Update geometry", group="layers", yscale="log", label="‖θₙ₊₁ − θₙ‖")

    def compute(self, step: Step, update: Update) -> dict[str, Any]:
        return self.record(self.geometries({n: update.direction[n] for n in self.present(step)}))


@dataclass(eq=False)
class RelativeUpdate(OfParameters, UpdateQuantity):
    """‖pₙ₊₁ − pₙ‖₂/‖pₙ‖₂ of each parameter and of all together, for any optimizer.

    For each parameter, ``"value"`` is that ratio and ``"rms"`` the root mean square of the elements
    of pₙ₊₁ − pₙ. A record also has both for all selected parameters together, as entries of its
    own. Of weights that are zero, such as new biases, the ratio is a NaN with this reason.
    ``parameters``, ``layers`` and ``exclude`` are those of ``ParameterQuantity``.
    """

    part = "update of"
    is_relative = True
    view = View("Relative update", group="step size", yscale="log", label="‖Δθ‖/‖θ‖")

    def compute(self, step: Step, update: Update) -> dict[str, Any]:
        names = self.present(step)
        counts = {name: step.parameters[name].numel() for name in names}
        moved, start = update.norms, update.start_norms
        found = {n: _relative(moved[n], start[n], counts[n], "parameter is") for n in names}
        length, size = (math.hypot(*(each[name] for name in names)) for each in (moved, start))
        total = _relative(length, size, sum(counts.values()), "parameters are")
        return {**self.record(found), **explained(total, "the update of a parameter")}


def _relative(moved: float, start: float, elements: int, what: str) -> dict[str, float]:
    """The length of an update over that of what it began at, and its root mean square."""
    if not elements:
        return dict.fromkeys(("value", "rms"), Undefined(NO_ELEMENTS))
    value = moved / start if start else Undefined(f"the {what} zero before the update")
    return {"value": value, "rms": moved / elements**0.5}


class WeightSignFlips(ComparesSteps, ParameterQuantity):
    """Number of elements of each parameter whose sign has changed since the step tracked before.

    These are the elements w with wₜ·wₜ₋₁ < 0. There is no value at the first step. The signs of one
    step are kept, one byte for each element.
    """

    view = View("Sign flips", group="layers", label="elements")

    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> Any:
        if parameter.is_complex():
            return Undefined("complex numbers have no sign")
        signs = parameter.detach().sign().nan_to_num_().to(torch.int8)
        before = self.before(name, signs)
        return before if isinstance(before, Undefined) else whole((before * signs < 0).sum())
