"""Per-sample gradients of one backward pass, from the loss's graph to a collector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from backpack import backpack
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from gradlens.hooks.model_calls import Given, calls_behind
from gradlens.hooks.undisturbed import buffers_kept, undisturbed
from gradlens.per_sample.backward_pass import BackwardPass
from gradlens.per_sample.batchnorm import (
    NOT_FROZEN,
    SKIPPED,
    BatchNormPolicy,
    in_front_of,
    uncoupled_gradients,
)
from gradlens.per_sample.collector import Collector
from gradlens.per_sample.labelling.batch import Batch, LossReduction
from gradlens.per_sample.labelling.candidates import BatchEvidence
from gradlens.per_sample.labelling.graph import Graph, Node
from gradlens.per_sample.labelling.loss_inputs import loss_inputs
from gradlens.per_sample.labelling.node_kinds import LEAF
from gradlens.per_sample.labelling.plan import Plan
from gradlens.per_sample.labelling.planner import plan_of


@dataclass
class Plans:
    """Plans by the structure of the graph; ``steps`` counts the graphs of each structure."""

    found: dict[int, Plan] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    def of(self, graph: Graph, key: int) -> Plan | None:
        """The plan of a graph; ``None`` if labelled passes are due.

        They are due at the first, second, fourth, eighth step of a structure and so on, where the
        plan doesn't hold for other numbers, and where some gradients were zero.
        """
        self.steps[key] = self.steps.get(key, 0) + 1
        plan = self.found.get(key)
        due = self.steps[key].bit_count() == 1
        return None if plan is None or due or not plan.holds_for(graph) else plan

    def store(self, key: int, plan: Plan) -> None:
        """Keep a plan for graphs of the same structure."""
        self.found[key] = plan


@dataclass(frozen=True)
class Setting:
    """What is the same at all steps; only ``plans`` grow.

    ``called`` is the module that the user calls: the model itself, or ``torch.compile``'s wrapper.
    """

    parameters: Mapping[str, nn.Parameter]
    model: nn.Module | None
    loss_reduction: LossReduction = "mean"
    batchnorm: BatchNormPolicy = "coupled"
    plans: Plans = field(default_factory=Plans)
    called: nn.Module | None = None

    @property
    def names(self) -> dict[int, str]:
        """Names of parameters by ``id``."""
        return {id(parameter): name for name, parameter in self.parameters.items()}


class Gradients:
    """Per-sample gradients of the backward pass of one loss.

    They are in ``collector`` as soon as backward has passed the nodes that parameters are used in.
    ``labelled`` is whether that took labelled passes through the graph.
    """

    def __init__(self, setting: Setting, info: Mapping[str, Any]) -> None:
        self.collector = Collector({})
        self.batch = Batch(loss_reduction=setting.loss_reduction)
        self.coupling: frozenset[str] = frozenset()
        self.beside: tuple[str, ...] = ()
        self.labelled = False
        self.closed = False
        self._setting = setting
        self._info = info
        self._given = False
        self._loss: Tensor | None = None
        self._pass: BackwardPass | None = None
        self._handle: RemovableHandle | None = None
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """The first exception that isn't a reason why there are no gradients."""
        return self._error if self._pass is None else self._pass.error

    def called_on(self, tensor: Tensor) -> None:
        """``backward`` is about to be called on a tensor: the loss, or something made of it."""
        if not self._given:
            self.end()
            self._begin(tensor, tensor)
            return
        loss = self._loss
        if loss is not None and tensor is not loss and not self.closed and _differs(tensor, loss):
            self.end()
            self.collector.clear()
            self._begin(loss, tensor)

    def begin(self, loss: Tensor) -> None:
        """Find the plan of the loss that the user has passed, and set hooks on its graph."""
        self._given = True
        self._begin(loss, loss)

    def _begin(self, loss: Tensor, root: Tensor) -> None:
        self._loss = loss
        if not loss.requires_grad:
            self.collector.refuse_all(self._setting.parameters, NO_GRAPH)
            return
        setting = self._setting
        graph = Graph(root)
        with _statistics_kept(setting.model):
            plan = self._plan(graph)
        self._take_in(graph, plan)
        self._pass = BackwardPass(graph, plan, self.batch, self.collector, setting.model)
        self._handle = loss.register_hook(self._receive_factor)
        self._pass.start()
        if setting.batchnorm == "frozen" and plan.coupling:
            self._freeze(graph, plan, loss)

    def _plan(self, graph: Graph) -> Plan:
        setting = self._setting
        evidence = evidence_of(graph, setting.called or setting.model, self._info)
        key = hash((graph.key(setting.names), evidence))
        known = setting.plans.of(graph, key)
        if known is not None:
            return known
        self.labelled = True
        # BackPACK's own hooks run in these passes, too, and must not release what they store.
        with backpack(retain_graph=True), undisturbed(setting.model), torch.enable_grad():
            plan = plan_of(
                graph,
                setting.parameters,
                evidence,
                inputs_of(graph, setting.called or setting.model),
            )
        setting.plans.store(key, plan)
        return plan

    def _take_in(self, graph: Graph, plan: Plan) -> None:
        setting = self._setting
        self.batch = Batch(plan.samples, plan.known_by, setting.loss_reduction)
        self.beside = plan.beside
        self.collector.unavailable |= plan.unavailable
        self.coupling = frozenset(_layers_of(graph, plan.coupling, setting))
        if setting.batchnorm == "skip" and plan.coupling:
            front = in_front_of(plan.coupling, graph, setting.parameters)
            self.collector.refuse_all(front, SKIPPED)

    def _freeze(self, graph: Graph, plan: Plan, loss: Tensor) -> None:
        """Take per-sample gradients from a backward pass with the batch's statistics fixed."""
        assert self._pass is not None
        nodes = [graph.nodes[number] for number in plan.coupling]
        reason = ""
        try:
            with (
                backpack(retain_graph=True),
                undisturbed(self._setting.model),
                torch.enable_grad(),
            ):
                uncoupled_gradients(loss, nodes, self._setting.parameters)
        except RuntimeError as error:  # such as that of a checkpoint
            reason = str(error).splitlines()[0]
        if not reason:
            self.closed = self._pass.paused = True
            return
        self.collector.clear()
        front = in_front_of(plan.coupling, graph, self._setting.parameters)
        self.collector.refuse_all(front, NOT_FROZEN.format(reason=reason))

    def _receive_factor(self, gradient: Tensor) -> None:
        """∂(what backward is called on)/∂loss, a factor that gₙ must not contain."""
        if self._pass is None or self._pass.paused:
            return
        # Nothing else can run before the loss's gradient, so on a GPU this costs one kernel launch.
        self.batch = replace(self.batch, factor=float(gradient.detach().sum()))
        self._pass.batch = self.batch

    def end(self) -> None:
        """Remove all hooks, and release the graph."""
        if self._handle is not None:
            self._handle.remove()
        if self._pass is not None:
            self._error = self._pass.error
            self._pass.stop()
        self._handle = self._pass = None


