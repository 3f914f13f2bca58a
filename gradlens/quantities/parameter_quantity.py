"""Quantities of single parameters."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from gradlens.gradients.gradients import layer_of
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.norms import norms
from gradlens.numerics.shards import is_distributed
from gradlens.numerics.tensors import double, on_host
from gradlens.quantities.quantity import OfParts, SingleStepQuantity, select_for
from gradlens.quantities.step import NO_ELEMENTS, NOT_CONVERGED, REMOVED, Step, all_explained
from gradlens.signals.selection import Selection, Selectors, selection
from gradlens.spelling import near

NO_GRADIENT = "it has no gradient: the loss doesn't depend on it, or it is frozen"

By: TypeAlias = Literal["network", "layer", "parameter"]


def groups(names: Iterable[str], by: By) -> dict[str, list[str]]:
    """Names of parameters by the layer that they are in, or each by itself."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(layer_of(name) if by == "layer" else name, []).append(name)
    return found


def check_layers(quantity: str, by: By, model: nn.Module | None) -> None:
    """``ValueError`` if there is to be a value for each layer, and a cockpit has no model."""
    if by == "layer" and model is None:
        raise ValueError(
            f"{quantity}: which layer a parameter is in is unknown: pass the model, as in "
            "Cockpit(model, ...), instead of its parameters"
        )


def in_layers(
    quantity: str, model: nn.Module | None, names: Sequence[str], chosen: Selection
) -> list[str]:
    """The names of parameters that are in selected layers; as ``select_for``."""
    if chosen == Selection():
        return [*names]
    modules = select_for(quantity, model, chosen)
    inside = tuple(f"{layer}." for layer, each in modules.items() if each is not model)
    whole = len(inside) < len(modules)
    return [name for name in names if whole or name.startswith(inside)]


@dataclass(eq=False)
class OfParameters(OfParts):
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
        names = in_layers(self.name, model, names, self.selection)
        if self.parameters is not None:
            names = self._with_own_names(names, self.parameters)
        if not names:
            raise ValueError(
                f"{self.name}: the selected layers have no trainable parameters: choose others"
            )
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


class ParameterQuantity(OfParameters, SingleStepQuantity):
    """A quantity with a value for each trainable parameter of the selected layers.

    A record is ``{"parameters": {name: value}}``, and the entries of ``summary``.
    """

    @final
    def compute(self, step: Step) -> dict[str, Any]:
        names = self.present(step)
        return self.record({n: self.parameter_value(step, n, step.parameters[n]) for n in names})

    @abstractmethod
    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> Any:
        """The value for one parameter, after backward.

        A NaN without a reason is recorded with the reason that the ``part`` has NaN or Inf.
        """


def gradient_of(parameter: nn.Parameter, step: Step) -> Tensor | Undefined:
    """``p.grad``, dense and without a scaler's scale."""
    if parameter.grad is None or not parameter.requires_grad:
        return Undefined(NO_GRADIENT)
    if step.overwritten:
        return Undefined(step.overwritten)
    (scale,) = step.gradient_scale.of({"": parameter}).values()
    gradient = parameter.grad.detach().to_dense()
    if scale == 1:
        return gradient
    # The scale prevents underflow in half precision, so that it is divided off in single.
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    return (gradient.float() if half else gradient) / scale


def real_parts(tensor: Tensor) -> Tensor:
    """Real and imaginary parts of complex numbers along a new last axis; others unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _own_name(parameter: str) -> str:
    return parameter.removesuffix(".original").rpartition(".")[2]


@dataclass(eq=False)
class ParameterNorm(OfParameters, SingleStepQuantity):
    """‖p‖₂ of each parameter, or the root mean square of its elements with ``normalize``."""

    view = View("Parameter norm", group="layers", yscale="log", label="‖θ‖")

    normalize: bool = False

    def compute(self, step: Step) -> dict[str, Any]:
        found = {name: step.parameters[name].detach() for name in self.present(step)}
        sizes = norms([real_parts(parameter) for parameter in found.values()])
        roots = [max(p.numel(), 1) ** 0.5 if self.normalize else 1 for p in found.values()]
        return self.record(
            {n: one / root for n, one, root in zip(found, sizes, roots, strict=True)}
        )


class ConditionNumber(ParameterQuantity):
    """σ₁/σₖ, largest over smallest singular value, of each parameter with two axes or more.

    The first axis is that of the rows; all others together are that of the columns. It is infinite
    if σₖ is zero up to rounding errors.
    """

    view = View("Condition number", group="layers", yscale="log", label="σ₁/σₖ")

    def suits(self, parameter: nn.Parameter) -> bool:
        return parameter.dim() >= 2

    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> float:
        if is_distributed(parameter):
            return Undefined(DIVIDED)
        matrix = parameter.detach().flatten(1)
        matrix = matrix.to(torch.complex128) if matrix.is_complex() else double(matrix)
        if not matrix.numel():
            return Undefined(NO_ELEMENTS)
        if not bool(matrix.isfinite().all()):
            return math.nan
        try:
            values = torch.linalg.svdvals(matrix)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return Undefined(NOT_CONVERGED)
        largest, smallest = float(values[0]), float(values[-1])
        if not largest:
            return Undefined(ZERO.format(part="parameter"))
        rounding = max(matrix.shape) * torch.finfo(matrix.dtype).eps * largest
        return largest / smallest if smallest > rounding else math.inf


DIVIDED = "each process has a part of the matrix alone, and singular values take all of it"
ZERO = "the {part} is zero"
