"""Derivatives of a live graph that can be differentiated again, without running user hooks.

Of some operations, torch lacks the second derivative or gets it wrong. Their nodes have saved their
inputs, from which their gradients are computed again in a way that can be differentiated. The
user's forward and backward passes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gradlens.gradients.gradients import OF_OTHERS
from gradlens.graph.checkpoints import read_again
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import Node
from gradlens.graph.passes import Gradients, Instead, call, derivatives
from gradlens.numerics.unavailable import FREED, UnavailableError, has_freed
from gradlens.torch_private import saved

_REMEDY = (
    "Compute the loss with operations that torch can differentiate twice. If it uses attention "
    "with dropout in a fused kernel, choose the math kernel: "
    "`with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...` around the forward pass. If "
    "it uses cuDNN's recurrent layers, `with torch.backends.cudnn.flags(enabled=False): ...`. A "
    "custom autograd.Function must not be once_differentiable, a "
    "checkpoint not reentrant."
)
_TORCH_SAYS = (
    "is not implemented",
    "differentiate twice",
    "double backward",
    "incompatible with .grad()",
    "is not differentiable with respect to argument",
    "was created in no_grad mode and is being modified inplace",  # by nested tensors' unbind
)
_ONCE_DIFFERENTIABLE = "torch::autograd::Error"


def differentiable_gradient(
    output: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None
) -> list[Tensor | None]:
    """Gradient of ``output`` times ``cotangent`` (default 1) as functions of the inputs.

    An entry is None where the gradient is zero or constant, so has no derivative of its own.
    Raises ``UnavailableError`` for an operation without second derivative, such as a function that
    is declared to be differentiable only once: torch would leave out its derivative silently. The
    same holds where the output depends on none of the inputs.
    """
    if cotangent is None:
        cotangent = torch.ones_like(output)
    if not cotangent.requires_grad:
        # Otherwise torch marks a once-differentiable function only where its gradient varies.
        cotangent = cotangent.detach().requires_grad_()
    with explained():
        found = derivatives([output], inputs, [cotangent], _twice_differentiable, create_graph=True)
    if all(gradient is None for gradient in found):
        raise UnavailableError(OF_OTHERS)
    gradients = [g if g is not None and g.requires_grad else None for g in found]
    functions = [gradient for gradient in gradients if gradient is not None]
    nodes = Graph(*functions).nodes if functions else []
    if any(node.name() == _ONCE_DIFFERENTIABLE for node in nodes):
        raise _not_twice_differentiable("a function was marked with @once_differentiable")
    return gradients


def derivative(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    graph: Graph | None = None,
    by_engine: bool = False,
) -> list[Tensor]:
    """Σⱼ cotangentⱼ·∂outputⱼ/∂input for each input; the graph stays alive.

    Outputs that are None count as constants. ``graph`` is that of the others, if it is known. What
    lies between outputs and inputs may be run ``by_engine``, autograd's, if nobody else knows of
    it: unlike a pass of our own, that computes no gradient that doesn't lead to the inputs.
    """
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None]
    if not pairs:
        return [torch.zeros_like(x, requires_grad=False) for x in inputs]
    given = [output for output, _ in pairs]
    along = [cotangent.to(output.dtype) for output, cotangent in pairs]
    found: Sequence[Tensor | None]
    with explained():
        if by_engine:
            found = torch.autograd.grad(given, inputs, along, retain_graph=True, allow_unused=True)
        else:
            found = derivatives(given, inputs, along, graph=graph)
    return [
        torch.zeros_like(x, requires_grad=False) if d is None else d.detach()
        for d, x in zip(found, inputs, strict=True)
    ]


@contextmanager
def explained() -> Iterator[None]:
    """Turn torch's errors on missing second derivatives, or graphs, into ``UnavailableError``."""
    try:
        yield
    except RuntimeError as error:
        missing = isinstance(error, NotImplementedError)
        if missing or any(words in str(error) for words in _TORCH_SAYS):
            raise _not_twice_differentiable(str(error)) from error
        if has_freed(error):
            raise UnavailableError(FREED) from error
        raise


def _not_twice_differentiable(torch_says: str) -> UnavailableError:
    says = " ".join(torch_says.split())
    return UnavailableError(f"the loss can't be differentiated twice; torch says: {says} {_REMEDY}")


_Recomputation: TypeAlias = tuple[Sequence["Tensor | None"], Tensor]
"""A node's inputs, in the order of its gradients, and its output as a function of them."""


def _twice_differentiable(graph: Graph) -> Instead:
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
    recompute: Callable[[Node], _Recomputation | None],
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
    inputs, output = again
    needed = {i: x for i, x in enumerate(inputs) if x is not None and x.requires_grad}
    found = derivatives([output], [*needed.values()], [gradient], create_graph=True)
    by_input = dict(zip(needed, found, strict=True))
    return tuple(by_input.get(place) for place in range(len(graph.children[number])))


def _attention(node: Node) -> _Recomputation | None:
    """Fused attention has no second derivative; with dropout, its mask isn't saved."""
    if saved(node, "dropout_p") > 0:
        return None
    query, key, value = saved(node, "query"), saved(node, "key"), saved(node, "value")
    # The kernels have different names for it, and some have none.
    mask: Tensor | None = saved(node, "attn_mask", saved(node, "attn_bias", None))
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
    return (query, key, value, mask), attended


def _weight_norm(node: Node) -> _Recomputation:
    """w = g·v/‖v‖; torch's second derivative with respect to v is wrong (as of 2.13)."""
    direction, length = saved(node, "v"), saved(node, "g")
    axes = [axis for axis in range(direction.dim()) if axis != saved(node, "dim")]
    norm = torch.linalg.vector_norm(direction, dim=axes, keepdim=True)
    return (direction, length), length * direction / norm


_RULES: dict[str, Callable[[Node], _Recomputation | None]] = {
    "ScaledDotProductFlashAttention": _attention,
    "ScaledDotProductEfficientAttention": _attention,
    "ScaledDotProductCudnnAttention": _attention,
    "WeightNormInterface": _weight_norm,
}
"""By the beginnings of the nodes' names."""
