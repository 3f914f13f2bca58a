"""Individual gradients of parameters outside known layers, by watching the loss's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils.hooks import RemovableHandle

from gradlens.individual.folding import Order
from gradlens.individual.gathering import Gathering, Readings, autocast_off
from gradlens.individual.graph import Graph, Node, Use
from gradlens.individual.recomputed import batch_axis
from gradlens.individual.rules import has_rule
from gradlens.individual.tap import tap_of
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
        model: nn.Module,
        names: Iterable[str],
        gathering: Gathering,
        samples: int,
    ) -> None:
        self._gathering = gathering
        self._samples = samples
        self._axes = _axes_of_attention(model, names)
        gathering.left_to_graph |= self._axes.keys()
        self._graph = graph
        self._uses = self._settled(dict(model.named_parameters()), names)
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

    def _settled(
        self, parameters: Mapping[str, nn.Parameter], names: Iterable[str]
    ) -> dict[Node, list[tuple[str, Use]]]:
        alone = self._graph.of_parameters_alone(self._samples)
        found: dict[Node, list[tuple[str, Use]]] = {}
        for name in (name for name in names if parameters[name] in self._graph):
            uses = list(self._graph.uses(parameters[name], alone))
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
        return {} if operator is None else dict.fromkeys(Order, operator)


def watch_graph(
    graph: Graph,
    model: nn.Module,
    names: Iterable[str],
    gathering: Gathering,
    besides: Collection[str] = (),
) -> GraphUses | None:
    """Watch the parameters that the calls of layers may not tell all about, if there are any.

    ``graph`` is that of the loss, and ``besides`` are parameters of known layers that may be used
    in another way, too.
    """
    outside = _outside_known_layers(model, names)
    others = set(besides) - _of_recurrent_layers(model)
    elsewhere = [name for name in names if name in outside or name in others]
    samples = gathering.batch_size or samples_of_last_call(model)
    if not elsewhere:
        return None
    if samples is None:
        for name in elsewhere:
            gathering.miss_use(
                name, "the batch size isn't known: pass batch_size=... to the context"
            )
        return None
    gathering.batch_size = samples
    return GraphUses(graph, model, elsewhere, gathering, samples)


def graph_of(loss: Tensor, model: nn.Module) -> Graph:
    """The loss's graph, told which weights the model computes from parameters alone."""
    return Graph(loss, _parametrised(model))


def _parametrised(model: nn.Module) -> list[Node]:
    """Where weights come from that are computed from parameters, whatever their shapes."""
    taps = [tap_of(module) for module in model.modules()]
    return [tap.parametrised for tap in taps if tap is not None and tap.parametrised is not None]


def samples_where_axes_are_known(model: nn.Module) -> int | None:
    """N, by layers that say which axis counts the samples, and put positions first."""
    second = tuple(f"{name}." if name else "" for name in _batch_comes_second(model))
    for name, module in model.named_modules():
        tap = tap_of(module)
        if tap is None or tap.latest is None or tap.last_call is None:
            continue
        inside = bool(second) and name.startswith(second)
        recurrent = isinstance(module, nn.RNNBase) and not module.batch_first
        if (inside or recurrent) and len(tap.last_call.shape) == 3:
            return tap.last_call.shape[1]
    return None


def samples_of_last_call(model: nn.Module) -> int | None:
    """N, by the layer that was called last, unless another one knows better."""
    known = samples_where_axes_are_known(model)
    if known is not None:
        return known
    layers = [module for module in model.modules() if not isinstance(module, _Loss)]
    taps = [(module, tap_of(module)) for module in layers]
    calls = [(tap.last_call, module, tap) for module, tap in taps if tap is not None]
    seen = [(c, module, tap.latest) for c, module, tap in calls if c is not None and c.shape]
    if not seen:
        return None
    # A frozen layer remembers no inputs, so nothing tells whether its call is part of the loss.
    pending = [entry for entry in seen if entry[2] is not None] or seen
    call, module, _ = max(pending, key=lambda entry: entry[0].number)
    axis = batch_axis(module)
    return call.shape[axis] if len(call.shape) > axis else None


def _of_recurrent_layers(model: nn.Module) -> set[str]:
    """Names that are left to their layers: inside these, positions look like samples."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.RNNBase)
        for name in module._parameters
    }


def _outside_known_layers(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Parameters that the calls of layers may not tell all about.

    Those of modules that are not called, have no rule, or whose leading axis may not be the batch.
    """
    batch_comes_second = any(
        isinstance(module, nn.MultiheadAttention) and not module.batch_first
        for module in model.modules()
    )
    inside: set[int] = set()
    for module in model.modules() if not batch_comes_second else ():
        tap = tap_of(module)
        if tap is None or tap.latest is None:
            continue
        if isinstance(module, nn.RNNBase) or (
            has_rule(module) and not isinstance(module, nn.Embedding)
        ):
            inside |= {id(p) for p in module._parameters.values() if p is not None}
    named = dict(model.named_parameters())
    return {name for name in names if id(named[name]) not in inside}


def _axes_of_attention(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Attention puts positions before samples, whatever order its inputs are in."""
    prefixes = tuple(f"{name}." if name else "" for name in _batch_comes_second(model))
    return {name: 1 for name in names if prefixes and name.startswith(prefixes)}


def _batch_comes_second(model: nn.Module) -> Iterator[str]:
    """Names of modules that compute on ``[T, N, D]``."""
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for name, module in model.named_modules():
        folded = isinstance(module, layers) and not module.self_attn.batch_first
        if folded or isinstance(module, nn.MultiheadAttention):
            yield name
