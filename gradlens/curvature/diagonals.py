"""The diagonal of a loss's curvature and the traces of its blocks, and the methods that find them.

A method raises ``UnavailableError`` with the reason why it doesn't apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.estimate import (
    Estimate,
    estimates_of_one_draw,
    hutchinson_estimates,
    positive_estimates,
    probed_diagonal,
    weighted_sum,
)
from gradlens.curvature.factors import SamplesJacobians, drawing, roots
from gradlens.curvature.hessian import GGNOperator, check_rows
from gradlens.curvature.operator import (
    CurvatureOperator,
    Products,
    Seed,
    float64_device,
    parameter_slices,
)
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import LEAF, called, kind_of
from gradlens.graph.model_calls import Given, calls_behind
from gradlens.numerics.norms import norms
from gradlens.numerics.tensors import on_host
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans
from gradlens.torch_private import hands_gradients_on, saved

DiagonalKind: TypeAlias = Literal["diag_h", "diag_ggn_exact", "diag_ggn_mc"]
"""Of the Hessian, of the generalised Gauss-Newton matrix, or an estimate of the latter's."""

Method: TypeAlias = Literal["Hutchinson", "Monte Carlo", "exact"]
"""How a diagonal was found, the most exact last."""

CURVED = (
    "the network isn't known to be piecewise linear in each parameter, so that the Hessian's "
    "diagonal isn't that of the Gauss-Newton matrix: {why}"
)


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


def by_roots(ggn: GGNOperator, jacobians: SamplesJacobians, seed: int) -> LossDiagonal:
    """Gauss-Newton diagonal by one backward pass for each output of a sample.

    Raises ``UnavailableError`` where there are no roots of the loss's Hessian, and for NaN or Inf.
    """
    columns = roots(ggn, np.random.default_rng(seed))
    diagonal = reduce(Tensor.add_, (_squared(ggn, jacobians, column) for column in columns))
    sums = _block_sums(diagonal, ggn.parameters).tolist()
    traces = [Estimate(value, 0.0, 1, products=1) for value in sums]
    return diagonal_by_parameter(diagonal, traces, ggn.parameters, "exact")


def by_draws(
    ggn: GGNOperator, jacobians: SamplesJacobians, samples: int, seed: int
) -> LossDiagonal:
    """Gauss-Newton diagonal as the mean over ``samples`` random gradients of the outputs.

    Each takes a backward pass. Raises ``UnavailableError`` where there are no such gradients.
    """
    parameters = ggn.parameters
    draw = drawing(ggn, np.random.default_rng(seed))
    total, sums = torch.zeros((), device="cpu"), []
    for _ in range(samples):
        diagonal = _squared(ggn, jacobians, draw())
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


def _squared(ggn: GGNOperator, jacobians: SamplesJacobians, start: Tensor) -> Tensor:
    """Σₙ(Jₙᵀsₙ)² ``[D]`` in float64, with sₙ in ``start``, of the scaled loss."""
    found = jacobians.operators(start)
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


# Traces of the generalised Gauss-Newton matrix alone ----------------------------------------

# For random sₙ with E[sₙsₙᵀ] = Hₙ, the loss's Hessian at sample n's outputs, E‖Jₙᵀsₙ‖² is the
# trace of JₙᵀHₙJₙ. The norms come from a backward pass that leaves out the gradients of weights.
# Where the network couples its samples, as BatchNorm does, J isn't made of the samples' Jₙ. With s
# of all samples, independent and with mean zero, E‖Jᵀs‖² is still the trace of JᵀHJ, and its part
# for a parameter is the trace of that block.


def sampled_traces(
    ggn: GGNOperator,
    samples: int,
    sub_batch: int | None,
    seed: int,
    model: nn.Module | None,
    plans: Plans,
) -> LossTraces:
    """Estimates of the whole trace, and of those of the parameters' blocks.

    From ``samples`` independent draws of sₙ, each for all samples of the batch, or for
    ``sub_batch`` random ones. The standard error is that between draws. Of one draw it is that
    between the batch's samples, which is rather too large: it contains how they differ.

    A sample has one row of the outputs, or several consecutive ones, such as the words of a text.

    Raises ``UnavailableError`` where there are no per-sample gradients, where the loss isn't a
    convex sum over samples, and for NaN or Inf.
    """
    check_rows(ggn.outputs)
    generator = np.random.default_rng(seed)
    jacobians = _jacobians(ggn, model, plans)
    draw, n = drawing(ggn, generator), jacobians.samples
    squares = [
        _squared_norms(jacobians, draw(), _some_of(n, sub_batch, generator)) for _ in range(samples)
    ]
    each = with_total(torch.stack(squares) * (n * ggn.scale))
    one = samples == 1
    found = estimates_of_one_draw(each[0], 1) if one else positive_estimates(each.mean(1), samples)
    return _traces(found, ggn)


