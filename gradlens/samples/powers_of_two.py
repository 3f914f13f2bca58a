"""Labels by powers of two: what one node does to rows, read off the gradients that it hands on.

A node's backward function is linear. It is called with random gradients at one of its outputs, and
again with these multiplied by ±2^k with another k or sign for each sample. Multiplying by a
power of two changes exponents alone, so it commutes with each rounding, product and sum inside: an
element of what is handed on that depends on one sample alone is multiplied by that power, bit for
bit and in every precision. An element in which samples meet gets no power of two, and one without
gradient gets none. More samples than there are such factors take further calls, each of which gives
one digit of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import torch
from torch import Tensor

from gradlens.graph.graph import Graph
from gradlens.graph.passes import call
from gradlens.numerics.tensors import on_device
from gradlens.samples.labels import MIXED, NO_SAMPLE, UNREADABLE

POISON = 1.375
"""A factor that is no power of two: what it reaches belongs to no sample."""

EXPONENTS = 64
"""Exponents of two that are used as factors, of the 252 that float32 and bfloat16 have. The others
are left for the gradients themselves, between 1e-28 and 1e28."""

HALF_EXPONENTS = 4
"""The same in float16, which has 30."""

DIGITS = 46
"""Binary digits by which a power of two has to be exact, in as many probes with other gradients as
that takes: where samples meet, each digit is right by chance in one of two."""

NOT_EXACT = 1e-3
"""Relative differences that are allowed off a CPU, where kernels use atomics, and in float16, whose
numbers lose digits below 6e-5. Labels differ by a factor of two or more."""

HALF_SCALE = 2.0**6
"""A factor that keeps gradients in float16 between 6e-5 and 65504, as a ``GradScaler`` does."""


NOT_LINEAR = (
    "the backward function of {kind} isn't linear in the gradient that it gets, so that what it "
    "hands on is no sum over samples: let it multiply the gradient by what doesn't depend on it"
)


def labels_below(
    graph: Graph, number: int, output: int, labels: Tensor, samples: int
) -> list[Tensor | None]:
    """Labels of the elements of a node's inputs, from those of one of its outputs.

    ``labels`` has as many axes as the output, some of length 1; elements with labels that aren't
    below ``samples`` belong to none, as do those of ``NO_SAMPLE`` without gradient. An input that
    gets no gradient has no labels. ``RefusedNodeError`` if the node can't be run without a trace,
    ``RuntimeError`` if a backward pass has freed the graph.
    """
    edges = graph.children[number]
    dtypes = [graph.like(e).dtype for e in ((number, output), *edges) if e is not None]
    is_half = torch.float16 in dtypes
    base = 2 * (HALF_EXPONENTS if is_half else EXPONENTS)
    is_exact = not is_half and graph.like((number, output)).device.type == "cpu"
    tolerance = 0.0 if is_exact else NOT_EXACT
    coarsest = max(tolerance, *(torch.finfo(dtype).eps for dtype in dtypes))
    generator = torch.Generator().manual_seed(0)

    def probed(start: Tensor) -> list[Tensor | None]:
        """From one random gradient; complex numbers have two labels, as real ones."""
        plain = _handed_on(graph, number, output, start)
        found: list[Tensor | None] = [None] * len(plain)
        weight = 1
        while weight == 1 or weight < samples:
            factors = _factors(labels, samples, weight, base)
            factors = on_device(factors, start.device, start.dtype)
            scaled = _handed_on(graph, number, output, start * factors)
            for place, (one, other) in enumerate(zip(plain, scaled, strict=True)):
                if one is not None and other is not None:
                    digits = _digits(one, other, base, tolerance)
                    before = found[place]
                    found[place] = digits if before is None else _combined(before, digits, weight)
            weight *= base
        return found

    found: list[Tensor | None] = [None] * len(edges)
    with torch.no_grad():
        for _ in range(ceil(DIGITS / -log2(coarsest))):
            start = _random(graph, number, output, generator)
            start = start.masked_fill(on_device(labels == NO_SAMPLE, start.device), 0)
            found = [*map(_agreed, found, probed(start))]
    pairs = zip(found, edges, strict=True)
    return [
        each if each is None or edge is None else _of_elements(each, samples, graph.shape(edge))
        for each, edge in pairs
    ]


def _handed_on(graph: Graph, number: int, output: int, gradient: Tensor) -> list[Tensor | None]:
    gradients: list[Tensor | None] = [None] * len(graph.outputs(number))
    gradients[output] = gradient
    return [None if each is None else _real(each) for each in call(graph, number, gradients)]


def why_not_linear(graph: Graph, number: int, output: int) -> str:
    """Why no sample is told apart in what a node hands on; empty if that is linear."""
    start = _random(graph, number, output, torch.Generator().manual_seed(0))
    with torch.no_grad():
        once, twice = (_handed_on(graph, number, output, times * start) for times in (1, 2))
    pairs = [(2 * one, two) for one, two in zip(once, twice, strict=True) if one is not None]
    same = (two is not None and torch.allclose(one, two, NOT_EXACT, 0, True) for one, two in pairs)
    return "" if all(same) else NOT_LINEAR.format(kind=graph.kinds[number])


def _agreed(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Labels by two probes, in each of which some gradients may cancel out, or nearly so."""
    if one is None or other is None:
        return other if one is None else one
    lower, upper = one.minimum(other), one.maximum(other)
    is_open = (lower == NO_SAMPLE) | ((lower == UNREADABLE) & (upper != NO_SAMPLE))
    return torch.where(is_open, upper, lower).masked_fill((lower >= 0) & (one != other), MIXED)


