"""The outputs of a network, at which the generalised Gauss-Newton matrix splits the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradlens.curvature.calls import LossCall
from gradlens.hooks.node_kinds import Node, kind
from gradlens.numerics.unavailable import UnavailableError

_PASS = "pass info={'outputs': ...} to the context"
LINEAR_IN_OUTPUTS = (
    "NLLLoss is linear in log-probabilities, so the generalised Gauss-Newton matrix is zero with "
    "these for outputs: pass info={'outputs': ...}, the logits that they are computed from"
)


@dataclass(frozen=True)
class NetworkOutputs:
    """The network's outputs, whether the user has ``passed`` them, and a note on them, if any."""

    tensor: Tensor
    passed: bool
    note: str = ""


def passed_outputs(passed: Any) -> NetworkOutputs:
    """The outputs that the user has passed; ``UnavailableError`` unless they are one tensor."""
    if not isinstance(passed, Tensor):
        raise UnavailableError(
            f"info['outputs'] is a {type(passed).__name__}: pass the one tensor that the loss is "
            "computed from (several can be joined by torch.cat before the loss)"
        )
    return NetworkOutputs(passed, passed=True)


def outputs_of_calls(calls: Sequence[LossCall]) -> NetworkOutputs:
    """The one tensor that extended loss modules were called with and that needs a gradient.

    Raises ``UnavailableError`` if there is none, or more than one.
    """
    tensors = [x for call in calls for x in call.inputs if isinstance(x, Tensor)]
    found = {id(tensor): tensor for tensor in tensors if tensor.requires_grad}
    if not found:
        raise UnavailableError(
            f"the generalised Gauss-Newton matrix takes the network's outputs: {_PASS}, or the "
            "loss module to the cockpit (Cockpit(..., loss_function=loss_function))"
        )
    if len(found) > 1:
        raise UnavailableError(
            f"the loss modules got {len(found)} tensors from the network, and the generalised "
            "Gauss-Newton matrix takes one: compute the loss from one tensor (torch.cat them "
            f"before, and cut it into pieces), and {_PASS}"
        )
    (outputs,) = found.values()
    linear = any(isinstance(call.module, nn.NLLLoss) for call in calls)
    return NetworkOutputs(outputs, False, LINEAR_IN_OUTPUTS if linear else "")


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
        raise UnavailableError(
            f"the loss depends on {_listed(names)} in other ways than through the loss module's "
            "input, so the generalised Gauss-Newton matrix would be that of a part of it: "
            f"{_PASS}, the one tensor that it is computed from, or this input to leave the rest out"
        )
    return (
        f"the loss depends on {_listed(names)} in other ways than through info['outputs']: that "
        "part doesn't enter the generalised Gauss-Newton matrix"
    )


def _bypassing(
    loss: Tensor, outputs: Tensor, parameters: Mapping[str, nn.Parameter]
) -> tuple[str, ...]:
    """Names of parameters that the loss depends on in other ways than through the outputs."""
    leaves: set[int] = set()
    seen, waiting = {_edge(outputs)}, [_edge(loss)]
    while waiting:
        edge = waiting.pop()
        node, _ = edge
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if kind(node) == "AccumulateGrad":
            leaves.add(id(node.variable))
        waiting.extend(node.next_functions)
    return tuple(name for name, parameter in parameters.items() if id(parameter) in leaves)


def _edge(tensor: Tensor) -> tuple[Node, int]:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more])
