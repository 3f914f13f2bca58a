"""The diagonal of a loss's curvature, and the traces of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from backpack.extensions import DiagGGNExact, DiagGGNMC, DiagHessian
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn

from gradlens.curvature.backpack_graph import BackpackGraph, BeyondBackpackError
from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.ggn_diagonal import SamplesJacobians, roots
from gradlens.curvature.operator import CurvatureOperator, parameter_slices
from gradlens.curvature.probes import private_random_numbers, rademacher
from gradlens.curvature.products import NotFiniteError, Products, float64_device
from gradlens.curvature.trace import Estimate, estimates, undefined_estimate
from gradlens.numerics.running_mean import RunningMean
from gradlens.per_sample.gradients import Plans

DiagonalKind: TypeAlias = Literal["diag_h", "diag_ggn_exact", "diag_ggn_mc"]
"""Of the Hessian, or of the generalised Gauss-Newton matrix; the last one samples targets."""

Method: TypeAlias = Literal["exact", "Monte Carlo", "Hutchinson", ""]
"""Where a diagonal comes from; nothing where there is none."""

MAX_BYTES = 2**31
"""More memory than this is not taken for BackPACK's matrices."""

_EXTENSIONS: dict[DiagonalKind, Callable[[], BackpropExtension]] = {
    "diag_h": DiagHessian,
    "diag_ggn_exact": DiagGGNExact,
    "diag_ggn_mc": DiagGGNMC,
}


def check_request(
    name: str, kind: str, samples: int, least: int, sub_batch: int | None = None
) -> None:
    """``ValueError`` on behalf of ``name`` for a kind that there isn't, or too few samples."""
    if kind not in _EXTENSIONS:
        known = ", ".join(repr(known) for known in _EXTENSIONS)
        raise ValueError(f"{name}: curvature={kind!r} is unknown: use one of {known}")
    if samples < least:
        raise ValueError(f"{name}: samples={samples} is too few: use {least} or more")
    if sub_batch is not None and sub_batch < 2:
        raise ValueError(f"{name}: sub_batch={sub_batch} is too few: use 2 or more")


@dataclass(frozen=True)
class LossTraces:
    """The ``trace`` and the parameters' ``traces``, as those of a ``LossDiagonal``."""

    trace: Estimate
    traces: Mapping[str, Estimate]
    method: Method


@dataclass(frozen=True)
class LossDiagonal:
    """Diagonal ``values`` by parameter name, each of its parameter's shape, in float64.

    ``trace`` is the sum of all and ``traces`` the sum for each parameter, with an error of zero
    where the ``method`` is exact. Where there are no numbers, their reason is in the traces.
    """

    values: Mapping[str, Tensor]
    trace: Estimate
    traces: Mapping[str, Estimate]
    method: Method

    def sums(self) -> LossTraces:
        """Without the values."""
        return LossTraces(self.trace, self.traces, self.method)


def diagonal_by_backpack(
    kind: DiagonalKind,
    graph: BackpackGraph,
    parameters: Mapping[str, nn.Parameter],
    scale: float,
    samples: int,
    seed: int,
) -> LossDiagonal:
    """By BackPACK's rules; ``diag_ggn_mc`` is the mean of ``samples`` independent ones.

    ``BeyondBackpackError`` where there are no rules, or where they take too much memory.
    """
    sampled = kind == "diag_ggn_mc"
    if graph.bytes_for(exact=not sampled, hessian=kind == "diag_h") > MAX_BYTES:
        raise BeyondBackpackError(f"BackPACK's matrices would take more than {MAX_BYTES} bytes")

    def draw() -> Tensor:
        extension = _EXTENSIONS[kind]()
        with _field_kept(parameters.values(), extension.savefield):
            graph.run(extension)
            parts = [_saved(name, p, extension.savefield) for name, p in parameters.items()]
        return torch.cat(parts) * (scale * graph.factor)

    with private_random_numbers(next(iter(parameters.values())).device, seed):
        if sampled:
            return _mean(draw, samples, parameters, "Monte Carlo")
        return _exact(draw, parameters)


