"""Traces of the generalised Gauss-Newton matrix, from random gradients of each sample's outputs.

For random sₙ with E[sₙsₙᵀ] = Hₙ, the loss's Hessian at sample n's outputs, E‖Jₙᵀsₙ‖² is the trace
of JₙᵀHₙJₙ. The norms come from a backward pass that leaves out the gradients of weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.ggn_diagonal import SamplesJacobians
from gradlens.curvature.loss_diagonal import DiagonalProblem, LossTraces
from gradlens.curvature.output_draws import drawing
from gradlens.curvature.trace import estimates_of_one_draw, positive_estimates
from gradlens.numerics.host import on_host
from gradlens.numerics.unavailable import UnavailableError


def sampled_traces(problem: DiagonalProblem) -> LossTraces:
    """Estimates of the whole trace, and of those of the parameters' blocks.

    From ``samples`` independent draws of sₙ, each for all samples of the batch, or for
    ``sub_batch`` random ones. The standard error is that between draws. Of one draw it is that
    between the batch's samples, which is rather too large: it contains how they differ.

    Raises ``UnavailableError`` where there are no per-sample gradients, where the loss isn't a
    convex sum over samples, and for NaN or Inf.
    """
    ggn, samples = problem.ggn, problem.samples
    if ggn.outputs.dim() == 0:
        raise UnavailableError("outputs without axes have no samples")
    generator = np.random.default_rng(problem.seed)
    jacobians = SamplesJacobians(ggn, problem.model, problem.plans)
    draw, n = drawing(ggn, generator), len(ggn.outputs)
    norms = [
        _squared_norms(jacobians, draw(), _some_of(n, problem.sub_batch, generator))
        for _ in range(samples)
    ]
    each = torch.stack(norms) * (n * ggn.scale)
    if not bool(each.isfinite().all()):
        raise UnavailableError("the curvature's diagonal contains NaN or Inf")
    each = torch.cat([each.sum(2, keepdim=True), each], dim=2)
    one = samples == 1
    found = estimates_of_one_draw(each[0], 1) if one else positive_estimates(each.mean(1), samples)
    trace, *traces = found
    return LossTraces(trace, dict(zip(ggn.parameters, traces, strict=True)), "Monte Carlo")


def _squared_norms(jacobians: SamplesJacobians, start: Tensor, kept: Tensor | None) -> Tensor:
    """‖Jₙᵀsₙ‖² ``[samples, parameters]`` of those ``kept`` or all, in float64 on the host."""
    zeros = torch.zeros(len(start) if kept is None else len(kept), dtype=torch.float64)
    found = jacobians.operators(start, kept)
    norms = on_host({name: each.squared_norms() for name, each in found.items()})
    columns = [norms.get(name, zeros).double() for name in jacobians.ggn.parameters]
    return torch.stack(columns, dim=1)


def _some_of(n: int, size: int | None, generator: np.random.Generator) -> Tensor | None:
    """Sorted indices of ``size`` random samples out of ``n``; ``None`` for all."""
    if size is None or size >= n:
        return None
    return torch.from_numpy(np.sort(generator.permutation(n)[:size]))
