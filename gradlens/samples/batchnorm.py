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

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal, TypeAlias, get_args

from torch import nn

from gradlens.graph.checkpoints import read_saved
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import HIDING, Node, kind, kind_of
from gradlens.graph.passes import Gradients, Instead, call
from gradlens.torch_private import saved

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


def frozen(graph: Graph, numbers: Iterable[int]) -> Instead:
    """What nodes hand on in a backward pass in which their statistics are constants."""
    return {number: partial(_frozen, graph, number) for number in numbers}


def _frozen(graph: Graph, number: int, gradients: Gradients) -> Gradients:
    to_input, *to_weights = call(graph, number, gradients)
    gradient = gradients[0]
    if to_input is None or gradient is None:
        return (to_input, *to_weights)
    factor, weight = (read_saved(graph.nodes[number], name) for name in ("result2", "weight"))
    assert factor is not None
    if weight is not None:
        factor = factor * weight.detach().to(factor.dtype)
    by_channel = factor.reshape(-1, *[1] * (to_input.dim() - 2))
    return ((gradient * by_channel).to(to_input.dtype), *to_weights)


def normalising(graph: Graph, samples: int) -> list[int]:
    """The nodes that normalise over samples, with statistics of their input.

    Instance normalisation has channels ``[1, N·C]`` of samples, and doesn't.
    """
    hidden = graph.below(n for n, each in enumerate(graph.kinds) if each in HIDING)
    return [
        number
        for number, node in enumerate(graph.nodes)
        if uses_statistics(node)
        and number not in hidden
        and samples > 1
        and graph.shape((number, 0))[0] > 1
    ]


def uses_statistics(node: Node) -> bool:
    """Whether a node computes statistics of its input and normalises with them, by channel."""
    return bool(kind_of(kind(node)).normalises_channels and saved(node, "training"))
