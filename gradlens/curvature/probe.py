"""Data that stay the same from step to step, on which a run's curvature is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.curvature.curvature import Curvature, LossCurvature, NetworkOutputs, returned_outputs
from gradlens.curvature.diagonals import DiagonalKind, LossDiagonal, LossTraces, summed_traces
from gradlens.curvature.directions import Directions
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.over_data import (
    BatchLoss,
    LossFunction,
    LossOverData,
    OfBatch,
    Split,
    SumOverData,
    as_pair,
    check_data,
)
from gradlens.gradients.per_sample_gradients import check_loss_reduction
from gradlens.graph.loss import Batch, LossReduction
from gradlens.graph.model_calls import tensors_of
from gradlens.graph.undisturbed import in_eval_mode
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans
from gradlens.torch_private import uncompiled_backward

OTHER_OUTPUTS = "let the model return another tensor"
NO_OUTPUTS = (
    "the generalised Gauss-Newton matrix takes the one tensor that the model returns and from "
    "which the probe's loss is computed: pass a loss_function of such a tensor"
)
SEEDS_APART = 2**31
"""Between the seeds of two batches, so that none is that of another batch at another step."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A loss over data that stay the same: ``HessMaxEV(on=Probe(data, nn.CrossEntropyLoss()))``.

    A quantity with a probe is of the probe's mean loss at the parameters of its steps, and not of
    the loss of their mini-batches: its values change with the parameters alone. ``data`` is an
    iterable of batches, such as a list or a DataLoader without shuffling. The loss of a batch is
    ``loss_function(outputs, targets)`` with ``outputs = model(inputs)``; it must be the mean or the
    sum over the batch's samples, as ``loss_reduction`` says. ``split`` makes ``(inputs, targets)``
    of a batch that isn't such a pair; inputs that are a mapping are passed as keyword arguments.

    All modules are in eval mode, or with ``training=True`` in the modes that they have at the step.
    The forward passes are run without autocast and uncompiled; hooks of the user's own run, those
    of gradlens don't. Quantities that are given the same object share its forward passes: one a
    step for a single batch, whose graph stays until all of them are computed, and for more batches
    one a batch for each product. ``ValueError`` for data that can't be passed through repeatedly.
    """

    data: Iterable[Any] = field(repr=False)
    loss_function: LossFunction
    _: KW_ONLY
    loss_reduction: LossReduction = "mean"
    training: bool = False
    split: Split = field(default=as_pair, repr=False)

    def __post_init__(self) -> None:
        check_data(self.data)
        check_loss_reduction(self.loss_reduction)

    def loss_of(self, model: nn.Module) -> LossOverData:
        """The loss over the data as a function of a model's parameters; checks both."""
        return LossOverData(
            model,
            self.loss_function,
            self.data,
            loss_reduction=self.loss_reduction,
            split=self.split,
            joined=False,
        )

    def mode_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which the modules of a model are in the probe's mode."""
        return nullcontext() if self.training else in_eval_mode(model)


@final
@dataclass(eq=False, kw_only=True)
class DataCurvature(Curvature):
    """The curvature of the mean loss over several batches, which are passed through repeatedly.

    Each product of a matrix takes a pass, and so do all draws of a diagonal or of traces, which are
    made for each batch: exact where all batches' are. ``sub_batch`` is that of each batch.
    """

    loss: LossOverData
    model: nn.Module
    plans: Plans

    @property
    def hessian(self) -> CurvatureOperator:
        return self._sum(lambda batch: self.of_batch(batch).hessian)

    @property
    def ggn(self) -> CurvatureOperator:
        return self._sum(lambda batch: self.of_batch(batch).ggn)

    @property
    def batch(self) -> Batch:
        is_sum = self.loss.loss_reduction == "sum"
        return Batch(self.loss.samples, "that of the probe", "sum") if is_sum else Batch()

    def of_batch(self, batch: BatchLoss) -> LossCurvature:
        """The curvature of a batch's loss, whose random vectors are its own.

        Under a sum loss, it is divided by the number of samples of all batches.
        """
        return LossCurvature(
            global_step=self.global_step,
            loss=batch.loss,
            parameters=self.parameters,
            model=self.model,
            optimizer=self.optimizer,
            held=self.held,
            find_outputs=lambda: self._outputs(batch),
            known_batch=self.batch,
            plans=self.plans,
            seed_after=batch.index * SEEDS_APART,
        )

    def directions(self, k: int) -> Directions:
        raise UnavailableError(
            "directions are found for a single batch: pass a probe with one, whose samples share "
            "a forward pass"
        )

    def _find_traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        return self._summed(lambda curvature, _: curvature.traces(kind, samples, sub_batch))

    def _find_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        totals: dict[str, Tensor] = {}

        def add(curvature: LossCurvature, weight: float) -> LossTraces:
            found = curvature.diagonal(kind, samples)
            for name, values in found.values.items():
                totals[name] = totals.get(name, 0) + weight * values
            # Without the values, which are added up.
            return LossTraces(found.trace, found.traces, found.method)

        sums = self._summed(add)
        return LossDiagonal(sums.trace, sums.traces, sums.method, totals)

    def _summed(self, of_batch: Callable[[LossCurvature, float], LossTraces]) -> LossTraces:
        """The sum of the batches' traces, which a function of curvature and weight finds."""
        parts: list[LossTraces] = []
        weights: list[float] = []

        def add(batch: BatchLoss) -> None:
            curvature = self.of_batch(batch)
            parts.append(of_batch(curvature, batch.weight))
            weights.append(batch.weight)
            self.notes += [note for note in curvature.notes if note not in self.notes]

        self.loss.each(add)
        return summed_traces(parts, weights)

    def _outputs(self, batch: BatchLoss) -> NetworkOutputs:
        returned = [t for t in tensors_of(batch.outputs) if t.grad_fn is not None]
        try:
            found = returned_outputs(batch.loss, returned, self.parameters)
        except UnavailableError as reason:
            raise UnavailableError(NO_OUTPUTS) from reason
        return replace(found, remedy=OTHER_OUTPUTS)

    def _sum(self, of_batch: OfBatch) -> SumOverData:
        return SumOverData(self.loss, of_batch, self.parameters)


@final
class ProbedModel:
    """A probe and the model that it is used with.

    The data and the loss are checked at the first step, which takes one more forward pass, and one
    more of the first batch.
    """

    def __init__(self, probe: Probe, model: nn.Module) -> None:
        self._probe = probe
        self._model = model
        self._plans = Plans()

    @cached_property
    def _loss(self) -> LossOverData:
        return self._probe.loss_of(self._model)

    @contextmanager
    def curvature(
        self,
        global_step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None = None,
        held: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> Iterator[Curvature]:
        """A context with the curvature at the parameters' present values.

        Raises ``ValueError`` as ``LossOverData`` does, and whatever the model raises.
        """
        with self._probe.mode_of(self._model), uncompiled_backward():
            loss = self._loss
            curvature = DataCurvature(
                loss=loss,
                global_step=global_step,
                parameters=parameters,
                optimizer=optimizer,
                held=held,
                model=self._model,
                plans=self._plans,
            )
            if loss.batches > 1:
                yield curvature
            else:
                found: list[BatchLoss] = []
                loss.each(found.append)
                yield curvature.of_batch(found[0])
