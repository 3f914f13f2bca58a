"""The points around an origin, at which a model is placed for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from gradlens.landscape.direction import Direction
from gradlens.landscape.states import StateDict, checked
from gradlens.spelling import near

UNKNOWN = "{which} has {name!r}, and the model has no parameter or buffer of this name{near}"
SHAPE = "{which} has the shape {found} for {name!r}, and the model {expected}"
NOT_REAL = "{which} moves {name!r}, which is {dtype}: only real floating-point numbers can move"
NOT_FINITE = "{which} has NaN or Inf for {name!r}"
TIED = "{which} has different values for {one!r} and {other!r}, which are one tensor of the model"
ZERO = (
    "{which} is zero. If it was meant to be that between two states: state_dict() returns the "
    "model's own tensors, which training changes in place, so keep copy.deepcopy(state_dict())"
)


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor of the model, its value at the origin, and how far each direction moves it."""

    tensor: Tensor
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
        named: dict[str, Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
        named |= dict(model.named_buffers(remove_duplicate=False))
        starts: dict[int, Tensor] = {}
        if origin is not None:
            found = checked(origin, model.state_dict(), "origin", "the model")
            starts = _by_tensor(named, found, "origin")
        parts = [_parts(named, each, f"direction {i}") for i, each in enumerate(directions, 1)]
        moved = {*starts}.union(*parts)
        tensors = {id(t): t for t in named.values() if id(t) in moved}
        self.origin = [0.0] * len(directions)
        self._model = model
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        self._places = {
            key: Place(tensor, starts.get(key, kept), tuple(each.get(key) for each in parts))
            for key, (tensor, kept) in zip(tensors, self._kept, strict=True)
        }

    def start(self, tensor: Tensor) -> Tensor:
        """A tensor's value at the origin."""
        place = self._places.get(id(tensor))
        return tensor.detach() if place is None else place.start

    def part(self, tensor: Tensor, direction: int) -> Tensor | None:
        """How far a direction moves a tensor; ``None`` if it doesn't."""
        place = self._places.get(id(tensor))
        return None if place is None else place.parts[direction]

    def moved(self, direction: int) -> list[Tensor]:
        """The tensors that a direction moves."""
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
        """The model is the same after the context as before, and so are torch's random numbers.

        That includes gradients, modes, and tensors that modules have as plain attributes, such as
        the weight that ``torch.nn.utils.weight_norm`` computes in the forward pass.
        """
        parameters = [*self._model.parameters()]
        attributes, gradients = _attributes(self._model), [p.grad for p in parameters]
        devices = sorted({p.device.index for p in parameters if p.is_cuda})
        with torch.random.fork_rng(devices):
            try:
                yield
            finally:
                self._restore(attributes, gradients)

    def _restore(
        self,
        attributes: Sequence[tuple[dict[str, Any], str, Any]],
        gradients: Sequence[Tensor | None],
    ) -> None:
        for tensor, value in self._kept:
            tensor.data.copy_(value)
        for attribute, name, value in attributes:
            attribute[name] = value
        for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def _attributes(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """The attributes of each module, and the name and value of its mode and of plain tensors."""
    return [
        (vars(module), name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name == "training" or isinstance(value, Tensor)
    ]


def _parts(named: Mapping[str, Tensor], direction: Direction, which: str) -> dict[int, Tensor]:
    """How far a direction moves each tensor, checked."""
    which = f"{which} ({direction.label})"
    for name, part in direction.parts.items():
        if name not in named:
            raise ValueError(UNKNOWN.format(which=which, name=name, near=near(name, named)))
        expected = named[name]
        if part.shape != expected.shape:
            shapes = {"found": [*part.shape], "expected": [*expected.shape]}
            raise ValueError(SHAPE.format(which=which, name=name, **shapes))
        for tensor in (part, expected):
            if not tensor.is_floating_point():
                raise ValueError(NOT_REAL.format(which=which, name=name, dtype=tensor.dtype))
        if not bool(part.isfinite().all()):
            raise ValueError(NOT_FINITE.format(which=which, name=name))
    found = _by_tensor(named, direction.parts, which)
    if not any(bool(part.any()) for part in found.values()):
        raise ValueError(ZERO.format(which=which))
    return found


def _by_tensor(
    named: Mapping[str, Tensor], values: Mapping[str, Tensor], which: str
) -> dict[int, Tensor]:
    """The values by the model's tensors, on their devices; each tensor may have several names."""
    own = {tensor.untyped_storage().data_ptr() for tensor in named.values()}
    found: dict[int, Tensor] = {}
    first: dict[int, str] = {}
    for name, value in values.items():
        if name not in named:
            raise ValueError(UNKNOWN.format(which=which, name=name, near=near(name, named)))
        key = id(named[name])
        value = _apart(value.detach().to(named[name].device), own)
        if key in found and not torch.equal(found[key], value):
            raise ValueError(TIED.format(which=which, one=first[key], other=name))
        first.setdefault(key, name)
        found[key] = value
    return found


def _apart(value: Tensor, own: Collection[int]) -> Tensor:
    """The value, in a copy if it is one of the model's own tensors, which are about to move."""
    return value.clone() if value.untyped_storage().data_ptr() in own else value
