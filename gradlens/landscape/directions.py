"""Directions in the space of a model's parameters: random ones, eigenvectors, those of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.eigenpairs import Which, eigenpairs
from gradlens.curvature.operator import (
    CurvatureOperator,
    Seed,
    float64_device,
    selected_parameters,
    shaped,
)
from gradlens.history.lines import Floats
from gradlens.instruments.scales import number_label
from gradlens.numerics.norms import products_of_pairs, row_norms
from gradlens.numerics.unavailable import UnavailableError
from gradlens.signals.predicates import is_normalization
from gradlens.spelling import near
from gradlens.torch_private import unseen

StateDict: TypeAlias = Mapping[str, Any]
"""A state dict, or any mapping of names to tensors. Entries that aren't tensors are left out."""

SHOWN = 4
"""Entries that an error message names, at most."""

UNIT_LENGTH = "a norm of 1"

ROUNDING = 1e-6
"""Differences that are smaller, relative to the largest ones, are rounding of single precision."""

OTHER_ENTRIES = "{which} has other entries than {other}: {differences}"
OTHER_SHAPE = "{name!r} has the shape {found} in {which}, and {expected} in {other}"
NOT_REAL = (
    "{name!r} is {dtype} and differs between the states: only real floating-point numbers can be "
    "interpolated"
)
TOO_FEW = (
    "the differences between the {states} states span {rank} dimensions, too few for {count} "
    "directions: pass more states. state_dict() returns the model's own tensors, which training "
    "changes in place, so keep copy.deepcopy(model.state_dict())"
)
NOTHING = (
    "nothing would move: the model has no weights that have two axes or more, require a gradient "
    "and aren't zero (biases_and_norms=True moves parameters with one axis, too)"
)
COMPLEX = "{name!r} is complex, and random directions are those of real parameters"


@dataclass(frozen=True, eq=False)
class Direction:
    """How far each parameter moves over a distance of one.

    ``parts`` are tensors of the parameters' shapes, by name; what isn't named stays where it is.
    Floating-point buffers have names, too. ``label`` says what the direction is, and ``unit`` what
    a distance of one is: both are in the labels of axes.
    """

    parts: Mapping[str, Tensor] = field(repr=False)
    label: str = "direction"
    unit: str = ""

    @property
    def axis(self) -> str:
        """The label of an axis along the direction."""
        return f"{self.label} (1 = {self.unit})" if self.unit else self.label


def random_direction(
    model: nn.Module, seed: Seed = 0, *, biases_and_norms: bool = False
) -> Direction:
    """A Gaussian random direction, normalised filter by filter (Li et al., 2018, Sec. 4).

    A filter is what one index of a parameter's first axis selects: an output channel of a
    convolution, a row of a linear layer's weight, the vector of a word. Each has the norm of the
    model's own filter, so that networks whose weights have different scales can be compared.

    Parameters with fewer than two axes, such as biases, and those of normalisation layers don't
    move, as in the paper. With ``biases_and_norms`` they do; each element of a parameter with one
    axis is a filter. Frozen parameters don't move.

    Draws are the same on every device, and leave torch's random numbers as they are. Raises
    ``ValueError`` where nothing would move, and for complex parameters.
    """
    generator = np.random.default_rng(seed)
    norms = {id(p) for m in model.modules() if is_normalization(m) for p in m.parameters(False)}
    moved = {
        name: parameter
        for name, parameter in selected_parameters(model).items()
        if biases_and_norms or (parameter.dim() > 1 and id(parameter) not in norms)
    }
    for name, parameter in moved.items():
        if parameter.is_complex():
            raise ValueError(COMPLEX.format(name=name))
    parts = {name: _filters(parameter.detach(), generator) for name, parameter in moved.items()}
    if not any(bool(part.any()) for part in parts.values()):
        raise ValueError(NOTHING)
    return Direction(parts, "random direction", "the norm of each filter")


