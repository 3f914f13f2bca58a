"""Labels by powers of two: which sample each row of a layer belongs to, read off exactly.

Backward is linear in the gradient that comes in. Two backward passes start from the same random
gradient at the loss's inputs, in the second one multiplied by ±2^k with another k or sign for each
sample. Multiplying by a power of two changes exponents alone, so it commutes with each rounding,
product and sum on the way: a row that depends on one sample alone gets the first pass's gradient
times that power, bit for bit and in every precision. A row in which samples meet gets no power of
two, and a row without gradient gets none. More samples than there are such factors take further
passes, each of which gives one digit of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradlens.graph.graph import Edge, Graph
from gradlens.graph.torch_private import output_metadata
from gradlens.numerics.precision import accumulable, autocast_off
from gradlens.samples.plan import NO_SAMPLE

MIXED = -2
"""Label of a row in which several samples meet."""

UNREADABLE = -3
"""Label of a row whose numbers aren't finite, or too small for their precision."""

POISON = 1.375
"""A factor that is no power of two: rows that it reaches belong to no sample."""

EXPONENTS = 64
"""Exponents of two that are used as factors, of the 252 that float32 and bfloat16 have. The others
are left for the gradients themselves, between 1e-28 and 1e28."""

HALF_EXPONENTS = 4
"""The same in float16, which has 30."""

PROBES = 2
"""Sums over each row that are compared; a chance power of two would have to occur in each."""

NOT_EXACT = 1e-3
"""Relative differences that are allowed off a CPU, where kernels use atomics, and in float16, whose
numbers lose digits below 6e-5. Labels differ by a factor of two or more."""

HALF_SCALE = 2.0**6
"""A factor that keeps gradients in float16 between 6e-5 and 65504, as a ``GradScaler`` does."""


@dataclass(frozen=True)
class LabelledEdge:
    """An edge of a graph, the rows of whose gradient get labels.

    ``features`` are the axes that belong to a row; all others count rows.
    """

    edge: Edge
    features: tuple[int, ...]

    def rows(self, gradient: Tensor) -> Tensor:
        """``[*S, F]`` from a gradient, with F = 1 if each element is a row."""
        rest = [axis for axis in range(gradient.dim()) if axis not in self.features]
        moved = gradient.permute((*rest, *self.features))
        return moved.flatten(len(rest)) if self.features else moved[..., None]


@dataclass(frozen=True)
class Source:
    """Where labels start: an edge of the loss's graph, and the samples of its rows.

    ``labels`` has as many axes as the edge's shape, some of length 1; ``None`` if the rows' samples
    aren't known, in which case the rows that they reach get the label ``MIXED``.
    """

    edge: Edge
    labels: Tensor | None


def read_labels(
    graph: Graph, sources: Sequence[Source], labelled: Sequence[LabelledEdge], count: int
) -> dict[LabelledEdge, Tensor]:
    """Labels ``[*S]`` of the rows at edges: below ``count``, or one of the negative constants.

    Rows without gradient get ``NO_SAMPLE``. Gradients of parameters stay as they are, and
    only the gradients at the lowest edges are in memory at the same time. ``RuntimeError`` if the
    graph allows no backward pass besides the user's own.
    """
    passes = _Passes(graph, sources, labelled)
    plain = passes.run(lambda source, gradient: gradient)
    base = 2 * (HALF_EXPONENTS if passes.in_half else EXPONENTS)
    labels: dict[LabelledEdge, Tensor] = {}
    weight = 1
    while weight == 1 or weight < count:
        digit = partial(_times_digit, weight=weight, base=base)
        for edge, sums in passes.run(digit).items():
            found = _digits(plain[edge], sums, base, passes.tolerance)
            before = labels.get(edge)
            labels[edge] = found if before is None else _combined(before, found, weight)
        weight *= base
    return {
        edge: _below(count, labels[edge]) if edge in labels else _without_gradient(graph, edge)
        for edge in labelled
    }


