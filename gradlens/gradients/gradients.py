"""Per-sample gradients of one backward pass, from the loss's graph to a collector."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradlens.gradients.collect import BackwardPass, Collector, GraphLosses
from gradlens.gradients.loss_factor import TIMES_ZERO, LossFactor, loss_scale
from gradlens.gradients.reduce import Reducer
from gradlens.graph.fully_shard import Sharding
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import LEAF, SYNCHRONISED
from gradlens.graph.loss import Batch, Loss, LossReduction, is_divided, read_loss
from gradlens.graph.model_calls import calls_behind, places_of_inputs
from gradlens.numerics.tensors import on_device
from gradlens.numerics.unavailable import Contain, UnavailableError, first_line, uncontained
from gradlens.operators.dense import Buffer
from gradlens.operators.operator import GradientOperator
from gradlens.reductions import Reduction
from gradlens.samples.batchnorm import (
    NOT_FROZEN,
    SKIPPED,
    BatchNormPolicy,
    frozen,
    in_front_of,
)
from gradlens.samples.count import BatchEvidence
from gradlens.samples.plan import LabelledEdge, Plan, Plans
from gradlens.samples.planner import plan_of, why_failed
from gradlens.torch_private import BatchNorm, saved, sequence_number

PACKING = "PackPaddedSequenceBackward0"

Replica: TypeAlias = nn.parallel.DistributedDataParallel
"""A module by which several processes train one model, each with samples of its own."""


def replicas_of(model: nn.Module | None) -> tuple[Replica, ...]:
    """All that a model consists of: itself, or parts of it."""
    modules = () if model is None else model.modules()
    return tuple(module for module in modules if isinstance(module, Replica))


@dataclass(frozen=True)
class Setting:
    """What is the same at all steps; only ``plans`` grow.

    ``buffer`` is memory that each step uses again. ``sharding`` is that of a model that
    ``fully_shard`` was called with, and ``replicas`` are the modules of a model that
    ``DistributedDataParallel`` wraps.
    """

    parameters: Mapping[str, nn.Parameter]
    model: nn.Module | None
    loss_reduction: LossReduction = "mean"
    batchnorm: BatchNormPolicy = "coupled"
    plans: Plans = field(default_factory=Plans)
    buffer: Buffer = field(default_factory=Buffer)
    sharding: Sharding | None = None
    replicas: Sequence[Replica] = ()

    @property
    def unsharded(self) -> Mapping[int, nn.Parameter]:
        """What a loss's graph has for sharded parameters, by the ``id`` of these."""
        return {} if self.sharding is None else self.sharding.unsharded()

    @property
    def leaves(self) -> Mapping[str, nn.Parameter]:
        """What a loss's graph has for the parameters: themselves, unless they are sharded."""
        unsharded = self.unsharded
        if not unsharded:
            return self.parameters
        return {name: unsharded.get(id(p), p) for name, p in self.parameters.items()}

    @property
    def names(self) -> dict[int, str]:
        """Names of parameters by the ``id`` of their leaves."""
        return {id(leaf): name for name, leaf in self.leaves.items()}


