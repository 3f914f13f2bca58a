"""The data of a tracked step, from which quantities compute their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.numerics.unavailable import UnavailableError
from gradlens.per_sample.gradients import layer_of
from gradlens.per_sample.labelling.batch import LossReduction
from gradlens.reductions import Reduction
from gradlens.signals.layer_signals import LayerSignals


@dataclass(frozen=True)
class Step:
    """A tracked step, after its backward pass.

    ``parameters`` are the trainable ones by name. ``batch_size`` is N and ``individual_losses`` are
    ℓₙ ``[N]``; both are ``None`` if they are unknown. ``info`` is what the user has passed to the
    context. ``reduced`` has the results of reductions, by reduction and parameter; read it by the
    methods below. ``uncovered`` is the reason why no parameter has per-sample gradients, and
    ``failed`` the reason why a reduction has no value. ``loss_weight`` is the factor between the
    loss and what the optimizer minimises, such as 0.5 for ``(loss / 2).backward()``; a scaler's
    doesn't count.
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

    def without_gradients(self) -> Step:
        """The step without reductions, signals and graph, to be kept until the next step."""
        loss = None if self.loss is None else self.loss.detach().clone()
        return replace(self, loss=loss, info={}, reduced={}, signals=LayerSignals())

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

    def total(self, reduction: Reduction) -> Any:
        """A reduction's value for all covered parameters together.

        Tensors are in float64 on the host, so that formulas of them are precise and need a single
        synchronisation with the device.
        """
        values = [_on_host(value) for value in self.by_parameter(reduction).values()]
        return reduction.total(values)

    def by_layer(self, reduction: Reduction) -> dict[str, Any]:
        """A reduction's value for the parameters of each layer together; otherwise as ``total``."""
        layers: dict[str, list[Any]] = {}
        for name, value in self.by_parameter(reduction).items():
            layers.setdefault(layer_of(name), []).append(_on_host(value))
        return {layer: reduction.total(values) for layer, values in layers.items()}

    @property
    def gradient_factor(self) -> float:
        """The gradient of what the optimizer minimises, over ḡ; N under a sum loss."""
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
        ``UnavailableError`` if none has one.
        """
        found = {n: p.grad.detach() for n, p in self.parameters.items() if p.grad is not None}
        if not found:
            raise UnavailableError(NO_GRADIENTS)
        scale = gradient_scale(self.info)
        return found if scale == 1 else {name: grad / scale for name, grad in found.items()}


def gradient_scale(info: Mapping[str, Any]) -> float:
    """The factor of the gradients by ``info["scaler"]``, a ``GradScaler``; 1 without it."""
    scaler = info.get("scaler")
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


NOTHING_COVERED = (
    "no layer gave per-sample gradients: extend the model (gradlens.extend, or "
    "Cockpit(model, ...)) before its forward pass, and call backward on the loss inside the "
    "context"
)


NO_GRADIENTS = (
    "no parameter has a gradient: no backward pass ran inside the context, the loss doesn't depend "
    "on any of them, or a hook has cleared their gradients"
)


def _on_host(value: Any) -> Any:
    return value.detach().cpu().double() if isinstance(value, Tensor) else value
