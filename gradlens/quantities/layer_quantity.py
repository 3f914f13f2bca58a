"""Quantities of the inputs and outputs of layers, and of the gradients at them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import ROUNDINGS
from gradlens.numerics.shards import whole
from gradlens.numerics.tensors import on_host
from gradlens.quantities.parameter_quantity import ParameterQuantity, gradient_of
from gradlens.quantities.quantity import OfParts, SingleStepQuantity, Summaries, mean, select_for
from gradlens.quantities.step import EMPTY, NO_ELEMENTS, NO_FEATURES, Step, all_explained
from gradlens.signals.attention import NO_KEYS, NO_SCORES, Attention, AttentionRows
from gradlens.signals.predicates import (
    computes_attention,
    is_activation,
    is_affine,
    is_batch_norm,
    is_dropout,
    is_embedding,
    is_normalization,
    is_recurrent,
)
from gradlens.signals.reductions import (
    Active,
    CentralMoments,
    Distribution,
    FeatureCounts,
    FeatureMoments,
    Logits,
    Maxima,
    Moments,
    Norms,
    Predictions,
    SignalReduction,
    Size,
)
from gradlens.signals.selection import Selection, Selectors, selection
from gradlens.signals.signal import Request, Signal
from gradlens.torch_private import LossModule


@dataclass(eq=False)
class LayerQuantity(OfParts, SingleStepQuantity):
    """A quantity with a value for each layer, from a signal that is reduced in the layers' hooks.

    A subclass states as data its ``signal``, the signal's ``reduction``, and its
    ``default_layers``. A record is ``{"layers": {name: value}}``, with a number or a dict for each
    layer that was called, and the entries of ``summary``. A layer that is called several times in a
    step has one value, for all its calls together.
    """

    signal: ClassVar[Signal]
    """The tensor at a layer that is captured: its input, output, or the gradient at one of them."""
    reduction: SignalReduction[Any] = field(init=False, repr=False)
    """What the tensor is reduced to."""
    default_layers: ClassVar[Selection] = Selection()
    """The layers that have values unless ``layers`` are given."""

    _: KW_ONLY
    layers: Selectors | Selection | None = None
    """Layers that have values: see ``gradlens.signals.Selection``."""
    exclude: Selectors = ()
    """Layers that have none."""
    channel_last: bool | None = None
    """Whether features are in the last axis, or in axis 1; by default, this depends on the kinds of
    the layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = self.default_layers if self.layers is None else self.layers
        self.selection = selection(chosen, self.exclude)

    @property
    @final
    def request(self) -> Request:
        """What is captured at each of the layers."""
        return Request(self.signal, self.reduction, self.channel_last)

    @property
    @final
    def layer_requests(self) -> dict[str, Request]:
        return dict.fromkeys(self.modules, self.request)

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self.modules = select_for(self.name, model, self.selection)

    @final
    def compute(self, step: Step) -> dict[str, Any]:
        signals, found = step.signals.values, {}
        for name, module in self.modules.items():
            if self.request in signals.get(name, {}):
                reduced = signals[name][self.request]
                undefined = isinstance(reduced, Undefined)
                found[name] = reduced if undefined else self.layer_value(name, module, reduced)
        signal = self.signal.value
        layers = all_explained(on_host(found), f"the {signal} of")
        self.end_step()
        return {"layers": layers, **self.summary(layers)}

    @abstractmethod
    def layer_value(self, layer: str, module: nn.Module, reduced: Any) -> Any:
        """The value for one layer, from its reduced signal.

        A NaN without a reason is recorded with the reason that the signal has NaN or Inf.
        """


# Norms, means and active units ----------------------------------------------------------------


