"""Directions that a curvature matrix or a training run has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradlens.curvature.eigenpairs import Which, eigenpairs
from gradlens.curvature.operator import CurvatureOperator, shaped
from gradlens.curvature.products import float64_device
from gradlens.instruments.scales import number_label
from gradlens.landscape.direction import Direction
from gradlens.landscape.states import StateDict, checked, difference
from gradlens.numerics.norms import products_of_pairs
from gradlens.numerics.unavailable import UnavailableError

UNIT_LENGTH = "a norm of 1"

ROUNDING = 1e-6
"""Differences that are smaller, relative to the largest ones, are rounding of single precision."""

TOO_FEW = (
    "the differences between the {states} states span {rank} dimensions, too few for {count} "
    "directions: pass more states. state_dict() returns the model's own tensors, which training "
    "changes in place, so keep copy.deepcopy(model.state_dict())"
)


def eigenvector_directions(
    matrix: CurvatureOperator, k: int = 1, which: Which = "largest", **options: Any
) -> tuple[Direction, ...]:
    """The eigenvectors of k outermost eigenvalues of a curvature matrix, each with a norm of one.

    The matrix is that of a mini-batch's loss or of a data set, such as that of
    ``HessianOperator.over_data``; parameters that it isn't of don't move. ``which`` and ``options``
    are those of ``eigenpairs``. Labels have the eigenvalues, and residuals where these haven't
    converged. Raises ``UnavailableError`` where products can't be had.
    """
    found = eigenpairs(matrix, k, which, **options)
    if np.isnan(found.values).any():
        raise UnavailableError(found.reason)
    directions = []
    for value, residual, vector in zip(found.values, found.residuals, found.vectors.T, strict=True):
        parts = shaped(torch.tensor(vector).to(matrix.torch_dtype), matrix.parameters)
        named = dict(zip(matrix.parameters, parts, strict=True))
        label = f"eigenvector of λ = {number_label(float(value))}"
        if not found.converged:
            label += f" ± {number_label(float(residual), 2)}"
        directions.append(Direction(named, label, UNIT_LENGTH))
    return tuple(directions)


def direction_between(
    first: StateDict, second: StateDict, label: str = "from the first state to the second",
    unit: str = "the second",
) -> Direction:  # fmt: skip
    """The direction from one state dict to another, over their whole distance.

    Of two checkpoints, or of the states before and after an update. All real floating-point entries
    move, frozen parameters and the running statistics of BatchNorm included: in between, buffers
    are interpolated linearly, as the parameters are. Counters stay as they are.

    Raises ``ValueError`` for states with different entries or shapes, and where entries differ that
    can't be interpolated.
    """
    start = checked(first, second, "the first state", "the second")
    end = checked(second, first, "the second state", "the first")
    return Direction(difference(start, end), label, unit)


def principal_directions(
    model: nn.Module, states: Sequence[StateDict], count: int = 2
) -> tuple[Direction, ...]:
    """The directions along which the states of a training run lie furthest from the last one.

    The singular vectors of the differences between each state's parameters and those of the last
    one (Li et al., 2018, Sec. 7.2, but without subtracting their mean, so that the last state is on
    the plane), with a norm of one. Buffers move by the same combinations of the states. Takes the
    memory of as many copies of the model as there are states.

    Raises ``ValueError`` for states that aren't of the model, or span fewer dimensions.
    """
    like = model.state_dict()
    found = [checked(s, like, f"states[{i}]", "the model") for i, s in enumerate(states)]
    moves = [difference(found[-1], each) for each in found[:-1]]
    gram = np.zeros((len(moves), len(moves)))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and moves:
            rows = torch.stack([move[name].flatten() for move in moves])
            rows = rows.to(float64_device(rows.device), torch.float64)
            gram += products_of_pairs(rows).cpu().numpy()
    squares, vectors = np.linalg.eigh(gram)
    rank = int((squares > ROUNDING**2 * squares.max(initial=0)).sum())
    if rank < count:
        raise ValueError(TOO_FEW.format(states=len(states), rank=rank, count=count))
    directions = []
    for number in range(1, count + 1):
        # Towards the first state, since the sign of a singular vector is arbitrary.
        vector = vectors[:, -number] * (1 if vectors[0, -number] >= 0 else -1)
        parts = _combined(moves, vector / squares[-number] ** 0.5)
        directions.append(Direction(parts, f"principal direction {number}", UNIT_LENGTH))
    return tuple(directions)


def _combined(
    moves: Sequence[dict[str, Tensor]], weights: NDArray[np.float64]
) -> dict[str, Tensor]:
    """The sum of the moves, each times its weight."""
    total = {name: torch.zeros_like(part) for name, part in moves[0].items()}
    for move, weight in zip(moves, weights.tolist(), strict=True):
        for name, part in move.items():
            total[name].add_(part, alpha=weight)
    return total
