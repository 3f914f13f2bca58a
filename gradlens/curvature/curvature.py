"""The curvature of a loss at the present parameters, shared by all quantities that need it."""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, final

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from gradlens.backpack_adapter.context import extended_by_backpack
from gradlens.curvature.diagonals import (
    DiagonalKind,
    LossDiagonal,
    LossTraces,
    by_draws,
    by_hutchinson,
    by_roots,
    check_piecewise_linear,
    coupled_traces,
    sampled_traces,
)
from gradlens.curvature.directions import Directions, LowRankGGN
from gradlens.curvature.factors import SamplesJacobians
from gradlens.curvature.hessian import GGNOperator, HessianOperator, check_loss
from gradlens.curvature.operator import CurvatureOperator
from gradlens.gradients.gradients import Setting, find_plan
from gradlens.graph.graph import Graph
from gradlens.graph.kinds import LEAF, Node, kind
from gradlens.graph.loss import Batch, LossReduction
from gradlens.history.coverage import few
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import LabelledEdge, Plan, Plans
from gradlens.samples.planner import EMPTY
from gradlens.torch_private import LossModule

# The network's outputs, at which the generalised Gauss-Newton matrix splits the loss -----------

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
NO_SAMPLES = (
    "the rows of the network's outputs of shape {shape} aren't its {samples} samples, whose "
    "variance the ratios are of: {remedy}, a tensor with samples first that the loss is computed "
    "from"
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


def passed_outputs(passed: Any) -> NetworkOutputs:
    """The outputs that the user has passed; ``UnavailableError`` unless they are one tensor."""
    if not isinstance(passed, Tensor):
        raise UnavailableError(
            f"info['outputs'] is a {type(passed).__name__}: pass the one tensor that the loss is "
            "computed from (several can be joined by torch.cat before the loss)"
        )
    return NetworkOutputs(passed, "info['outputs']")


def outputs_of_extended(loss: Tensor, model: nn.Module | None) -> NetworkOutputs | None:
    """The one tensor that loss modules behind a loss were called with and that needs a gradient.

    ``None`` unless BackPACK has extended the modules, on which it stores the latest call: nothing
    leads from the graph to the module, so that it is looked for among all objects. ``None`` for
    ``NLLLoss``, too, which is linear in its input, so that the matrix would be zero. Raises
    ``UnavailableError`` if there is no such tensor, or more than one.
    """
    check_loss(loss)
    if not (model is None or extended_by_backpack(model)):
        return None
    graph = Graph(loss)
    every = (each for each in gc.get_objects() if issubclass(type(each), LossModule))
    outputs = [(each, vars(each).get("output")) for each in every]
    called = [m for m, out in outputs if isinstance(out, Tensor) and graph.number_of(out) >= 0]
    if not called or any(isinstance(module, nn.NLLLoss) for module in called):
        return None
    stored = [each for module in called for each in vars(module).items()]
    inputs = [x for name, x in stored if name.startswith("input") and name[5:].isdigit()]
    found = {id(x): x for x in inputs if isinstance(x, Tensor) and x.requires_grad}
    if not found:
        raise UnavailableError(NO_OUTPUTS)
    if len(found) > 1:
        raise UnavailableError(
            f"the loss modules got {len(found)} tensors from the network, and the generalised "
            "Gauss-Newton matrix takes one: compute the loss from one tensor (torch.cat them "
            f"before, and cut it into pieces), and {_PASS}"
        )
    (tensor,) = found.values()
    return NetworkOutputs(tensor, "the loss module's input")


def returned_outputs(
    loss: Tensor, returned: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]
) -> NetworkOutputs:
    """The tensor that a model has returned and that its loss is computed from.

    Of several, it is the one through which the loss depends on all parameters and on the others.
    Raises ``UnavailableError`` if there is none.
    """
    edges = {_edge(tensor): tensor for tensor in returned if tensor.dim()}
    behind = _behind(loss) - {_edge(loss)}
    reached = {edge: tensor for edge, tensor in edges.items() if edge in behind}
    if not reached:
        raise UnavailableError(NO_OUTPUTS)
    last = [t for t in reached.values() if not _bypassing(loss, t, parameters)]
    last = [t for t in last if all(t is u or _edge(t) not in _behind(u) for u in last)]
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
    if outputs.origin != "info['outputs']":  # which the user has chosen
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


