"""The parameters, and their norm, condition number and sign changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.norms import norms
from gradlens.numerics.precision import double
from gradlens.numerics.shards import is_distributed, whole
from gradlens.quantities.consecutive import ComparesSteps, real_parts
from gradlens.quantities.explained import NO_ELEMENTS, NOT_CONVERGED
from gradlens.quantities.parameter_quantity import AllParametersQuantity, ParameterQuantity
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step


class Parameters(SingleStepQuantity):
    """All trainable parameters by name, before the update; meant for small networks."""

    view = View("Parameters, RMS", group="layers")

    def compute(self, step: Step) -> dict[str, Tensor]:
        return {name: whole(parameter.detach()) for name, parameter in step.parameters.items()}


@dataclass(eq=False)
class ParameterNorm(AllParametersQuantity):
    """‖p‖₂ of each parameter, or the root mean square of its elements with ``normalize``."""

    view = View("Parameter norm", group="layers", yscale="log", label="‖θ‖")

    normalize: bool = False

    def parameter_values(
        self, step: Step, parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        sizes = norms([real_parts(parameter.detach()) for parameter in parameters.values()])
        roots = [max(p.numel(), 1) ** 0.5 if self.normalize else 1 for p in parameters.values()]
        return {n: size / root for n, size, root in zip(parameters, sizes, roots, strict=True)}


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
            return Undefined("the parameter is zero")
        rounding = max(matrix.shape) * torch.finfo(matrix.dtype).eps * largest
        return largest / smallest if smallest > rounding else math.inf


DIVIDED = "each process has a part of the matrix alone, and singular values take all of it"


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
        before = self.steps.before(name, signs)
        return before if isinstance(before, Undefined) else whole((before * signs < 0).sum())
