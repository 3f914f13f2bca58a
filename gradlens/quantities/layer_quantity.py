"""Quantities of the inputs and outputs of layers, and of the gradients at them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, final

from torch import nn

from gradlens.history.undefined import Undefined
from gradlens.numerics.host import on_host
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step, all_explained
from gradlens.signals.reductions import SignalReduction
from gradlens.signals.selection import Selection, Selectors, select, selection
from gradlens.signals.signal import Request, Signal


@dataclass(eq=False)
class LayerQuantity(SingleStepQuantity):
    """A quantity with a value for each layer, from a signal that is reduced in the layers' hooks.

    A subclass states as data its ``signal``, the signal's ``reduction``, and its
    ``default_layers``. A record is ``{"layers": {name: value}}``, with a number or a dict for each
    layer that was called, and the entries of ``summary``. A layer that is called several times in a
    step has one value, for all its calls together.
    """

    signal: ClassVar[Signal]
    """The tensor at a layer that is captured: its input, output, or the gradient at one of them."""
    reduction: SignalReduction[Any] = field(init=False, repr=False)
    """What the tensor is reduced to."""
    default_layers: ClassVar[Selection] = Selection()
    """The layers that have values unless ``layers`` are given."""

    _: KW_ONLY
    layers: Selectors | Selection | None = None
    """Layers that have values: see ``gradlens.signals.Selection``."""
    exclude: Selectors = ()
    """Layers that have none."""
    channel_last: bool | None = None
    """Whether features are in the last axis, or in axis 1; by default, this depends on the kinds of
    the layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = self.default_layers if self.layers is None else self.layers
        self.selection = selection(chosen, self.exclude)

    @property
    @final
    def request(self) -> Request:
        """What is captured at each of the layers."""
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
        signals, found = step.signals.values, {}
        for name, module in self.modules.items():
            if self.request in signals.get(name, {}):
                reduced = signals[name][self.request]
                undefined = isinstance(reduced, Undefined)
                found[name] = reduced if undefined else self.layer_value(name, module, reduced)
        signal = self.signal.value
        layers = all_explained(on_host(found), f"the {signal} of")
        self.end_step()
        return {"layers": layers, **self.summary(layers)}

    @abstractmethod
    def layer_value(self, layer: str, module: nn.Module, reduced: Any) -> Any:
        """The value for one layer, from its reduced signal.

        A NaN without a reason is recorded with the reason that the signal has NaN or Inf.
        """

    def summary(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """Further entries of the record, for all layers together; by default, none."""
        return {}

    def end_step(self) -> None:
        """Called when all layers of a step have values; by default, do nothing."""


def select_for(quantity: str, model: nn.Module | None, layers: Selection) -> dict[str, nn.Module]:
    """As ``select``; ``ValueError`` names the quantity, also if there is no model."""
    if model is None:
        raise ValueError(
            f"{quantity} selects layers: pass the model, as in Cockpit(model, ...), instead of "
            "its parameters"
        )
    try:
        return select(model, layers)
    except ValueError as error:
        raise ValueError(f"{quantity}: {error}") from None
