"""Whether the samples of a layer are those of the loss.

Rows of a layer are taken for samples in the order of the batch. They aren't, where samples change
places inside the network (sorted by length, routed to experts), where another axis has N entries
by chance, or where samples meet (a contrastive loss, attention across the batch). The sum over
samples is right in all these cases. What tells is a loss whose samples weigh differently: its
gradient Σₙ vₙ∇ℓₙ, found in a backward pass of its own, must be Σₙ vₙcₙ of the samples'
contributions cₙ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradlens.individual.folding import Order
from gradlens.individual.graph import Edge, Graph, Node, kind, nodes_below, output_shape
from gradlens.individual.operator import GradientOperator, accumulable
from gradlens.norms import norm

MIXED = (
    "its samples aren't those of the loss: they meet or change places inside the network, or "
    "another axis has as many entries as the batch has samples by chance (or backward was called "
    "on another loss than the one passed)"
)

UNTOLD = (
    "its rows are samples folded with another axis, and its gradient doesn't tell in which order "
    "(it vanishes, is in front of a normalisation over the batch, or samples change places)"
)

NOISE = 4
"""Rounding errors of a gradient that vanishes, in units of the relative one of all gradients."""

TF32 = 0.01
"""Relative difference that is put down to rounding where matrix products may use TF32."""


@dataclass(frozen=True)
class Verdict:
    """What is known of all steps at which the network's layers have outputs of the same shapes.

    ``tested`` are the parameters of which it has been asked whose samples they have, ``refuted``
    those whose samples aren't the loss's, ``left_to_graph`` those of which only the loss's graph
    tells the right ones, and ``orders`` say, by layer, how samples are folded with another axis.
    ``steps`` counts the steps.
    """

    tested: frozenset[str] = frozenset()
    refuted: frozenset[str] = frozenset()
    left_to_graph: frozenset[str] = frozenset()
    orders: Mapping[str, Order] = field(default_factory=dict)
    steps: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the next step takes a look anyway: the first, second, fourth, eighth and so on.

        Gradients may vanish at first, and what a network does may change.
        """
        return (self.steps + 1).bit_count() == 1

    def after(self, attribution: Attribution | None) -> Verdict:
        """With what another step has shown, if it has taken a look."""
        if attribution is None:
            return replace(self, steps=self.steps + 1)
        return Verdict(
            self.tested | attribution.tested,
            self.refuted | attribution.refuted,
            self.left_to_graph | attribution.left_to_graph,
            {**self.orders, **attribution.orders},
            self.steps + 1,
        )


@dataclass
class Attribution:
    """What the samples' contributions to the gradient must add up to, weighted with ``weights``.

    ``weights`` are vₙ, ``[N]``, and ``expected`` the weighted gradients, by parameter name;
    ``tested`` are the parameters that were asked for. ``obstacle`` says why there is no test at
    all, if so. What has come out so far: ``refuted`` are parameters whose contributions don't add
    up, ``left_to_graph`` those of which the loss's graph told the right ones, and ``orders`` say,
    by layer, how samples are folded.
    """

    tested: frozenset[str]
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    expected: Mapping[str, Tensor] = field(default_factory=dict)
    obstacle: str = ""
    refuted: set[str] = field(default_factory=set)
    left_to_graph: set[str] = field(default_factory=set)
    orders: dict[str, Order] = field(default_factory=dict)

    def agrees(self, name: str, individual: GradientOperator, epsilon: float) -> bool | None:
        """Whether gₙ, given as N·cₙ, or cₙ under a sum loss, is that of the loss's sample n.

        ``None`` if that can't be told. ``epsilon`` is the relative rounding error of the numbers
        involved.
        """
        if name not in self.expected or individual.batch_size != len(self.weights):
            return None
        expected = self.expected[name]
        difference = float(norm(individual.weighted_sum(self.weights) - expected))
        size = max(float(individual.squared_norms().sum().sqrt()), float(norm(expected)))
        noise = NOISE * epsilon * self._everything
        tolerance = max(math.sqrt(epsilon), TF32 if _may_use_tf32(expected) else 0.0)
        if size > 0 and difference <= tolerance * size:
            return True
        return False if difference > noise else None

    @cached_property
    def _everything(self) -> float:
        return math.hypot(*(float(norm(gradient)) for gradient in self.expected.values()))


