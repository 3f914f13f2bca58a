"""Size and direction of the gradient of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.consecutive import Consecutive, geometry, mean_correlation
from gradlens.quantities.explained import NO_ELEMENTS
from gradlens.quantities.output_activation import activation, over_parts
from gradlens.quantities.parameter_quantity import ParameterQuantity, gradient_of
from gradlens.quantities.step import Step
from gradlens.schedules import Schedule
from gradlens.signals.selection import Selection, Selectors


class GradientGeometry(ParameterQuantity):
    """‖p.grad‖₂ of each parameter, and how it correlates with that of the step tracked before.

    Values are those of ``OutputGradientGeometry``. With ``correlation``, a copy of the gradients
    is kept until the next step.
    """

    part = "gradient of"
    view = View("Gradient geometry", group="layers", yscale="log", label="‖∇L‖")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        normalize: bool = False,
        correlation: bool = True,
        *,
        parameters: str | Iterable[str] | None = None,
        layers: Selectors | Selection | None = None,
        exclude: Selectors = (),
        name: str | None = None,
    ) -> None:
        super().__init__(
            track_schedule, verbose, parameters=parameters, layers=layers, exclude=exclude,
            name=name,
        )  # fmt: skip
        self.normalize = normalize
        self._steps = Consecutive() if correlation else None

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if self._steps is not None:
            self._steps.forget()

    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> Any:
        gradient = gradient_of(parameter, step)
        if isinstance(gradient, Undefined):
            return gradient
        kept = gradient if self._steps is None else gradient.clone()
        return geometry(name, kept, self.normalize, self._steps)

    def summary(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return mean_correlation(parameters)

    def all_seen(self) -> None:
        if self._steps is not None:
            self._steps.end_step()


class GradientActivation(ParameterQuantity):
    """Share of each parameter's gradient that isn't zero, and share of its units that get none.

    A unit is a row of the parameter, along its first axis: an output feature or channel. Values
    are those of ``OutputActivation``, for elements whose absolute value is above ``threshold``.
    """

    part = "gradient of"
    view = View("Gradient activation", group="layers", label="share")

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        threshold: float = 1e-8,
        *,
        parameters: str | Iterable[str] | None = None,
        layers: Selectors | Selection | None = None,
        exclude: Selectors = (),
        name: str | None = None,
    ) -> None:
        super().__init__(
            track_schedule, verbose, parameters=parameters, layers=layers, exclude=exclude,
            name=name,
        )  # fmt: skip
        self.threshold = threshold

    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> Any:
        gradient = gradient_of(parameter, step)
        if isinstance(gradient, Undefined):
            return gradient
        if not gradient.numel():
            return Undefined(NO_ELEMENTS)
        rows = gradient.reshape(len(gradient), -1) if gradient.dim() else gradient.reshape(1, 1)
        rates = (rows.abs() > self.threshold).double().mean(1)
        return activation(rates.masked_fill(rows.isnan().any(1), torch.nan))

    def summary(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return over_parts(parameters)
