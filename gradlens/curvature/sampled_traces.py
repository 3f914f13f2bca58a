"""Traces of the generalised Gauss-Newton matrix, from random gradients of each sample's outputs.

With a random sₙ of which E[sₙsₙᵀ] is the loss's Hessian Hₙ at sample n's outputs, E‖Jₙᵀsₙ‖² is
the trace of JₙᵀHₙJₙ. These norms are found in a backward pass that leaves out the gradients of
weights.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.ggn_diagonal import NoRootError, SamplesJacobians
from gradlens.curvature.output_draws import drawing
from gradlens.curvature.products import NotFiniteError
from gradlens.curvature.trace import Estimate, estimates
from gradlens.numerics.running_mean import RunningMean
from gradlens.per_sample.gradients import Plans


def sampled_traces(
    model: nn.Module | None,
    ggn: GGNOperator,
    samples: int,
    sub_batch: int | None,
    seed: int,
    plans: Plans,
) -> tuple[Estimate, dict[str, Estimate]]:
    """Estimates of the whole trace, and of those of the parameters' blocks.

    From ``samples`` independent draws of sₙ, each for all samples of the batch, or for
    ``sub_batch`` random ones. The error is that between draws. Of one draw it is that between the
    batch's samples, which is rather too large: it contains how they differ.

    ``NoRootError`` where whose gradients are whose can't be told, or where the loss isn't a convex
    sum over samples; ``NotFiniteError`` for NaN or Inf.
    """
    if ggn.outputs.dim() == 0:
        raise NoRootError("outputs without axes have no samples")
    generator = np.random.default_rng(seed)
    jacobians = SamplesJacobians(ggn, model, plans)
    draw, n = drawing(ggn, generator), len(ggn.outputs)
    norms = [
        _squared_norms(jacobians, draw(), _some_of(n, sub_batch, generator)) for _ in range(samples)
    ]
    each = torch.stack(norms) * (n * ggn.scale)
    if not bool(each.isfinite().all()):
        raise NotFiniteError("the curvature's diagonal contains NaN or Inf")
    independent = each[0] if samples == 1 else each.mean(1)
    whole = independent.sum(1, keepdim=True)
    trace, *traces = estimates(RunningMean.of(torch.cat([whole, independent], dim=1)), samples)
    return trace, dict(zip(ggn.parameters, traces, strict=True))


def _squared_norms(jacobians: SamplesJacobians, start: Tensor, kept: Tensor | None) -> Tensor:
    """‖Jₙᵀsₙ‖² ``[samples, parameters]`` of those ``kept`` or all, in float64 on the host."""
    zeros = torch.zeros(len(start) if kept is None else len(kept), dtype=torch.float64)
    found = jacobians.operators(start, kept)
    norms = {name: each.squared_norms().cpu().double() for name, each in found.items()}
    return torch.stack([norms.get(name, zeros) for name in jacobians.ggn.parameters], dim=1)


def _some_of(n: int, size: int | None, generator: np.random.Generator) -> Tensor | None:
    """Places of ``size`` samples, each as likely as any other; None for all."""
    if size is None or size >= n:
        return None
    return torch.from_numpy(np.sort(generator.permutation(n)[:size]))