def diagonal_by_per_sample_gradients(
    kind: DiagonalKind,
    ggn: GGNOperator,
    model: nn.Module | None,
    parameters: Mapping[str, nn.Parameter],
    samples: int,
    seed: int,
    plans: Plans,
) -> LossDiagonal:
    """Of the generalised Gauss-Newton matrix, by one backward pass for each output.

    For ``diag_ggn_mc`` it is one for each of ``samples`` random signings of the root's columns.
    ``NoRootError`` where there are no per-sample gradients, or too many outputs.
    """
    generator = np.random.default_rng(seed)
    columns = roots(ggn, generator)
    jacobians = SamplesJacobians(ggn, model, plans)

    def squared(start: Tensor) -> Tensor:
        found = jacobians.squared(start)
        return torch.cat([_flat64(part) for part in found.values()]) * ggn.scale

    def exact() -> Tensor:
        return torch.stack([squared(column) for column in columns]).sum(0)

    def sampled() -> Tensor:
        signs = torch.tensor(2 * generator.integers(0, 2, columns.shape[:2]) - 1)
        shape = (*signs.shape, *[1] * (columns.dim() - 2))
        return squared((columns * signs.to(columns).reshape(shape)).sum(0))

    if kind == "diag_ggn_mc":
        return _mean(sampled, samples, parameters, "Monte Carlo")
    return _exact(exact, parameters)


def diagonal_by_hutchinson(
    operator: CurvatureOperator, parameters: Mapping[str, nn.Parameter], samples: int, seed: int
) -> LossDiagonal:
    """As the mean of z∘Hz over random signs z (Bekas et al., 2007, Eq. 2)."""
    products = Products(operator)
    generator = np.random.default_rng(seed)

    def draw() -> Tensor:
        probe = rademacher(products, generator)
        return probe * products(probe)

    return _mean(draw, samples, parameters, "Hutchinson")


def undefined_diagonal(
    parameters: Mapping[str, nn.Parameter], samples: int, reason: str
) -> LossDiagonal:
    """What there is instead of a diagonal."""
    trace = undefined_estimate(samples, 0, reason)
    part = undefined_estimate(samples, 0, "as the trace of all parameters")
    values = {
        name: torch.full(p.shape, torch.nan, dtype=torch.float64) for name, p in parameters.items()
    }
    return LossDiagonal(values, trace, dict.fromkeys(parameters, part), "")


def _exact(find: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]) -> LossDiagonal:
    found = _mean(find, 1, parameters, "exact")
    traces = {name: replace(each, standard_error=0.0) for name, each in found.traces.items()}
    return replace(found, trace=replace(found.trace, standard_error=0.0), traces=traces)


def _mean(
    draw: Callable[[], Tensor],
    samples: int,
    parameters: Mapping[str, nn.Parameter],
    method: Method,
) -> LossDiagonal:
    """Mean of independent diagonals ``[D]``, and of the sums of their blocks.

    ``NotFiniteError`` if one contains NaN or Inf.
    """
    slices = parameter_slices(parameters)
    total, sums = torch.zeros(()), RunningMean()
    for _ in range(samples):
        diagonal = draw()
        if not bool(diagonal.isfinite().all()):
            raise NotFiniteError("the curvature's diagonal contains NaN or Inf")
        total = diagonal if sums.samples == 0 else total.add_(diagonal)
        parts = [diagonal.sum(), *(diagonal[block].sum() for block in slices.values())]
        sums.add(torch.stack(parts))
    trace, *traces = estimates(sums, samples)
    values = {
        name: (total[block] / samples).reshape(parameters[name].shape)
        for name, block in slices.items()
    }
    return LossDiagonal(values, trace, dict(zip(slices, traces, strict=True)), method)


@contextmanager
def _field_kept(parameters: Iterable[nn.Parameter], field: str) -> Iterator[None]:
    """Whatever a user's own extension has saved on the parameters is there again afterwards."""
    states = [vars(parameter) for parameter in parameters]
    kept = [state.pop(field, None) for state in states]
    try:
        yield
    finally:
        for state, value in zip(states, kept, strict=True):
            state.pop(field, None)
            if value is not None:
                state[field] = value


def _saved(name: str, parameter: nn.Parameter, field: str) -> Tensor:
    """What BackPACK has saved on the parameter, flat."""
    found = vars(parameter).get(field)
    if found is None:
        raise BeyondBackpackError(f"BackPACK gave nothing for {name}")
    return _flat64(found)


def _flat64(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().to(float64_device(tensor.device), torch.float64)