class Gradients(LossFactor):
    """Per-sample gradients of the backward pass of one loss, which a ``reducer`` reduces.

    They are in ``collector`` as soon as backward has passed the nodes that parameters are used in,
    and reduced as soon as a parameter's are complete; ``called_with`` is the factor of the loss in
    what backward was called on, zero if it wasn't called. ``planning_seconds`` is the time that a
    new plan has taken, which most steps don't need. With ``needs_losses``, the losses of single
    samples are found, too.
    """

    def __init__(
        self,
        setting: Setting,
        info: Mapping[str, Any],
        *,
        reductions: Iterable[Reduction] = (),
        retain: bool = False,
        keep: Callable[[GradientOperator], GradientOperator] | None = None,
        contain: Contain = uncontained,
        needs_losses: bool = False,
    ) -> None:
        """``reductions``, ``retain``, ``keep`` and ``contain`` are those of ``Reducer``."""
        super().__init__(info)
        self.collector = Collector({})
        self.reducer = Reducer(
            setting.parameters,
            self.collector,
            reductions,
            retain=retain,
            keep=keep,
            contain=contain,
            buffer=setting.buffer,
        )
        self.batch = Batch(loss_reduction=setting.loss_reduction, factor=self._scale)
        self.called_with = 0.0
        self.coupling: frozenset[str] = frozenset()
        self.beside: tuple[str, ...] = ()
        self.is_divided = False
        self.planning_seconds = 0.0
        self.closed = False
        self._setting = setting
        self._info = info
        self._contain = contain
        self._needs_losses = needs_losses
        self._losses: GraphLosses | None = None
        self._pass: BackwardPass | None = None

    def called_on(self, root: Tensor) -> None:
        loss = self.loss
        if loss is None or not loss.requires_grad:
            return
        with self._contain("finding the samples of the loss", self._refuse_all):
            beside = _reached_beside(loss, root, self._setting.names)
            self.collector.refuse(beside, BESIDE_LOSS)

    def begin(self, loss: Tensor) -> None:
        """Find the plan of the loss, and set hooks on its graph."""
        with self._contain("finding the samples of the loss", self._refuse_all):
            # Unsharded parameters exist from the first forward pass on, which may be over only now.
            self.reducer.start(self._setting.leaves)
            self.end()
            try:
                self._attach(loss)
            except Exception as error:  # the user's training goes on
                self.end()
                self._refuse_all(why_failed(error))

    def _refuse_all(self, reason: str) -> None:
        self.collector.refuse(self._setting.parameters, reason)

    def _attach(self, loss: Tensor) -> None:
        setting = self._setting
        if not loss.requires_grad:
            self._refuse_all(NO_GRAPH)
            return
        graph, leaves = Graph(loss), setting.leaves
        self.is_divided = is_divided(loss)
        if not any(leaf in graph for leaf in leaves.values()):
            self._refuse_all(OF_OTHERS)
            return
        start = time.perf_counter()
        plan, is_new = find_plan(setting, graph, self._info, self._needs_losses)
        if is_new:
            self.planning_seconds += time.perf_counter() - start
        self._take_in(graph, plan)
        if graph.python_functions:
            self.reducer.copy_what_lasts()
        if self._needs_losses:
            self._losses = GraphLosses(plan, loss)
        self._pass = BackwardPass(graph, plan, self.batch, self.collector, self._losses)
        self._pass.start()
        self._pass.paused = True  # until the loss's gradient is known
        if plan.coupling and setting.batchnorm != "coupled":
            is_skipped = setting.batchnorm == "skip"
            reason = SKIPPED if is_skipped else self._why_not_frozen(graph, plan, loss)
            if reason:
                self.collector.refuse(in_front_of(plan.coupling, graph, leaves), reason)

    def _take_in(self, graph: Graph, plan: Plan) -> None:
        setting = self._setting
        reduction = setting.loss_reduction
        self.batch = Batch(plan.samples, plan.known_by, reduction, self._scale)
        self.beside = plan.beside
        self.collector.unavailable |= plan.unavailable
        self.coupling = frozenset(_layers_of(graph, plan.coupling, setting))

    def _why_not_frozen(self, graph: Graph, plan: Plan, loss: Tensor) -> str:
        """Take per-sample gradients from a backward pass with the batch's statistics fixed."""
        assert self._pass is not None
        if SYNCHRONISED in graph.kinds:
            return NOT_FROZEN.format(reason=ACROSS_PROCESSES)
        try:
            self._pass.run(torch.ones_like(loss), frozen(graph, plan.coupling))
        except Exception as error:  # such as that of a checkpoint
            self.collector.clear()
            return NOT_FROZEN.format(reason=first_line(error))
        self.closed = True
        return ""

    def receive_factor(self, factor: Tensor) -> float:
        """∂(what backward is called on)/∂(the step's loss), a factor that gₙ must not contain."""
        # Nothing else can run before the loss's gradient: on a GPU, this is one kernel launch.
        self.called_with = found = float(factor)
        if self._pass is not None:
            self.batch = self._pass.batch = replace(self.batch, factor=found)
            self._pass.paused = self.closed or not found
            if not found:
                self._refuse_all(TIMES_ZERO)
        return found

    def losses(self) -> tuple[Tensor, Tensor]:
        """ℓₙ ``[N]``, from the loss's graph, and whether they add up to the loss.

        ``UnavailableError`` if they can't be had.
        """
        if self._losses is None:
            reasons = self.collector.unavailable.values()
            raise UnavailableError(next(iter(reasons), NO_GRAPH))
        return self._losses.values(self.batch, self._scale)

    def end(self) -> None:
        """Remove all hooks, and release the graph."""
        if self._pass is not None:
            self._pass.stop()
        self._pass = None

    def release(self) -> None:
        """Remove all hooks, and free all gradients and the loss."""
        self.end()
        self.reducer.stop()
        self.loss = None


