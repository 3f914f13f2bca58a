"""The data of a tracked step, from which quantities compute their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.gradients.gradients import layer_of
from gradlens.graph.loss import LossReduction
from gradlens.graph.scaler import GradientScale
from gradlens.history.undefined import Undefined
from gradlens.numerics.noise_scales import PartSums
from gradlens.numerics.tensors import are_small, is_on_host, on_host
from gradlens.numerics.unavailable import UnavailableError
from gradlens.reductions import Reduction
from gradlens.signals.signal import LayerSignals

Measure: TypeAlias = Callable[["Step"], Any]
"""What is computed of a step besides reductions: tensors, or what has some, on their device."""


@dataclass(frozen=True)
class Step:
    """A tracked step, after its backward pass.

    ``parameters`` are the trainable ones by name. ``batch_size`` is N and ``individual_losses`` are
    ℓₙ ``[N]``; both are ``None`` if they are unknown. ``info`` is what the user has passed to the
    context. ``reduced`` has the results of reductions, by reduction and parameter; read it by the
    methods below. ``uncovered`` is the reason why no parameter has per-sample gradients, and
    ``failed`` the reason why a reduction has no value. ``loss_weight`` is the factor between the
    loss and what the optimizer minimises, such as 0.5 for ``(loss / 2).backward()``, without a
    scaler's, and a NaN with its reason where it isn't known. ``removed`` names the parameters that
    the model doesn't have any more. ``without_losses`` is the reason why ``individual_losses`` are
    unknown. ``untracked`` names the model's trained parameters besides ``parameters``, and
    ``lacking`` those of ``parameters`` that have a gradient, but none of single samples.
    ``missing`` says of parameters why they have no gradients of single samples. ``gradient_scale``
    has the factors of their gradients by a scaler. ``parts`` are sums over the parts of the batch,
    if it has some, where a quantity needs ``"gradients_of_parts"``. ``overwritten`` is the reason
    why ``p.grad`` isn't the gradient that the optimizer has taken. ``measures`` are what quantities
    measure of the step; all of them are moved to the host together.
    """

    global_step: int
    parameters: Mapping[str, nn.Parameter]
    loss_reduction: LossReduction = "mean"
    batch_size: int | None = None
    loss: Tensor | None = None
    individual_losses: Tensor | None = None
    optimizer: Optimizer | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    reduced: Mapping[Reduction, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    signals: LayerSignals = field(default_factory=LayerSignals, repr=False)
    uncovered: str = ""
    failed: Mapping[Reduction, str] = field(default_factory=dict)
    loss_weight: float = 1.0
    removed: Sequence[str] = ()
    without_losses: str = ""
    untracked: Sequence[str] = ()
    lacking: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict, repr=False)
    gradient_scale: GradientScale = field(default_factory=GradientScale, repr=False)
    parts: PartSums | None = field(default=None, repr=False)
    overwritten: str = ""
    measures: Sequence[Measure] = ()
    _totals: dict[Reduction, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def without_gradients(self) -> Step:
        """The step without reductions, signals and graph, to be kept until the next step."""
        loss = None if self.loss is None else self.loss.detach().clone()
        return replace(
            self,
            loss=loss,
            individual_losses=self._known.get(losses_of_samples, self.individual_losses),
            info={},
            measures=(),
            reduced={},
            signals=LayerSignals(),
            failed={},
            gradient_scale=GradientScale(),
        )

    @property
    def samples(self) -> int:
        """N; ``UnavailableError`` if it is unknown."""
        if self.batch_size is None:
            raise self._nothing_covered()
        return self.batch_size

    def _nothing_covered(self) -> UnavailableError:
        return UnavailableError(self.uncovered or NOTHING_COVERED)

    def by_parameter(self, reduction: Reduction) -> Mapping[str, Any]:
        """A reduction's value for each covered parameter, on its device and in its precision.

        ``KeyError`` if the reduction was not requested; ``UnavailableError`` if it has failed, or
        if no parameter is covered.
        """
        if reduction in self.failed:
            raise UnavailableError(self.failed[reduction])
        if reduction not in self.reduced:
            raise KeyError(
                f"{reduction} was not computed at step {self.global_step}: name it in the "
                "quantity's `reductions`"
            )
        found = self.reduced[reduction]
        if not found:
            raise self._nothing_covered()
        return {name: found[name] for name in self.parameters if name in found}

    def on_host(self, reduction: Reduction) -> Mapping[str, Any]:
        """As ``by_parameter``, but on the host, and in float64 where a value is a tensor.

        The program waits once for the device, since all parameters' values are moved together, and
        those of other reductions with them if they are small.
        """
        if reduction not in self._known:
            self._move({reduction: self.by_parameter(reduction)})
        found: Mapping[str, Any] = self._known[reduction]
        return found

    def measured(self, measure: Measure) -> Any:
        """What a measure has found, on the host; moved with all else that is small."""
        if measure not in self._known:
            self._move({measure: measure(self)})
        return self._known[measure]

    def _move(self, wanted: dict[Any, Any]) -> None:
        if not is_on_host(wanted):
            small = (each for each, found in self.reduced.items() if found and are_small(found))
            others = (each for each in small if each not in self.failed.keys() | self._known.keys())
            for measure in self.measures:
                with suppress(Exception):  # raised again where its value is wanted
                    wanted.setdefault(measure, measure(self))
            wanted = on_host({**{each: self.by_parameter(each) for each in others}, **wanted})
        for each, value in wanted.items():
            if isinstance(each, Reduction):
                value = {
                    name: (one.detach() if one.requires_grad else one).double()
                    if isinstance(one, Tensor)
                    else one
                    for name, one in value.items()
                }
            self._known.setdefault(each, value)

    def total(self, reduction: Reduction) -> Any:
        """A reduction's value for all covered parameters together, on the host.

        Tensors are in float64, so that formulas of them are precise.
        """
        if reduction not in self._totals:
            self._totals[reduction] = reduction.total(list(self.on_host(reduction).values()))
        return self._totals[reduction]

    def by_layer(self, reduction: Reduction) -> dict[str, Any]:
        """A reduction's value for the parameters of each layer together; otherwise as ``total``."""
        layers: dict[str, list[Any]] = {}
        for name, value in self.on_host(reduction).items():
            layers.setdefault(layer_of(name), []).append(value)
        return {layer: reduction.total(values) for layer, values in layers.items()}

    @property
    def gradient_factor(self) -> float:
        """The gradient of what the optimizer minimises, over ḡ; N under a sum loss.

        ``UnavailableError`` if that is no constant, or isn't known.
        """
        if isinstance(self.loss_weight, Undefined):
            raise UnavailableError(self.loss_weight.reason)
        return self.loss_weight * self._loss_factor

    @property
    def _loss_factor(self) -> int:
        return self.samples if self.loss_reduction == "sum" else 1

    def mean_loss(self) -> float:
        """L under a mean loss, L/N under a sum loss; ``UnavailableError`` without a loss."""
        if self.loss is None:
            raise UnavailableError("the loss is unknown: pass loss=... to the context")
        return float(self.loss.detach()) / self._loss_factor

    def gradients(self) -> dict[str, Tensor]:
        """``p.grad`` of all parameters that have one, without a scaler's scale.

        The others are those that optimizers leave out, too, such as an expert without tokens.
        Parameters that are frozen, or that the model has no longer, may have gradients of earlier
        steps, which don't count. ``UnavailableError`` if none has one, or if they are overwritten.
        """
        if self.overwritten:
            raise UnavailableError(self.overwritten)
        trained = {n: p for n, p in self.parameters.items() if n not in self.removed}
        found = {
            name: parameter.grad.detach() if parameter.grad.requires_grad else parameter.grad
            for name, parameter in trained.items()
            if parameter.grad is not None and parameter.requires_grad
        }
        if not found:
            raise UnavailableError(NO_GRADIENTS)
        scales = self.gradient_scale.of(trained)
        return {n: grad if scales[n] == 1 else grad / scales[n] for n, grad in found.items()}