def _filters(parameter: Tensor, generator: np.random.Generator) -> Tensor:
    """Gaussian random numbers whose filters have the norms of the parameter's."""
    filters = parameter.flatten(1) if parameter.dim() > 1 else parameter.reshape(-1, 1)
    draws = torch.from_numpy(generator.standard_normal(tuple(filters.shape)))
    with unseen():
        draws /= row_norms(draws)[:, None]
        norms = row_norms(filters)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    found = draws.to(dtype).to(parameter.device) * norms[:, None]
    return found.reshape(parameter.shape)


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
        parts = shaped(torch.tensor(vector, device="cpu").to(matrix.torch_dtype), matrix.parameters)
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
    gram = inner_products(model, len(moves), lambda name, _: [move[name] for move in moves])
    squares, vectors = np.linalg.eigh(gram)
    rank = int((squares > ROUNDING**2 * squares.max(initial=0)).sum())
    if rank < count:
        raise ValueError(TOO_FEW.format(states=len(states), rank=rank, count=count))
    directions = []
    for number in range(1, count + 1):
        # Towards the first state, since the sign of a singular vector is arbitrary.
        vector = vectors[:, -number] * (1 if vectors[0, -number] >= 0 else -1)
        weights = (vector / squares[-number] ** 0.5).tolist()
        parts = {name: torch.zeros_like(part) for name, part in moves[0].items()}
        for move, weight in zip(moves, weights, strict=True):
            for name, total in parts.items():
                total.add_(move[name], alpha=weight)
        directions.append(Direction(parts, f"principal direction {number}", UNIT_LENGTH))
    return tuple(directions)


def inner_products(
    model: nn.Module, count: int, rows: Callable[[str, Tensor], Sequence[Tensor | None]]
) -> Floats:
    """Inner products ``[count, count]`` of vectors in the space of all parameters, in float64.

    ``rows`` returns the vectors' parts for a parameter and its name, ``None`` for zeros.
    """
    total = np.zeros((count, count))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and count:
            zeros = torch.zeros_like(parameter)
            parts = [zeros if row is None else row for row in rows(name, parameter)]
            device = float64_device(zeros.device)
            found = torch.stack([part.to(device, torch.float64).flatten() for part in parts])
            total += products_of_pairs(found).cpu().numpy()
    return total


def checked(state: StateDict, like: StateDict, which: str, other: str) -> dict[str, Tensor]:
    """The tensors of a state; ``ValueError`` unless names and shapes are those of another."""
    found, expected = _tensors(state), _tensors(like)
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    differences = [f"{name!r} is missing" for name in sorted(missing)]
    differences += [f"{name!r}{near(name, expected)}" for name in sorted(unknown)]
    if differences:
        more = len(differences) - SHOWN
        shown = ", ".join(differences[:SHOWN]) + (f", and {more} more" if more > 0 else "")
        raise ValueError(OTHER_ENTRIES.format(which=which, other=other, differences=shown))
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            shapes = {"found": [*tensor.shape], "expected": [*expected[name].shape]}
            raise ValueError(OTHER_SHAPE.format(name=name, which=which, other=other, **shapes))
    return found


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far each floating-point entry moves from the first state to the second.

    In single precision at least, and on the devices of the first state. Integers of one element,
    which count something, are left out. Raises ``ValueError`` for other entries that differ and
    aren't real floating-point numbers.
    """
    found: dict[str, Tensor] = {}
    for name, start in first.items():
        end = second[name].detach().to(start.device)
        if start.is_floating_point() and end.is_floating_point():
            dtype = torch.promote_types(start.dtype, torch.float32)
            found[name] = end.to(dtype) - start.detach().to(dtype)
        elif start.numel() > 1 and not torch.equal(start, end):
            raise ValueError(NOT_REAL.format(name=name, dtype=start.dtype))
    return found


def _tensors(state: StateDict) -> dict[str, Tensor]:
    return {name: entry for name, entry in state.items() if isinstance(entry, Tensor)}
