"""The diagonal of a loss's curvature and the traces of its blocks, and the methods that find them.

A method raises ``UnavailableError`` with the reason why it doesn't apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.estimate import (
    Estimate,
    positive_estimates,
    weighted_sum,
)
from gradlens.curvature.hessian_roots import drawing, roots
from gradlens.curvature.hutchinson import hutchinson_estimates, probed_diagonal
from gradlens.curvature.operator import CurvatureOperator, parameter_slices
from gradlens.curvature.products import Products, Seed, float64_device
from gradlens.curvature.samples_jacobians import SamplesJacobians
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import LEAF, called, kind_of
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import hands_gradients_on, saved

DiagonalKind: TypeAlias = Literal["diag_h", "diag_ggn_exact", "diag_ggn_mc"]
"""Of the Hessian, of the generalised Gauss-Newton matrix, or an estimate of the latter's."""

Method: TypeAlias = Literal["Hutchinson", "Monte Carlo", "exact"]
"""How a diagonal was found, the most exact last."""

CURVED = (
    "the network isn't known to be piecewise linear in each parameter, so that the Hessian's "
    "diagonal isn't that of the Gauss-Newton matrix: {why}"
)


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
class LossTraces:
    """The ``trace`` of the whole matrix, and the ``traces`` of the parameters' blocks by name.

    Their standard error is zero where the ``method`` is exact.
    """

    trace: Estimate
    traces: Mapping[str, Estimate]
    method: Method


@dataclass(frozen=True)
class LossDiagonal(LossTraces):
    """Diagonal ``values`` by parameter name, each of its parameter's shape, in float64.

    ``trace`` is the sum of all values and ``traces`` the sum for each parameter, with a standard
    error of zero where the ``method`` is exact.
    """

    values: Mapping[str, Tensor]


def summed_traces(parts: Sequence[LossTraces], weights: Sequence[float]) -> LossTraces:
    """The traces of Σᵢ wᵢ Mᵢ from those of the matrices, whose estimates are independent.

    The method is the least exact of all.
    """
    traces = {n: weighted_sum([part.traces[n] for part in parts], weights) for n in parts[0].traces}
    method = min((part.method for part in parts), key=get_args(Method).index)
    return LossTraces(weighted_sum([part.trace for part in parts], weights), traces, method)


def check_piecewise_linear(outputs: Tensor) -> None:
    """``UnavailableError`` unless outputs are piecewise linear in each element of all parameters.

    Then their second derivatives with respect to single elements are zero, so that the diagonal of
    the loss's Hessian is that of the Gauss-Newton matrix. Holds for linear layers, convolutions,
    ReLU and maxima, and for what adds up or multiplies results of different parameters.
    """
    graph = Graph(outputs)
    behind: list[frozenset[int]] = []  # the leaves behind each node
    for node, kind, children in zip(graph.nodes, graph.kinds, graph.children, strict=True):
        if kind == LEAF:
            behind.append(frozenset([len(behind)]))
            continue
        inputs = [frozenset() if edge is None else behind[edge[0]] for edge in children]
        behind.append(frozenset().union(*inputs))
        its = kind_of(kind)
        is_linear = its.is_linear or its.is_table or hands_gradients_on(node)
        if is_linear or its.is_piecewise_linear:
            continue
        by_fixed = its.normalises_channels and not saved(node, "training")
        by_factors = its.is_product and not (its.is_division and any(inputs[1:]))
        if not (its.is_affine or by_factors or by_fixed):
            raise UnavailableError(CURVED.format(why=f"it has {called(kind)}"))
        if len(behind[-1]) < sum(map(len, inputs)):
            raise UnavailableError(CURVED.format(why="a parameter is multiplied by itself"))


def by_roots(jacobians: SamplesJacobians, seed: int) -> LossDiagonal:
    """Gauss-Newton diagonal by one backward pass for each output of a sample.

    Raises ``UnavailableError`` where there are no roots of the loss's Hessian, and for NaN or Inf.
    """
    ggn = jacobians.ggn
    columns = roots(ggn, np.random.default_rng(seed))
    diagonal = reduce(Tensor.add_, (_squared(jacobians, column) for column in columns))
    sums = _block_sums(diagonal, ggn.parameters).tolist()
    traces = [Estimate(value, 0.0, 1, products=1) for value in sums]
    return diagonal_by_parameter(diagonal, traces, ggn.parameters, "exact")


def by_draws(jacobians: SamplesJacobians, samples: int, seed: int) -> LossDiagonal:
    """Gauss-Newton diagonal as the mean over ``samples`` random gradients of the outputs.

    Each takes a backward pass. Raises ``UnavailableError`` where there are no such gradients.
    """
    parameters = jacobians.ggn.parameters
    draw = drawing(jacobians.ggn, np.random.default_rng(seed))
    total, sums = torch.zeros((), device="cpu"), []
    for _ in range(samples):
        diagonal = _squared(jacobians, draw())
        sums.append(_block_sums(diagonal, parameters))
        total = diagonal if len(sums) == 1 else total.add_(diagonal)
    traces = positive_estimates(torch.stack(sums), samples)
    return diagonal_by_parameter(total / samples, traces, parameters, "Monte Carlo")


def by_hutchinson(matrix: CurvatureOperator, samples: int, seed: Seed) -> LossDiagonal:
    """Mean of z∘Hz over ``samples`` random signs z (Bekas et al., 2007, Eq. 2).

    Raises ``UnavailableError`` where a product contains NaN or Inf.
    """
    diagonal = probed_diagonal(Products(matrix), samples, seed)
    blocks = [slice(None), *matrix.slices.values()]
    traces = hutchinson_estimates(diagonal, blocks, samples)
    return diagonal_by_parameter(diagonal.mean, traces, matrix.parameters, "Hutchinson")


def _squared(jacobians: SamplesJacobians, start: Tensor) -> Tensor:
    """Σₙ(Jₙᵀsₙ)² ``[D]`` in float64, with sₙ in ``start``, of the scaled loss."""
    found, ggn = jacobians.operators(start), jacobians.ggn
    parts = [
        found[name].sum_of_squares() if name in found else torch.zeros_like(p)
        for name, p in ggn.parameters.items()
    ]
    device = float64_device(ggn.device)
    return torch.cat([p.detach().flatten().to(device, torch.float64) for p in parts]) * ggn.scale


def diagonal_by_parameter(
    diagonal: Tensor, traces: Sequence[Estimate], parameters: Mapping[str, Tensor], method: Method
) -> LossDiagonal:
    """A diagonal ``[D]``, with the traces of the whole and of each parameter's block, in order."""
    trace, *parts = traces
    slices = parameter_slices(parameters)
    values = {name: diagonal[slices[name]].reshape(p.shape) for name, p in parameters.items()}
    return LossDiagonal(trace, dict(zip(slices, parts, strict=True)), method, values)


def _block_sums(diagonal: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """The sum of all elements, and those of the parameters' blocks."""
    blocks = parameter_slices(parameters).values()
    return with_total(torch.stack([diagonal[block].sum() for block in blocks]))


def with_total(traces: Tensor) -> Tensor:
    """Traces of the whole matrix in front of those of its blocks, which are the last axis."""
    if not bool(traces.isfinite().all()):
        raise UnavailableError("the curvature's diagonal contains NaN or Inf")
    return torch.cat([traces.sum(-1, keepdim=True), traces], dim=-1)
