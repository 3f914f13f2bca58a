"""The Hessian of usual losses with respect to the network's outputs, in closed form.

It takes a few operations on tensors of the outputs' shape, where differentiating the loss's
gradient takes about ten and keeps its graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from gradlens.curvature.differentiation import explained
from gradlens.graph.checkpoints import read_saved
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import Node, kind_of, plain_name
from gradlens.graph.loss import REDUCTIONS, terms
from gradlens.graph.passes import Gradients, run_backward
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import recomputing, saved, signed

AT_ONCE = 2**18
"""Elements of which probabilities are computed at once: 1 MiB in single precision, which a core's
cache holds."""

Product: TypeAlias = Callable[[Tensor], Tensor]
"""The product of the Hessian of a loss with a tensor of the outputs' shape."""


def closed_form(graph: Graph, outputs: Tensor) -> Product | None:
    """The product u ↦ (∇²ℓ)u of cross-entropy, squared errors, or binary cross-entropy of logits.

    Also with weights, ignored targets and smoothed labels, and of weighted sums of such losses.
    ``graph`` is that of the loss. ``None`` for any other loss, as far as its nodes say.
    """
    edge = (graph.number_of(outputs), outputs.output_nr)
    found: list[Product] = []

    def take(number: int, gradients: Gradients) -> None:
        (gradient,) = gradients
        assert gradient is not None
        found.append(_FORMS[plain_name(graph.kinds[number])](graph.nodes[number], gradient))

    with explained(), torch.no_grad(), recomputing():
        try:
            numbers = terms(graph)
            for number in numbers:
                below, *others = graph.children[number]
                while below not in (None, edge) and kind_of(graph.kinds[below[0]]).in_order:
                    below = graph.children[below[0]][0]
                is_known = plain_name(graph.kinds[number]) in _FORMS
                if below != edge or not is_known or any(other is not None for other in others):
                    return None
            like = graph.like(graph.root)
            start = torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
            run_backward(graph, [(graph.root, start)], numbers, take)
        except UnavailableError:
            return None
    return lambda u: reduce(Tensor.add_, [each(u).reshape(u.shape).to(u.dtype) for each in found])


def _cross_entropy(node: Node, gradient: Tensor) -> Product:
    """−s(diag(p) − ppᵀ) for each row, of a loss that is linear in the logarithms of p = softmax.

    s is the sum of its derivatives with respect to them.
    """
    axis = signed(saved(node, "dim"))
    logs, factor = _read(node, "result"), -gradient.sum(axis, keepdim=True)

    def product(u: Tensor) -> Tensor:
        found = torch.empty_like(logs, dtype=torch.promote_types(logs.dtype, u.dtype))
        every = (logs, factor, u.reshape(logs.shape), found)
        at_once = AT_ONCE * len(logs) // max(logs.numel(), 1) if axis else len(logs)
        for log, s, along, out in zip(
            *(each.split(max(at_once, 1)) for each in every), strict=True
        ):
            p = log.exp()
            torch.mul(p, along, out=out)
            out.addcmul_(p, out.sum(axis, keepdim=True), value=-1).mul_(s)
        return found

    return product


def _squared_errors(node: Node, gradient: Tensor) -> Product:
    diagonal = 2 * gradient / _divisor(node)
    return lambda u: diagonal * u.reshape(_read(node, "self").shape)


def _binary_cross_entropy(node: Node, gradient: Tensor) -> Product:
    """p(1 − p) for p = sigmoid, where a label of 1 counts ``pos_weight`` times."""
    p = _read(node, "self").sigmoid()
    diagonal = torch.addcmul(p, p, p, value=-1).mul_(gradient / _divisor(node))
    weight, of_positives = read_saved(node, "weight"), read_saved(node, "pos_weight")
    if of_positives is not None:
        diagonal *= 1 + (of_positives - 1) * _read(node, "target")
    if weight is not None:
        diagonal *= weight
    return lambda u: diagonal * u.reshape(diagonal.shape)


_FORMS: dict[str, Callable[[Node, Tensor], Product]] = {
    "LogSoftmax": _cross_entropy,
    "MseLoss": _squared_errors,
    "BinaryCrossEntropyWithLogits": _binary_cross_entropy,
}
"""Of a node, and of the loss's gradient at its output."""


def _read(node: Node, name: str) -> Tensor:
    found = read_saved(node, name)
    assert found is not None  # these kinds have saved it
    return found.detach()


def _divisor(node: Node) -> int:
    """What a loss function divides the sum over all elements by."""
    return _read(node, "self").numel() if REDUCTIONS[saved(node, "reduction")] == "mean" else 1
