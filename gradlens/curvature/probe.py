"""Data that stay the same from step to step, on which a run's curvature is followed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import nn

from gradlens.curvature.loss_over_data import LossFunction, LossOverData
from gradlens.curvature.network_over_data import Split, as_pair, check_data
from gradlens.gradients.per_sample_gradients import check_loss_reduction
from gradlens.graph.loss import LossReduction
from gradlens.graph.undisturbed import in_eval_mode


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
        )

    def mode_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which the modules of a model are in the probe's mode."""
        return nullcontext() if self.training else in_eval_mode(model)
