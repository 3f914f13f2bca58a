"""Which signals of layers are wanted when: between a cockpit and its capture of signals."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.quantity import Quantity
from gradlens.quantities.selective import Selective
from gradlens.quantities.step import Step
from gradlens.signals.capture import SignalCapture, Wanted
from gradlens.signals.layer_signals import LayerSignals
from gradlens.signals.signal import Request

Record = Callable[[LayerQuantity, Any], None]
"""Takes in a quantity and its value in an evaluation."""


class LayerTracking:
    """Tells a capture what the quantities want at the step to come.

    A forward pass runs before its step is announced. It is taken for that of the step which
    follows the last one by as much as that followed the one before, or for that of the same step
    if steps have been repeated. For the first two steps, whatever may be wanted is captured.
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
        self._past: deque[int] = deque(maxlen=3)
        self._step: int | None = None
        self._unfinished = False
        self._evaluated: dict[str, tuple[int, LayerSignals]] = {}
        self._everything = _wanted(self.quantities)
        named = {n: m for q in self.quantities for n, m in q.modules.items()}
        modules = {} if model is None else _in_order(model, named)
        self._capture = None
        if model is not None and modules:
            self._capture = SignalCapture(model, modules, self._everything)
            self._capture.expect(self._everything)

    def is_repeated(self, global_step: int) -> bool:
        """Whether the last step to end has the same number."""
        return bool(self._past) and self._past[-1] == global_step

    @property
    def steps_to_come(self) -> tuple[int, ...]:
        """Which step may be next; none if there is no telling."""
        return steps_to_expect(self._past)

    def announce(self, global_step: int) -> None:
        """A step's context is about to be entered; micro-batches of another one are forgotten.

        Whatever runs until the step begins is of no interest, such as curvature's passes.
        """
        if self._step is not None and self._step != global_step and self._unfinished:
            self._past.append(self._step)
            self._unfinished = False
            if self._capture is not None:
                self._capture.drop()
        self._step = global_step
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
        self._unfinished = accumulating
        if accumulating:
            if self._capture is not None:
                self._capture.go_on(self._wanted_at(global_step))
            return
        self._step = None
        self._evaluated.clear()
        self._past.append(global_step)
        if self._capture is not None:
            following = self.steps_to_come
            self._capture.expect(self._wanted_in(following) if following else self._everything)

    @contextmanager
    def forward(self, global_step: int) -> Iterator[None]:
        """A context for a forward pass of a step that isn't the one to expect."""
        if self._capture is None:
            yield
            return
        wanted = self._wanted_at(global_step)
        if global_step != self._step:
            self.announce(global_step)
            self._capture.expect(wanted)
            self._capture.pause()
        with self._capture.listening(wanted):
            yield

    @contextmanager
    def evaluation(
        self, step: Step, name: str, record: Record, note: Callable[[str], None]
    ) -> Iterator[None]:
        """A context for forward passes without backward passes, recorded under ``step``.

        Several of the same step and ``name``, with no other step between them, count together.
        """
        able = [q for q in self.quantities if not q.signal.needs_backward]
        if self._capture is None or not able:
            raise ValueError(
                "there is nothing to look at in an evaluation: track a quantity of layers' "
                "inputs or outputs, such as OutputNorm"
            )
        with self._capture.evaluating(_wanted(able)) as found:
            yield
        for remark in found[0].remarks:
            note(f"{name}: {remark}")
        at, before = self._evaluated.get(name, (None, LayerSignals()))
        with torch.no_grad():
            signals = before.and_also(found[0]) if at == step.global_step else found[0]
            self._evaluated[name] = step.global_step, signals
            for quantity in able:
                record(quantity, quantity.compute(replace(step, signals=signals)))

    def close(self) -> None:
        """Take all hooks off the model."""
        self._evaluated.clear()
        if self._capture is not None:
            self._capture.close()

    def _wanted_at(self, global_step: int) -> Wanted:
        return _wanted(q for q in self.quantities if q.should_compute(global_step))

    def _wanted_in(self, steps: Sequence[int]) -> Wanted:
        """What may be wanted at some of these steps, which are still to come."""
        return _wanted(q for q in self.quantities if any(_may_want(q, step) for step in steps))


def steps_to_expect(past: Iterable[int]) -> tuple[int, ...]:
    """Which step may follow the last three; none if there is no telling."""
    steps = tuple(past)
    gaps = [after - before for before, after in pairwise(steps)]
    moves = [gap for gap in gaps if gap]
    if not moves:
        return ()
    following = steps[-1] + moves[-1]
    return (following,) if len(moves) == len(gaps) else (steps[-1], following)


def _may_want(quantity: LayerQuantity, global_step: int) -> bool:
    try:
        return quantity.should_compute(global_step)
    except Exception:  # of a table that ends before; if the step comes, it is raised there
        return True


def _wanted(quantities: Iterable[LayerQuantity]) -> Wanted:
    wanted: dict[str, set[Request]] = {}
    for quantity in quantities:
        for layer in quantity.modules:
            wanted.setdefault(layer, set()).add(quantity.request)
    return {layer: frozenset(requests) for layer, requests in wanted.items()}


def _in_order(model: nn.Module, named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    places = {module: place for place, module in enumerate(model.modules())}
    return dict(sorted(named.items(), key=lambda item: places[item[1]]))
