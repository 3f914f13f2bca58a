"""Normalisation over the batch: what a per-sample gradient is where samples are coupled.

In train mode a sample's output depends on the statistics of the whole batch, so its loss is not a
function of that sample alone. ``BatchNormPolicy`` chooses what gₙ is then:

- ``"coupled"``: the contribution that flows through sample n's activations, δₙ times its inputs.
  The contributions add up to the gradient that the optimizer gets, but those in front of a
  normalisation contain the effect of sample n on the others through the statistics.
- ``"frozen"``: the gradient of ℓₙ with the batch's statistics taken for constants, as if the layer
  were in eval mode with these. A function of sample n alone, given the statistics; the mean is not
  the gradient that the optimizer gets. It takes a backward pass of its own.
- ``"skip"``: no value for parameters in front of a normalisation. Behind the last one, and for its
  own weight and bias, gₙ is the same under all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from gradlens.graph.graph import Graph, recomputation
from gradlens.graph.kinds import CHANNEL_NORMALISATION, SYNCHRONISED, Node, kind
from gradlens.graph.torch_private import saved
from gradlens.graph.undisturbed import hooks_muted

BatchNormPolicy: TypeAlias = Literal["coupled", "frozen", "skip"]

SKIPPED = 'it is in front of a normalisation over the batch, and batchnorm="skip"'

NOT_FROZEN = (
    "it is in front of a normalisation over the batch whose statistics can't be frozen ({reason}): "
    'use batchnorm="coupled" or "skip"'
)


def check_batchnorm(policy: str) -> None:
    """``ValueError`` unless it is one of the policies."""
    if policy not in get_args(BatchNormPolicy):
        raise ValueError(
            f"batchnorm={policy!r} is unknown: use one of {', '.join(get_args(BatchNormPolicy))}"
        )


def in_front_of(
    coupling: Iterable[int], graph: Graph, parameters: Mapping[str, nn.Parameter]
) -> tuple[str, ...]:
    """Names of the parameters that the inputs of normalising nodes are computed from."""
    inputs = [graph.children[number][0] for number in coupling]
    below = graph.below(edge[0] for edge in inputs if edge is not None)
    return tuple(n for n, p in parameters.items() if p in graph and graph.leaves[id(p)] in below)


@contextmanager
def statistics_frozen(nodes: Sequence[Node]) -> Iterator[None]:
    """In backward passes inside the context, the nodes' statistics are constants."""
    recomputed = recomputation()
    handles = [node.register_hook(partial(_frozen, node, recomputed, {})) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _frozen(
    node: Node,
    recomputed: AbstractContextManager[Any],
    known: dict[str, Tensor | None],
    grad_inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    if grad_inputs[0] is None or grad_outputs[0] is None:
        return None
    if not known:
        with recomputed:
            known |= {"inverse": saved(node, "result2"), "weight": saved(node, "weight")}
    factor, weight = known["inverse"], known["weight"]
    assert factor is not None
    if weight is not None:
        factor = factor * weight.detach().to(factor.dtype)
    by_channel = factor.reshape(-1, *[1] * (grad_inputs[0].dim() - 2))
    return ((grad_outputs[0] * by_channel).to(grad_inputs[0].dtype), *grad_inputs[1:])


def uses_statistics(node: Node) -> bool:
    """Whether a node computes statistics of its input and normalises with them, by channel."""
    return bool(CHANNEL_NORMALISATION.match(kind(node)) and saved(node, "training"))


def uncoupled_gradients(
    loss: Tensor, nodes: Sequence[Node], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Run a backward pass with frozen statistics, for the hooks on the graph; keeps p.grad.

    ``RuntimeError`` if the graph allows none.
    """
    if any(kind(node) == SYNCHRONISED for node in nodes):
        raise RuntimeError("they are those of all processes")
    wanted = [parameter for parameter in parameters.values() if parameter.requires_grad]
    with statistics_frozen(nodes), hooks_muted(wanted):
        torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