def evidence_of(graph: Graph, model: nn.Module | None, info: Mapping[str, Any]) -> BatchEvidence:
    """What is known of a loss's batch besides its graph."""
    calls = calls_behind(graph, model)
    return BatchEvidence(
        info.get("batch_size"),
        _length(info.get("individual_losses")),
        tuple(call.shapes for call in calls),
        _has_positions_first(model),
        any(len(given.shape) > 1 + given.is_real for call in calls for given in call.inputs),
    )


def inputs_of(graph: Graph, model: nn.Module | None) -> list[Given]:
    """The tensors that the model was called with for a loss."""
    return [given for call in calls_behind(graph, model) for given in call.inputs]


def _statistics_kept(model: nn.Module | None) -> Any:
    """A context for reading what checkpoints save, which runs normalisation layers again."""
    has_buffers = model is not None and any(isinstance(m, _BatchNorm) for m in model.modules())
    return buffers_kept(model) if has_buffers else nullcontext()


def _differs(tensor: Tensor, loss: Tensor) -> bool:
    """Whether a tensor is computed from samples in other ways than through the loss."""
    return _inputs(tensor) != _inputs(loss)


def _inputs(tensor: Tensor) -> set[tuple[Node, int]]:
    graph = Graph(tensor)
    edges = loss_inputs(graph, graph.of_parameters_alone()).edges
    return {(graph.nodes[number], output) for number, output in edges}


def _length(losses: Tensor | None) -> int | None:
    return len(losses) if losses is not None and losses.dim() else None


def _has_positions_first(model: nn.Module | None) -> bool:
    """Whether the model has layers whose second axis counts the samples."""
    modules: Iterable[nn.Module] = () if model is None else model.modules()
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    return any(isinstance(m, kinds) and not m.batch_first for m in modules)


def _layers_of(graph: Graph, coupling: Iterable[int], setting: Setting) -> list[str]:
    """The layers that normalising nodes belong to, by their weights' names."""
    names, found = setting.names, []
    unnamed = False
    for number in coupling:
        leaves = [e for e in graph.children[number][1:] if e and graph.kinds[e[0]] == LEAF]
        known = [names.get(id(graph.nodes[edge[0]].variable)) for edge in leaves]
        name = next((each for each in known if each), None)
        found += [] if name is None else [layer_of(name)]
        unnamed |= name is None
    if unnamed:
        found += _without_weights(setting.model) or ["a function"]
    return found


def _without_weights(model: nn.Module | None) -> list[str]:
    named = [] if model is None else model.named_modules()
    return [
        name
        for name, module in named
        if isinstance(module, _BatchNorm)
        and (module.weight is None or not module.weight.requires_grad)
        and (module.training or module.running_mean is None)
    ]


def layer_of(parameter_name: str) -> str:
    """The layer that a parameter belongs to: its name up to the last dot."""
    return parameter_name.rpartition(".")[0] or parameter_name


NO_GRAPH = "the loss needs no gradient: it was computed under no_grad, or of frozen parameters"
