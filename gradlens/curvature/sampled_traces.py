"""Traces of the generalised Gauss-Newton matrix, from random gradients of each sample's outputs.

With a random sₙ of which E[sₙsₙᵀ] is the loss's Hessian Hₙ at sample n's outputs, E‖Jₙᵀsₙ‖² is
the trace of JₙᵀHₙJₙ. Most layers tell these norms in a backward pass that leaves out the gradients
of weights; where some don't, the loss's graph does in a complete one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradlens.curvature.calls import Calls
from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.ggn_diagonal import (
    NoRootError,
    SamplesJacobians,
    check_products,
    normal_like,
)
from gradlens.curvature.output_draws import drawing
from gradlens.curvature.products import NotFiniteError
from gradlens.curvature.running import RunningMean
from gradlens.curvature.trace import Estimate, estimates
from gradlens.individual.gathering import autocast_off
from gradlens.individual.graph import Node, kind, output_shape
from gradlens.individual.layers import Layers
from gradlens.individual.operator import GradientOperator
from gradlens.individual.recomputed import CannotRecomputeError, batch_axis
from gradlens.individual.rules import operators_of
from gradlens.individual.tap import LayerCall, known_gradient

_TRANSPOSED = "TBackward0"
"""What a linear layer does to its weight."""


def sampled_traces(
    model: nn.Module,
    loss: Tensor,
    ggn: GGNOperator,
    samples: int,
    sub_batch: int | None,
    seed: int,
    tellers: Tellers,
) -> tuple[Estimate, dict[str, Estimate]]:
    """Estimates of the whole trace, and of those of the parameters' blocks.

    From ``samples`` independent draws of sₙ, each for all samples of the batch, or for
    ``sub_batch`` random ones. The error is that between draws. Of one draw it is that between the
    batch's samples, which is rather too large: it contains how they differ.

    Who tells all of Jₙᵀsₙ is found out once for each ``structure`` of the graph.
    ``NoRootError`` where nobody does, or where the loss isn't a convex sum over samples;
    ``NotFiniteError`` for NaN or Inf.
    """
    generator = np.random.default_rng(seed)
    teller = _chosen(model, loss, ggn, tellers, generator)
    draw, n = drawing(ggn, generator), len(ggn.outputs)
    norms = [
        teller.squared_norms(draw(), _some_of(n, sub_batch, generator)) for _ in range(samples)
    ]
    each = torch.stack(norms) * (n * ggn.scale)
    if not bool(each.isfinite().all()):
        raise NotFiniteError("the curvature's diagonal contains NaN or Inf")
    independent = each[0] if samples == 1 else each.mean(1)
    whole = independent.sum(1, keepdim=True)
    trace, *traces = estimates(RunningMean.of(torch.cat([whole, independent], dim=1)), samples)
    return trace, dict(zip(ggn.parameters, traces, strict=True))


@dataclass(frozen=True)
class Teller(ABC):
    """Who tells Jₙᵀsₙ of every sample, by parameter; ``NoRootError`` where it can't."""

    model: nn.Module
    ggn: GGNOperator
    loss: Tensor

    @abstractmethod
    def operators(self, start: Tensor) -> Mapping[str, GradientOperator]:
        """Jₙᵀsₙ of all samples; ``start`` is sₙ ``[N, *C]``."""

    @abstractmethod
    def squared_norms(self, start: Tensor, kept: Tensor | None) -> Tensor:
        """‖Jₙᵀsₙ‖² ``[samples, parameters]`` of those ``kept`` or all, in float64 on the host."""

    @final
    def _squared_norms(self, found: Mapping[str, GradientOperator], samples: int) -> Tensor:
        zeros = torch.zeros(samples, dtype=torch.float64)
        norms = {name: each.squared_norms().cpu().double() for name, each in found.items()}
        return torch.stack([norms.get(name, zeros) for name in self.ggn.parameters], dim=1)


Tellers: TypeAlias = MutableMapping[int, type[Teller] | None]
"""Who tells all of a graph, by its ``structure``; ``None`` if nobody does."""


@final
class LossGraph(Teller):
    """The layers and the loss's graph, wherever parameters are used."""

    def operators(self, start: Tensor) -> Mapping[str, GradientOperator]:
        return SamplesJacobians(self.model, self.ggn, self.loss).operators(start)

    def squared_norms(self, start: Tensor, kept: Tensor | None) -> Tensor:
        norms = self._squared_norms(self.operators(start), len(start))
        return norms if kept is None else norms[kept]


