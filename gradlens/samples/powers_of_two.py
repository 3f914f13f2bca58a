"""Labels by powers of two: what one node does to rows, read off the gradients that it hands on.

A node's backward function is linear. It is called twice with random gradients at one of its
outputs, the second time multiplied by ±2^k with another k or sign for each sample. Multiplying by a
power of two changes exponents alone, so it commutes with each rounding, product and sum inside: an
element of what is handed on that depends on one sample alone is multiplied by that power, bit for
bit and in every precision. An element in which samples meet gets no power of two, and one without
gradient gets none. More samples than there are such factors take further calls, each of which gives
one digit of their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlens.graph.graph import Graph
from gradlens.graph.passes import call, outputs_of
from gradlens.graph.torch_private import output_metadata
from gradlens.samples.rows import MIXED, NO_SAMPLE, UNREADABLE

POISON = 1.375
"""A factor that is no power of two: what it reaches belongs to no sample."""

EXPONENTS = 64
"""Exponents of two that are used as factors, of the 252 that float32 and bfloat16 have. The others
are left for the gradients themselves, between 1e-28 and 1e28."""

HALF_EXPONENTS = 4
"""The same in float16, which has 30."""

NOT_EXACT = 1e-3
"""Relative differences that are allowed off a CPU, where kernels use atomics, and in float16, whose
numbers lose digits below 6e-5. Labels differ by a factor of two or more."""

HALF_SCALE = 2.0**6
"""A factor that keeps gradients in float16 between 6e-5 and 65504, as a ``GradScaler`` does."""


def labels_below(
    graph: Graph, number: int, output: int, labels: Tensor, samples: int
) -> list[Tensor | None]:
    """Labels of the elements of a node's inputs, from those of one of its outputs.

    ``labels`` has as many axes as the output, some of length 1; elements with labels that aren't
    below ``samples`` belong to none, as do those of ``NO_SAMPLE`` without gradient. An input that
    gets no gradient has no labels. ``RefusedNodeError`` if the node can't be run without a trace,
    ``RuntimeError`` if a backward pass has freed the graph.
    """
    metadata = output_metadata(graph.nodes[number])[output]
    shape = graph.shape((number, output))
    where = {"device": metadata.device, "dtype": metadata.dtype}
    start = (
        _random(shape, metadata.dtype)
        .to(**where)
        .masked_fill((labels == NO_SAMPLE).to(metadata.device), 0)
    )

    def handed_on(factors: Tensor | None) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] * outputs_of(graph, number)
        gradients[output] = start if factors is None else start * factors.to(**where)
        return [None if g is None else _real(g) for g in call(graph, number, gradients)]

    with torch.no_grad():
        plain = handed_on(None)
        dtypes = {metadata.dtype, *(each.dtype for each in plain if each is not None)}
        base = 2 * (HALF_EXPONENTS if torch.float16 in dtypes else EXPONENTS)
        is_exact = metadata.device.type == "cpu" and torch.float16 not in dtypes
        found: list[Tensor | None] = [None] * len(plain)
        weight = 1
        while weight == 1 or weight < samples:
            scaled = handed_on(_factors(labels, samples, weight, base))
            for place, (one, other) in enumerate(zip(plain, scaled, strict=True)):
                if one is not None and other is not None:
                    digits = _digits(one, other, base, 0.0 if is_exact else NOT_EXACT)
                    before = found[place]
                    found[place] = digits if before is None else _combined(before, digits, weight)
            weight *= base
    pairs = zip(found, graph.children[number], strict=True)
    return [
        each if each is None or edge is None else _of_elements(each, samples, graph.shape(edge))
        for each, edge in pairs
    ]


def _random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    found = signed(shape, generator) * (HALF_SCALE if dtype == torch.float16 else 1)
    return torch.complex(found, signed(shape, generator)) if dtype.is_complex else found


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
    one, other = labels.unbind(-1)
    first, second = one.where(one != NO_SAMPLE, other), other.where(other != NO_SAMPLE, one)
    return first.where(first == second, first.minimum(second).clamp(max=MIXED))


def signed(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random numbers between 1/2 and 1 of either sign."""
    sizes = 0.5 + torch.rand(tuple(shape), generator=generator) / 2
    return sizes * (torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1)