def find_plan(
    setting: Setting,
    graph: Graph,
    info: Mapping[str, Any],
    needs_losses: bool,
    edges: tuple[LabelledEdge, ...] = (),
) -> tuple[Plan, bool]:
    """The plan of a loss's graph, and whether it was found anew; with labels at some edges."""
    evidence = evidence_of(graph, setting.model, info, setting.unsharded)
    places = places_of_inputs(graph, evidence.calls)
    key = hash((graph.key(setting.names), evidence, needs_losses, edges, places))
    make = partial(plan_of, graph, setting.leaves, evidence, needs_losses, edges)
    return setting.plans.find(key, graph, make, evidence.calls)


@dataclass(frozen=True)
class SampleLosses:
    """ℓₙ ``[N]``, of the rows of the loss function that a loss is a multiple ``of``.

    ``owners`` ``[M]`` has the sample of each row, and ``parts`` ``[M, K]`` add up to ℓₙ.
    """

    losses: Tensor
    parts: Tensor
    owners: Tensor
    of: Loss


def sample_losses(setting: Setting, loss: Tensor, info: Mapping[str, Any]) -> SampleLosses | None:
    """ℓₙ from the loss's graph, before the backward pass.

    ``None`` if that isn't known, if a row is of no sample or several, or if a sample has no row.
    """
    if not loss.requires_grad:
        return None
    found = read_loss(loss)
    rows = found.rows(setting.loss_reduction, loss_scale(info))
    owners = None if rows is None else _owners_of_rows(setting, loss, found, info)
    if rows is None or owners is None or len(owners) != len(rows):
        return None
    counts = torch.bincount(owners) if int(owners.min()) >= 0 else owners.new_zeros(1)
    if not bool(counts.all()):
        return None
    samples, weight = len(counts), 1.0
    if setting.loss_reduction == "mean":
        weight = samples / len(owners)
    owners, parts = on_device(owners, rows.device), rows * weight
    losses = parts.new_zeros(samples).index_add_(0, owners, parts.sum(1))
    return SampleLosses(losses, parts, owners, found)


def _owners_of_rows(
    setting: Setting, loss: Tensor, found: Loss, info: Mapping[str, Any]
) -> Tensor | None:
    """The sample of each row of a loss function, ``[M]``, on the host."""
    node, graph = found.function, Graph(loss)
    number = None if node is None else graph.by_sequence_number.get(sequence_number(node))
    edges = [] if number is None else [each for each in graph.children[number] if each is not None]
    if not edges:
        return None
    by_row = LabelledEdge(edges[0], tuple(range(1, len(graph.shape(edges[0])))))
    plan, _ = find_plan(setting, graph, info, False, (by_row,))
    return plan.edges[by_row].labels if by_row in plan.edges else None