@final
class LayersAlone(Teller):
    """Each layer's only call.

    ``NoRootError`` where a layer has more calls, or another axis counts its samples.
    """

    def squared_norms(self, start: Tensor, kept: Tensor | None) -> Tensor:
        samples = len(start) if kept is None else len(kept)
        return self._squared_norms(self.operators(start, kept), samples)

    def operators(self, start: Tensor, kept: Tensor | None = None) -> dict[str, GradientOperator]:
        names = {id(p): name for name, p in self.ggn.parameters.items()}
        found: dict[str, GradientOperator] = {}
        for call in self._calls(start):
            _check_call(call, len(start))
            operators = _operators(call if kept is None else _part_of(call, kept))
            for key, operator in operators.items():
                name = names.get(id(call.module._parameters[key]))
                if name in found:
                    raise NoRootError(f"{name} belongs to more than one layer")
                if name is not None:
                    found[name] = operator
        return found

    def _calls(self, start: Tensor) -> list[LayerCall]:
        calls, layers, outputs = Calls(), Layers(self.model), self.ggn.outputs
        layers.listen(calls)
        try:
            torch.autograd.grad([outputs], _entrances(outputs), [start], retain_graph=True)
        finally:
            layers.stop_listening(calls)
        for module, found in calls.of.items():
            if len(found) > 1:
                raise NoRootError(f"{type(module).__name__} was called {len(found)} times")
        return [call for found in calls.of.values() for call in found]


def structure(outputs: Tensor, parameters: Mapping[str, Tensor]) -> int:
    """A hash of the graph behind the outputs: its operations, shapes, edges and parameters."""
    places = {id(parameter): place for place, parameter in enumerate(parameters.values())}
    numbers = _numbered(outputs)
    nodes = [
        (
            node.name(),
            output_shape(node, 0),
            places.get(id(node.variable)) if kind(node) == "AccumulateGrad" else None,
            tuple((numbers.get(child), output) for child, output in node.next_functions),
        )
        for node in numbers
    ]
    return hash((tuple(outputs.shape), tuple(nodes)))


def _numbered(outputs: Tensor) -> dict[Node, int]:
    """The graph's nodes, in the same order for equal graphs."""
    numbers: dict[Node, int] = {}
    stack: list[Node | None] = [outputs.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in numbers:
            numbers[node] = len(numbers)
            stack += [child for child, _ in node.next_functions]
    return numbers


def _entrances(outputs: Tensor) -> list[GradientEdge]:
    """Where parameters enter the graph: gradients that get there have passed all layers."""
    return [
        GradientEdge(node, 0)
        for node in _numbered(outputs)
        if kind(node) != _TRANSPOSED and any(_is_parameter(child) for child in _children(node))
    ]


def _children(node: Node) -> Iterator[Node]:
    for child, _ in node.next_functions:
        if child is not None:
            yield child.next_functions[0][0] if kind(child) == _TRANSPOSED else child


def _is_parameter(node: Node) -> bool:
    return node is not None and kind(node) == "AccumulateGrad"


def _chosen(
    model: nn.Module,
    loss: Tensor,
    ggn: GGNOperator,
    tellers: Tellers,
    generator: np.random.Generator,
) -> Teller:
    if ggn.outputs.dim() == 0:
        raise NoRootError("outputs without axes have no samples")
    seen = structure(ggn.outputs, ggn.parameters)
    if seen not in tellers:
        kinds: list[type[Teller]] = [LayersAlone, LossGraph]
        telling = (kind for kind in kinds if _tells_all(kind(model, ggn, loss), generator))
        tellers[seen] = next(telling, None)
    chosen = tellers[seen]
    if chosen is None:
        raise NoRootError("neither layers nor the loss's graph tell all samples' gradients")
    return chosen(model, ggn, loss)


def _tells_all(teller: Teller, generator: np.random.Generator) -> bool:
    """By ⟨Jₙᵀsₙ, v⟩ = ⟨sₙ, Jₙv⟩ for random sₙ and v."""
    start = normal_like(teller.ggn.outputs, generator)
    try:
        check_products(teller.ggn, teller.operators(start), start, generator)
    except NoRootError:
        return False
    return True


def _check_call(call: LayerCall, n: int) -> None:
    index, gradient = known_gradient(call)
    tensors = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Tensor)]
    usual = len(call.grad_outputs) == 1 and batch_axis(call.module, index) == 0
    if call.flaw or not usual or any(each.shape[:1] != (n,) for each in (gradient, *tensors)):
        reason = call.flaw or "its first axis doesn't count the samples"
        raise NoRootError(f"{type(call.module).__name__}: {reason}")


def _operators(call: LayerCall) -> Mapping[str, GradientOperator]:
    try:
        with torch.no_grad(), autocast_off(known_gradient(call)[1]):
            return operators_of(call, 1.0)
    except CannotRecomputeError as reason:
        raise NoRootError(str(reason)) from reason


def _part_of(call: LayerCall, kept: Tensor) -> LayerCall:
    """The call with some of its samples alone."""

    def part(value: object) -> object:
        return value[kept.to(value.device)] if isinstance(value, Tensor) else value

    return replace(
        call,
        args=tuple(part(each) for each in call.args),
        kwargs={key: part(each) for key, each in call.kwargs.items()},
        grad_outputs=tuple(g if g is None else g[kept.to(g.device)] for g in call.grad_outputs),
    )


def _some_of(n: int, size: int | None, generator: np.random.Generator) -> Tensor | None:
    """Places of ``size`` samples, each as likely as any other; None for all."""
    if size is None or size >= n:
        return None
    return torch.from_numpy(np.sort(generator.permutation(n)[:size]))
