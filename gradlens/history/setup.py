"""What a run consists of: its optimizer, loss, layers and graph, as they were found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gradlens.history.schema import Fields, Is, ListOf, MapOf, Schema, Whole


@dataclass(frozen=True)
class ParameterGroup:
    """A parameter group of an optimizer: its options that are numbers, and its parameters' names.

    ``options`` holds ``betas`` as ``beta1`` and ``beta2``, and switches as 0 or 1.
    """

    options: Mapping[str, float]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own.

    ``classes`` are the names of its class and of those it derives from, up to ``Module``, which is
    left out. ``fan_in`` is the number of inputs of one of its outputs; 0 without a weight.
    """

    classes: tuple[str, ...]
    training: bool
    fan_in: int = 0


@dataclass(frozen=True)
class Setup:
    """What a run consists of, from one step on.

    ``optimizer`` is the name of its class; empty if it wasn't passed to the context. ``missed`` are
    trainable parameters in none of its groups, and ``frozen`` those that need no gradient.
    ``loss`` is the kind of the loss's node in the graph, and ``loss_reduction`` what it says of
    itself; ``loss_weighted`` says that it has weights of classes or samples, and
    ``declared_reduction`` is that of the cockpit. ``activations`` are the kinds of the nonlinear
    nodes by the layer before each. ``order`` are the parameters from input to output,
    and ``transformed`` are weights that are changed before they multiply data, as by a
    softplus, a mask or a scale.
    ``before_loss`` is the kind of the node from which the loss's logarithm of probabilities is
    computed, if it makes probabilities itself. ``broadcast`` are the shapes of predictions and
    targets that it compares all pairs of. ``linear_pairs`` are pairs of layers with nothing
    but linear nodes between, and ``is_linear`` says that all of the network's nodes are linear.
    ``half`` says that there are nodes in float16, and ``scaler`` that a gradient scaler was passed.
    """

    optimizer: str = ""
    groups: tuple[ParameterGroup, ...] = ()
    missed: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    loss: str = ""
    loss_reduction: str = ""
    loss_weighted: bool = False
    declared_reduction: str = ""
    layers: Mapping[str, Layer] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    transformed: tuple[str, ...] = ()
    before_loss: str = ""
    broadcast: str = ""
    linear_pairs: tuple[tuple[str, str], ...] = ()
    is_linear: bool = False
    half: bool = False
    scaler: bool = False
    dtypes: tuple[str, ...] = ()
    input_kind: str = ""
    input_normalised: bool = False

    def plain(self) -> dict[str, Any]:
        """For a file."""
        found: dict[str, Any] = _lists(asdict(self))
        return found

    @classmethod
    def from_plain(cls, found: Mapping[str, Any]) -> Setup:
        """The inverse of ``plain``; ``ValueError`` if it has another form."""
        SETUP.check(found, "the setup")
        known = {each.name: _tuples(found[each.name]) for each in fields(cls)}
        groups = tuple(
            ParameterGroup(each["options"], tuple(each["parameters"])) for each in found["groups"]
        )
        layers = {
            name: Layer(tuple(each["classes"]), each["training"], each["fan_in"])
            for name, each in found["layers"].items()
        }
        return cls(**known | {"groups": groups, "layers": layers})


def _lists(value: Any) -> Any:
    """The same with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _lists(entry) for key, entry in value.items()}
    return [*map(_lists, value)] if isinstance(value, (list, tuple)) else value


def _tuples(value: Any) -> Any:
    """The same with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


NAMES = ListOf(Is(str))

SCHEMAS: Mapping[str, Schema] = {
    "optimizer": Is(str),
    "groups": ListOf(Fields({"options": MapOf(Is(float)), "parameters": NAMES})),
    "missed": NAMES,
    "frozen": NAMES,
    "loss": Is(str),
    "loss_reduction": Is(str),
    "declared_reduction": Is(str),
    "layers": MapOf(Fields({"classes": NAMES, "training": Is(bool), "fan_in": Whole(0, 2**53)})),
    "activations": MapOf(Is(str)),
    "order": NAMES,
    "transformed": NAMES,
    "before_loss": Is(str),
    "broadcast": Is(str),
    "linear_pairs": ListOf(ListOf(Is(str), 2)),
    "is_linear": Is(bool),
    "half": Is(bool),
    "scaler": Is(bool),
    "dtypes": NAMES,
    "input_kind": Is(str),
    "input_normalised": Is(bool),
    "loss_weighted": Is(bool),
}
SETUP = Fields(SCHEMAS)
