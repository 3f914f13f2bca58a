"""Quantities of the curvature, and of what gradients are along it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.diagonals import (
    DiagonalKind,
    LossDiagonal,
    LossTraces,
)
from gradlens.curvature.eigenpairs import WarmStartedEigenpairs, Which
from gradlens.curvature.estimate import Estimate, spectral_density
from gradlens.curvature.operator import CurvatureOperator
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import NOT_FINITE
from gradlens.numerics.tensors import on_host
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.parameter_quantity import By, check_layers, groups
from gradlens.quantities.quantity import (
    CurvatureQuantity,
    GradientCurvatureQuantity,
)
from gradlens.quantities.step import Step
from gradlens.reductions import SquaredNorms, SumOfSquares


@dataclass(eq=False)
class HessEigenvalues(CurvatureQuantity):
    """The ``k`` outermost eigenvalues of the Hessian, or of the generalised Gauss-Newton matrix.

    A value holds ``"eigenvalues"``, outermost first, their ``"residuals"`` ‖Hv − λv‖, whether they
    have ``"converged"`` to the relative ``tolerance`` within ``max_products`` products of the
    matrix and a vector, the number of ``"products"``, and the ``"reason"`` if they have not.
    ``which`` is ``"largest"`` or ``"smallest"`` (algebraic), or ``"magnitude"``. ``matrix`` is
    ``"hessian"``, or ``"ggn"``, which needs ``info={"outputs": ...}``.

    With ``by="layer"`` or ``by="parameter"``, ``"layers"`` or ``"parameters"`` has the same for the
    diagonal block of each layer or parameter by name, with its outermost eigenvalue as ``"value"``.
    A layer is the module to which the parameters belong: their names up to the last dot. Each block
    takes a search of its own. ``ValueError`` for other options, and for layers if the cockpit has
    no model.
    """

    choices: ClassVar = {"by": get_args(By), "matrix": ("hessian", "ggn")}
    view = View("Curvature eigenvalues", group="curvature", yscale="symlog", label="λ")

    k: int = 5
    which: Which = "largest"
    matrix: Literal["hessian", "ggn"] = "hessian"
    tolerance: float = 1e-3  # that of HessMaxEV
    max_products: int = 300
    by: By = field(default="network", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._eigenpairs = self.keeps = WarmStartedEigenpairs(self.tolerance, self.max_products)

    def compute(self, curvature: Curvature) -> dict[str, Any]:
        matrix = curvature.hessian if self.matrix == "hessian" else curvature.ggn
        found = self._entries(matrix, curvature.seed)
        if self.by == "network":
            return found
        blocks: dict[str, Any] = {}
        for name, names in groups(matrix.parameters, self.by).items():
            of_block = self._entries(matrix.block(names), curvature.seed, name)
            value = of_block["eigenvalues"][0]
            known = value if math.isfinite(value) else Undefined(of_block["reason"])
            blocks[name] = {"value": known, **of_block}
        return {**found, f"{self.by}s": blocks}

    def _entries(self, matrix: CurvatureOperator, seed: int, block: str = "") -> dict[str, Any]:
        found = self._eigenpairs(matrix, seed, self.k, self.which, block)
        others = ("residuals", "converged", "products", "reason")
        return {"eigenvalues": found.values, **{name: getattr(found, name) for name in others}}

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        check_layers(self.name, self.by, model)


@dataclass(eq=False)
class HessMaxEV(CurvatureQuantity):
    """Largest (algebraic) eigenvalue of the mini-batch Hessian, by Lanczos' method.

    At one of ``search_interval`` tracked steps, it searches: it starts from the eigenvector of the
    last tracked step and from a random vector, and takes at least ten products, so that it finds an
    eigenvalue that has become larger than that of the last eigenvector. At the other steps, it only
    improves the last eigenvector, by one product or more, until the value's error is within the
    tolerance. If another eigenvalue has become larger in the meantime, the next search finds it. By
    default, ``search_interval`` is 1 and each step has a search.

    The value of a search has an eigenvalue of the Hessian within the relative ``tolerance``. At the
    other steps, the error is estimated from the residual and the distance to the next eigenvalue of
    the last search, and there is an eigenvalue within √(tolerance/2) in any case. The largest
    eigenvalue is never below the value, except for rounding. If the error is not within the
    tolerance after ``max_products`` Hessian products, the value is a NaN whose reason has the
    estimate and its residual. ``ValueError`` for a ``search_interval`` below one.
    """

    least: ClassVar = {"search_interval": 1}
    view = View("Largest Hessian eigenvalue", group="curvature", yscale="symlog", label="λ₁")

    # As in cockpit-for-pytorch's power iteration.
    tolerance: float = 1e-3
    max_products: int = 100
    search_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._eigenpairs = self.keeps = WarmStartedEigenpairs(
            self.tolerance, self.max_products, self.search_interval
        )

    def compute(self, curvature: Curvature) -> float:
        found = self._eigenpairs(curvature.hessian, curvature.seed)
        if found.converged:
            return float(found.values[0])
        if not math.isfinite(found.values[0]):
            return Undefined(found.reason)
        best = f"{found.values[0]:.4g} ± {found.residuals[0]:.2g}"
        return Undefined(f"{found.reason}; the estimate is {best}")


@dataclass(eq=False)
class SpectralDensity(CurvatureQuantity):
    """Density of the Hessian's eigenvalues by stochastic Lanczos quadrature.

    A value holds ``"grid"`` and ``"density"`` ``[points]``, smoothed by a Gaussian of standard
    deviation ``"width"``, and a 95 % confidence band ``"low"``, ``"high"``, which holds at each
    point by itself. What is random are the probes, not the batch. Lanczos' method runs
    for ``steps`` steps from each of ``probes`` random vectors, with one Hessian product a step
    (Ghorbani et al., 2019, arXiv:1901.10159).
    """

    view = View("Hessian spectral density", group="curvature", yscale="log", label="density")

    probes: int = 4
    steps: int = 30
    points: int = 256

    def compute(self, curvature: Curvature) -> dict[str, Any]:
        found = spectral_density(
            curvature.hessian, self.probes, self.steps, points=self.points, seed=curvature.seed
        )
        low, high = found.confidence_band()
        return {
            "grid": found.grid,
            "density": found.density,
            "low": low,
            "high": high,
            "width": Undefined(found.reason) if found.reason else found.width,
        }


@dataclass(eq=False)
class HessTrace(CurvatureQuantity):
    """Trace of the mini-batch Hessian, or of the generalised Gauss-Newton matrix.

    ``curvature`` selects the matrix and how its diagonal is computed:

    - ``"diag_h"``, the Hessian. It is exact where its diagonal is that of the Gauss-Newton matrix
      and that is exact: for networks whose outputs are piecewise linear in each parameter, such as
      those with ReLU and, in eval mode, BatchNorm.
    - ``"diag_ggn_exact"``, the Gauss-Newton matrix. It is exact where all parameters have
      per-sample gradients and each sample has at most 256 outputs.
    - ``"diag_ggn_mc"``, the Gauss-Newton matrix, by Monte Carlo sampling, which is cheap:
      ``samples`` backward passes from random gradients at the outputs, each for all samples of the
      batch or for a random ``sub_batch`` of them. The standard error is computed from the
      differences between the passes; with one pass, from those between the batch's samples, which
      overestimates it. If few samples have most of the trace, a sub-batch may contain none of them,
      and the interval is too narrow. Where samples are coupled in the network, as by BatchNorm,
      there are three passes at least, each for all samples.

    For all other networks the trace is estimated by Hutchinson's method with ``samples`` products,
    at least two. For ``"diag_ggn_mc"``, whether the graph keeps the samples apart is checked at the
    first step and whenever its operations, shapes or parameters change: samples that are mixed
    without such a change, for example by other numbers in an index, are not detected.

    A value holds the ``"trace"``, its ``"standard_error"``, the ends ``"low"`` and ``"high"`` of a
    95 % confidence interval, the ``"method"`` (``"exact"``, ``"Monte Carlo"`` or ``"Hutchinson"``),
    and under ``"parameters"`` the first four for the block of each parameter. The Gauss-Newton
    matrix needs the tensor of outputs through which the loss depends on the parameters; without it,
    the value is a NaN whose reason names what to pass. ``ValueError`` for an unknown ``curvature``,
    and for ``samples`` or ``sub_batch`` below their minimum.
    """

    choices: ClassVar = {"curvature": get_args(DiagonalKind)}
    view = View("Hessian trace", group="curvature", yscale="symlog", label="tr(H)")

    curvature: DiagonalKind = "diag_h"
    samples: int = 10
    sub_batch: int | None = None

    @property
    def least(self) -> Mapping[str, int]:  # type: ignore[override]
        # The error is estimated from several samples: those of the batch for one Monte Carlo pass.
        return {"samples": 1 if self.curvature == "diag_ggn_mc" else 2, "sub_batch": 2}

    def compute(self, curvature: Curvature) -> dict[str, Any]:
        found = curvature.traces(self.curvature, self.samples, self.sub_batch)
        parameters = {name: _trace_fields(trace) for name, trace in found.traces.items()}
        return {**_trace_fields(found.trace), "method": found.method, "parameters": parameters}


def _trace_fields(estimate: Estimate) -> dict[str, float]:
    low, high = estimate.confidence_interval()
    return {
        "trace": estimate.value,
        "standard_error": estimate.standard_error,
        "low": low,
        "high": high,
    }


@dataclass(eq=False)
class DirectionalDerivatives(CurvatureQuantity):
    """Gradient and curvature along the directions of largest curvature, with the noise in both.

    The directions are unit eigenvectors e of the generalised Gauss-Newton matrix, those of its
    ``k`` largest eigenvalues. A value holds these ``"eigenvalues"``, descending, and the mean
    gradient's components along e, ``"gradient"``; signs of e are chosen so that none is negative.
    ``"gradient_snr"`` and ``"curvature_snr"`` are the signal-to-noise ratios of both. ``"overlap"``
    is the share of the mean gradient's squared norm in the span of all e (Gur-Ari et al., 2018,
    arXiv:1812.04754).

    A ratio is γ̄²/(s²/N), with mean γ̄ and variance s² of the samples' first derivatives gₙᵀe, or of
    their second derivatives eᵀJₙᵀHₙJₙe. It is N times that of Dangel et al. (2022,
    arXiv:2106.02624), since it describes the mini-batch and not a sample. If the gradient consists
    of noise, the ratio is 1 on average, and above 4 about one time in twenty. With micro-batches or
    several processes, the values are those of the last part of the first process.

    Directions are exact, from Gram matrices (``LowRankGGN``). Where these would be too large, the
    value is a NaN: with more than 256 outputs for each sample, 2048 for the mini-batch, or 2 GiB.
    It is one, too, where samples are coupled, as by ``BatchNorm`` in train mode; on a ``Probe``, in
    eval mode, they are not. Entries beyond the matrix's rank are NaN. The network's outputs are
    found as for ``HessEigenvalues(matrix="ggn")``; the value is a NaN if their rows aren't the
    samples, but positions, say. ``ValueError`` for ``k`` below one.
    """

    least: ClassVar = {"k": 1}
    view = View("Signal along directions", group="curvature", yscale="log", label="SNR")

    k: int = 10

    def compute(self, curvature: Curvature) -> dict[str, Any]:
        return vars(curvature.directions(self.k))


@dataclass(eq=False)
class TIC(GradientCurvatureQuantity):
    """Base of the approximations of tr(H⁻¹·Σₙgₙgₙᵀ/N) (Thomas et al., 2020, arXiv:1906.07774).

    ``curvature`` and ``samples`` are those of ``HessTrace``; ε is ``epsilon``. Only parameters that
    have per-sample gradients count. If the curvature is not positive, the criterion has no meaning
    and the value is a NaN; likewise if the batch comes in parts, since curvature is that of the
    last part alone.
    """

    choices: ClassVar = {"curvature": get_args(DiagonalKind)}
    least: ClassVar = {"samples": 1}

    curvature: DiagonalKind = "diag_h"
    epsilon: float = 1e-7  # as in cockpit-for-pytorch
    samples: int = 10

    @final
    def before_backward(self, curvature: Curvature) -> LossTraces:
        if curvature.is_part:
            raise UnavailableError(OF_PARTS)
        return self._found(curvature)

    @final
    def compute(self, step: Step, earlier: Any) -> float:
        (reduction,) = self.reductions
        sums = step.by_parameter(reduction)
        estimated = earlier.method == "Hutchinson"
        why = "estimated, and more samples may help" if estimated else "zero there"
        return self._criterion(sums, step.samples, earlier, f"{self.curvature} is {why}")

    @abstractmethod
    def _found(self, curvature: Curvature) -> LossTraces:
        """The diagonal of the curvature, or its traces."""

    @abstractmethod
    def _criterion(
        self, sums: Mapping[str, Tensor], samples: int, found: Any, remedy: str
    ) -> float:
        """The value; ``remedy`` completes the reason of a NaN if the curvature is not positive."""


OF_PARTS = (
    "the batch comes in parts, from micro-batches or processes: gradients are those of all parts, "
    "and curvature is that of one. A micro-batch with a step of its own, without "
    "accumulating=True, has a value of its own"
)


@final
class TICDiag(TIC):
    """Σⱼ (Σₙgₙⱼ²/N) / (cⱼ + ε) over all elements j, with the curvature's diagonal c.

    A sampled or estimated diagonal is noisy in each element, which biases the ratios. ``TICTrace``
    divides by the sum of the elements instead.
    """

    reductions = (SumOfSquares(),)
    view = View("TIC (diagonal)", group="curvature", yscale="log", label="TIC")

    def _found(self, curvature: Curvature) -> LossDiagonal:
        return curvature.diagonal(self.curvature, self.samples)

    def _criterion(
        self, sums: Mapping[str, Tensor], samples: int, found: LossDiagonal, remedy: str
    ) -> float:
        pairs = [
            (total.to(diagonal.device, diagonal.dtype) / samples, diagonal)
            for total, diagonal in ((sums[name], found.values[name]) for name in sums)
        ]
        flat = int(torch.stack([((c <= 0) & (s > 0)).sum() for s, c in pairs]).sum())
        if flat:
            elements = sum(c.numel() for _, c in pairs)
            return Undefined(
                f"the curvature is not positive at {flat} of {elements} elements ({remedy})"
            )
        total = float(torch.stack([(s / (c + self.epsilon)).sum() for s, c in pairs]).sum())
        return total if math.isfinite(total) else Undefined(NOT_FINITE)


@final
@dataclass(eq=False)
class TICTrace(TIC):
    """(Σₙⱼgₙⱼ²/N) / (Σⱼcⱼ + ε), with the curvature's diagonal c.

    ``sub_batch`` is that of ``HessTrace``.
    """

    reductions = (SquaredNorms(),)
    least: ClassVar = {"samples": 1, "sub_batch": 2}
    view = View("TIC (trace)", group="curvature", yscale="log", label="TIC")

    sub_batch: int | None = None

    def _found(self, curvature: Curvature) -> LossTraces:
        return curvature.traces(self.curvature, self.samples, self.sub_batch)

    def _criterion(
        self, sums: Mapping[str, Tensor], samples: int, found: LossTraces, remedy: str
    ) -> float:
        moment = float(SquaredNorms().total(on_host([*sums.values()])).sum()) / samples
        trace = sum(found.traces[name].value for name in sums)
        if trace <= 0 < moment:
            return Undefined(f"the trace of the curvature is not positive: {trace:.4g} ({remedy})")
        ratio = moment / (trace + self.epsilon)
        return ratio if math.isfinite(ratio) else Undefined(NOT_FINITE)
