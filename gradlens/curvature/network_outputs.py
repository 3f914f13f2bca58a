"""The outputs of a network, at which the generalised Gauss-Newton matrix splits the loss."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradlens.backpack_adapter.context import extended_by_backpack
from gradlens.curvature.hessian import check_loss
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import LEAF, Node, kind
from gradlens.history.coverage import few
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import LossModule

_PASS = "pass info={'outputs': ...} to the context"
NO_OUTPUTS = (
    "the generalised Gauss-Newton matrix takes the network's outputs, and the loss wasn't computed "
    f"from a tensor that the model has returned: {_PASS}, the tensor that it is computed from"
)
LINEAR_IN_RETURNED = (
    "the loss is linear in what the model has returned, such as log-probabilities, so the "
    "generalised Gauss-Newton matrix is zero at it: {remedy}, such as the logits"
)
SEVERAL_RETURNED = (
    "the loss is computed from several tensors that the model has returned (of shapes {shapes}), "
    "and the generalised Gauss-Newton matrix takes one: compute the loss outside of the model from "
    "one tensor that holds them all (torch.stack or torch.cat, cut into pieces for the loss), and "
    "pass it to the context as info['outputs']"
)
_Edge: TypeAlias = tuple[Node, int]


@dataclass(frozen=True)
class NetworkOutputs:
    """The network's outputs and their ``origin``.

    ``remedy`` is the beginning of how the user can give others.
    """

    tensor: Tensor
    origin: Literal["info['outputs']", "the loss module's input", "the model's output"]
    remedy: str = _PASS

    @property
    def passed(self) -> bool:
        """Whether the user has chosen them."""
        return self.origin == "info['outputs']"


def passed_outputs(passed: Any) -> NetworkOutputs:
    """The outputs that the user has passed; ``UnavailableError`` unless they are one tensor."""
    if not isinstance(passed, Tensor):
        raise UnavailableError(
            f"info['outputs'] is a {type(passed).__name__}: pass the one tensor that the loss is "
            "computed from (several can be joined by torch.cat before the loss)"
        )
    return NetworkOutputs(passed, "info['outputs']")


LossCall: TypeAlias = tuple[LossModule, Sequence[Any]]
"""A loss module that was called, and its inputs, still in the graph."""


def calls_of_losses(loss: Tensor, model: nn.Module | None) -> list[LossCall]:
    """The calls of loss modules behind a loss; none unless BackPACK has extended the modules.

    BackPACK stores the latest call on each. Nothing leads from the graph to the module, so that it
    is looked for among all objects.
    """
    check_loss(loss)
    if not (model is None or extended_by_backpack(model)):
        return []
    graph = Graph(loss)
    every = (each for each in gc.get_objects() if issubclass(type(each), LossModule))
    outputs = [(each, vars(each).get("output")) for each in every]
    return [
        (module, [v for k, v in vars(module).items() if k.startswith("input") and k[5:].isdigit()])
        for module, output in outputs
        if isinstance(output, Tensor) and graph.number_of(output) >= 0
    ]


def outputs_of_calls(calls: Sequence[LossCall]) -> NetworkOutputs:
    """The one tensor that extended loss modules were called with and that needs a gradient.

    Raises ``UnavailableError`` if there is none, or more than one.
    """
    tensors = [x for _, inputs in calls for x in inputs if isinstance(x, Tensor)]
    found = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
    if not found:
        raise UnavailableError(NO_OUTPUTS)
    if len(found) > 1:
        raise UnavailableError(
            f"the loss modules got {len(found)} tensors from the network, and the generalised "
            "Gauss-Newton matrix takes one: compute the loss from one tensor (torch.cat them "
            f"before, and cut it into pieces), and {_PASS}"
        )
    (outputs,) = found.values()
    return NetworkOutputs(outputs, "the loss module's input")


def returned_outputs(
    loss: Tensor, returned: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]
) -> NetworkOutputs:
    """The tensor that a model has returned and that its loss is computed from.

    Of several, it is the one through which the loss depends on all parameters and on the others.
    Raises ``UnavailableError`` if there is none.
    """
    edges = {_edge(tensor): tensor for tensor in returned if tensor.dim()}
    reached = {edge: t for edge, t in edges.items() if edge != _edge(loss) and _reaches(loss, edge)}
    if not reached:
        raise UnavailableError(NO_OUTPUTS)
    last = [t for t in reached.values() if not _bypassing(loss, t, parameters)]
    last = [t for t in last if all(t is u or not _reaches(u, _edge(t)) for u in last)]
    if len(last) == 1 or len(reached) == 1:
        (tensor,) = last or reached.values()
        return NetworkOutputs(tensor, "the model's output")
    shapes = ", ".join(str(list(tensor.shape)) for tensor in reached.values())
    raise UnavailableError(SEVERAL_RETURNED.format(shapes=shapes))


def note_on_bypass(
    loss: Tensor, outputs: NetworkOutputs, parameters: Mapping[str, nn.Parameter]
) -> str:
    """A note on parameters that the loss depends on in other ways than through the outputs.

    Empty if there are none. ``UnavailableError`` unless the user has chosen the outputs: the matrix
    would be that of a part of the loss.
    """
    names = _bypassing(loss, outputs.tensor, parameters)
    if not names:
        return ""
    if not outputs.passed:
        rest = ", or this one to leave the rest out" if outputs.remedy == _PASS else ""
        raise UnavailableError(
            f"the loss depends on {few(names)} in other ways than through {outputs.origin}, so "
            "the generalised Gauss-Newton matrix would be that of a part of it: "
            f"{outputs.remedy}, the one tensor that it is computed from{rest}"
        )
    return (
        f"the loss depends on {few(names)} in other ways than through info['outputs']: that "
        "part doesn't enter the generalised Gauss-Newton matrix"
    )


def _bypassing(
    loss: Tensor, outputs: Tensor, parameters: Mapping[str, nn.Parameter]
) -> tuple[str, ...]:
    """Names of parameters that the loss depends on in other ways than through the outputs."""
    behind = _behind(loss, _edge(outputs))
    leaves = {id(node.variable) for node, _ in behind if kind(node) == LEAF}
    return tuple(name for name, parameter in parameters.items() if id(parameter) in leaves)


def _reaches(tensor: Tensor, edge: _Edge) -> bool:
    """Whether a tensor was computed from what flows along an edge, or is that."""
    return edge in _behind(tensor)


def _behind(tensor: Tensor, stop: _Edge | None = None) -> set[_Edge]:
    """The edges behind a tensor, its own included, without those that ``stop`` alone leads to."""
    seen: set[_Edge] = set()
    waiting = [_edge(tensor)]
    while waiting:
        edge = waiting.pop()
        if edge[0] is not None and edge not in seen and edge != stop:
            seen.add(edge)
            waiting.extend(edge[0].next_functions)
    return seen


def _edge(tensor: Tensor) -> _Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
