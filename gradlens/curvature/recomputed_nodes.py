"""Operations whose second derivative torch lacks or gets wrong, in a pass that needs it.

Their nodes have saved their inputs, from which their gradients can be computed again in a way that
can be differentiated. The user's forward and backward passes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gradlens.graph.checkpoints import recomputing
from gradlens.graph.graph import nodes_below
from gradlens.graph.kinds import Node
from gradlens.graph.torch_private import saved


@dataclass(frozen=True)
class Recomputation:
    """A node's inputs, in the order of its gradients, and its output as a function of them."""

    inputs: Sequence[Tensor | None]
    output: Tensor


@contextmanager
def twice_differentiable_nodes(output: Tensor) -> Iterator[None]:
    """Gradients of ``output`` found inside the context can be differentiated."""
    handles = [
        node.register_hook(partial(_differentiable, node, recompute))
        for node, recompute in _flawed(output)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flawed(output: Tensor) -> list[tuple[Node, Callable[[Node], Recomputation | None]]]:
    return [
        (node, rule)
        for node in nodes_below([output.grad_fn])
        for prefix, rule in _RULES.items()
        if node.name().startswith(prefix)
    ]


def _differentiable(
    node: Node,
    recompute: Callable[[Node], Recomputation | None],
    grad_inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    """Other gradients of a node's inputs, with a graph of their own; ``None`` for no change."""
    # While second derivatives are taken, the node is passed again, for a first one.
    if not torch.is_grad_enabled() or grad_outputs[0] is None:
        return None
    with recomputing():
        again = recompute(node)
    if again is None:
        return None
    pairs = enumerate(again.inputs[: len(grad_inputs)])
    needed = {i: tensor for i, tensor in pairs if tensor is not None and tensor.requires_grad}
    found = torch.autograd.grad(
        again.output, list(needed.values()), grad_outputs[0], create_graph=True
    )
    gradients = dict(zip(needed, found, strict=True))
    return tuple(gradients.get(i, gradient) for i, gradient in enumerate(grad_inputs))


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