def sample_axes(
    setting: Setting, loss: Tensor, info: Mapping[str, Any], made: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """The axis that counts the samples of tensors that nodes have ``made``, as far as it is known.

    Nodes are given by their sequence numbers, with the number of their output.
    """
    if not loss.requires_grad:
        return {}
    graph = Graph(loss)
    inside = graph.by_sequence_number
    edges = {
        LabelledEdge((inside[each[0]], each[1]), ()): each for each in made if each[0] in inside
    }
    if not edges:
        return {}
    plan, _ = find_plan(setting, graph, info, False, tuple(edges))
    labelled = {edges[edge]: rows.counting_axis for edge, rows in plan.edges.items()}
    return {each: axis for each, axis in labelled.items() if axis is not None}


def evidence_of(
    graph: Graph,
    model: nn.Module | None,
    info: Mapping[str, Any],
    unsharded: Mapping[int, nn.Parameter] = MappingProxyType({}),
) -> BatchEvidence:
    """What is known of a loss's batch besides its graph: by the calls of the model, say.

    ``unsharded`` are what the graph has for sharded parameters, by the ``id`` of these.
    """
    losses: Tensor | None = info.get("individual_losses")
    count = len(losses) if losses is not None and losses.dim() else None
    # A matrix, such as that of words, doesn't say which of its axes counts the samples.
    is_vector = losses is not None and losses.numel() == count
    return BatchEvidence(
        info.get("batch_size"),
        count,
        graph.edge_of(losses) if losses is not None and is_vector else None,
        calls_behind(graph, model),
        has_positions_first(graph, model, unsharded),
    )


def _reached_beside(loss: Tensor, root: Tensor, names: Mapping[int, str]) -> list[str]:
    """Parameters that what backward is called on depends on in other ways than by the loss.

    Terms of parameters alone, such as regularisers, don't count.
    """
    graph = Graph(root)
    seen: set[Edge] = set()
    with_axes: list[int] = []
    waiting = [graph.root]
    while waiting:
        edge = waiting.pop()
        is_loss = graph.nodes[edge[0]] is loss.grad_fn and edge[1] == loss.output_nr
        if is_loss or edge in seen or graph.alone[edge[0]]:
            continue
        seen.add(edge)
        if graph.shape(edge):
            with_axes.append(edge[0])
        else:
            waiting += graph.descend(edge)
    below = graph.below(with_axes)
    variables = [graph.nodes[n].variable for n in below if graph.kinds[n] == LEAF]
    return [names[id(variable)] for variable in variables if id(variable) in names]


def has_positions_first(
    graph: Graph, model: nn.Module | None, unsharded: Mapping[int, nn.Parameter]
) -> bool:
    """Whether layers that the loss may depend on count samples along their second axis.

    Or a sequence was packed that does.
    """
    pairs = zip(graph.nodes, graph.kinds, strict=True) if PACKING in graph.kinds else ()
    if any(k == PACKING and not saved(node, "batch_first") for node, k in pairs):
        return True
    modules: Iterable[nn.Module] = () if model is None else model.modules()
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    layers = [m for m in modules if isinstance(m, kinds) and not m.batch_first]
    trained = ([p for p in layer.parameters() if p.requires_grad] for layer in layers)
    return any(not own or any(unsharded.get(id(p), p) in graph for p in own) for own in trained)


def _layers_of(graph: Graph, coupling: Collection[int], setting: Setting) -> list[str]:
    """The layers that normalising nodes belong to, by their weights' names."""
    names, found = setting.names if coupling else {}, list[str]()
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
        if isinstance(module, BatchNorm)
        and (module.weight is None or not module.weight.requires_grad)
        and (module.training or module.running_mean is None)
    ]


def layer_of(parameter_name: str) -> str:
    """The layer that a parameter belongs to: its name up to the last dot."""
    return parameter_name.rpartition(".")[0] or parameter_name


ACROSS_PROCESSES = "they are those of all processes"
BESIDE_LOSS = (
    "backward was called on something that depends on it in other ways than by the loss that was "
    "passed: call backward once, on what you pass as loss=..."
)
NO_GRAPH = (
    "the loss needs no gradient: it was detached, computed under no_grad, or of frozen parameters. "
    "Pass the tensor that backward is called on"
)
OF_OTHERS = (
    "the loss depends on none of the tracked parameters, or in a way that autograd doesn't follow: "
    "was it computed by another model or a copy, or were the parameters frozen or replaced since?"
)
