"""The mean loss at points around a model, at which it is placed for a while and stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.hessian import HessianOperator
from gradlens.curvature.over_data import LossOverData, SumOverData
from gradlens.curvature.probe import Probe
from gradlens.graph.undisturbed import training_kept, undisturbed
from gradlens.history.lines import Floats
from gradlens.history.undefined import Undefined
from gradlens.landscape.directions import Direction, StateDict, checked, inner_products
from gradlens.landscape.figures import LossLine, LossPlane
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


# Where the model is placed ---------------------------------------------------------------------

PARALLEL = 1e-6
"""Largest squared sine of the angle between two directions that don't count as a plane.

It is that of a thousandth of a radian, far above rounding in single precision.
"""

NO_PLANE = "the two directions are parallel in the space of the parameters, so they span no plane"
NOT_REAL = "{which} moves {name!r}, which is {dtype}: only real floating-point numbers can move"
NOT_FINITE = "{which} has NaN or Inf for {name!r}"
TIED = "{which} has different values for {one!r} and {other!r}, which are one tensor of the model"
ZERO = (
    "{which} is zero. If it was meant to be that between two states: state_dict() returns the "
    "model's own tensors, which training changes in place, so keep copy.deepcopy(state_dict())"
)


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor of the model, its own value, that at the origin, and how far directions move it."""

    tensor: Tensor
    kept: Tensor
    start: Tensor
    parts: tuple[Tensor | None, ...]


@final
class Neighbourhood:
    """The points origin + Σᵢ aᵢ·dᵢ for directions dᵢ; the origin is by default the model's state.

    ``origin`` are its coordinates, which are zeros. Keeps a copy of all tensors that move. Raises
    ``ValueError`` for directions and origins that aren't those of this model.
    """

    def __init__(
        self, model: nn.Module, directions: Sequence[Direction], origin: StateDict | None = None
    ) -> None:
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        starts: dict[int, Tensor] = {}
        if origin is not None:
            checked(origin, model.state_dict(), "origin", "the model")
            starts = _by_tensor(named, origin, "origin")
        parts = [_parts(named, each, f"direction {i}") for i, each in enumerate(directions, 1)]
        self.origin = [0.0] * len(directions)
        self._model = model
        moved = {*starts}.union(*parts)
        self._places: dict[int, Place] = {}
        for key, tensor in ((id(tensor), tensor) for tensor in named.values()):
            if key in moved and key not in self._places:
                kept = tensor.detach().clone()
                moves = tuple(each.get(key) for each in parts)
                self._places[key] = Place(tensor, kept, starts.get(key, kept), moves)

    def start(self, tensor: Tensor) -> Tensor:
        place = self._places.get(id(tensor))
        return tensor.detach() if place is None else place.start

    def part(self, tensor: Tensor, direction: int) -> Tensor | None:
        """How far a direction moves a tensor; ``None`` if it doesn't."""
        place = self._places.get(id(tensor))
        return None if place is None else place.parts[direction]

    def moved(self, direction: int) -> list[Tensor]:
        return [
            place.tensor
            for place in self._places.values()
            if (part := place.parts[direction]) is not None and bool(part.any())
        ]

    def move(self, coordinates: Sequence[float]) -> None:
        """Place the model at coordinates, inside ``kept``."""
        for place in self._places.values():
            value = place.start
            for distance, part in zip(coordinates, place.parts, strict=True):
                if part is not None and distance:
                    value = torch.add(value, part, alpha=distance)
            place.tensor.data.copy_(value)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The model is the same after the context as before, and so are random numbers.

        That includes gradients, modes, and what modules have as plain attributes.
        """
        with undisturbed(self._model), training_kept(self._model.parameters()):
            try:
                yield
            finally:
                for place in self._places.values():
                    place.tensor.data.copy_(place.kept)

    def projections(self, states: Sequence[StateDict]) -> tuple[Floats, float]:
        """Coordinates ``[T, 2]`` of a run's states, projected on the plane, and its share.

        Projections are orthogonal in the space of all parameters; buffers are left out. The share
        is that of the squared distances from the origin that is in the plane, and NaN without
        distances. Raises ``ValueError`` for states that aren't of the model, and for parallel
        directions.
        """
        like = self._model.state_dict()
        found = [checked(s, like, f"trajectory[{i}]", "the model") for i, s in enumerate(states)]

        def rows(name: str, parameter: Tensor) -> list[Tensor | None]:
            start = self.start(parameter)
            precise = torch.promote_types(start.dtype, torch.float32)
            moves = [state[name].to(start.device, precise) - start for state in found]
            return [self.part(parameter, 0), self.part(parameter, 1), *moves]

        gram = inner_products(self._model, 2 + len(found), rows)
        plane, moves = gram[:2, :2], gram[:2, 2:]
        if np.linalg.det(plane) <= PARALLEL * plane[0, 0] * plane[1, 1]:
            raise ValueError(NO_PLANE)
        path = np.linalg.solve(plane, moves).T.astype(np.float64)
        distances = float(gram.diagonal()[2:].sum())
        return path, float((path * moves.T).sum()) / distances if distances else float("nan")


def _parts(named: Mapping[str, Tensor], direction: Direction, which: str) -> dict[int, Tensor]:
    """How far a direction moves each tensor, checked."""
    which = f"{which} ({direction.label})"
    found = _by_tensor(named, direction.parts, which)
    for name, part in direction.parts.items():
        for tensor in (part, named[name]):
            if not tensor.is_floating_point():
                raise ValueError(NOT_REAL.format(which=which, name=name, dtype=tensor.dtype))
        if not bool(part.isfinite().all()):
            raise ValueError(NOT_FINITE.format(which=which, name=name))
    if not any(bool(part.any()) for part in found.values()):
        raise ValueError(ZERO.format(which=which))
    return found


def _by_tensor(named: Mapping[str, Tensor], values: StateDict, which: str) -> dict[int, Tensor]:
    """The values by the model's tensors, on their devices; each tensor may have several names."""
    own = {tensor.untyped_storage().data_ptr() for tensor in named.values()}
    found: dict[int, Tensor] = {}
    first: dict[int, str] = {}
    # What has no value stays as it is.
    every = checked({**named, **values}, named, which, "the model")
    for name, value in ((name, every[name]) for name in values if name in every):
        key = id(named[name])
        value = value.detach().to(named[name].device)
        # One of the model's own tensors, which are about to move.
        value = value.clone() if value.untyped_storage().data_ptr() in own else value
        if key in found and not torch.equal(found[key], value):
            raise ValueError(TIED.format(which=which, one=first[key], other=name))
        first.setdefault(key, name)
        found[key] = value
    return found
