"""Derivatives of a live graph that can be differentiated again, without running user hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradlens.curvature.recomputed_nodes import twice_differentiable
from gradlens.gradients.gradients import OF_OTHERS
from gradlens.graph.graph import Graph, nodes_below
from gradlens.graph.passes import derivatives
from gradlens.graph.uncompiled import ran_compiled
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.planner import FREED, FREED_GRAPH

_REMEDY = (
    "Compute the loss with operations that torch can differentiate twice. If it uses attention "
    "with dropout in a fused kernel, choose the math kernel: "
    "`with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ...` around the forward pass. If "
    "it uses cuDNN's recurrent layers, `with torch.backends.cudnn.flags(enabled=False): ...`. A "
    "custom autograd.Function must not be once_differentiable, a "
    "checkpoint not reentrant."
)
COMPILED = (
    "torch can't differentiate what torch.compile has made twice: pass the compiled model to the "
    "cockpit, and a compiled loss module as loss_function=..., or run the forward pass, with the "
    "loss, inside `with cockpit.forward(step):`"
)
_TORCH_SAYS = (
    "is not implemented",
    "differentiate twice",
    "double backward",
    "incompatible with .grad()",
    "is not differentiable with respect to argument",
)
_ONCE_DIFFERENTIABLE = "torch::autograd::Error"


def differentiable_gradient(
    output: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None
) -> list[Tensor | None]:
    """Gradient of ``output`` times ``cotangent`` (default 1) as functions of the inputs.

    An entry is None where the gradient is zero or constant, so has no derivative of its own.
    Raises ``UnavailableError`` for an operation without second derivative, such as a function that
    is declared to be differentiable only once: torch would leave out its derivative silently. The
    same holds for compiled code, and where the output depends on none of the inputs.
    """
    if ran_compiled(output):
        raise UnavailableError(COMPILED)
    if cotangent is None:
        cotangent = torch.ones_like(output)
    if not cotangent.requires_grad:
        # Otherwise torch marks a once-differentiable function only where its gradient varies.
        cotangent = cotangent.detach().requires_grad_()
    with _explained():
        found = derivatives([output], inputs, [cotangent], twice_differentiable, create_graph=True)
    if all(gradient is None for gradient in found):
        raise UnavailableError(OF_OTHERS)
    gradients = [g if g is not None and g.requires_grad else None for g in found]
    _refuse_once_differentiable(g for g in gradients if g is not None)
    return gradients


def derivative(
    outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Σⱼ cotangentⱼ·∂outputⱼ/∂input for each input; the graph stays alive.

    Outputs that are None count as constants.
    """
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None]
    if not pairs:
        return [torch.zeros_like(x, requires_grad=False) for x in inputs]
    with _explained():
        found = derivatives(
            [output for output, _ in pairs],
            inputs,
            [cotangent.to(output.dtype) for output, cotangent in pairs],
        )
    return [
        torch.zeros_like(x, requires_grad=False) if d is None else d.detach()
        for d, x in zip(found, inputs, strict=True)
    ]


def depends_on(output: Tensor, tensor: Tensor) -> bool:
    """Whether ``tensor`` is part of the scalar ``output``'s graph."""
    return output.grad_fn is not None and Graph(output).number_of(tensor) >= 0


@contextmanager
def _explained() -> Iterator[None]:
    """Turn torch's errors on missing second derivatives, or graphs, into ``UnavailableError``."""
    try:
        yield
    except RuntimeError as error:
        missing = isinstance(error, NotImplementedError)
        if missing or any(words in str(error) for words in _TORCH_SAYS):
            raise _not_twice_differentiable(str(error)) from error
        if FREED_GRAPH in str(error):
            raise UnavailableError(FREED) from error
        raise


def _refuse_once_differentiable(gradients: Iterable[Tensor]) -> None:
    nodes = nodes_below(gradient.grad_fn for gradient in gradients)
    if any(node.name() == _ONCE_DIFFERENTIABLE for node in nodes):
        raise _not_twice_differentiable("a function was marked with @once_differentiable")


def _not_twice_differentiable(torch_says: str) -> UnavailableError:
    says = " ".join(torch_says.split())
    return UnavailableError(f"the loss can't be differentiated twice; torch says: {says} {_REMEDY}")
