"""Norm, correlation and activation of the gradient of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.host import together
from gradlens.numerics.norms import norms
from gradlens.numerics.shards import whole
from gradlens.quantities.consecutive import ComparesSteps, geometries, mean_correlation
from gradlens.quantities.explained import NO_ELEMENTS, all_explained
from gradlens.quantities.output_activation import activation, over_parts
from gradlens.quantities.parameter_quantity import (
    AllParametersQuantity,
    ParameterQuantity,
    gradient_of,
)
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step


def _norms(step: Step) -> tuple[tuple[str, ...], Tensor]:
    gradients = step.gradients()
    return together(dict(zip(gradients, norms([*gradients.values()]), strict=True)))


class GradNorm(SingleStepQuantity):
    """‖p.grad‖₂ of each parameter by name, as it is when the context is left.

    With a sum loss, it is N times that of the mean loss.
    """

    measures = (_norms,)
    view = View("Gradient norm", group="step size", yscale="log", label="‖∇L‖")

    def compute(self, step: Step) -> dict[str, float]:
        names, sizes = step.measured(_norms)
        return all_explained(dict(zip(names, sizes.tolist(), strict=True)), "the gradient of")


@dataclass(eq=False)
class GradientGeometry(ComparesSteps, AllParametersQuantity):
    """‖p.grad‖₂ of each parameter, and its correlation with that of the step tracked before.

    Values, ``normalize`` and ``correlation`` are those of ``OutputGradientGeometry``. With
    ``correlation``, a copy of the gradients is kept until the next tracked step.
    """

    part = "gradient of"
    view = View("Gradient geometry", group="layers", yscale="log", label="‖∇L‖")

    normalize: bool = False
    correlation: bool = True

    def parameter_values(
        self, step: Step, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, Any]:
        found = {name: gradient_of(parameter, step) for name, parameter in parameters.items()}
        gradients = {n: each for n, each in found.items() if not isinstance(each, Undefined)}
        if self.correlation:
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        steps = self.steps if self.correlation else None
        return {**found, **geometries(gradients, self.normalize, steps)}

    def summary(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return mean_correlation(parameters)


@dataclass(eq=False)
class GradientActivation(ParameterQuantity):
    """Share of nonzero elements in each parameter's gradient, and of units whose gradient is zero.

    A unit is a row of the parameter, along its first axis: an output feature or channel. Values
    are those of ``OutputActivation``; an element is nonzero if its absolute value is above
    ``threshold``.
    """

    part = "gradient of"
    view = View("Gradient activation", group="layers", label="share")

    threshold: float = 1e-8  # as in monitorch

    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> Any:
        gradient = gradient_of(parameter, step)
        if isinstance(gradient, Undefined):
            return gradient
        if not gradient.numel():
            return Undefined(NO_ELEMENTS)
        rows = gradient.reshape(len(gradient), -1) if gradient.dim() else gradient.reshape(1, 1)
        rates = (rows.abs() > self.threshold).double().mean(1)
        # NaNs are filled in afterwards: torch would look for a rule of a DTensor's in each call.
        rates, has_nan = whole(torch.stack([rates, rows.isnan().any(1).double()]))
        return activation(rates.masked_fill(has_nan > 0, torch.nan))

    def summary(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return over_parts(parameters)
