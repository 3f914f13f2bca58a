"""Quantities of the noise in the gradient of a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics import formulas
from gradlens.numerics.deviations import SampleDeviations
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.noise_quantity import NoiseQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import Deviations, ElementRatios


class NormTest(NoiseQuantity):
    """Smallest θ for which the norm test holds (Byrd et al., 2012, Eq. 3.9)."""

    reductions = (Deviations(),)
    view = View("Norm test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        return formulas.norm_test(total)


class InnerTest(NoiseQuantity):
    """Smallest θ for which the inner product test holds (Bollapragada et al., 2017, Eq. 2.6)."""

    reductions = (Deviations(),)
    view = View("Inner product test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        return formulas.inner_test(total)


class OrthoTest(NoiseQuantity):
    """Smallest ν for which the orthogonality test holds (Bollapragada et al., 2017)."""

    reductions = (Deviations(),)
    view = View("Orthogonality test", group="gradients", yscale="log", label="ν")

    def value(self, total: SampleDeviations) -> float:
        return formulas.ortho_test(total)


class GradNoiseScale(NoiseQuantity):
    """Simple gradient noise scale tr(Σ)/‖G‖² (McCandlish et al., 2018, arXiv:1812.06162).

    A value holds the ``"value"``, the ends ``"low"`` and ``"high"`` of its 95 % confidence
    interval, and the unbiased estimates ``"trace"`` of tr(Σ) and ``"squared_norm"`` of ‖G‖².
    ``"high"`` is infinite if ‖G‖² can't be distinguished from zero, for fewer than 59 samples, and
    if one sample has more than 15 % of the estimates' spread: other batches may have more noise.
    """

    reductions = (Deviations(),)
    view = View("Gradient noise scale", group="noise", yscale="log", label="samples")

    def value(self, total: SampleDeviations) -> dict[str, float]:
        return asdict(formulas.noise_scale(total))


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

    def parts(self, step: Step) -> Mapping[str, formulas.ElementRatios]:
        if step.samples < 2:
            raise UnavailableError(formulas.ONE_SAMPLE)
        return super().parts(step)

    def value(self, total: formulas.ElementRatios) -> float:
        return formulas.gradient_signal_to_noise(total)


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
            return Undefined(formulas.ONE_SAMPLE)
        groups = [] if step.optimizer is None else step.optimizer.param_groups
        if any(group.get("weight_decay") for group in groups):
            return Undefined("with weight decay, training doesn't converge to a zero of ∇L")
        return formulas.early_stopping(step.total(self.reductions[0]), step.samples)
