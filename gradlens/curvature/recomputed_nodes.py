"""Operations whose second derivative torch lacks or gets wrong, in a pass that needs it.

Their nodes have saved their inputs, from which their gradients can be computed again in a way that
can be differentiated. The user's forward and backward passes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gradlens.graph.checkpoints import read_again
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import Node
from gradlens.graph.passes import Gradients, Instead, call, derivatives
from gradlens.graph.torch_private import saved


@dataclass(frozen=True)
class Recomputation:
    """A node's inputs, in the order of its gradients, and its output as a function of them."""

    inputs: Sequence[Tensor | None]
    output: Tensor


def twice_differentiable(graph: Graph) -> Instead:
    """What hands on gradients that can be differentiated, in place of nodes whose own can't be."""
    return {
        number: partial(_differentiable, graph, number, rule)
        for number, node in enumerate(graph.nodes)
        for prefix, rule in _RULES.items()
        if node.name().startswith(prefix)
    }


def _differentiable(
    graph: Graph,
    number: int,
    recompute: Callable[[Node], Recomputation | None],
    gradients: Gradients,
) -> Gradients:
    """Gradients of a node's inputs, with a graph of their own where that is known."""
    node, gradient = graph.nodes[number], gradients[0]
    if gradient is None:
        return call(graph, number, gradients, create_graph=True)
    with read_again(node), torch.enable_grad():
        again = recompute(node)
    if again is None:
        return call(graph, number, gradients, create_graph=True)
    needed = {i: x for i, x in enumerate(again.inputs) if x is not None and x.requires_grad}
    found = derivatives([again.output], [*needed.values()], [gradient], create_graph=True)
    by_input = dict(zip(needed, found, strict=True))
    return tuple(by_input.get(place) for place in range(len(graph.children[number])))


def _attention(node: Node) -> Recomputation | None:
    """Fused attention has no second derivative; with dropout, its mask isn't saved."""
    if saved(node, "dropout_p") > 0:
        return None
    query, key, value = saved(node, "query"), saved(node, "key"), saved(node, "value")
    mask = _mask_of(node)
    with sdpa_kernel(SDPBackend.MATH):
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=saved(node, "is_causal"),
            scale=saved(node, "scale"),
            enable_gqa=query.shape[-3] != key.shape[-3],
        )
    return Recomputation((query, key, value, mask), attended)


def _mask_of(node: Node) -> Tensor | None:
    """The kernels have different names for it, and some have none."""
    mask: Tensor | None = saved(node, "attn_mask", saved(node, "attn_bias", None))
    return mask


def _weight_norm(node: Node) -> Recomputation:
    """w = g·v/‖v‖; torch's second derivative with respect to v is wrong (as of 2.13)."""
    direction, length = saved(node, "v"), saved(node, "g")
    axes = [axis for axis in range(direction.dim()) if axis != saved(node, "dim")]
    norm = torch.linalg.vector_norm(direction, dim=axes, keepdim=True)
    return Recomputation((direction, length), length * direction / norm)


_RULES: dict[str, Callable[[Node], Recomputation | None]] = {
    "ScaledDotProductFlashAttention": _attention,
    "ScaledDotProductEfficientAttention": _attention,
    "ScaledDotProductCudnnAttention": _attention,
    "WeightNormInterface": _weight_norm,
}
"""By the beginnings of the nodes' names."""
