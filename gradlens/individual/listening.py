"""Listening to one backward pass: to the calls of layers, and to the loss's graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import nullcontext

import torch
from backpack import backpack
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.individual.attribution import Attribution, attribution_of
from gradlens.individual.batchnorm import (
    HIDDEN,
    NOT_FROZEN,
    SKIPPED,
    BatchNormPolicy,
    coupling_nodes,
    hidden_by_checkpoints,
    in_front_of,
    uncoupled_gradients,
)
from gradlens.individual.gathering import Gathering
from gradlens.individual.graph import Graph, Node
from gradlens.individual.graph_uses import GraphUses, watch_graph
from gradlens.individual.layers import Layers
from gradlens.individual.undisturbed import buffers_kept, hooks_muted, undisturbed


class Listening:
    """Lets a gathering hear of what a model's backward pass does, between start and stop.

    The loss is needed for parameters outside known layers, for any factor between it and what
    backward is called on (that of a ``GradScaler``, or 1/k in gradient accumulation), and for
    ``batchnorm`` other than ``"coupled"``. ``besides`` are parameters of known layers that may be
    used in another way, too. With frozen statistics all is heard when it starts, in a backward
    pass of its own. Another one finds out whether samples of layers are those of the loss, unless
    that has been asked of all parameters in the graph before (``tested``).
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        gathering: Gathering,
        parameters: Mapping[str, nn.Parameter],
        loss: Tensor | None,
        besides: Collection[str] = (),
        batchnorm: BatchNormPolicy = "coupled",
        tested: Set[str] | None = None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._gathering = gathering
        self._parameters = parameters
        self._loss = loss
        self._besides = besides
        self._batchnorm = batchnorm
        self._tested = tested
        self._in_graph: GraphUses | None = None
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        """Listen. ``ValueError`` if the policy for normalisation over the batch needs the loss."""
        if self._gathering.batch_size is None:
            self._gathering.batch_size = self._layers.samples_where_axes_are_known
        self._layers.listen(self._gathering)
        try:
            self._look_at_loss()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop listening, and let go of the graph."""
        self._layers.stop_listening(self._gathering)
        if self._in_graph is not None:
            self._in_graph.stop()
        if self._handle is not None:
            self._handle.remove()
        self._in_graph = self._handle = None

    def _look_at_loss(self) -> None:
        if self._loss is None:
            if self._batchnorm != "coupled" and self._layers.normalise_over_batch:
                raise ValueError(
                    f'batchnorm="{self._batchnorm}" needs the loss while a layer normalises over '
                    "the batch: pass loss=... to the context"
                )
            return
        if not self._loss.requires_grad:
            return
        layers, loss = self._layers, self._loss
        # Inside a checkpoint, a look at what is saved runs layers again.
        changing = layers.normalise_over_batch or layers.parametrised
        with buffers_kept(self._model) if changing else nullcontext():
            self._look_at(Graph(loss, layers.parametrised), loss)

    def _look_at(self, graph: Graph, loss: Tensor) -> None:
        gathering = self._gathering
        gathering.knows_loss = True
        samples = gathering.batch_size or self._layers.samples
        nodes = coupling_nodes(graph, samples)
        if nodes and not self._layers.normalise_over_batch:
            gathering.coupling.add("a function")
        front = in_front_of(nodes, graph, self._parameters)
        if samples is not None and samples > 1:
            gathering.attribution = self._attribution(graph, loss, front, samples)
        if self._batchnorm != "coupled" and self._layers.normalise_over_batch:
            hidden = hidden_by_checkpoints(graph, self._parameters)
            gathering.leave_out(dict.fromkeys(hidden, HIDDEN))
        if self._batchnorm == "skip":
            gathering.leave_out(dict.fromkeys(front, SKIPPED))
        self._in_graph = watch_graph(
            graph, self._layers, self._parameters, gathering, self._besides
        )
        if self._batchnorm == "frozen" and nodes:
            self._listen_to_uncoupled(loss, nodes, front)
        self._handle = loss.register_hook(gathering.receive_loss_gradient)

    def _listen_to_uncoupled(
        self, loss: Tensor, nodes: Sequence[Node], front: Collection[str]
    ) -> None:
        reason = ""
        try:
            # BackPACK's own hooks run in this pass too; they must keep what they store.
            with backpack(retain_graph=True), buffers_kept(self._model), torch.enable_grad():
                uncoupled_gradients(loss, nodes, self._parameters)
        except RuntimeError as error:  # such as that of a checkpoint
            reason = str(error).splitlines()[0]
        if not reason:
            self._gathering.close()
            return
        self._gathering.forget_calls()
        self._gathering.leave_out(dict.fromkeys(front, NOT_FROZEN.format(reason=reason)))

    def _attribution(
        self, graph: Graph, loss: Tensor, coupled: Collection[str], samples: int
    ) -> Attribution | None:
        """``None`` if nothing new is to be found out."""
        asked = {
            name: parameter
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and parameter in graph and name not in coupled
        }
        if not asked or (self._tested is not None and asked.keys() <= self._tested):
            return None
        scale = samples if self._gathering.loss_reduction == "mean" else 1
        positions_first = self._layers.samples_where_axes_are_known is not None
        try:
            with (
                backpack(retain_graph=True),
                undisturbed(self._model),
                hooks_muted(asked.values()),
                torch.enable_grad(),
            ):
                return attribution_of(loss, graph, samples, asked, scale, positions_first)
        except Exception as error:  # a graph that allows no pass besides the user's own
            reason = (str(error).splitlines() or [""])[0]
            return Attribution(frozenset(asked), obstacle=f"{type(error).__name__}: {reason}")