def losses_of_samples(step: Step) -> Tensor | None:
    """ℓₙ ``[N]`` of a step, as a measure."""
    return step.individual_losses


NOTHING_COVERED = (
    "no layer gave per-sample gradients: extend the model (gradlens.extend, or "
    "Cockpit(model, ...)) before its forward pass, and call backward on the loss inside the "
    "context"
)


NEW_COCKPIT = (
    "close the cockpit and make a new one, which continues the run's file with resume=True"
)
REMOVED = (
    "the model doesn't have this parameter any more, since it, or its layer, was replaced or "
    f"removed: {NEW_COCKPIT}"
)
NO_GRADIENTS = (
    "no parameter has a gradient: no backward pass ran inside the context, the loss doesn't depend "
    "on any of them, all are frozen or were replaced, or a hook has cleared their gradients"
)


# Reasons why values are NaN ----------------------------------------------------------------

EMPTY = "the batch is empty"
NO_FEATURES = "the layer has no features"
NO_ELEMENTS = "the parameter has no elements"
NOT_CONVERGED = "the eigenvalues or singular values are unknown: LAPACK did not converge"


def all_explained(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """``explained`` values by name; ``what`` they are of comes in front of the name."""
    return {
        # Most values are numbers, for which a call takes longer than this check.
        name: value
        if type(value) is float and value == value
        else explained(value, f"{what} {name}")
        for name, value in values.items()
    }


def explained(value: Any, what: str) -> Any:
    """The value, in which each NaN has a reason: ``what`` is not finite.

    Applies to a number, and to the numbers in nested dicts. A NaN that has a reason keeps it. Other
    values, such as arrays, are returned unchanged.
    """
    if isinstance(value, Mapping):
        return {key: explained(part, what) for key, part in value.items()}
    number = isinstance(value, float) or (isinstance(value, Tensor) and value.dim() == 0)
    if number and not isinstance(value, Undefined) and math.isnan(float(value)):
        return Undefined(f"{what} has NaN or Inf")
    return value