def _may_use_tf32(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and tensor.dtype == torch.float32


def attribution_of(
    loss: Tensor,
    graph: Graph,
    samples: int,
    parameters: Mapping[str, nn.Parameter],
    scale: float,
    positions_first: bool = False,
) -> Attribution:
    """By a backward pass from the network's outputs, weighted by samples; p.grad stays as it is.

    ``graph`` is that of ``loss`` and ``scale`` what contributions are multiplied by to give gₙ.
    ``positions_first`` says that the network computes on ``[T, N, ...]``. Where no outputs have an
    axis of N = ``samples`` entries, nothing is expected.
    """
    tested = frozenset(parameters)
    outputs = _outputs(graph, samples, positions_first)
    if not outputs:
        return Attribution(tested, obstacle="no axis of the network's outputs counts the samples")
    weights = _weights(samples)
    edges = [GradientEdge(node, number) for node, number in outputs]
    gradients = torch.autograd.grad(loss, edges, retain_graph=True)
    factor = _loss_scale(gradients)
    weighted = [
        gradient * _along(weights.to(gradient), gradient, positions_first) * factor
        for gradient in gradients
    ]
    found = torch.autograd.grad(
        edges, list(parameters.values()), weighted, retain_graph=True, allow_unused=True
    )
    expected = {
        name: accumulable(gradient.to_dense() if gradient.is_sparse else gradient) * scale / factor
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None and not gradient.is_complex()
    }
    finite = {name: gradient for name, gradient in expected.items() if gradient.isfinite().all()}
    return Attribution(tested - (expected.keys() - finite.keys()), weights, finite)


def _outputs(graph: Graph, samples: int, positions_first: bool) -> list[Edge]:
    """The edges nearest to the parameters at which one axis counts the samples.

    All that depends on samples passes them, on its way from parameters to the loss, once.
    """
    alone = graph.of_parameters_alone(samples)

    def below(edges: Iterable[Edge]) -> list[Edge] | None:
        """The next such edges below; ``None`` if more than scalars comes in before them."""
        starts = [edge for node, _ in edges for edge in node.next_functions]
        found, met = _first(starts, alone, samples, positions_first)
        return found if found and graph.has_scalars_alone(met) else None

    chosen: list[Edge] = []
    edges, _ = _first([graph.root], alone, samples, positions_first)
    while edges:
        above = _above_others(edges)
        if not above:
            chosen = edges
        moved = {edge: below([edge]) for edge in above or edges}
        if above and None in moved.values():
            break
        lower = [other for edge in edges for other in moved.get(edge) or [edge]]
        if set(lower) == set(edges):
            break
        edges = list(dict.fromkeys(lower))
    return chosen


def _first(
    start: Iterable[Edge], alone: Collection[Node], samples: int, positions_first: bool
) -> tuple[list[Edge], set[Node]]:
    """The first edges on the ways down that have an axis of N entries.

    And the nodes of parameters alone that were met before.
    """
    found: dict[Edge, None] = {}
    seen, waiting, met = set(), list(start), set()
    while waiting:
        edge = waiting.pop()
        node, output = edge
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if node in alone:
            met.add(node)
            continue
        if kind(node) == "AccumulateGrad":  # of an input
            continue
        shape = output_shape(node, output)
        if shape[_sample_axis(shape, positions_first) :][:1] == (samples,):
            found[edge] = None
        else:
            waiting += node.next_functions
    return list(found), met


def _above_others(edges: Sequence[Edge]) -> list[Edge]:
    """Those from which another one can be reached."""
    nodes = {node for node, _ in edges}
    return [
        edge for edge in edges if nodes & nodes_below(child for child, _ in edge[0].next_functions)
    ]


def _weights(samples: int) -> Tensor:
    """Numbers of either sign, none near zero, ``[N]``."""
    generator = torch.Generator().manual_seed(samples)
    sizes = 0.5 + torch.rand(samples, generator=generator) / 2
    return sizes * (torch.randint(0, 2, (samples,), generator=generator) * 2 - 1)


def _along(weights: Tensor, gradient: Tensor, positions_first: bool) -> Tensor:
    behind = gradient.dim() - _sample_axis(gradient.shape, positions_first) - 1
    return weights.reshape(-1, *[1] * behind)


def _sample_axis(shape: Sequence[int], positions_first: bool) -> int:
    return 1 if positions_first and len(shape) == 3 else 0


def _loss_scale(gradients: Sequence[Tensor]) -> float:
    """What keeps gradients in float16 from vanishing, a power of two."""
    if all(gradient.dtype != torch.float16 for gradient in gradients):
        return 1.0
    largest = max(float(gradient.abs().amax()) for gradient in gradients if gradient.numel())
    return 2.0 ** (6 - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
