"""Mean and standard deviation of the inputs of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.explained import EMPTY, NO_FEATURES
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.signals.predicates import is_batch_norm
from gradlens.signals.reductions import FeatureMoments, Moments
from gradlens.signals.selection import Selection
from gradlens.signals.signal import Signal

NO_RUNNING_STATISTICS = "the layer keeps no running mean and variance"


@dataclass(eq=False)
class _InputMoment(LayerQuantity, ABC):
    signal = Signal.INPUT
    reduction = Moments()

    by_feature: bool = False

    def layer_value(self, layer: str, module: nn.Module, reduced: FeatureMoments) -> Any:
        if not reduced.count:
            return Undefined(EMPTY)
        return self._moment(reduced) if reduced.mean.numel() else Undefined(NO_FEATURES)

    @abstractmethod
    def _moment(self, reduced: FeatureMoments) -> Tensor: ...


class InputMean(_InputMoment):
    """Mean of each layer's input over all elements, or ``by_feature`` of each feature, ``[F]``."""

    view = View("Input mean", group="layers", yscale="symlog", label="mean")

    def _moment(self, reduced: FeatureMoments) -> Tensor:
        return reduced.mean if self.by_feature else reduced.mean.mean()


class InputStd(_InputMoment):
    """Standard deviation of each layer's input over all elements, or ``by_feature``, ``[F]``.

    It is the population's: the sum of squares is divided by the number of elements.
    """

    view = View("Input standard deviation", group="layers", yscale="log", label="std")

    def _moment(self, reduced: FeatureMoments) -> Tensor:
        if self.by_feature:
            return reduced.variance.sqrt()
        return (reduced.variance.mean() + reduced.mean.var(correction=0)).sqrt()


class _Discrepancy(LayerQuantity, ABC):
    signal = Signal.INPUT
    reduction = Moments()
    default_layers = Selection((is_batch_norm,))

    def layer_value(self, layer: str, module: nn.Module, reduced: FeatureMoments) -> Any:
        running = _running_statistics(module)
        if isinstance(running, Undefined):
            return running
        if not reduced.count:
            return Undefined(EMPTY)
        mean, deviation = running
        if mean.shape != reduced.mean.shape:
            return Undefined(
                f"the input has {reduced.mean.numel()} features and the running mean "
                f"{mean.numel()}: set channel_last"
            )
        size = torch.linalg.vector_norm(deviation)
        return torch.linalg.vector_norm(self._difference(reduced, mean, deviation)) / size

    @abstractmethod
    def _difference(self, reduced: FeatureMoments, mean: Tensor, deviation: Tensor) -> Tensor: ...


def _running_statistics(module: nn.Module) -> tuple[Tensor, Tensor] | Undefined:
    """Running mean and standard deviation ``[C]`` of a layer, in float64 on the host."""
    buffers = dict(module.named_buffers(recurse=False))
    if "running_mean" not in buffers or "running_var" not in buffers:
        return Undefined(NO_RUNNING_STATISTICS)
    mean, variance = (buffers[name].cpu().double() for name in ("running_mean", "running_var"))
    if not bool(mean.isfinite().all() and variance.isfinite().all()):
        return Undefined("the running mean or variance has NaN or Inf")
    if not bool(variance.any()):
        return Undefined("the running variance is zero")
    return mean, variance.sqrt()


class MeanTID(_Discrepancy):
    """Training inference discrepancy ‖μ_B − μ‖₂/‖σ‖₂ of the mean of each batch normalisation.

    Wang et al., 2022, arXiv:2210.05153: μ_B ``[C]`` is the batch's mean; μ and σ are the running
    mean and standard deviation, which are used in evaluation, after the step's forward pass. For
    the mean over steps of the paper, use ``gradlens.Aggregate``.
    """

    view = View("Mean TID", group="layers", yscale="log", label="‖μ_B − μ‖/‖σ‖")

    def _difference(self, reduced: FeatureMoments, mean: Tensor, deviation: Tensor) -> Tensor:
        return reduced.mean - mean


class VarTID(_Discrepancy):
    """Training inference discrepancy ‖σ_B − σ‖₂/‖σ‖₂ of the standard deviation, as ``MeanTID``.

    σ_B² is the batch's population variance, with which the layer normalises.
    """

    view = View("Variance TID", group="layers", yscale="log", label="‖σ_B − σ‖/‖σ‖")

    def _difference(self, reduced: FeatureMoments, mean: Tensor, deviation: Tensor) -> Tensor:
        return reduced.variance.sqrt() - deviation
