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

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from gradlens.graph.graph import Edge, Graph
from gradlens.graph.passes import (
    Gradients,
    Instead,
    RefusedNodeError,
    nodes_above,
    reason_not_to_run,
    run_backward,
)
from gradlens.graph.torch_private import output_metadata
from gradlens.numerics.precision import accumulable, autocast_off
from gradlens.samples.rows import MIXED, NO_SAMPLE, UNREADABLE, LabelledEdge, Source

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


class ReadLabels(NamedTuple):
    """Labels ``[*S]`` by edges, and the reasons why nodes weren't run, by their numbers.

    Labels are below the number of samples, or one of the negative constants. Rows without gradient
    have ``NO_SAMPLE``, and those behind nodes that weren't run ``UNREADABLE``.
    """

    labels: dict[LabelledEdge, Tensor]
    refused: dict[int, str]


def read_labels(
    graph: Graph,
    sources: Sequence[Source],
    labelled: Sequence[LabelledEdge],
    count: int,
    instead: Instead = MappingProxyType({}),
) -> ReadLabels:
    """Labels of the rows at edges, from backward passes of gradlens's own.

    They compute something else ``instead`` of some nodes. Gradients of parameters stay as they are,
    and those at the edges aren't kept. ``RuntimeError`` if a backward pass has freed the graph.
    """
    refused: dict[int, str] = {}
    while True:
        behind = graph.below(e[0] for n in refused for e in graph.children[n] if e is not None)
        readable = [each for each in labelled if each.edge[0] not in behind]
        found = _not_to_run(graph, sources, readable) - refused.keys()
        if not found:
            try:
                labels = _read(_Passes(graph, sources, readable, instead), count)
                break
            except RefusedNodeError as error:
                refused[error.number] = str(error)
        refused |= {number: reason_not_to_run(graph.nodes[number]) for number in found}
    for each in labelled:
        if each not in labels:
            label = UNREADABLE if each.edge[0] in behind else NO_SAMPLE
            labels[each] = torch.full(_rows(graph, each), label)
    return ReadLabels(labels, refused)


def _not_to_run(
    graph: Graph, sources: Sequence[Source], labelled: Sequence[LabelledEdge]
) -> set[int]:
    """The nodes between sources and edges that can't be run without a trace."""
    between = graph.below(source.edge[0] for source in sources)
    between &= nodes_above(graph, {each.edge[0] for each in labelled})
    return {number for number in between if reason_not_to_run(graph.nodes[number])}


def _read(passes: _Passes, count: int) -> dict[LabelledEdge, Tensor]:
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
    return {edge: _below(count, each) for edge, each in labels.items()}


def _rows(graph: Graph, labelled: LabelledEdge) -> list[int]:
    """The shape of the rows at an edge."""
    shape = graph.shape(labelled.edge)
    return [length for axis, length in enumerate(shape) if axis not in labelled.features]


def _below(count: int, labels: Tensor) -> Tensor:
    """``MIXED`` for labels of no sample, which backward functions that aren't linear give."""
    return labels.masked_fill(labels >= count, MIXED)


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


class _Passes:
    """Backward passes from the same random gradient, with sums over the rows at labelled edges."""

    def __init__(
        self,
        graph: Graph,
        sources: Sequence[Source],
        labelled: Sequence[LabelledEdge],
        instead: Instead,
    ) -> None:
        self._graph = graph
        self._sources = sources
        self._instead = instead
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

    def run(self, change: Callable[[Source, Tensor], Tensor]) -> dict[LabelledEdge, Tensor]:
        """Sums over the rows of each labelled edge, ``[probes, *S]``."""
        sums: dict[LabelledEdge, Tensor] = {}

        def take(number: int, gradients: Gradients) -> None:
            for each in self._by_node[number]:
                gradient = gradients[each.edge[1]]
                if gradient is not None:
                    sums[each] = self._sums(each, gradient)

        generator = torch.Generator().manual_seed(0)
        starts = [(s.edge, change(s, self._random(s.edge, generator))) for s in self._sources]
        run_backward(self._graph, starts, self._by_node.keys(), take, self._instead)
        return sums

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
