"""Traces of the generalised Gauss-Newton matrix, from random gradients of each sample's outputs.

For random sₙ with E[sₙsₙᵀ] = Hₙ, the loss's Hessian at sample n's outputs, E‖Jₙᵀsₙ‖² is the trace
of JₙᵀHₙJₙ. The norms come from a backward pass that leaves out the gradients of weights.

Where the network couples its samples, as BatchNorm does, J isn't made of the samples' Jₙ. With s of
all samples, independent and with mean zero, E‖Jᵀs‖² is still the trace of JᵀHJ, and its part for a
parameter is the trace of that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.diagonals import LossTraces, with_total
from gradlens.curvature.estimate import Estimate, estimates_of_one_draw, positive_estimates
from gradlens.curvature.hessian import GGNOperator, check_rows
from gradlens.curvature.hessian_roots import drawing
from gradlens.curvature.samples_jacobians import SamplesJacobians
from gradlens.gradients.gradients import inputs_of
from gradlens.graph.graph import Graph
from gradlens.graph.model_calls import Given
from gradlens.numerics.host import on_host
from gradlens.numerics.norms import norms
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans


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
    for parts in _divisions(rows, inputs_of(Graph(ggn.outputs), model)):
        together = rows // max(parts, 1) or 1
        try:
            return SamplesJacobians(ggn, model, plans, together)
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
    texts = {given.shape[0] for given in several if _are_texts(given, rows)}
    fewer = {n for n in lengths if COUPLED_DRAWS <= n < rows and rows % n == 0}
    by_number = partial(sorted, reverse=True)
    return list(dict.fromkeys([*by_number(texts & fewer), rows, *by_number(fewer)]))


def _are_texts(given: Given, rows: int) -> bool:
    """Whether it may be texts of words, given as integers, with a row of the outputs each."""
    first, second, *others = given.shape
    return not given.is_real and not others and first * second == rows


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
    columns = [squares.get(name, zeros).double() for name in jacobians.ggn.parameters]
    return torch.stack(columns, dim=1)


def _traces(found: Sequence[Estimate], ggn: GGNOperator) -> LossTraces:
    trace, *traces = found
    return LossTraces(trace, dict(zip(ggn.parameters, traces, strict=True)), "Monte Carlo")


def _some_of(n: int, size: int | None, generator: np.random.Generator) -> Tensor | None:
    """Sorted indices of ``size`` random samples out of ``n``; ``None`` for all."""
    if size is None or size >= n:
        return None
    return torch.from_numpy(np.sort(generator.permutation(n)[:size]))
