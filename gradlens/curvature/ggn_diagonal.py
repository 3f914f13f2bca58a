"""The diagonal of the generalised Gauss-Newton matrix, from per-sample gradients.

Sample n's part of the matrix is JₙᵀHₙJₙ, with the Jacobian Jₙ of the network's outputs and the
loss's Hessian Hₙ there. With a root Hₙ = Σₖ sₙₖsₙₖᵀ its diagonal is Σₖ(Jₙᵀsₙₖ)², and Jₙᵀsₙₖ are the
per-sample gradients of a backward pass that starts from sₙₖ. It takes one backward pass for each
output, and a network whose parameters have per-sample gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.ggn import GGNOperator
from gradlens.gradients.collect import BackwardPass, Collector
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch
from gradlens.graph.undisturbed import undisturbed
from gradlens.history.coverage import few
from gradlens.numerics.precision import accumulable
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.operator import GradientOperator
from gradlens.samples.plan import Plan, Plans
from gradlens.samples.planner import plan_of_rows

MAX_OUTPUTS = 256
"""Outputs K of each sample up to which a root of the loss's Hessian is computed.

A trade-off: the diagonal takes K backward passes, where Hutchinson's method estimates it from
``samples`` products, and the Hessians of N samples take N·K² numbers: 64 MiB in float64 at N = 128.
"""


def roots(ggn: GGNOperator, generator: np.random.Generator) -> Tensor:
    """Columns sₙₖ ``[K, N, *C]`` of a root of the loss's Hessian at the outputs ``[N, *C]``.

    Raises ``UnavailableError`` if the loss isn't a sum over samples or isn't convex, for more than
    ``MAX_OUTPUTS`` outputs of each sample, and for a Hessian with NaN or Inf.
    """
    outputs = ggn.outputs
    if outputs.numel() == 0 or outputs.dim() == 0:
        raise UnavailableError(f"outputs of shape {list(outputs.shape)} have no samples")
    n, size = len(outputs), outputs[0].numel()
    if size > MAX_OUTPUTS:
        raise UnavailableError(f"{size} outputs for each sample are more than {MAX_OUTPUTS}")

    def product(direction: Tensor) -> Tensor:
        found = ggn.loss_hessian_product(direction.reshape(outputs.shape).to(outputs.dtype))
        return accumulable(found).reshape(n, size)

    units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    hessians = torch.stack([product(unit.expand(n, size)) for unit in units], dim=1)
    if not bool(hessians.isfinite().all()):
        raise UnavailableError("the loss's Hessian at the network's outputs contains NaN or Inf")
    values, vectors = torch.linalg.eigh((hessians + hessians.mT) / 2)
    rounding = torch.finfo(outputs.dtype).eps ** 0.5 * values.abs().max()
    probe = accumulable(normal_like(outputs, generator)).reshape(n, size)
    coupled = product(probe) - (hessians.mT @ probe[:, :, None])[:, :, 0]
    if bool((coupled.abs() > rounding).any()):
        raise UnavailableError("the loss is not a sum over samples")
    if bool((values < -rounding).any()):
        raise UnavailableError("the loss is not convex in the network's outputs")
    columns = (vectors * values.clamp(min=0).sqrt()[:, None, :]).permute(2, 0, 1)
    return columns.reshape(size, *outputs.shape).to(outputs.dtype)


def signed_sum(columns: Tensor, signs: Tensor) -> Tensor:
    """Σₖ ±sₙₖ ``[N, *C]`` of columns ``[K, N, *C]`` and their signs ``[K, N]``."""
    shape = (*signs.shape, *[1] * (columns.dim() - 2))
    return (columns * signs.to(columns).reshape(shape)).sum(0)


@final
class SamplesJacobians:
    """Transposed Jacobians Jₙᵀ times vectors, by per-sample gradients of passes from the outputs.

    ``plans`` hold from step to step which rows belong to which sample. ``together`` is the number
    of consecutive rows of the outputs that belong to one sample. Raises ``UnavailableError`` if a
    parameter has no per-sample gradients, or if samples are coupled inside the network.
    """

    def __init__(
        self, ggn: GGNOperator, model: nn.Module | None, plans: Plans, together: int = 1
    ) -> None:
        self.ggn = ggn
        self._model = model
        self._graph = Graph(ggn.outputs)
        self._plan = self._planned(plans, together)
        absent = self._plan.unavailable
        if absent:
            reason = next(iter(absent.values()))
            raise UnavailableError(
                f"there are no per-sample gradients of {few([*absent])}: {reason}"
            )
        if self._plan.coupling:
            raise UnavailableError(
                "a normalisation over the batch couples the samples; in eval mode, as on a Probe, "
                "it doesn't"
            )

    @property
    def samples(self) -> int:
        """N."""
        return self._plan.samples or 0

    def _planned(self, plans: Plans, together: int) -> Plan:
        # Of the graph's parameters alone: a plan also holds where others were frozen, or are new.
        parameters = {
            name: parameter
            for name, parameter in self.ggn.parameters.items()
            if isinstance(parameter, nn.Parameter) and parameter in self._graph
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        key = hash((self._graph.key(names), together))
        known = plans.of(self._graph, key)
        if known is not None:
            return known
        with undisturbed(self._model), torch.enable_grad():
            samples = len(self.ggn.outputs) // together
            plan = plan_of_rows(self._graph, parameters, samples, together=together)
        if plan.unavailable:
            # It is kept even if it may not hold for other graphs, and isn't made again: nothing is
            # computed from it.
            plan = replace(plan, uses={}, holds=True, read=False)
        plans.store(key, plan)
        return plan

    def operators(self, start: Tensor, kept: Tensor | None = None) -> dict[str, GradientOperator]:
        """Jₙᵀsₙ by parameter name, with sₙ ``[N, *C]`` in ``start``.

        Of the samples whose indices are ``kept``, or of all. Raises ``UnavailableError`` where a
        parameter's per-sample gradients can't be computed.
        """
        plan = self._plan if kept is None else self._plan.part(kept)
        collector = Collector({})
        batch = Batch(plan.samples, plan.known_by, "sum")
        with undisturbed(self._model):
            BackwardPass(self._graph, plan, batch, collector).run(start)
        if collector.unavailable:
            name, reason = next(iter(collector.unavailable.items()))
            raise UnavailableError(f"there are no per-sample gradients of {name}: {reason}")
        found = {name: collector.take(name) for name in self.ggn.parameters}
        return {name: operator for name, operator in found.items() if operator is not None}

    def squared(self, start: Tensor) -> dict[str, Tensor]:
        """Σₙ(Jₙᵀsₙ)² by parameter name, of its shape, with sₙ ``[N, *C]`` in ``start``."""
        found = self.operators(start)
        return {
            name: found[name].sum_of_squares() if name in found else torch.zeros_like(p)
            for name, p in self.ggn.parameters.items()
        }


def normal_like(like: Tensor, generator: np.random.Generator) -> Tensor:
    """Independent standard normal numbers of another tensor's shape, dtype and device."""
    drawn = torch.from_numpy(generator.standard_normal(tuple(like.shape)))
    return drawn.to(like.device, like.dtype)
