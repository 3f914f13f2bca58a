"""Which signals of layers are wanted when: between a cockpit and its capture of signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.quantity import Quantity
from gradlens.quantities.selective import Selective
from gradlens.signals.capture import SignalCapture, Wanted
from gradlens.signals.layer_signals import LayerSignals
from gradlens.signals.signal import Request
from gradlens.step import Step

Record = Callable[[int, LayerQuantity, Any], None]
"""Takes in a step, a quantity, and its value in an evaluation."""

EVALUATION = "{} (evaluation)"
"""Under which name a quantity's values in evaluations are recorded."""


class LayerTracking:
    """Tells a capture what the quantities want at the step to come.

    A forward pass runs before its step is announced. It is taken for that of the step which
    follows the last one by as much as that followed the one before. For the first two steps,
    whatever may be wanted is captured.
    """

    def __init__(
        self,
        model: nn.Module | None,
        parameters: Mapping[str, nn.Parameter],
        quantities: Iterable[Quantity],
    ) -> None:
        """``ValueError`` if a quantity selects nothing of the model."""
        for quantity in quantities:
            if isinstance(quantity, Selective):
                quantity.choose(model, parameters)
        self.quantities = [q for q in quantities if isinstance(q, LayerQuantity)]
        self._last: int | None = None
        self._everything = _wanted(self.quantities)
        named = {n: m for q in self.quantities for n, m in q.modules.items()}
        modules = {} if model is None else _in_order(model, named)
        self._capture = None
        if model is not None and modules:
            self._capture = SignalCapture(model, modules, self._everything)
            self._capture.expect(self._everything)

    def pause(self) -> None:
        """Whatever runs until the step begins is of no interest, such as curvature's passes."""
        if self._capture is not None:
            self._capture.pause()

    def begin(self, global_step: int, scale: float) -> None:
        """A step's context is entered, and what runs before its backward pass has run.

        Backward's gradients are ``scale`` times those to be seen.
        """
        if self._capture is not None:
            self._capture.begin(self._wanted_at(global_step), scale)

    def finish(self, global_step: int) -> LayerSignals:
        """What was seen at a step, after its backward pass."""
        if self._capture is None:
            return LayerSignals()
        return self._capture.finish(global_step, self._wanted_at(global_step))

    def end(self, global_step: int, accumulating: bool) -> None:
        """A step's context is left, be it after an exception; ``accumulating`` if it goes on."""
        if accumulating:
            if self._capture is not None:
                self._capture.go_on(self._wanted_at(global_step))
            return
        last, self._last = self._last, global_step
        if self._capture is not None:
            following = None if last is None else 2 * global_step - last
            wanted = self._everything if following is None else self._wanted_at(following)
            self._capture.expect(wanted)

    @contextmanager
    def forward(self, global_step: int) -> Iterator[None]:
        """A context for the forward pass of a step that isn't the one to expect."""
        if self._capture is None:
            yield
            return
        self._capture.expect(self._wanted_at(global_step))
        try:
            yield
        finally:
            self._capture.pause()

    @contextmanager
    def evaluation(self, step: Step, record: Record) -> Iterator[None]:
        """A context for forward passes without backward passes, recorded under ``step``."""
        able = [q for q in self.quantities if not q.signal.needs_backward]
        if self._capture is None or not able:
            raise ValueError(
                "there is nothing to look at in an evaluation: track a quantity of layers' "
                "inputs or outputs, such as OutputNorm"
            )
        with self._capture.evaluating(_wanted(able)) as found:
            yield
        with torch.no_grad():
            seen = replace(step, signals=found[0])
            for quantity in able:
                record(step.global_step, quantity, quantity.compute(seen))

    def close(self) -> None:
        """Take all hooks off the model."""
        if self._capture is not None:
            self._capture.close()

    def _wanted_at(self, global_step: int) -> Wanted:
        return _wanted(q for q in self.quantities if q.should_compute(global_step))


def _wanted(quantities: Iterable[LayerQuantity]) -> Wanted:
    wanted: dict[str, set[Request]] = {}
    for quantity in quantities:
        for layer in quantity.modules:
            wanted.setdefault(layer, set()).add(quantity.request)
    return {layer: frozenset(requests) for layer, requests in wanted.items()}


def _in_order(model: nn.Module, named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    places = {module: place for place, module in enumerate(model.modules())}
    return dict(sorted(named.items(), key=lambda item: places[item[1]]))
