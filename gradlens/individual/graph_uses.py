"""Individual gradients of parameters outside known layers, by watching the loss's graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.individual.folding import Order
from gradlens.individual.gathering import Gathering, Readings, autocast_off
from gradlens.individual.graph import Graph, Node, Use
from gradlens.individual.layers import Layers
from gradlens.individual.uses import (
    Meeting,
    Saved,
    UnknownUseError,
    flaw_of,
    operator_of,
    saved_tensors,
)


class GraphUses:
    """Watches the nodes at which parameters meet N samples, for one backward pass.

    What is found goes to ``gathering``.
    """

    def __init__(
        self,
        graph: Graph,
        layers: Layers,
        parameters: Mapping[str, nn.Parameter],
        gathering: Gathering,
        samples: int,
    ) -> None:
        self._gathering = gathering
        self._samples = samples
        # Attention puts positions before samples, whatever order its inputs are in.
        second = layers.prefixes_of_positions_first
        self._axes = {name: 1 for name in parameters if second and name.startswith(second)}
        gathering.left_to_graph |= self._axes.keys()
        self._graph = graph
        self._uses = self._settled(parameters)
        self._saved = {node: saved_tensors(node) for node in self._uses}
        self._handles: list[RemovableHandle] = [
            node.register_prehook(partial(self._reach, node)) for node in self._uses
        ]

    def stop(self) -> None:
        """Remove all hooks and let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._saved, self._uses = [], {}, {}
        self._graph = Graph(torch.zeros(()))

    def _settled(self, parameters: Mapping[str, nn.Parameter]) -> dict[Node, list[tuple[str, Use]]]:
        alone = self._graph.of_parameters_alone(self._samples)
        found: dict[Node, list[tuple[str, Use]]] = {}
        for name, parameter in parameters.items():
            if parameter not in self._graph:
                continue
            uses = list(self._graph.uses(parameter, alone))
            flaws = [flaw_of(use, self._samples) for use in uses]
            flaw = next((flaw for flaw in flaws if flaw), "")
            if flaw:
                self._gathering.miss_use(name, flaw)
                continue
            for use in uses:
                found.setdefault(use.node, []).append((name, use))
        return found

    def _reach(self, node: Node, grad_outputs: tuple[Tensor | None, ...]) -> None:
        gradient, gathering = grad_outputs[0], self._gathering
        if gradient is None or gathering.closed or gathering.paused or gathering.error is not None:
            return
        # Another pass may come, if the graph is kept.
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        saved = self._saved.get(node, {}) if again else self._saved.pop(node, {})
        with torch.no_grad(), autocast_off(gradient):
            for name, use in self._uses.get(node, ()):
                self._take(name, use, gradient.detach(), saved)

    def _take(self, name: str, use: Use, gradient: Tensor, saved: Saved) -> None:
        gathering, samples = self._gathering, self._samples
        layout = self._graph.layout_around(use.node, len(gradient)) if gradient.dim() == 2 else None
        scale = float(samples) if gathering.loss_reduction == "mean" else 1.0
        scale *= gathering.loss_scale
        axis = self._axes.get(name, 0)
        meeting = Meeting(use, gradient, saved, layout, samples, scale, axis)
        try:
            readings = self._readings(meeting, gathering.orders_of(name))
        except UnknownUseError as reason:
            gathering.miss_use(name, str(reason))
        except Exception as error:  # the user's backward pass goes on
            gathering.error = error
        else:
            if readings:
                gathering.receive_use(name, readings, gradient.dtype)

    def _readings(self, meeting: Meeting, orders: Collection[Order]) -> Readings:
        """What the use may give, by how the samples are folded if they are; nothing if nothing."""
        try:
            operator = operator_of(meeting)
        except UnknownUseError:
            if not (orders and meeting.may_be_folded):
                raise
            folded = {order: operator_of(replace(meeting, order=order)) for order in orders}
            return {order: operator for order, operator in folded.items() if operator is not None}
        return {} if operator is None else {None: operator}


def watch_graph(
    graph: Graph,
    layers: Layers,
    parameters: Mapping[str, nn.Parameter],
    gathering: Gathering,
    besides: Collection[str] = (),
) -> GraphUses | None:
    """Watch the parameters that the calls of layers may not tell all about, if there are any.

    ``graph`` is that of the loss, and ``besides`` are parameters of known layers that may be used
    in another way, too.
    """
    known, recurrent = layers.well_known_parameters, layers.recurrent_parameters
    elsewhere = {
        name: parameter
        for name, parameter in parameters.items()
        if id(parameter) not in known or (name in besides and name not in recurrent)
    }
    if not elsewhere:
        return None
    samples = gathering.batch_size or layers.samples
    if samples is None:
        for name in elsewhere:
            gathering.miss_use(
                name, "the batch size isn't known: pass batch_size=... to the context"
            )
        return None
    gathering.batch_size = samples
    return GraphUses(graph, layers, elsewhere, gathering, samples)
