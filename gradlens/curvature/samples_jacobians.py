"""Transposed Jacobians of each sample's outputs times vectors, from per-sample gradients.

They are those of a backward pass that starts from the vectors, at the network's outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from gradlens.curvature.hessian import GGNOperator, check_rows
from gradlens.gradients.collect import BackwardPass, Collector
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch
from gradlens.graph.undisturbed import undisturbed
from gradlens.history.coverage import few
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.operator import GradientOperator
from gradlens.samples.plan import Plan, Plans
from gradlens.samples.planner import plan_of_rows


@final
class SamplesJacobians:
    """Transposed Jacobians Jₙᵀ times vectors, by per-sample gradients of passes from the outputs.

    ``plans`` hold from step to step which rows belong to which sample. ``together`` is the number
    of consecutive rows of the outputs that belong to one sample. Raises ``UnavailableError`` if a
    parameter has no per-sample gradients, or if samples are coupled inside the network.
    """

    def __init__(
        self,
        ggn: GGNOperator,
        model: nn.Module | None = None,
        plans: Plans | None = None,
        together: int = 1,
    ) -> None:
        check_rows(ggn.outputs)
        self.ggn = ggn
        self._model = model
        self._graph = Graph(ggn.outputs)
        self._plan = self._planned(Plans() if plans is None else plans, together)
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
