"""Random directions whose filters are as long as those of the network."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.operator import selected_parameters
from gradlens.curvature.products import Seed
from gradlens.graph.undisturbed import unseen
from gradlens.landscape.direction import Direction
from gradlens.numerics.norms import row_norms
from gradlens.signals.predicates import is_normalization

NOTHING = (
    "nothing would move: the model has no weights that have two axes or more, require a gradient "
    "and aren't zero (biases_and_norms=True moves parameters with one axis, too)"
)
COMPLEX = "{name!r} is complex, and random directions are those of real parameters"


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
