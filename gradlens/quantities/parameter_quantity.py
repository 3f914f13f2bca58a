"""Quantities of single parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.numerics.host import on_host
from gradlens.quantities.explained import all_explained
from gradlens.quantities.layer_quantity import select_for
from gradlens.quantities.quantity import Quantity, SingleStepQuantity
from gradlens.quantities.step import REMOVED, Step
from gradlens.signals.selection import Selection, Selectors, selection
from gradlens.spelling import near

NO_GRADIENT = "it has no gradient: the loss doesn't depend on it, or it is frozen"


@dataclass(eq=False)
class OfParameters(Quantity):
    """A quantity with a value for each trainable parameter of the selected layers.

    A record is ``{"parameters": {name: value}}``, and the entries of ``summary``.
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
        self.selection = selection(self.layers, self.exclude)

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        names = [name for name, p in parameters.items() if self.suits(p)]
        if self.selection != Selection():
            modules = select_for(self.name, model, self.selection)
            inside = tuple(f"{layer}." for layer, each in modules.items() if each is not model)
            whole = len(inside) < len(modules)
            names = [name for name in names if whole or name.startswith(inside)]
        if self.parameters is not None:
            names = self._with_own_names(names, self.parameters)
        if not names:
            raise ValueError(f"{self.name}: the selected layers have no trainable parameters")
        self.chosen = tuple(names)

    def _with_own_names(self, names: Sequence[str], own: str | Iterable[str]) -> list[str]:
        """The names of parameters that have one of these names in their layers."""
        chosen = (own,) if isinstance(own, str) else tuple(own)
        existing = sorted({_own_name(name) for name in names})
        for each in chosen:
            if each not in existing:
                hint = near(each, existing)
                raise ValueError(f"{self.name}: no layer has a trainable parameter {each!r}{hint}")
        return [name for name in names if _own_name(name) in chosen]

    def suits(self, parameter: nn.Parameter) -> bool:
        """Whether the quantity is defined for this parameter; by default, for all."""
        return True

    @final
    def present(self, step: Step) -> list[str]:
        """Names of the selected parameters that the model still has."""
        return [name for name in self.chosen if name not in step.removed]

    @final
    def record(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The record of the values of those that are ``present``."""
        known = all_explained(on_host(found), f"the {self.part}")
        values = {name: known.get(name, Undefined(REMOVED)) for name in self.chosen}
        self.end_step()
        return {"parameters": values, **self.summary(values)}

    @abstractmethod
    def summary(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Further entries of the record, for all parameters together."""

    def end_step(self) -> None:
        """Called when all parameters of a step have values; by default, do nothing."""


class AllParametersQuantity(OfParameters, SingleStepQuantity):
    """A quantity that computes its values for all parameters of the selected layers together.

    Where parameters are divided among processes, norms of all of them are exchanged at once.
    """

    @final
    def compute(self, step: Step) -> dict[str, Any]:
        present = {name: step.parameters[name] for name in self.present(step)}
        return self.record(self.parameter_values(step, present))

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


def _own_name(parameter: str) -> str:
    return parameter.removesuffix(".original").rpartition(".")[2]
