"""Whether the samples of a layer are those of the loss.

Rows of a layer are taken for samples in the order of the batch. They aren't, where samples change
places inside the network (sorted by length, routed to experts), where another axis has N entries
by chance, or where samples meet (a contrastive loss, attention across the batch). The sum over
samples is right in all these cases. What tells is a loss whose samples weigh differently: its
gradient Σₙ vₙ∇ℓₙ, found in a backward pass of its own, must be Σₙ vₙcₙ of the samples'
contributions cₙ. Both are projected onto a random direction for each parameter.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gradlens.individual.consistency import ROUNDING
from gradlens.individual.folding import Order
from gradlens.individual.graph import Edge, Graph, Node, kind, nodes_below, output_shape
from gradlens.individual.operator import GradientOperator, accumulable

MIXED = (
    "its samples aren't those of the loss: they meet or change places inside the network, or "
    "another axis has as many entries as the batch has samples by chance (or backward was called "
    "on another loss than the one passed)"
)

UNTOLD = (
    "its rows are samples folded with another axis, and its gradient doesn't tell in which order "
    "(it vanishes, is in front of a normalisation over the batch, or samples change places)"
)

_TOLERANCE = 0.01
"""Relative; wrong attributions differ by about 1/√N, TF32 products by a thousandth."""


@dataclass(frozen=True)
class Verdict:
    """What is known of all steps at which the network's layers have outputs of the same shapes.

    ``refuted`` are parameters whose samples aren't those of the loss, ``left_to_graph`` those of
    which only the loss's graph tells the right ones, and ``orders`` say, by layer, how samples are
    folded with another axis. ``looks`` counts the steps looked at.
    """

    refuted: frozenset[str] = frozenset()
    left_to_graph: frozenset[str] = frozenset()
    orders: Mapping[str, Order] = field(default_factory=dict)
    looks: int = 0
    settled: bool = False

    @property
    def calls_for_a_look(self) -> bool:
        """Some parameters have no gradient at first (those behind zeros), and some never do."""
        return not self.settled and self.looks < MOST_LOOKS

    def after(self, attribution: Attribution | None) -> Verdict:
        """With what another look has shown; ``None`` if there is nothing to look at."""
        if attribution is None:
            return replace(self, settled=True)
        return Verdict(
            self.refuted | attribution.refuted,
            self.left_to_graph | attribution.left_to_graph,
            {**self.orders, **attribution.orders},
            self.looks + 1,
            not attribution.undecided,
        )


MOST_LOOKS = 3


@dataclass
class Attribution:
    """What the samples' contributions to the gradient must add up to, weighted with ``weights``.

    ``weights`` are vₙ, ``[N]``, and ``expected`` projections of the weighted gradient, by parameter
    name. ``confirmed`` are the parameters whose contributions do add up, ``refuted`` those whose
    don't. The others have no gradient to speak of yet, or nothing is known of them.
    ``left_to_graph`` are those of which calls of layers told otherwise than the loss's graph, and
    ``orders`` those of folded samples, by layer.
    """

    weights: Tensor
    expected: Mapping[str, float]
    confirmed: set[str] = field(default_factory=set)
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
        dots = individual.dot(_direction(name, individual)).double()
        weighted, expected = float(dots @ self.weights.to(dots)), self.expected[name]
        size = max(float(torch.linalg.vector_norm(dots)), abs(expected))
        noise = ROUNDING * epsilon * math.hypot(*self.expected.values())
        if abs(weighted - expected) > max(max(_TOLERANCE, math.sqrt(epsilon)) * size, noise):
            self.refuted.add(name)
            return False
        self.refuted.discard(name)
        if size <= noise:
            return None
        self.confirmed.add(name)
        return True

    @property
    def undecided(self) -> bool:
        """Whether some of the parameters had no gradient to speak of."""
        return not self.expected.keys() <= self.confirmed | self.refuted


def attribution_of(
    loss: Tensor,
    graph: Graph,
    samples: int,
    parameters: Mapping[str, nn.Parameter],
    scale: float,
    positions_first: bool = False,
) -> Attribution | None:
    """By a backward pass from the network's outputs, weighted by samples; p.grad stays as it is.

    ``graph`` is that of ``loss`` and ``scale`` what contributions are multiplied by to give gₙ.
    ``positions_first`` says that the network computes on ``[T, N, ...]``. ``None`` where there are
    no outputs with an axis of N = ``samples`` entries.
    """
    outputs = _outputs(graph, samples, positions_first)
    if not outputs:
        return None
    weights = _weights(samples)
    edges = [GradientEdge(node, number) for node, number in outputs]
    gradients = torch.autograd.grad(loss, edges, retain_graph=True)
    factor = _loss_scale(gradients)
    weighted = [
        gradient * _along(weights.to(gradient), gradient, positions_first) * factor
        for gradient in gradients
    ]
    names = list(parameters)
    found = torch.autograd.grad(
        edges, [parameters[name] for name in names], weighted, retain_graph=True, allow_unused=True
    )
    expected = {
        name: scale / factor * _projection(name, gradient)
        for name, gradient in zip(names, found, strict=True)
        if gradient is not None and not gradient.is_complex()
    }
    finite = {name: value for name, value in expected.items() if math.isfinite(value)}
    return Attribution(weights, finite)


def _outputs(graph: Graph, samples: int, positions_first: bool) -> list[Edge]:
    """The edges nearest to the parameters at which one axis counts the samples.

    All that depends on samples passes them, on its way from parameters to the loss, once.
    """
    alone = graph.of_parameters_alone(samples)
    first = partial(_first, alone=alone, samples=samples, positions_first=positions_first)
    edges, _ = first([graph.root])
    chosen: list[Edge] = []
    met_parameters = False
    while edges and not met_parameters:
        if not _nested(edges):
            chosen = edges
        below = [edge for node, _ in edges for edge in node.next_functions]
        edges, met_parameters = first(below)
    return chosen


def _first(
    start: Iterable[Edge], alone: Collection[Node], samples: int, positions_first: bool
) -> tuple[list[Edge], bool]:
    """The first edges on the ways down that have an axis of N entries.

    And whether parameters were met before.
    """
    found: dict[Edge, None] = {}
    seen, waiting, met_parameters = set(), list(start), False
    while waiting:
        edge = waiting.pop()
        node, output = edge
        if node is None or edge in seen:
            continue
        seen.add(edge)
        met_parameters |= node in alone
        if node in alone or kind(node) == "AccumulateGrad":
            continue
        shape = output_shape(node, output)
        if shape[_sample_axis(shape, positions_first) :][:1] == (samples,):
            found[edge] = None
        else:
            waiting += node.next_functions
    return list(found), met_parameters


def _nested(edges: Sequence[Edge]) -> bool:
    below = nodes_below(child for node, _ in edges for child, _ in node.next_functions)
    return any(node in below for node, _ in edges)


def _weights(samples: int) -> Tensor:
    """Numbers of either sign, none near zero, few of them alike, and exact in every precision."""
    generator = torch.Generator().manual_seed(samples)
    sizes = torch.randint(64, 128, (samples,), generator=generator) / 128
    return sizes * (torch.randint(0, 2, (samples,), generator=generator) * 2 - 1)


def _along(weights: Tensor, gradient: Tensor, positions_first: bool) -> Tensor:
    behind = gradient.dim() - _sample_axis(gradient.shape, positions_first) - 1
    return weights.reshape(-1, *[1] * behind)


def _sample_axis(shape: Sequence[int], positions_first: bool) -> int:
    return 1 if positions_first and len(shape) > 2 else 0


def _loss_scale(gradients: Sequence[Tensor]) -> float:
    """What keeps gradients in float16 from vanishing, a power of two."""
    if all(gradient.dtype != torch.float16 for gradient in gradients):
        return 1.0
    largest = max(float(gradient.abs().amax()) for gradient in gradients if gradient.numel())
    return 2.0 ** (6 - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0


def _projection(name: str, gradient: Tensor) -> float:
    gradient = accumulable(gradient.to_dense() if gradient.is_sparse else gradient)
    return float((gradient * _direction(name, gradient)).sum())


def _direction(name: str, like: Tensor | GradientOperator) -> Tensor:
    """Random signs, the same ones for a parameter's name and shape, ``[*P]``."""
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
    return (2 * signs - 1).to(like.dtype)