@dataclass(eq=False)
class OutputNorm(LayerQuantity):
    """Mean over samples of ‖outₙ‖₂ for each layer, over all features and positions.

    With ``normalize``, it is the mean over samples of the root mean square of their elements.
    """

    signal = Signal.OUTPUT
    reduction = Size()
    view = View("Output norm", group="layers", yscale="log", label="‖output‖")

    normalize: bool = False
    # Norms don't depend on which axis is that of the features.
    channel_last: bool | None = field(default=None, init=False, repr=False)

    def layer_value(self, layer: str, module: nn.Module, reduced: Norms) -> Any:
        if not reduced.count:
            return Undefined(EMPTY)
        return (reduced.sample_rms if self.normalize else reduced.sample_norms) / reduced.count


class InputNorm(LayerQuantity):
    """‖x‖₂ of each layer's whole input, all samples together."""

    signal = Signal.INPUT
    reduction = Size()
    view = View("Input norm", group="layers", yscale="log", label="‖input‖")

    def layer_value(self, layer: str, module: nn.Module, reduced: Norms) -> Tensor:
        return reduced.norm


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


NO_OUTPUT = "the batch is empty, or all of its outputs are -inf"
ACTIVATION: Summaries = {"active": ("active", mean), "dead": ("dead", mean), "worst": ("dead", max)}
"""The ``summaries`` of ``activation``."""


@dataclass(eq=False)
class OutputActivation(LayerQuantity):
    """Share of active outputs and of dead units of each layer, by default of activations.

    A unit is a feature, or a channel of a convolution; an output is active if its absolute value
    is above ``threshold``. A unit's rate is the share of samples and positions at which it is
    active. For each layer, ``"active"`` is the mean rate, ``"dead"`` the share of units whose rate
    is zero, ``"least"`` the smallest rate, and ``"least_unit"`` the index of its unit. With
    ``units``, ``"dead_units"`` are the indices of all units whose rate is zero. A record also has
    the means of the first two over layers, and ``"worst"``, the largest share of dead units in any
    layer.
    """

    signal = Signal.OUTPUT
    default_layers = Selection((is_activation,))
    summaries = ACTIVATION
    view = View("Active and dead units", group="layers", label="share")

    threshold: float = 1e-8  # as in monitorch
    _: KW_ONLY
    units: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reduction = Active(self.threshold)

    def layer_value(self, layer: str, module: nn.Module, reduced: FeatureCounts) -> Any:
        if not reduced.count:
            return Undefined(EMPTY)
        if not reduced.active.numel():
            return Undefined(NO_FEATURES)
        rates = reduced.active / reduced.count
        found = activation(rates)
        if not self.units or isinstance(found, float):
            return found
        return found | {"dead_units": on_host(rates == 0).nonzero()[:, 0].numpy()}


def activation(rates: Tensor) -> dict[str, float] | float:
    """Statistics of units that are active at these ``rates`` ``[F]``, in float64."""
    rates = on_host(rates)
    if bool(rates.isnan().any()):
        return math.nan
    least, unit = rates.min(0)
    return {
        "active": float(rates.mean()),
        "dead": float((rates == 0).double().mean()),
        "least": float(least),
        "least_unit": int(unit),
    }


NO_OUTPUTS = "the batch is empty, or the layer has no features"
EQUAL = "all outputs are equal"
OUT_OF_RANGE = "the fourth powers of outputs are beyond the range of double precision"
MODERATE = 1e70
"""The largest size of numbers whose fourth powers, and their sums, are in range; so are those of
the inverse. Numbers in single precision are smaller."""


class ActivationOutliers(LayerQuantity):
    """Largest absolute value and excess kurtosis of each layer's outputs, over all their elements.

    ``"largest"`` is ``max |x|``, and ``"channel"`` and ``"position"`` are where it is: the index of
    its feature, and its place among the positions of its sample, such as that of a token, or of a
    pixel in rows. ``"kurtosis"`` is E(x − μ)⁴/σ⁴ − 3, which is 0 for a normal distribution and
    large where few of the elements are far from the others; of M elements, it is at most M. A
    record also has the largest of both over layers.
    """

    signal = Signal.OUTPUT
    reduction = CentralMoments()
    summaries: ClassVar = {"largest": ("largest", max), "kurtosis": ("kurtosis", max)}
    view = View("Activation outliers", group="layers", yscale="log", label="max |x|")

    def layer_value(self, layer: str, module: nn.Module, reduced: Distribution) -> Any:
        if not reduced.count:
            return Undefined(NO_OUTPUTS)
        largest = float(reduced.largest)
        if not math.isfinite(largest):
            return math.nan
        return {
            "largest": largest,
            "kurtosis": _excess_kurtosis(reduced, largest),
            "channel": int(reduced.feature),
            "position": int(reduced.position),
        }


