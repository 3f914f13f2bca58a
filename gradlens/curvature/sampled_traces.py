"""Traces of the generalised Gauss-Newton matrix, from random gradients of each sample's outputs.

For random sₙ with E[sₙsₙᵀ] = Hₙ, the loss's Hessian at sample n's outputs, E‖Jₙᵀsₙ‖² is the trace
of JₙᵀHₙJₙ. The norms come from a backward pass that leaves out the gradients of weights.

Where the network couples its samples, as BatchNorm does, J isn't made of the samples' Jₙ. With s of
all samples, independent and with mean zero, E‖Jᵀs‖² is still the trace of JᵀHJ, and its part for a
parameter is the trace of that block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.ggn_diagonal import SamplesJacobians
from gradlens.curvature.loss_diagonal import DiagonalProblem, LossTraces
from gradlens.curvature.output_draws import drawing
from gradlens.curvature.trace import Estimate, estimates_of_one_draw, positive_estimates
from gradlens.hooks.model_calls import Given
from gradlens.numerics.host import on_host
from gradlens.numerics.norms import norms
from gradlens.numerics.unavailable import UnavailableError
from gradlens.per_sample.gradients import inputs_of
from gradlens.per_sample.labelling.graph import Graph


def sampled_traces(problem: DiagonalProblem) -> LossTraces:
    """Estimates of the whole trace, and of those of the parameters' blocks.

    From ``samples`` independent draws of sₙ, each for all samples of the batch, or for
    ``sub_batch`` random ones. The standard error is that between draws. Of one draw it is that
    between the batch's samples, which is rather too large: it contains how they differ.

    A sample has one row of the outputs, or several in turn, such as the words of a text.

    Raises ``UnavailableError`` where there are no per-sample gradients, where the loss isn't a
    convex sum over samples, and for NaN or Inf.
    """
    ggn, samples = problem.ggn, problem.samples
    generator = np.random.default_rng(problem.seed)
    draw = _drawing(ggn, generator)
    jacobians = _jacobians(problem)
    n = jacobians.samples
    squares = [
        _squared_norms(jacobians, draw(), _some_of(n, problem.sub_batch, generator))
        for _ in range(samples)
    ]
    each = _with_total(torch.stack(squares) * (n * ggn.scale))
    one = samples == 1
    found = estimates_of_one_draw(each[0], 1) if one else positive_estimates(each.mean(1), samples)
    return _traces(found, ggn)


def _jacobians(problem: DiagonalProblem) -> SamplesJacobians:
    """By the samples that the model was called with, or otherwise by the rows of the outputs.

    A loss of all words of some texts has a row for each word, and the words of a text are coupled
    by attention. Any division of the rows into parts that aren't coupled gives the same trace.
    """
    ggn, rows = problem.ggn, len(problem.ggn.outputs)
    inputs = inputs_of(Graph(ggn.outputs), problem.model)
    for parts in _parts_of_rows(rows, inputs):
        with suppress(UnavailableError):
            return SamplesJacobians(ggn, problem.model, problem.plans, rows // parts)
    return SamplesJacobians(ggn, problem.model, problem.plans)


def _parts_of_rows(rows: int, inputs: Sequence[Given]) -> list[int]:
    """Lengths of the model's inputs that the rows can be divided by, if none is that of the rows.

    The largest, which leaves the most samples, is the first.
    """
    lengths = {given.shape[0] for given in inputs if len(given.shape) > 1}
    fitting = (n for n in lengths if 1 < n < rows and rows % n == 0)
    return [] if rows in lengths else sorted(fitting, reverse=True)


COUPLED_DRAWS = 3
"""The least number of draws where samples are coupled.

Each is a backward pass. Their differences are all that is known of the error, so that two would
leave it one degree of freedom, with which a 95 % interval is three times as wide as with two.
"""


def coupled_traces(problem: DiagonalProblem) -> LossTraces:
    """The same from the gradients of all samples together, whether the network couples them or not.

    From ``samples`` independent draws, or ``COUPLED_DRAWS`` if that is more. The standard error is
    that between draws.

    Raises ``UnavailableError`` where the loss isn't a convex sum over samples, and for NaN or Inf.
    """
    ggn, draws = problem.ggn, max(problem.samples, COUPLED_DRAWS)
    draw = _drawing(ggn, np.random.default_rng(problem.seed))
    sizes = on_host([norms(ggn.pulled_back(draw())) for _ in range(draws)])
    each = torch.stack([torch.stack([size.double() for size in one]) for one in sizes])
    each = each.square() * ggn.scale
    return _traces(positive_estimates(_with_total(each), draws), ggn)


def _squared_norms(jacobians: SamplesJacobians, start: Tensor, kept: Tensor | None) -> Tensor:
    """‖Jₙᵀsₙ‖² ``[samples, parameters]`` of those ``kept`` or all, in float64 on the host."""
    samples = jacobians.samples if kept is None else len(kept)
    zeros = torch.zeros(samples, dtype=torch.float64)
    found = jacobians.operators(start, kept)
    squares = on_host({name: each.squared_norms() for name, each in found.items()})
    columns = [squares.get(name, zeros).double() for name in jacobians.ggn.parameters]
    return torch.stack(columns, dim=1)


def _drawing(ggn: GGNOperator, generator: np.random.Generator) -> Callable[[], Tensor]:
    if ggn.outputs.dim() == 0:
        raise UnavailableError("outputs without axes have no samples")
    return drawing(ggn, generator)


def _with_total(traces: Tensor) -> Tensor:
    """Traces of the whole matrix in front of those of its blocks, which are the last axis."""
    if not bool(traces.isfinite().all()):
        raise UnavailableError("the curvature's diagonal contains NaN or Inf")
    return torch.cat([traces.sum(-1, keepdim=True), traces], dim=-1)


def _traces(found: Sequence[Estimate], ggn: GGNOperator) -> LossTraces:
    trace, *traces = found
    return LossTraces(trace, dict(zip(ggn.parameters, traces, strict=True)), "Monte Carlo")


def _some_of(n: int, size: int | None, generator: np.random.Generator) -> Tensor | None:
    """Sorted indices of ``size`` random samples out of ``n``; ``None`` for all."""
    if size is None or size >= n:
        return None
    return torch.from_numpy(np.sort(generator.permutation(n)[:size]))
