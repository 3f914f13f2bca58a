"""Listening to one backward pass: to the calls of layers, and to the loss's graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from backpack import backpack
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.individual.batchnorm import (
    SKIPPED,
    BatchNormPolicy,
    coupling_nodes,
    in_front_of,
    uncoupled_gradients,
)
from gradlens.individual.gathering import Gathering
from gradlens.individual.graph import Graph
from gradlens.individual.graph_uses import (
    GraphUses,
    samples_of_last_call,
    samples_where_axes_are_known,
    watch_graph,
)
from gradlens.individual.rules import has_batch_statistics
from gradlens.individual.tap import listen, stop_listening


class Listening:
    """Lets a gathering hear of what a model's backward pass does, between start and stop.

    The loss is needed for parameters outside known layers, for any factor between it and what
    backward is called on (that of a ``GradScaler``, or 1/k in gradient accumulation), and for
    ``batchnorm`` other than ``"coupled"``. ``besides`` are parameters of known layers that may be
    used in another way, too. With frozen statistics all is heard when it starts, in a backward
    pass of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        gathering: Gathering,
        parameters: Mapping[str, nn.Parameter],
        loss: Tensor | None,
        besides: Collection[str] = (),
        batchnorm: BatchNormPolicy = "coupled",
    ) -> None:
        self._model = model
        self._gathering = gathering
        self._parameters = parameters
        self._loss = loss
        self._besides = besides
        self._batchnorm = batchnorm
        self._in_graph: GraphUses | None = None
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        """Listen. ``ValueError`` if the policy for normalisation over the batch needs the loss."""
        if self._gathering.batch_size is None:
            self._gathering.batch_size = samples_where_axes_are_known(self._model)
        listen(self._model, self._gathering)
        try:
            self._look_at_loss()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop listening, and let go of the graph."""
        stop_listening(self._model, self._gathering)
        if self._in_graph is not None:
            self._in_graph.stop()
        if self._handle is not None:
            self._handle.remove()
        self._in_graph = self._handle = None

    def _look_at_loss(self) -> None:
        if self._loss is None:
            if self._batchnorm != "coupled" and has_batch_statistics(self._model):
                raise ValueError(
                    f'batchnorm="{self._batchnorm}" needs the loss while a layer normalises over '
                    "the batch: pass loss=... to the context"
                )
            return
        if not self._loss.requires_grad:
            return
        if self._batchnorm != "coupled":
            self._apply_policy(self._loss)
        if not self._gathering.closed:
            self._watch(self._loss)
        self._handle = self._loss.register_hook(self._gathering.receive_loss_gradient)

    def _watch(self, loss: Tensor) -> None:
        self._in_graph = watch_graph(
            loss, self._model, self._parameters, self._gathering, self._besides
        )

    def _apply_policy(self, loss: Tensor) -> None:
        graph = Graph(loss)
        nodes = coupling_nodes(
            graph, self._gathering.batch_size or samples_of_last_call(self._model)
        )
        if nodes and not has_batch_statistics(self._model):
            self._gathering.coupling.add("a function")
        if self._batchnorm == "skip":
            front = in_front_of(nodes, graph, self._parameters)
            self._gathering.leave_out(dict.fromkeys(front, SKIPPED))
        elif nodes:
            self._watch(loss)
            # BackPACK's own hooks run in this pass too; they must keep what they store.
            with backpack(retain_graph=True), torch.enable_grad():
                uncoupled_gradients(loss, nodes, self._parameters)
            self._gathering.close()