def _excess_kurtosis(found: Distribution, largest: float) -> float:
    variance, _, fourth = found.powers.tolist()
    # In double precision, which rounds the mean, and with it the deviations of equal elements.
    if math.sqrt(variance) <= ROUNDINGS * torch.finfo(torch.float64).eps * largest:
        return Undefined(EQUAL)
    if largest > MODERATE or variance < MODERATE**-2:
        return Undefined(OUT_OF_RANGE)
    return float(fourth / variance**2 - 3)


class OutputEntropy(LayerQuantity):
    """Entropy of the classes that a network predicts, share of the most frequent, and logits' size.

    Outputs of a layer, by default of the last one, are the logits of classes; those of one feature
    are of the second of two classes, whose probability is their sigmoid. ``"entropy"`` is the mean
    over samples and positions of −Σ pₖ log pₖ in nats, with p = softmax(z), at most log C of C
    ``"classes"``; ``"top_share"`` is the share of them at which ``"top_class"`` has the largest
    logit, which is that of most. ``"rms"`` and ``"largest"`` are the root mean square and the
    largest absolute value of the logits; those that are -inf, of classes that are ruled out, don't
    count. A record also has the mean over layers of the entropy over log C, and the largest share.
    All positions count, also those that a loss ignores. By default, a last layer that is a
    normalisation, an activation, dropout, an embedding or recurrent has a NaN: it has no logits.
    """

    signal = Signal.OUTPUT
    reduction = Logits()
    summaries: ClassVar = {"top_share": ("top_share", max)}
    default_layers = Selection((-1,))
    view = View("Output entropy", group="layers", label="share")

    def layer_value(self, layer: str, module: nn.Module, reduced: Predictions) -> Any:
        is_chosen = self.layers is not None
        if isinstance(module, (LossModule, *PROBABILITIES)) or not (is_chosen or _is_head(module)):
            return Undefined(NO_LOGITS.format(kind=type(module).__name__))
        if not reduced.count:
            return Undefined(EMPTY)
        if not len(reduced.predicted):
            return Undefined(NO_FEATURES)
        entropy = float(reduced.entropy) / reduced.count
        if math.isnan(entropy):
            return math.nan
        top, at = reduced.predicted.max(0)
        return {
            "entropy": entropy,
            "rms": math.sqrt(float(reduced.squares) / int(reduced.known)),
            "largest": float(reduced.largest),
            "top_share": int(top) / reduced.count,
            "top_class": int(at),
            "classes": len(reduced.predicted),
        }

    def summary(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        known = [layer for layer in parts.values() if isinstance(layer, Mapping)]
        if not known:
            return {}
        shares = [layer["entropy"] / math.log(layer["classes"]) for layer in known]
        return {"entropy": mean(shares), **super().summary(parts)}


def _is_head(module: nn.Module) -> bool:
    """Whether a network's last layer may have its logits: what is written last may run before."""
    of_features = (is_normalization, is_recurrent, is_embedding, is_dropout, is_activation)
    if isinstance(module, nn.Flatten) and module.start_dim == 0:
        return False  # a vector, of which it isn't known whether it is of samples
    return isinstance(module, nn.LogSoftmax) or not any(each(module) for each in of_features)


PROBABILITIES = (nn.Softmax, nn.Softmax2d, nn.Softmin, nn.Sigmoid)
NO_LOGITS = "the outputs of {kind} are no logits: name the layer that has them, as in layers='head'"


@dataclass(eq=False)
class DeadNeurons(LayerQuantity):
    """Share of each layer's features whose outputs are all ≤ ``threshold``, by default all ≤ 0.

    It is meant for layers in front of a ReLU, whose output is zero for such a feature.
    """

    signal = Signal.OUTPUT
    reduction = Maxima()
    default_layers = Selection((is_affine,))
    view = View("Dead neurons", group="layers", label="share of features")

    threshold: float = 0.0

    def layer_value(self, layer: str, module: nn.Module, reduced: Tensor) -> float:
        if bool((reduced == -math.inf).all()):
            return Undefined(NO_OUTPUT if reduced.numel() else NO_FEATURES)
        if bool(reduced.isnan().any()):
            return math.nan
        return float((reduced <= self.threshold).double().mean())


@dataclass(eq=False)
class _Attention(LayerQuantity, ABC):
    signal = Signal.ATTENTION
    reduction = Attention()
    default_layers = Selection((computes_attention,), leaf=False)
    channel_last: bool | None = field(default=None, init=False, repr=False)

    _: KW_ONLY
    by_head: bool = False


@dataclass(eq=False)
class AttentionLogits(_Attention):
    """Largest score of each layer's attention over all queries, or ``by_head``, ``[H]``.

    A score is the scaled product of a query and a key that masks let it see, without biases that
    are added. Scores of 50 and more, which grow from step to step, come before a training that
    diverges (Dehghani et al., 2023, arXiv:2302.05442, Figure 1). By default, layers are the
    innermost modules whose class is called attention, in any spelling. Read are
    ``scaled_dot_product_attention`` and a softmax of a batched product, ``[N, H, T, S]``; other
    attention, and scores that two products are added to, have a NaN with the reason. Heads that are
    folded into the axis of samples, or into two axes, count as one.
    """

    view = View("Attention logits", group="layers", yscale="symlog", label="largest score")

    def layer_value(self, layer: str, module: nn.Module, reduced: AttentionRows) -> Any:
        if reduced.largest is None:
            return Undefined(NO_SCORES)
        found = reduced.largest if self.by_head else reduced.largest.amax()
        return (
            found if bool((found > -math.inf).any() | found.isnan().any()) else Undefined(NO_KEYS)
        )


class AttentionEntropy(_Attention):
    """Mean entropy of each layer's weights of attention, in nats, or of each head, ``[H]``.

    It is ln S if all S keys have the same weight, and near zero if each query looks at one key, as
    in trainings that became unstable (Zhai et al., 2023, arXiv:2303.06296). Layers are chosen, and
    attention is read, as by ``AttentionLogits``.
    """

    view = View("Attention entropy", group="layers", label="nats")

    def layer_value(self, layer: str, module: nn.Module, reduced: AttentionRows) -> Any:
        if not bool(reduced.rows.any()):
            return Undefined(NO_KEYS)
        if self.by_head:
            return reduced.entropies / reduced.rows
        return reduced.entropies.sum() / reduced.rows.sum()


@dataclass(eq=False)
class GradientActivation(ParameterQuantity):
    """Share of nonzero elements in each parameter's gradient, and of units whose gradient is zero.

    A unit is a row of the parameter, along its first axis: an output feature or channel. Values
    are those of ``OutputActivation``; an element is nonzero if its absolute value is above
    ``threshold``.
    """

    part = "gradient of"
    summaries = ACTIVATION
    view = View("Gradient activation", group="layers", label="share")

    threshold: float = 1e-8  # as in monitorch

    def parameter_value(self, step: Step, name: str, parameter: nn.Parameter) -> Any:
        gradient = gradient_of(parameter, step)
        if isinstance(gradient, Undefined):
            return gradient
        if not gradient.numel():
            return Undefined(NO_ELEMENTS)
        rows = gradient.reshape(len(gradient), -1) if gradient.dim() else gradient.reshape(1, 1)
        rates = (rows.abs() > self.threshold).double().mean(1)
        # NaNs are filled in afterwards: torch would look for a rule of a DTensor's in each call.
        rates, has_nan = whole(torch.stack([rates, rows.isnan().any(1).double()]))
        return activation(rates.masked_fill(has_nan > 0, torch.nan))