def _random(graph: Graph, number: int, output: int, generator: torch.Generator) -> Tensor:
    like, shape = graph.like((number, output)), graph.shape((number, output))
    found = signed(shape, generator) * (HALF_SCALE if like.dtype == torch.float16 else 1)
    if like.dtype.is_complex:
        found = torch.complex(found, signed(shape, generator))
    return on_device(found, like.device, like.dtype)


def _real(gradient: Tensor) -> Tensor:
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _factors(labels: Tensor, samples: int, weight: int, base: int) -> Tensor:
    """``POISON``, or ±2^k by a digit of each label.

    Exponents are on both sides of zero, so that gradients neither overflow nor vanish, but none is
    zero itself: what doesn't scale, as after normalising gradients, has no label.
    """
    digits = (labels // weight) % base
    exponents = digits // 2 - base // 4
    exponents = exponents + (exponents >= 0)
    factors = exponents.double().exp2() * (1 - 2 * (digits % 2))
    return factors.masked_fill((labels < 0) | (labels >= samples), POISON)


def _digits(plain: Tensor, scaled: Tensor, base: int, tolerance: float) -> Tensor:
    """Digits of elements, from the gradients without factors and with them."""
    ratio = scaled.double() / plain.double()
    exponent = ratio.abs().log2().round()
    exact = (ratio / exponent.exp2().copysign(ratio) - 1).abs() <= tolerance
    digits = (exponent + base // 4 - (exponent > 0).to(exponent.dtype)) * 2 + (ratio < 0)
    known = exact & (exponent != 0) & (digits >= 0) & (digits < base)
    smaller, larger = plain.abs().minimum(scaled.abs()), plain.abs().maximum(scaled.abs())
    # Finite, and so large that the numbers that they are sums of haven't lost digits.
    limits = torch.finfo(plain.dtype)
    readable = (smaller > limits.tiny / limits.eps) & (larger < torch.inf)
    found = digits.where(known, MIXED).long().masked_fill(~readable, UNREADABLE)
    return found.masked_fill(larger == 0, NO_SAMPLE).cpu()


def _combined(labels: Tensor, digits: Tensor, weight: int) -> Tensor:
    """Labels by one more digit; what isn't known of one of them isn't known."""
    return torch.where(
        (labels < 0) | (digits < 0), labels.minimum(digits), labels + digits * weight
    )


def _of_elements(labels: Tensor, samples: int, shape: Sequence[int]) -> Tensor:
    """``MIXED`` for labels of no sample, which backward functions that aren't linear give.

    The real and the imaginary part of a number have the same label, if both have one.
    """
    labels = labels.masked_fill(labels >= samples, MIXED)
    if labels.dim() == len(shape):
        return labels
    found = _agreed(*labels.unbind(-1))
    assert found is not None
    return found


def signed(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random numbers between 1/2 and 1 of either sign."""
    sizes = 0.5 + torch.rand(tuple(shape), generator=generator, device="cpu") / 2
    return sizes * (torch.randint(0, 2, tuple(shape), generator=generator, device="cpu") * 2 - 1)
