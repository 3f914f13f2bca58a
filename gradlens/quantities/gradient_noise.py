"""Quantities of the gradient's noise: of the whole network, of layers, or of parameters."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

from torch import nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import (
    EQUAL,
    NOT_FINITE,
    ONE_SAMPLE,
    ZERO_MEAN,
    RatioSums,
    SampleDeviations,
    mean_ratio,
)
from gradlens.numerics.noise_scales import (
    ONE_PART,
    Averages,
    NoiseScale,
    PartSums,
    dual_noise_scale,
    noise_between_parts,
    noise_scale,
)
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.basics import gradient_norms
from gradlens.quantities.dual_norms import DualBounds
from gradlens.quantities.parameter_quantity import (
    NO_GRADIENT,
    By,
    check_layers,
    groups,
    in_layers,
)
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import NEW_COCKPIT, REMOVED, Step
from gradlens.reductions import Deviations, ElementRatios
from gradlens.signals.selection import Selection, Selectors, selection

Between: TypeAlias = Literal["samples", "parts"]
Norm: TypeAlias = Literal["l2", "l1", "nuclear"]

EQUAL_IN_PART = (
    "the per-sample gradients differ, but the part that this test compares, along the mean "
    "gradient or across it, differs by no more than the rounding errors of their precision: use a "
    "higher precision, if the gradients aren't all parallel"
)
UNTRACKED = f"{{name}} is trained and not tracked: {NEW_COCKPIT}"


@dataclass(eq=False)
class NoiseQuantity(SingleStepQuantity):
    """A quantity that is defined for the per-sample gradients of any set of parameters.

    A value is that of the whole network. With ``by="layer"`` or ``by="parameter"``, it is a dict:
    ``"value"`` is that of the network (if it consists of several numbers, each has its own name),
    and ``"layers"`` or ``"parameters"`` has the same for each layer or parameter by name. A layer
    is the module to which the parameters belong: their names up to the last dot. Its value is a NaN
    with the reason if one of its trained parameters has no per-sample gradients. ``ValueError`` for
    another ``by``, and for layers if the cockpit has no model.
    """

    choices: ClassVar[Mapping[str, Sequence[str]]] = {"by": get_args(By)}

    _: KW_ONLY
    by: By = "network"

    @final
    def compute(self, step: Step) -> Any:
        parts = self.parts(step)
        network = self.follow("", self.value(self.whole(step, parts)))
        if self.by == "network":
            return network
        entries = network if isinstance(network, dict) else {"value": network}
        untracked = groups(step.untracked, self.by)
        values: dict[str, Any] = {}
        for name, group in groups(filter(self.is_of, step.parameters), self.by).items():
            lost = UNTRACKED.format(name=untracked[name][0]) if name in untracked else ""
            why = lost or self.why_not(step, group, parts)
            if why and isinstance(network, dict):
                values[name] = dict.fromkeys(network, Undefined(why))
            else:
                covered = [parts[each] for each in group if each in parts]
                found = Undefined(why) if why else self.value(self.total(covered))
                values[name] = found if why else self.follow(name, found)
        return {**entries, f"{self.by}s": values}

    def parts(self, step: Step) -> Mapping[str, Any]:
        """The first reduction's value for each covered parameter by name, on the host."""
        return step.on_host(self.reductions[0])

    @abstractmethod
    def value(self, total: Any) -> Any:
        """A number, or a dict of numbers by name, from that reduction's total of parameters."""

    # For those that are of other parameters, or of something else than one reduction.

    def select(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        """Choose the parameters, when a cockpit is made; by default, all."""

    def is_of(self, name: str) -> bool:
        """Whether a parameter was chosen."""
        return True

    def whole(self, step: Step, parts: Mapping[str, Any]) -> Any:
        """The total of all ``parts``."""
        return step.total(self.reductions[0])

    def total(self, values: Sequence[Any]) -> Any:
        """The total of the values of some parameters."""
        return self.reductions[0].total(values)

    def why_not(self, step: Step, names: Sequence[str], parts: Container[str]) -> str:
        """Why a value of these parameters would leave out a part; empty if not."""
        return _why_not_all(step, names, parts)

    def follow(self, name: str, value: Any) -> Any:
        """What is recorded of a layer or parameter, "" for the network, for the step's value."""
        return value

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        check_layers(self.name, self.by, model)
        self.select(model, parameters)


def _why_not_all(step: Step, names: Sequence[str], covered: Container[str]) -> str:
    """Why a value of these parameters would leave out a part of their gradient; empty if not."""
    removed = [name for name in names if name in step.removed]
    trained = [name for name in names if step.parameters[name].requires_grad]
    lacking = removed or [name for name in trained if name in step.lacking]
    if not lacking and any(name in covered for name in names):
        return ""
    name = (lacking or trained or names)[0]
    return f"{name} has no per-sample gradients: {step.missing[name]}"


class NormTest(NoiseQuantity):
    """Smallest θ for which the norm test holds: relative standard error of the mean gradient.

    √[Σₙ‖gₙ − ḡ‖² / ((N−1)·N·‖ḡ‖²)] (Byrd et al., 2012, Eq. 3.9).
    """

    reductions = (Deviations(),)
    view = View("Norm test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        return _relative_error(total.spread, total, total.noise + total.rounding)


class InnerTest(NoiseQuantity):
    """Smallest θ for which the inner product test holds: spread along the mean gradient.

    √[Σₙ⟨gₙ − ḡ, ḡ⟩² / ((N−1)·N·‖ḡ‖⁴)] (Bollapragada et al., 2017, Eq. 2.6).
    """

    reductions = (Deviations(),)
    view = View("Inner product test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        if total.unknown:
            return Undefined(total.unknown)
        return _relative_error(_spread_along(total), total, total.noise)


class OrthoTest(NoiseQuantity):
    """Smallest ν for which the orthogonality test holds: spread across the mean gradient.

    √[(Σₙ‖gₙ − ḡ‖² − Σₙ⟨gₙ − ḡ, ḡ⟩²/‖ḡ‖²) / ((N−1)·N·‖ḡ‖²)] (Bollapragada et al., 2017).
    """

    reductions = (Deviations(),)
    view = View("Orthogonality test", group="gradients", yscale="log", label="ν")

    def value(self, total: SampleDeviations) -> float:
        if total.unknown:
            return Undefined(total.unknown)
        across = total.spread - _spread_along(total)
        return _relative_error(across, total, total.noise + total.rounding)


@dataclass(eq=False)
class GradNoiseScale(NoiseQuantity):
    """Simple gradient noise scale tr(Σ)/‖G‖² (McCandlish et al., 2018, arXiv:1812.06162).

    A value holds the ``"value"``, the ends ``"low"`` and ``"high"`` of its 95 % confidence
    interval, and the unbiased estimates ``"trace"`` of tr(Σ) and ``"squared_norm"`` of ‖G‖².
    ``"high"`` is infinite if ‖G‖² can't be distinguished from zero, for fewer than 59 samples, and
    if one sample has more than 15 % of the estimates' spread: other batches may have more noise.

    ``between`` is whose gradients differ: ``"samples"``, or ``"parts"``, the micro-batches and
    processes of a step (Appendix A.1). The latter takes no per-sample gradients, and forward passes
    stay compiled; N is that of single samples all the same. It has an interval only over steps.
    With ``smoothing``, such as 0.99, the two estimates are averaged over steps, with weights that
    decay by this factor, and then divided; the interval is from the variation between steps.
    ``layers`` and ``exclude`` choose the layers that it is of, as for ``ParameterNorm``; those that
    normalise are enough in transformers, and cheap (Gray et al., 2024, arXiv:2411.00999).

    With ``norm="l1"``, for sign methods and Adam, and ``norm="nuclear"``, for Muon, it is
    (noise/‖G‖)² in this norm (Naganuma et al., 2026, arXiv:2602.03001), ``"trace"`` is the square
    of the noise, and ``"squared_norm"`` that of ‖G‖. The interval is one of bounds, which are far
    apart for small batches; then there is no value. Parameters of one axis have no nuclear norm,
    and are left out. ``ValueError`` for other options, or for some that exclude each other.
    """

    ratios: ClassVar[Mapping[str, tuple[str, str]]] = {"value": ("trace", "squared_norm")}
    choices: ClassVar = {
        **NoiseQuantity.choices,
        "between": get_args(Between),
        "norm": get_args(Norm),
    }
    view = View("Gradient noise scale", group="noise", yscale="log", label="samples")

    _: KW_ONLY
    between: Between = "samples"
    smoothing: float = 0.0
    norm: Norm = "l2"
    layers: Selectors | Selection | None = None
    exclude: Selectors = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.smoothing < 1:
            raise ValueError(
                f"{self.name}: smoothing={self.smoothing!r}: use a factor from 0 up to 1, or 0"
            )
        if self.norm != "l2" and (self.between == "parts" or self.smoothing):
            raise ValueError(f"{self.name}: {OF_L2.format(norm=self.norm)}")
        self.selection = selection(self.layers, self.exclude)
        if self.between == "parts":
            self.needs, self.measures = ("gradients_of_parts",), (gradient_norms, _parts)
        self._names: frozenset[str] | None = None
        self._set_reductions()
        if self.smoothing:
            self.keeps = self._averages = Averages(self.smoothing)

    def _set_reductions(self) -> None:
        of = self._names
        found = Deviations(of) if self.norm == "l2" else DualBounds(self.norm, of)
        self.reductions = () if self.between == "parts" else (found,)

    def select(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        names = in_layers(self.name, model, [*parameters], self.selection)
        if self.norm == "nuclear":
            names = [name for name in names if parameters[name].dim() >= 2]
        if not names:
            raise ValueError(f"{self.name}: the selected layers have no parameters that it is of")
        self._names = frozenset(names) if len(names) < len(parameters) else None
        self._set_reductions()

    def is_of(self, name: str) -> bool:
        return self._names is None or name in self._names

    def parts(self, step: Step) -> Mapping[str, Any]:
        if self.between == "samples":
            return super().parts(step)
        if step.parts is None or step.parts.count < 2:
            raise UnavailableError(ONE_PART)
        sums, (names, sizes) = step.measured(_parts), step.measured(gradient_norms)
        norms = dict(zip(names, sizes.tolist(), strict=True))
        squares = dict(zip(step.parameters, sums.squares.tolist(), strict=True))
        scale = step.gradient_scale.of_backward
        return {
            name: _OfParts(squares[name], norms[name] ** 2, sums, scale)
            for name in step.parameters
            if name in norms and self.is_of(name)
        }

    def whole(self, step: Step, parts: Mapping[str, Any]) -> Any:
        return super().whole(step, parts) if self.reductions else self.total([*parts.values()])

    def total(self, values: Sequence[Any]) -> Any:
        if self.reductions:
            return super().total(values)
        squares = sum(each.squares for each in values)
        return replace(
            values[0], squares=squares, squared_norm=sum(each.squared_norm for each in values)
        )

    def why_not(self, step: Step, names: Sequence[str], parts: Container[str]) -> str:
        if self.reductions:
            return super().why_not(step, names, parts)
        removed = next((f"{name}: {REMOVED}" for name in names if name in step.removed), "")
        return removed or ("" if any(name in parts for name in names) else NO_GRADIENT)

    def value(self, total: Any) -> dict[str, float]:
        if isinstance(total, SampleDeviations):
            return asdict(noise_scale(total))
        if isinstance(total, _OfParts):
            return asdict(
                noise_between_parts(total.squares, total.squared_norm, total.parts, total.scale)
            )
        return asdict(dual_noise_scale(total))

    def follow(self, name: str, value: Any) -> Any:
        return asdict(self._averages.add(name, NoiseScale(**value))) if self.smoothing else value


def _parts(step: Step) -> PartSums | None:
    return step.parts


@dataclass(frozen=True)
class _OfParts:
    """What ``noise_between_parts`` takes, of one parameter or of several."""

    squares: float
    squared_norm: float
    parts: PartSums
    scale: float


OF_L2 = (
    "norm={norm!r} takes per-sample gradients, and has bounds that aren't averaged over steps: "
    "leave out between='parts' and smoothing"
)


@dataclass(eq=False)
class MeanGSNR(NoiseQuantity):
    """Mean over all elements j of ḡⱼ² / (variance of gₙⱼ over samples + ε).

    Liu et al., 2020, arXiv:2001.07384, with the population variance as there; ε is ``epsilon``.
    """

    view = View("Mean GSNR", group="noise", yscale="log", label="mean GSNR")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reductions = (ElementRatios(self.epsilon),)

    def parts(self, step: Step) -> Mapping[str, RatioSums]:
        if step.samples < 2:
            raise UnavailableError(ONE_SAMPLE)
        return super().parts(step)

    def value(self, total: RatioSums) -> float:
        return mean_ratio(total)


@dataclass(eq=False)
class EarlyStopping(SingleStepQuantity):
    """1 − N·meanⱼ[ḡⱼ²/(vⱼ + ε)], vⱼ the sample variance: stop when it is positive.

    Mahsereci et al., 2017, arXiv:1703.09580, Eq. 7; ε is ``epsilon``. The criterion tests whether
    the gradient of the loss can be distinguished from zero. It holds for any optimizer that
    converges to a zero of this gradient. Weight decay moves the optimum elsewhere: if the optimizer
    is passed to the context and has weight decay, the value is a NaN with this reason.
    """

    view = View("Early stopping", group="noise", label="criterion")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reductions = (ElementRatios(self.epsilon, ddof=1),)

    def compute(self, step: Step) -> float:
        if step.samples < 2:
            return Undefined(ONE_SAMPLE)
        groups = [] if step.optimizer is None else step.optimizer.param_groups
        if any(group.get("weight_decay") for group in groups):
            return Undefined("with weight decay, training doesn't converge to a zero of ∇L")
        ratio = mean_ratio(step.total(self.reductions[0]))
        return ratio if isinstance(ratio, Undefined) else 1 - step.samples * ratio


def _spread_along(found: SampleDeviations) -> float:
    """Σₙ⟨gₙ − ḡ, ḡ⟩²/‖ḡ‖², zero for a mean of zero."""
    squared_mean = found.squared_norm_of_mean
    return found.squared_dots / squared_mean if squared_mean else 0.0


def _relative_error(spread: float, found: SampleDeviations, rounding: float) -> float:
    n = found.samples
    if n < 2:
        return Undefined(ONE_SAMPLE)
    if found.squared_norm_of_mean == 0:
        return Undefined(ZERO_MEAN)
    if not math.isfinite(spread):
        return Undefined(NOT_FINITE)
    if spread <= rounding:
        return Undefined(EQUAL if found.vanish else EQUAL_IN_PART)
    return math.sqrt(spread / ((n - 1) * n * found.squared_norm_of_mean))
