"""The diagonal of a loss's curvature and the traces of its blocks, whatever method finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from gradlens.curvature.backpack_graph import BackpackGraph
from gradlens.curvature.estimate import (
    Estimate,
    positive_estimates,
    undefined_estimate,
    weighted_sum,
)
from gradlens.curvature.hessian import GGNOperator, HessianOperator
from gradlens.curvature.operator import CurvatureOperator, parameter_slices
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans

DiagonalKind: TypeAlias = Literal["diag_h", "diag_ggn_exact", "diag_ggn_mc"]
"""Of the Hessian, of the generalised Gauss-Newton matrix, or an estimate of the latter's."""

Method: TypeAlias = Literal["exact", "Monte Carlo", "Hutchinson", ""]
"""How a diagonal was found; empty where there is none."""


def check_request(
    name: str, kind: str, samples: int, least: int, sub_batch: int | None = None
) -> None:
    """Raise ``ValueError`` in the name of a quantity for an unknown kind or too few samples."""
    if kind not in get_args(DiagonalKind):
        known = ", ".join(repr(known) for known in get_args(DiagonalKind))
        raise ValueError(f"{name}: curvature={kind!r} is unknown: use one of {known}")
    if samples < least:
        raise ValueError(f"{name}: samples={samples} is too few: use {least} or more")
    if sub_batch is not None and sub_batch < 2:
        raise ValueError(f"{name}: sub_batch={sub_batch} is too few: use 2 or more")


@dataclass(frozen=True)
class DiagonalProblem:
    """The diagonal that a method has to find, and what it can be found from.

    ``matrix`` is the Hessian for ``"diag_h"`` and otherwise the generalised Gauss-Newton matrix, of
    the mean loss. A random method takes ``samples`` draws, each for ``sub_batch`` samples of the
    batch (``None``: all of them). ``graph`` returns the graph that BackPACK's rules can be used on,
    or raises ``UnavailableError``. ``plans`` hold from step to step which rows of the network's
    outputs belong to which sample.
    """

    kind: DiagonalKind
    matrix: CurvatureOperator
    samples: int
    sub_batch: int | None
    seed: int
    model: nn.Module | None
    plans: Plans
    graph: Callable[[], BackpackGraph]

    @property
    def hessian(self) -> HessianOperator:
        """The matrix of ``"diag_h"``."""
        assert isinstance(self.matrix, HessianOperator)
        return self.matrix

    @property
    def ggn(self) -> GGNOperator:
        """The matrix of the two kinds that are of the generalised Gauss-Newton matrix."""
        assert isinstance(self.matrix, GGNOperator)
        return self.matrix


@dataclass(frozen=True)
class LossTraces:
    """The ``trace`` of the whole matrix, and the ``traces`` of the parameters' blocks by name.

    Their standard error is zero where the ``method`` is exact. Where there are no numbers, they
    hold the reason.
    """

    trace: Estimate
    traces: Mapping[str, Estimate]
    method: Method


@dataclass(frozen=True)
class LossDiagonal(LossTraces):
    """Diagonal ``values`` by parameter name, each of its parameter's shape, in float64.

    ``trace`` is the sum of all values and ``traces`` the sum for each parameter, with a standard
    error of zero where the ``method`` is exact. Where there are no numbers, the values are NaN and
    the traces hold the reason.
    """

    values: Mapping[str, Tensor]


def summed_traces(parts: Sequence[LossTraces], weights: Sequence[float]) -> LossTraces:
    """The traces of Σᵢ wᵢ Mᵢ from those of the matrices, whose estimates are independent.

    The method is the least exact of all.
    """
    traces = {n: weighted_sum([part.traces[n] for part in parts], weights) for n in parts[0].traces}
    least_exact: tuple[Method, ...] = ("", "Hutchinson", "Monte Carlo", "exact")
    method = min((part.method for part in parts), key=least_exact.index)
    return LossTraces(weighted_sum([part.trace for part in parts], weights), traces, method)


def diagonal_by_parameter(
    diagonal: Tensor, traces: Sequence[Estimate], parameters: Mapping[str, Tensor], method: Method
) -> LossDiagonal:
    """A diagonal ``[D]``, with the traces of the whole and of each parameter's block, in order."""
    trace, *parts = traces
    slices = parameter_slices(parameters)
    values = {name: diagonal[slices[name]].reshape(p.shape) for name, p in parameters.items()}
    return LossDiagonal(trace, dict(zip(slices, parts, strict=True)), method, values)


def mean_diagonal(
    draw: Callable[[], Tensor], samples: int, parameters: Mapping[str, Tensor]
) -> LossDiagonal:
    """Mean of ``samples`` independent random diagonals ``[D]``, none of which has a negative sum.

    Raises ``UnavailableError`` if a diagonal contains NaN or Inf.
    """
    total, sums = torch.zeros(()), []
    for _ in range(samples):
        diagonal = draw()
        sums.append(_block_sums(diagonal, parameters))
        total = diagonal if len(sums) == 1 else total.add_(diagonal)
    traces = positive_estimates(torch.stack(sums), samples)
    return diagonal_by_parameter(total / samples, traces, parameters, "Monte Carlo")


def exact_diagonal(diagonal: Tensor, parameters: Mapping[str, Tensor]) -> LossDiagonal:
    """A diagonal ``[D]`` without error; ``UnavailableError`` if it contains NaN or Inf."""
    sums = _block_sums(diagonal, parameters).tolist()
    traces = [Estimate(value, 0.0, 1, products=1) for value in sums]
    return diagonal_by_parameter(diagonal, traces, parameters, "exact")


def _block_sums(diagonal: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """The sum of all elements, and those of the parameters' blocks."""
    if not bool(diagonal.isfinite().all()):
        raise UnavailableError("the curvature's diagonal contains NaN or Inf")
    blocks = parameter_slices(parameters).values()
    return torch.stack([diagonal.sum(), *(diagonal[block].sum() for block in blocks)])


def undefined_diagonal(parameters: Mapping[str, Tensor], reason: str) -> LossDiagonal:
    """NaNs with their reason, in place of a diagonal that no method has found."""
    trace = undefined_estimate(0, reason)
    part = undefined_estimate(0, "as the trace of all parameters")
    values = {
        name: torch.full(p.shape, torch.nan, dtype=torch.float64) for name, p in parameters.items()
    }
    return LossDiagonal(trace, dict.fromkeys(parameters, part), "", values)
