"""Quantities of what flows through layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, final

from torch import nn

from gradlens.history.undefined import Undefined
from gradlens.quantities.explained import explained
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.selective import select_for
from gradlens.quantities.step import Step
from gradlens.signals.reductions import SignalReduction
from gradlens.signals.selection import Selection, Selectors, selection
from gradlens.signals.signal import Request, Signal


@dataclass(eq=False)
class LayerQuantity(SingleStepQuantity):
    """A quantity with a value for each layer, from signals that were reduced as they flowed.

    States as data which ``signal`` it needs and its ``reduction``, and which layers it looks at by
    default. A record is ``{"layers": {name: value}}``, with a number or a dict for each layer that
    was called, and what ``summary`` says of all of them. Layers called several times in a step
    count once, with all their calls together.
    """

    signal: ClassVar[Signal]
    reduction: SignalReduction[Any] = field(init=False, repr=False)
    default_layers: ClassVar[Selection] = Selection()

    _: KW_ONLY
    layers: Selectors | Selection | None = None
    exclude: Selectors = ()
    channel_last: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.selection = _chosen(self.default_layers, self.layers, self.exclude)

    @property
    @final
    def request(self) -> Request:
        """What is captured of each of its layers."""
        return Request(self.signal, self.reduction, self.channel_last)

    @property
    @final
    def layer_requests(self) -> dict[str, Request]:
        return dict.fromkeys(self.modules, self.request)

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        self.modules = select_for(self.name, model, self.selection)

    @final
    def compute(self, step: Step) -> dict[str, Any]:
        signals, layers = step.signals.values, {}
        for name, module in self.modules.items():
            if self.request in signals.get(name, {}):
                seen = signals[name][self.request]
                undefined = isinstance(seen, Undefined)
                value = seen if undefined else self.layer_value(name, module, seen)
                layers[name] = explained(value, f"the {self.signal.value} of {name}")
        self.all_seen()
        return {"layers": layers, **self.summary(layers)}

    @abstractmethod
    def layer_value(self, layer: str, module: nn.Module, seen: Any) -> Any:
        """The value for one layer, from what its signal was reduced to.

        A NaN without a reason means that there is NaN or Inf in the signal.
        """

    def summary(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """What to record besides, of all layers together; by default, nothing."""
        return {}

    def all_seen(self) -> None:
        """Called after the last layer of a step; by default, do nothing."""


def _chosen(
    default: Selection, layers: Selectors | Selection | None, exclude: Selectors
) -> Selection:
    chosen = default if layers is None else selection(layers)
    return replace(chosen, exclude=(*chosen.exclude, *selection((), exclude).exclude))