# The curvature --------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class Curvature(ABC):
    """The curvature matrices of a mean loss: that of a step's mini-batch, or of a ``Probe``.

    ``parameters`` are those that require a gradient, and ``held`` the same as the optimizer has
    them, which are shards of those of a sharded model. ``is_part`` says that the loss is that of a
    part of its step's batch, such as the last micro-batch. ``notes`` are messages to the user on
    how the curvature was found. Matrices, diagonals and traces raise ``UnavailableError`` where
    they can't be had.
    """

    global_step: int
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None = None
    held: Mapping[str, nn.Parameter] = field(default_factory=dict)
    is_part: bool = False
    seed_after: int = 0
    notes: list[str] = field(default_factory=list, init=False)
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.parameters = {name: p for name, p in self.parameters.items() if p.requires_grad}
        held = self.held or self.parameters
        self.held = {name: p for name, p in held.items() if name in self.parameters}

    @property
    def seed(self) -> int:
        """The seed of random vectors, which differs from step to step."""
        return self.global_step + self.seed_after

    @property
    @abstractmethod
    def hessian(self) -> CurvatureOperator:
        """The Hessian ``[D, D]``."""

    @property
    @abstractmethod
    def ggn(self) -> CurvatureOperator:
        """The generalised Gauss-Newton matrix ``[D, D]``."""

    @property
    @abstractmethod
    def batch(self) -> Batch:
        """The samples, with their number under a sum loss, which is divided by it."""

    @final
    def diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """The diagonal by the first method that applies.

        Exact where one of them is, and estimated with ``samples`` draws otherwise;
        ``"diag_ggn_mc"`` is always an estimate. Each is found once for all quantities.
        """
        key = (kind, samples)
        if key not in self._found:
            self._found[key] = self._find_diagonal(*key)
        found: LossDiagonal = self._found[key]
        return found

    @final
    def traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        """The sums of the diagonal's blocks, without a diagonal where a method finds them so.

        That is so for ``"diag_ggn_mc"``, with ``samples`` draws, each for ``sub_batch`` samples of
        the batch (``None``: all). Otherwise they are sums of a diagonal with two draws at least.
        """
        key = (kind, samples, sub_batch)
        if key not in self._found:
            self._found[key] = self._find_traces(*key)
        found: LossTraces = self._found[key]
        return found

    @abstractmethod
    def directions(self, k: int) -> Directions:
        """The eigenvectors of the generalised Gauss-Newton matrix's k largest eigenvalues.

        Described by what the loss and its samples do along them.
        """

    @abstractmethod
    def _find_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """The diagonal, which isn't known yet."""

    @abstractmethod
    def _find_traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        """The traces, which aren't known yet."""

    @final
    @property
    def loss_factor(self) -> int:
        """The loss over the mean of ℓₙ: N under a sum loss, 1 under a mean loss.

        Raises ``ValueError`` as ``batch`` does.
        """
        return self.batch.samples or 1


