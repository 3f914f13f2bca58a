"""Quantities of the gradient's noise: of the whole network, of layers, or of parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias, final, get_args

from torch import nn

from gradlens.gradients.gradients import layer_of
from gradlens.history.undefined import Undefined
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import NEW_COCKPIT, Step
from gradlens.spelling import near

By: TypeAlias = Literal["network", "layer", "parameter"]

UNTRACKED = f"{{name}} is trained and not tracked: {NEW_COCKPIT}"


@dataclass(eq=False)
class NoiseQuantity(SingleStepQuantity):
    """A quantity that is defined for the per-sample gradients of any set of parameters.

    A value is that of the whole network. With ``by="layer"`` or ``by="parameter"``, it is a dict:
    ``"value"`` is that of the network (if it consists of several numbers, each has its own name),
    and ``"layers"`` or ``"parameters"`` has the same for each layer or parameter by name. A layer
    is the module to which the parameters belong: their names up to the last dot. Its value is a NaN
    with the reason if one of its trained parameters has no per-sample gradients. ``ValueError`` for
    another ``by``, and for layers if the cockpit has no model.
    """

    _: KW_ONLY
    by: By = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in get_args(By):
            choices = ", ".join(map(repr, get_args(By)))
            hint = near(str(self.by), get_args(By))
            raise ValueError(f"{self.name}: by={self.by!r} is none of {choices}{hint}")

    @final
    def compute(self, step: Step) -> Any:
        parts = self.parts(step)
        network = self.value(step.total(self.reductions[0]))
        if self.by == "network":
            return network
        entries = network if isinstance(network, dict) else {"value": network}
        untracked = _groups(step.untracked, self.by)
        values: dict[str, Any] = {}
        for name, group in _groups(step.parameters, self.by).items():
            lost = UNTRACKED.format(name=untracked[name][0]) if name in untracked else ""
            why = lost or _why_not_all(step, group, parts)
            if why and isinstance(network, dict):
                values[name] = dict.fromkeys(network, Undefined(why))
            else:
                covered = [parts[each] for each in group if each in parts]
                total = None if why else self.reductions[0].total(covered)
                values[name] = Undefined(why) if why else self.value(total)
        return {**entries, f"{self.by}s": values}

    def parts(self, step: Step) -> Mapping[str, Any]:
        """The first reduction's value for each covered parameter by name, on the host."""
        return step.on_host(self.reductions[0])

    @abstractmethod
    def value(self, total: Any) -> Any:
        """A number, or a dict of numbers by name, from that reduction's total of parameters."""

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        if self.by == "layer" and model is None:
            raise ValueError(
                f"{self.name}: which layer a parameter is in is unknown: pass the model, as in "
                "Cockpit(model, ...), instead of its parameters"
            )


def _groups(names: Iterable[str], by: By) -> dict[str, list[str]]:
    """Names of parameters by the layer that they are in, or each by itself."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(name) if by == "layer" else name, []).append(name)
    return groups


def _why_not_all(step: Step, names: Sequence[str], covered: Container[str]) -> str:
    """Why a value of these parameters would leave out a part of their gradient; empty if not."""
    removed = [name for name in names if name in step.removed]
    trained = [name for name in names if step.parameters[name].requires_grad]
    lacking = removed or [name for name in trained if name in step.lacking]
    if not lacking and any(name in covered for name in names):
        return ""
    name = (lacking or trained or names)[0]
    return f"{name} has no per-sample gradients: {step.missing[name]}"
