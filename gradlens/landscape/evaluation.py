"""The mean loss at points around a model, which stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.hessian import HessianOperator
from gradlens.curvature.loss_over_data import LossOverData, SumOverData
from gradlens.curvature.probe import Probe
from gradlens.history.lines import Floats
from gradlens.history.undefined import Undefined
from gradlens.landscape.directions import Direction, StateDict
from gradlens.landscape.figures import LossLine, LossPlane
from gradlens.landscape.neighbourhood import Neighbourhood
from gradlens.numerics.norms import inner
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import uncompiled_backward, unseen

Distances: TypeAlias = Sequence[float] | Floats
"""Ascending distances from the origin, in units of a direction."""

ON_LINE, ON_PLANE = 51, 25
"""Points of a line, and along each direction of a plane, by default.

A trade-off of time against detail: with these, curves and contours look smooth.
"""

MARGIN = 0.25
"""How much further than its trajectory a plane extends by default, relative to its extent."""

PLACES = "distances must be two ascending numbers at least, and are {places}"
NOT_ASKED_FOR = "parabola=False was passed"
OTHERS_MOVE = (
    "the direction moves more than the parameters that require a gradient: {count} other tensors, "
    "such as frozen parameters or buffers"
)


def loss_along(
    model: nn.Module,
    probe: Probe,
    direction: Direction,
    distances: Distances | None = None,
    *,
    origin: StateDict | None = None,
    parabola: bool = True,
) -> LossLine:
    """The mean loss of a probe's data along a direction from an origin.

    ``distances`` ``[K]`` are ascending, by default 51 from -1 to 1. The origin is the model's
    present state, or the state dict ``origin``. Each point takes one forward pass through the data.
    With ``parabola``, the gradient and the curvature along the direction are computed at the
    origin, in two passes with derivatives; where the direction moves anything but parameters that
    require a gradient, they are ``Undefined``.

    Buffers are the origin's, unless the direction moves them as that of ``direction_between`` does.
    In eval mode, BatchNorm then normalises by these and not by statistics of the network at that
    point; with ``Probe(..., training=True)`` it normalises each batch by the batch's own.

    The model with its buffers, gradients and modes and all random numbers are the same afterwards,
    also after an exception. Takes the memory of one batch's graph and of a copy of what moves.
    Raises ``ValueError`` for a direction or an origin that isn't one of this model, and as
    ``LossOverData`` does.
    """
    places = _places(distances, ON_LINE)
    around = Neighbourhood(model, [direction], origin)
    with _placed(model, probe, around) as loss:
        at_origin = loss.mean()
        slope, curvature = (
            _derivatives(loss, around) if parabola else [Undefined(NOT_ASKED_FOR)] * 2
        )
        losses = _losses(loss, around, [places])
    return LossLine(places, losses, direction.axis, at_origin, slope, curvature)


def loss_on_plane(
    model: nn.Module,
    probe: Probe,
    directions: tuple[Direction, Direction],
    distances: tuple[Distances, Distances] | None = None,
    *,
    origin: StateDict | None = None,
    trajectory: Sequence[StateDict] = (),
) -> LossPlane:
    """The mean loss of a probe's data on the plane of two directions, as ``loss_along``.

    ``distances`` are those along each direction, by default 25 from -1 to 1, or as far as the
    trajectory goes and a quarter more. ``trajectory`` are state dicts, whose parameters are
    projected on the plane orthogonally. Raises ``ValueError`` for parallel directions, too.
    """
    around = Neighbourhood(model, directions, origin)
    path, in_plane = around.projections(trajectory)
    by_default = [_around(column) for column in path.T] if len(path) else (None, None)
    first, second = (_places(each, ON_PLANE) for each in distances or by_default)
    with _placed(model, probe, around) as loss:
        at_origin = loss.mean()
        losses = _losses(loss, around, [first, second])
    axes = (directions[0].axis, directions[1].axis)
    return LossPlane(first, second, losses, axes, at_origin, path, in_plane)


@contextmanager
def _placed(model: nn.Module, probe: Probe, around: Neighbourhood) -> Iterator[LossOverData]:
    """The probe's loss, with the model at the origin; the model is as before after the context."""
    with around.kept(), probe.mode_of(model), unseen(), uncompiled_backward():
        around.move(around.origin)
        yield probe.loss_of(model)


def _losses(loss: LossOverData, around: Neighbourhood, places: Sequence[Floats]) -> Floats:
    """The mean losses at the points of a grid, of the shape of the places."""
    found = []
    for coordinates in product(*places):
        around.move([float(one) for one in coordinates])
        found.append(loss.mean())
    return np.array(found).reshape([len(one) for one in places])


def _derivatives(loss: LossOverData, around: Neighbourhood) -> tuple[float, float]:
    """gᵀd and dᵀHd of the mean loss along the first direction d, at the model's present values.

    Takes two passes through the data. The curvature is ``Undefined`` where the loss can't be
    differentiated twice.
    """
    own = {id(p) for p in loss.parameters.values()}
    others = [tensor for tensor in around.moved(0) if id(tensor) not in own]
    if others:
        reason = Undefined(OTHERS_MOVE.format(count=len(others)))
        return reason, reason
    parameters = list(loss.parameters.values())
    parts = [around.part(p, 0) for p in parameters]
    vectors = [
        torch.zeros_like(p) if part is None else part.to(p.device)
        for part, p in zip(parts, parameters, strict=True)
    ]
    slope = _inner(loss.mean_gradient(), vectors)
    hessian = SumOverData(loss, lambda batch: HessianOperator(batch.loss, loss.parameters))
    try:
        image = hessian.product(vectors)
    except UnavailableError as error:
        return slope, Undefined(str(error))
    return slope, _inner(image, vectors) / loss.divisor


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The inner product, in single precision at least."""
    dtypes = [torch.promote_types(part.dtype, torch.float32) for part in one]
    pairs = zip(one, other, dtypes, strict=True)
    return sum(float(inner(a.flatten().to(dtype), b.flatten().to(dtype))) for a, b, dtype in pairs)


def _places(distances: Distances | None, count: int) -> Floats:
    found = np.linspace(-1, 1, count) if distances is None else np.array(distances, np.float64)
    if found.ndim != 1 or len(found) < 2 or not (np.diff(found) > 0).all():
        raise ValueError(PLACES.format(places=distances))
    return found


def _around(path: Floats) -> Floats:
    """Distances that reach from below all places to above them, with the origin among the range."""
    low, high = min(0.0, float(path.min())), max(0.0, float(path.max()))
    margin = MARGIN * (high - low) or 1.0
    return np.linspace(low - margin, high + margin, ON_PLANE)