@final
@dataclass(eq=False, kw_only=True)
class LossCurvature(Curvature):
    """The curvature matrices of the mean mini-batch loss, as long as its graph is alive.

    Each is built when it is first needed, by ``torch.autograd.grad``, which leaves the parameters'
    gradients as they are. ``outputs`` is what the user has passed as such, and ``returned`` the
    tensors that the model has returned; ``find_outputs`` goes before both. ``known_batch`` is given
    where it is known without the graph. ``plans`` hold from step to step which rows belong to which
    sample.
    """

    loss: Tensor
    model: nn.Module | None = None
    outputs: Any = None
    returned: Sequence[Tensor] = ()
    loss_reduction: LossReduction = "mean"
    batch_size: int | None = None
    find_outputs: Callable[[], NetworkOutputs] | None = None
    known_batch: Batch | None = None
    plans: Plans = field(default_factory=Plans)

    @cached_property
    def hessian(self) -> HessianOperator:
        """The Hessian; ``UnavailableError`` if the loss can't be differentiated twice."""
        self._check_batch()
        return HessianOperator(self.loss, self.parameters, 1 / self.loss_factor)

    @cached_property
    def ggn(self) -> GGNOperator:
        """The generalised Gauss-Newton matrix.

        At the outputs that the user has passed, or otherwise at the input of the extended loss
        module, or at what the model has returned; ``UnavailableError`` where there isn't one tensor
        of them.
        """
        self._check_batch()
        found = self._network_outputs()
        operator = GGNOperator(self.loss, found.tensor, self.parameters, 1 / self.loss_factor)
        if found.origin == "the model's output" and operator.is_zero(self.seed):
            raise UnavailableError(LINEAR_IN_RETURNED.format(remedy=found.remedy))
        bypass = note_on_bypass(self.loss, found, self.parameters)
        if bypass:
            self.notes.append(bypass)
        return operator

    def _check_batch(self) -> None:
        """``UnavailableError`` if the batch is empty, whose loss is NaN or, of a sum, zero."""
        check_loss(self.loss)
        loss = float(self.loss.detach())
        if loss and not math.isnan(loss):
            return
        try:
            outputs = self._network_outputs().tensor
        except UnavailableError:
            return  # without outputs, it isn't known
        if not outputs.numel():
            raise UnavailableError(EMPTY)

    def _network_outputs(self) -> NetworkOutputs:
        if self.find_outputs is not None:
            return self.find_outputs()
        if self.outputs is not None:
            return passed_outputs(self.outputs)
        of_extended = outputs_of_extended(self.loss, self.model)
        return of_extended or returned_outputs(self.loss, self.returned, self.parameters)

    @cached_property
    def batch(self) -> Batch:
        """The batch, with its number of samples under a sum loss, which is divided by it.

        Raises ``UnavailableError`` if that number isn't known, or the loss has no graph.
        """
        if self.known_batch is not None:
            return self.known_batch
        if self.loss_reduction == "mean":
            return Batch()
        # Samples are found as for per-sample gradients, so that both are of the same batch.
        check_loss(self.loss)
        plan = self._plan(Graph(self.loss))
        if plan.samples is None:
            raise UnavailableError(
                f"the curvature of a sum loss is divided by the number of samples: {plan.known_by}"
            )
        return Batch(plan.samples, plan.known_by, "sum")

    def _plan(self, graph: Graph, *edges: LabelledEdge) -> Plan:
        """The samples of the loss's graph, and of the rows at some edges of it."""
        setting = Setting(self.parameters, self.model, plans=self.plans)
        return find_plan(setting, graph, {"batch_size": self.batch_size}, False, edges)[0]

    def directions(self, k: int) -> Directions:
        ggn = self.ggn
        self._check_rows_are_samples()  # other rows may meet, which says nothing of samples
        return LowRankGGN(ggn, self.model, self.plans, self.seed).directions(k)

    def _check_rows_are_samples(self) -> None:
        """``UnavailableError`` if the outputs have rows of several samples, or several of one."""
        outputs = self._network_outputs()
        graph = Graph(self.loss)
        edge = graph.edge_of(outputs.tensor)
        if edge is None:
            return
        elements = LabelledEdge(edge, ())
        plan = self._plan(graph, elements)
        if elements not in plan.edges:
            return  # it isn't known
        # Elements that the loss doesn't depend on have no sample.
        labels = plan.edges[elements].labels.reshape(len(outputs.tensor), -1)
        first = labels.amax(1)
        own = first[first >= 0]
        is_one = bool(((labels == first[:, None]) | (labels < 0)).all())
        if not is_one or len(own.unique()) < len(own):
            shape = list(outputs.tensor.shape)
            raise UnavailableError(
                NO_SAMPLES.format(shape=shape, samples=plan.samples, remedy=outputs.remedy)
            )

    def _find_traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        if kind == "diag_ggn_mc":
            with suppress(UnavailableError):
                return sampled_traces(
                    self.ggn, samples, sub_batch, self.seed, self.model, self.plans
                )
            with suppress(UnavailableError):
                return coupled_traces(self.ggn, samples, self.seed)
        return self.diagonal(kind, max(samples, 2))

    def _find_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        try:
            return self._preferred_diagonal(kind, samples)
        except UnavailableError as reason:
            better = str(reason)
        # Hutchinson's method takes nothing but products, so its reason is the matrix's own.
        found = by_hutchinson(self.hessian if kind == "diag_h" else self.ggn, samples, self.seed)
        self.notes.append(
            f"{kind} is estimated, by Hutchinson's method with {samples} products: {better}"
        )
        return found

    def _preferred_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """The diagonal by a method that is exact, or takes less than Hutchinson's."""
        if kind == "diag_h":
            outputs = self._network_outputs()
            check_piecewise_linear(outputs.tensor)
            bypass = note_on_bypass(self.loss, outputs, self.parameters)
            if bypass:
                raise UnavailableError(bypass)
        jacobians = SamplesJacobians(self.ggn.jacobian, self.model, self.plans)
        if kind == "diag_ggn_mc":
            return by_draws(self.ggn, jacobians, samples, self.seed)
        return by_roots(self.ggn, jacobians, self.seed)