def _below(count: int, labels: Tensor) -> Tensor:
    """``MIXED`` for labels of no sample, which backward functions that aren't linear give."""
    return labels.masked_fill(labels >= count, MIXED)


def _without_gradient(graph: Graph, labelled: LabelledEdge) -> Tensor:
    """Labels of an edge without gradient."""
    shape = graph.shape(labelled.edge)
    rows = [length for axis, length in enumerate(shape) if axis not in labelled.features]
    return torch.full(rows, NO_SAMPLE)


def _combined(labels: Tensor, digits: Tensor, weight: int) -> Tensor:
    mixed = (labels == MIXED) | (digits == MIXED)
    nothing = (labels == NO_SAMPLE) | (digits == NO_SAMPLE)
    unreadable = (labels == UNREADABLE) | (digits == UNREADABLE)
    found = (labels + digits * weight).masked_fill(nothing, NO_SAMPLE).masked_fill(mixed, MIXED)
    return found.masked_fill(unreadable, UNREADABLE)


def _times_digit(source: Source, gradient: Tensor, weight: int, base: int) -> Tensor:
    """In place: a gradient has as many elements as the outputs, such as those for each word."""
    if source.labels is None:
        return gradient.mul_(POISON)
    labels = source.labels.to(gradient.device)
    digits = (labels // weight) % base
    factors = _exponents(digits // 2, base).double().exp2() * (1 - 2 * (digits % 2))
    return gradient.mul_(factors.masked_fill(labels == NO_SAMPLE, POISON).to(gradient.dtype))


def _exponents(steps: Tensor, base: int) -> Tensor:
    """Exponents on both sides of zero, so that gradients neither overflow nor vanish.

    But not zero itself: a row that doesn't scale, as after normalising gradients, has no label.
    """
    exponents = steps - base // 4
    return exponents + (exponents >= 0)


def _digits(plain: Tensor, labelled: Tensor, base: int, tolerance: float) -> Tensor:
    """Digits of rows ``[*S]`` from their sums ``[probes, *S]`` in both passes."""
    ratio = labelled / plain
    exponent = ratio[0].abs().log2().round()
    factor = exponent.exp2().copysign(ratio[0])
    exact = ((ratio / factor - 1).abs() <= tolerance).all(0)
    digits = (exponent + base // 4 - (exponent > 0).to(exponent.dtype)) * 2 + (ratio[0] < 0)
    known = exact & (exponent != 0) & (digits >= 0) & (digits < base)
    smaller, larger = plain.abs().minimum(labelled.abs()), plain.abs().maximum(labelled.abs())
    nothing = larger == 0
    # Finite, and so large that the numbers that they are sums of haven't lost digits.
    limits = torch.finfo(plain.dtype)
    readable = (smaller > limits.tiny / limits.eps) & (larger < torch.inf)
    found = digits.where(known, MIXED).long().masked_fill(~(readable | nothing).all(0), UNREADABLE)
    return found.masked_fill(nothing.all(0), NO_SAMPLE)


def _dtype(graph: Graph, edge: Edge) -> torch.dtype:
    node = graph.nodes[edge[0]]
    variable = getattr(node, "variable", None)
    return output_metadata(node)[edge[1]].dtype if variable is None else variable.dtype


def _device(graph: Graph, edge: Edge) -> torch.device:
    device: torch.device = output_metadata(graph.nodes[edge[0]])[edge[1]].device
    return device


def lowest(graph: Graph, numbers: Collection[int]) -> list[int]:
    """The nodes behind which there is none of the others: the inputs of ``autograd.grad``."""
    above: list[bool] = []
    for edges in graph.children:
        below = (edge[0] for edge in edges if edge is not None)
        above.append(any(above[child] or child in numbers for child in below))
    return [number for number in numbers if not above[number]]


class _Passes:
    """Backward passes from the same random gradient, with sums over the rows at labelled edges."""

    def __init__(
        self, graph: Graph, sources: Sequence[Source], labelled: Sequence[LabelledEdge]
    ) -> None:
        self._graph = graph
        self._sources = sources
        reached = graph.below(source.edge[0] for source in sources)
        reachable = [each for each in labelled if each.edge[0] in reached]
        edges = [*(s.edge for s in sources), *(each.edge for each in reachable)]
        self.in_half = any(_dtype(graph, edge) == torch.float16 for edge in edges)
        on_cpu = all(_device(graph, source.edge).type == "cpu" for source in sources)
        self.tolerance = 0.0 if on_cpu and not self.in_half else NOT_EXACT
        self._weights: dict[tuple[int, torch.device], Tensor] = {}
        self._by_node: dict[int, list[LabelledEdge]] = {}
        for each in reachable:
            self._by_node.setdefault(each.edge[0], []).append(each)
        numbers = lowest(graph, self._by_node.keys())
        self._lowest = [each for number in numbers for each in self._by_node[number]]

    def run(self, change: Callable[[Source, Tensor], Tensor]) -> dict[LabelledEdge, Tensor]:
        """Sums over the rows of each labelled edge, ``[probes, *S]``."""
        sums: dict[LabelledEdge, Tensor] = {}
        nodes = self._graph.nodes
        handles = [
            nodes[number].register_prehook(partial(self._take_sums, labelled, sums))
            for number, labelled in self._by_node.items()
        ]
        generator = torch.Generator().manual_seed(0)
        edges = [GradientEdge(nodes[s.edge[0]], s.edge[1]) for s in self._sources]
        starts = [change(s, self._random(s.edge, generator)) for s in self._sources]
        ends = [GradientEdge(nodes[each.edge[0]], each.edge[1]) for each in self._lowest]
        try:
            if not ends:
                return sums
            found = torch.autograd.grad(edges, ends, starts, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for each, gradient in zip(self._lowest, found, strict=True):
            if gradient is not None:
                sums[each] = self._sums(each, gradient)
        return sums

    def _take_sums(
        self,
        labelled: Sequence[LabelledEdge],
        sums: dict[LabelledEdge, Tensor],
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        for each in labelled:
            gradient = gradients[each.edge[1]]
            if gradient is not None:
                sums[each] = self._sums(each, gradient)

    def _sums(self, labelled: LabelledEdge, gradient: Tensor) -> Tensor:
        # Sums of half the precision would lose the digits that they are compared by.
        with torch.no_grad(), autocast_off(gradient):
            dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
            rows = labelled.rows(dense)
            rows = torch.view_as_real(rows).flatten(-2) if rows.is_complex() else accumulable(rows)
            if rows.shape[-1] == 1:
                return rows.movedim(-1, 0).clone()
            flat = rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])
            # Several times as fast on a CPU as flat @ weights.T, whose result is narrow.
            return (self._random_weights(rows) @ flat.T).reshape(PROBES, *rows.shape[:-1])

    def _random_weights(self, rows: Tensor) -> Tensor:
        key = (rows.shape[-1], rows.device)
        if key not in self._weights:
            generator = torch.Generator().manual_seed(rows.shape[-1])
            self._weights[key] = signed((PROBES, rows.shape[-1]), generator).to(rows.device)
        return self._weights[key].to(rows.dtype)

    def _random(self, edge: Edge, generator: torch.Generator) -> Tensor:
        """A gradient without zeros, of an edge's shape and dtype; the same in each pass."""
        metadata = output_metadata(self._graph.nodes[edge[0]])[edge[1]]
        shape = self._graph.shape(edge)
        rows, features = shape[:-1], shape[-1:]
        first, second = signed(rows, generator), signed(features, generator)
        second = second * HALF_SCALE if self.in_half else second
        where = {"device": metadata.device, "dtype": metadata.dtype}
        return first.to(**where)[..., None] * second.to(**where) if rows else second.to(**where)


def signed(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random numbers between 1/2 and 1 of either sign."""
    sizes = 0.5 + torch.rand(tuple(shape), generator=generator) / 2
    return sizes * (torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1)
