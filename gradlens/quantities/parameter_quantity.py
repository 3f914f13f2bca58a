"""Quantities of single parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.numerics.host import on_host
from gradlens.quantities.explained import all_explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.selective import choose_parameters
from gradlens.quantities.step import REMOVED, Step
from gradlens.signals.selection import Selection, Selectors, selection

NO_GRADIENT = "it has no gradient: the loss doesn't depend on it, or it is frozen"


@dataclass(eq=False)
class AllParametersQuantity(SingleStepQuantity):
    """A quantity that computes its values for all parameters of the selected layers together.

    Where parameters are divided among processes, norms of all of them are exchanged at once. A
    record is ``{"parameters": {name: value}}``, and the entries of ``summary``.
    """

    part: ClassVar[str] = "parameter"
    """What a value is computed from, as the reasons of NaN name it."""

    _: KW_ONLY
    parameters: str | Iterable[str] | None = None
    """Names of parameters in their layers, such as ``"weight"``; by default, all."""
    layers: Selectors | Selection | None = None
    """Layers whose parameters have values: see ``gradlens.signals.Selection``; by default, all."""
    exclude: Selectors = ()
    """Layers whose parameters have none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selection = parameter_layers(self.layers, self.exclude)

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        suitable = {name: p for name, p in parameters.items() if self.suits(p)}
        self.chosen = choose_parameters(self.name, model, suitable, self.selection, self.parameters)

    def suits(self, parameter: nn.Parameter) -> bool:
        """Whether the quantity is defined for this parameter; by default, for all."""
        return True

    @final
    def compute(self, step: Step) -> dict[str, Any]:
        present = {n: step.parameters[n] for n in self.chosen if n not in step.removed}
        found = on_host(self.parameter_values(step, present))
        known = all_explained(found, f"the {self.part}")
        values = {name: known.get(name, Undefined(REMOVED)) for name in self.chosen}
        self.end_step()
        return {"parameters": values, **self.summary(values)}

    @abstractmethod
    def parameter_values(
        self, step: Step, parameters: Mapping[str, nn.Parameter]
    ) -> Mapping[str, Any]:
        """The values for all parameters, after backward.

        A NaN without a reason is recorded with the reason that the ``part`` has NaN or Inf.
        """

    def summary(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Further entries of the record, for all parameters together; by default, none."""
        return {}

    def end_step(self) -> None:
        """Called when all parameters of a step have values; by default, do nothing."""


class ParameterQuantity(AllParametersQuantity):
    """A quantity with a value for each trainable parameter of the selected layers.

    A record is ``{"parameters": {name: value}}``, and the entries of ``summary``.
    """

    @final
    def parameter_values(
        self, step: Step, parameters: Mapping[str, nn.Parameter]
    ) -> Mapping[str, Any]:
        return {name: self.parameter_value(step, name, p) for name, p in parameters.items()}

    @abstractmethod
    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> Any:
        """The value for one parameter, after backward, as in ``parameter_values``."""


def parameter_layers(layers: Selectors | Selection | None, exclude: Selectors) -> Selection | None:
    """The selection of layers whose parameters have values; ``None`` for all."""
    chosen = selection(layers, exclude)
    return None if chosen == Selection() else chosen


def gradient_of(parameter: nn.Parameter, step: Step) -> Tensor | Undefined:
    """``p.grad``, dense and without a scaler's scale."""
    if parameter.grad is None or not parameter.requires_grad:
        return Undefined(NO_GRADIENT)
    (scale,) = step.gradient_scale.of({"": parameter}).values()
    gradient = parameter.grad.detach().to_dense()
    if scale == 1:
        return gradient
    # The scale prevents underflow in half precision, so that it is divided off in single.
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    return (gradient.float() if half else gradient) / scale
