"""The methods for a loss's diagonal and traces, in order of preference.

A method is a function of a ``DiagonalProblem`` that returns a result, or raises
``UnavailableError`` with the reason why it doesn't apply. The first one that applies is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce

import numpy as np
import torch
from backpack.extensions import DiagHessian
from torch import Tensor

from gradlens.curvature.backpack_graph import check_graph
from gradlens.curvature.hessian_roots import drawing, roots
from gradlens.curvature.hutchinson import hutchinson_estimates, probed_diagonal
from gradlens.curvature.loss_diagonal import (
    DiagonalKind,
    DiagonalProblem,
    LossDiagonal,
    LossTraces,
    diagonal_by_parameter,
    exact_diagonal,
    mean_diagonal,
)
from gradlens.curvature.operator import CurvatureOperator, parameter_slices
from gradlens.curvature.products import Products, float64_device
from gradlens.curvature.sampled_traces import coupled_traces, sampled_traces
from gradlens.curvature.samples_jacobians import SamplesJacobians
from gradlens.numerics.host import on_host
from gradlens.numerics.unavailable import UnavailableError

MAX_BYTES = 2**31
"""BackPACK's backpropagated matrices may take 2 GiB; beyond, another method is used.

A trade-off: the matrices are exact and come in one backward pass, but most GPUs that networks are
trained on have no more than a few times as much memory to spare.
"""


_DIAGONAL_ROUNDING = 10
"""Rounding errors of one element, as a multiple of both tolerances in ``_has_diagonal``."""


def by_backpack(problem: DiagonalProblem) -> LossDiagonal:
    """The Hessian's diagonal by BackPACK's rules.

    Raises ``UnavailableError`` where BackPACK has no rules, where they take too much memory, and
    where their result isn't the diagonal of the loss's Hessian.
    """
    hessian = problem.hessian
    graph = problem.graph()
    check_graph(graph, hessian, problem.seed)
    if graph.bytes_for_hessian > MAX_BYTES:
        raise UnavailableError(f"BackPACK's matrices would take more than {MAX_BYTES} bytes")
    extension = DiagHessian()
    with _field_kept(hessian.parameters.values(), extension.savefield):
        graph.run(extension)
        parts = [_saved(name, p, extension.savefield) for name, p in hessian.parameters.items()]
    found = exact_diagonal(torch.cat(parts) * (hessian.scale * graph.factor), hessian.parameters)
    if not _has_diagonal(hessian, found.values, problem.seed):
        raise UnavailableError("BackPACK's diagonal isn't that of the loss")
    return found


def by_per_sample_gradients(problem: DiagonalProblem) -> LossDiagonal:
    """Gauss-Newton diagonal by one backward pass for each output of a sample.

    For ``diag_ggn_mc`` it is one pass for each of ``samples`` random gradients of the outputs.
    Raises ``UnavailableError`` where there are no per-sample gradients, or too many outputs.
    """
    ggn, generator = problem.ggn, np.random.default_rng(problem.seed)
    jacobians = SamplesJacobians(ggn, problem.model, problem.plans)

    def squared(start: Tensor) -> Tensor:
        found = jacobians.squared(start)
        return torch.cat([_flat64(part) for part in found.values()]) * ggn.scale

    if problem.kind == "diag_ggn_mc":
        draw = drawing(ggn, generator)
        return mean_diagonal(lambda: squared(draw()), problem.samples, ggn.parameters)
    total = reduce(Tensor.add_, map(squared, roots(ggn, generator)))
    return exact_diagonal(total, ggn.parameters)


def by_hutchinson(problem: DiagonalProblem) -> LossDiagonal:
    """Mean of z∘Hz over ``samples`` random signs z (Bekas et al., 2007, Eq. 2).

    Raises ``UnavailableError`` where a product contains NaN or Inf.
    """
    parameters = problem.matrix.parameters
    diagonal = probed_diagonal(Products(problem.matrix), problem.samples, problem.seed)
    blocks = [slice(None), *parameter_slices(parameters).values()]
    traces = hutchinson_estimates(diagonal, blocks, problem.samples)
    return diagonal_by_parameter(diagonal.mean, traces, parameters, "Hutchinson")


DIAGONAL_METHODS: Mapping[DiagonalKind, Sequence[Callable[[DiagonalProblem], LossDiagonal]]] = {
    "diag_h": (by_backpack, by_hutchinson),
    "diag_ggn_exact": (by_per_sample_gradients, by_hutchinson),
    "diag_ggn_mc": (by_per_sample_gradients, by_hutchinson),
}
"""The methods for each kind of diagonal, the preferred one first."""

TRACE_METHODS: Mapping[DiagonalKind, Sequence[Callable[[DiagonalProblem], LossTraces]]] = {
    "diag_h": (),
    "diag_ggn_exact": (),
    "diag_ggn_mc": (sampled_traces, coupled_traces),
}
"""The methods that find traces without a diagonal, and are preferred to its sums."""


@contextmanager
def _field_kept(parameters: Iterable[Tensor], field: str) -> Iterator[None]:
    """Restore on leaving what a user's own extension has saved on the parameters."""
    states = [vars(parameter) for parameter in parameters]
    kept = [state.pop(field, None) for state in states]
    try:
        yield
    finally:
        for state, value in zip(states, kept, strict=True):
            state.pop(field, None)
            if value is not None:
                state[field] = value


def _saved(name: str, parameter: Tensor, field: str) -> Tensor:
    """What BackPACK has saved on the parameter, flat and in float64."""
    found = vars(parameter).get(field)
    if found is None:
        raise UnavailableError(f"BackPACK gave nothing for {name}")
    return _flat64(found)


def _flat64(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().to(float64_device(tensor.device), torch.float64)


def _has_diagonal(matrix: CurvatureOperator, values: Mapping[str, Tensor], seed: int) -> bool:
    """Whether one element of the diagonal ``values`` is that of the matrix, but for rounding.

    It is the largest of a random parameter, or a random one where all of these are zero.
    """
    generator = np.random.default_rng(seed)
    name = list(values)[int(generator.integers(len(values)))]
    diagonal = values[name].flatten()
    flat = int(generator.integers(len(diagonal)))
    place = int(diagonal.abs().argmax()) if bool(diagonal.any()) else flat
    unit = torch.zeros(matrix.shape[0], dtype=matrix.torch_dtype, device=matrix.device)
    unit[matrix.slices[name].start + place] = 1
    truth = float(matrix.multiply(unit)[matrix.slices[name]][place])
    largest = max(map(float, on_host([others.abs().max() for others in values.values()])))
    eps = torch.finfo(matrix.torch_dtype).eps
    difference = abs(float(diagonal[place]) - truth)
    return not difference > _DIAGONAL_ROUNDING * (eps**0.5 * abs(truth) + eps * largest)