def _jacobians(ggn: GGNOperator, model: nn.Module | None, plans: Plans) -> SamplesJacobians:
    """Those of the texts that the model was called with, or of the outputs' rows, or of others.

    The loss of a language model has a row for each word, and attention couples the words of a text.
    If the rows are divided into parts that aren't coupled, the trace is the same for any division.
    """
    rows = len(ggn.outputs)
    reasons: dict[int, UnavailableError] = {}
    calls = calls_behind(ggn.jacobian.graph, model)
    inputs = [given for call in calls for given in call.inputs]
    for parts in _divisions(rows, inputs):
        together = rows // max(parts, 1) or 1
        try:
            return SamplesJacobians(ggn.jacobian, model, plans, together)
        except UnavailableError as reason:
            reasons[parts] = reason
    raise reasons[rows]


def _divisions(rows: int, inputs: Sequence[Given]) -> list[int]:
    """Numbers of samples, each with as many rows of the outputs, in the order they are tried in.

    First texts of as many words, since looking at each word takes longer, then the rows themselves,
    then other lengths that the model's inputs have. More samples come first, because the error is
    that between samples; fewer than ``COUPLED_DRAWS`` would say too little of it.
    """
    several = [given for given in inputs if len(given.shape) > 1]
    lengths = {given.shape[0] for given in several}
    # What may be texts of words, given as integers, with a row of the outputs each.
    words = [given for given in several if len(given.shape) == 2 and not given.is_real]
    texts = {given.shape[0] for given in words if math.prod(given.shape) == rows}
    fewer = {n for n in lengths if COUPLED_DRAWS <= n < rows and rows % n == 0}
    by_number = partial(sorted, reverse=True)
    return list(dict.fromkeys([*by_number(texts & fewer), rows, *by_number(fewer)]))


COUPLED_DRAWS = 3
"""The least number of draws where samples are coupled.

Each is a backward pass. Their differences are all that is known of the error, so that two would
leave it one degree of freedom, with which a 95 % interval is three times as wide as with two.
"""


def coupled_traces(ggn: GGNOperator, samples: int, seed: int) -> LossTraces:
    """The same from the gradients of all samples together, whether the network couples them or not.

    From ``samples`` independent draws, or ``COUPLED_DRAWS`` if that is more. The standard error is
    that between draws.

    Raises ``UnavailableError`` where the loss isn't a convex sum over samples, and for NaN or Inf.
    """
    draws = max(samples, COUPLED_DRAWS)
    check_rows(ggn.outputs)
    draw = drawing(ggn, np.random.default_rng(seed))
    sizes = on_host([norms(ggn.jacobian.transposed_product(draw())) for _ in range(draws)])
    each = torch.stack([torch.stack([size.double() for size in one]) for one in sizes])
    each = each.square() * ggn.scale
    return _traces(positive_estimates(with_total(each), draws), ggn)


def _squared_norms(jacobians: SamplesJacobians, start: Tensor, kept: Tensor | None) -> Tensor:
    """‖Jₙᵀsₙ‖² ``[samples, parameters]`` of those ``kept`` or all, in float64 on the host."""
    samples = jacobians.samples if kept is None else len(kept)
    zeros = torch.zeros(samples, dtype=torch.float64, device="cpu")
    found = jacobians.operators(start, kept)
    squares = on_host({name: each.squared_norms() for name, each in found.items()})
    columns = [squares.get(name, zeros).double() for name in jacobians.jacobian.parameters]
    return torch.stack(columns, dim=1)


def _traces(found: Sequence[Estimate], ggn: GGNOperator) -> LossTraces:
    trace, *traces = found
    return LossTraces(trace, dict(zip(ggn.parameters, traces, strict=True)), "Monte Carlo")


def _some_of(n: int, size: int | None, generator: np.random.Generator) -> Tensor | None:
    """Sorted indices of ``size`` random samples out of ``n``; ``None`` for all."""
    if size is None or size >= n:
        return None
    return torch.from_numpy(np.sort(generator.permutation(n)[:size]))
