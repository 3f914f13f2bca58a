"""What a cockpit records of its values: the values themselves, or statistics of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gradlens.cockpit.aggregate import Aggregate
from gradlens.cockpit.window import Window, gathered
from gradlens.history.records import Source
from gradlens.quantities.quantity import Quantity, class_names
from gradlens.stateful import State


class Aggregation:
    """Collects the values of a cockpit's aggregates and pushed metrics until they are recorded."""

    def __init__(self, quantities: Iterable[Any]) -> None:
        """``quantities`` and ``Aggregate``s of them; ``ValueError`` if two series have one name."""
        given = tuple(quantities)
        self._aggregates = {a.quantity.name: a for a in given if isinstance(a, Aggregate)}
        self.quantities = tuple(q.quantity if isinstance(q, Aggregate) else q for q in given)
        names = [*(a.name for a in self._aggregates.values()), *self._shown(self.quantities)]
        for aggregate in self._aggregates.values():
            if names.count(aggregate.name) > 1:
                raise ValueError(
                    f"two series are called {aggregate.name!r}: give one of them another name, as "
                    f"in Aggregate(..., name='{aggregate.name} 2')"
                )
        self._windows: dict[str, Window] = {}
        self._pushed: dict[str, Window] = {}
        self._step = 0
        self._recorded: dict[str, tuple[int, Window]] = {}

    def sources(self, quantities: Iterable[Quantity]) -> dict[str, Source]:
        """The sources of all series by name, those of the quantities themselves first."""
        own = {q.name: Source(class_names(q), q.view, q.of_samples) for q in quantities}
        shown = {name: own[name] for name in own if name in self._shown(quantities)}
        return shown | {a.name: a.source for a in self._aggregates.values()}

    def begin_step(self, global_step: int) -> None:
        """A step has begun; statistics from now on are recorded under it."""
        if global_step != self._step:
            self._recorded = {}
        self._step = global_step

    def take_in(self, global_step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a step: values that aren't aggregated, and statistics of full windows."""
        self._step = max(self._step, global_step)
        kept = dict(values)
        for name in self._aggregates.keys() & values.keys():
            aggregate = self._aggregates[name]
            window = self._windows.setdefault(name, Window(aggregate.statistics))
            window.add(values[name])
            if not aggregate.raw:
                del kept[name]
            if window.records == aggregate.over:
                kept |= self._records(global_step, {aggregate.name: self._windows.pop(name)})
        return kept

    def push(self, metrics: Mapping[str, float]) -> None:
        """Add values of the training loop's metrics."""
        for name, value in metrics.items():
            self._pushed.setdefault(name, Window()).add(value)

    def has_pushed(self, name: str) -> bool:
        """Whether a metric of this name has values in the present epoch."""
        return name in self._pushed

    def end_epoch(self, across_processes: bool = False) -> tuple[int, dict[str, Any]]:
        """The step under which an epoch is recorded, and its record."""
        epochs = {n: w for n, w in self._windows.items() if self._aggregates[n].over == "epoch"}
        windows = {self._aggregates[name].name: window for name, window in epochs.items()}
        windows |= self._pushed
        if across_processes:
            windows = gathered(windows)
        for name in epochs:
            del self._windows[name]
        self._pushed = {}
        return self._step, self._records(self._step, windows)

    def rest(self) -> tuple[int, dict[str, Any]]:
        """As ``end_epoch``, with the windows that aren't full."""
        step, values = self.end_epoch()
        windows = {self._aggregates[name].name: window for name, window in self._windows.items()}
        self._windows = {}
        return step, values | self._records(step, windows)

    def state_dict(self) -> State:
        """The windows that aren't full, and the statistics under the last step."""
        return {
            "step": self._step,
            "windows": {name: window.state_dict() for name, window in self._windows.items()},
            "pushed": {name: window.state_dict() for name, window in self._pushed.items()},
            "recorded": {
                name: [step, window.state_dict()] for name, (step, window) in self._recorded.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; windows of what isn't aggregated any more are left out."""
        windows = {n: Window.from_state(found) for n, found in state["windows"].items()}
        self._step = state["step"]
        self._windows = {n: windows[n] for n in windows.keys() & self._aggregates.keys()}
        self._pushed = {n: Window.from_state(found) for n, found in state["pushed"].items()}
        self._recorded = {
            name: (step, Window.from_state(found))
            for name, (step, found) in state["recorded"].items()
        }

    def _records(self, global_step: int, windows: Mapping[str, Window]) -> dict[str, Any]:
        """Records of windows, merged with those of the same series under the same step."""
        for name, window in windows.items():
            step, whole = self._recorded.get(name, (global_step, window))
            if whole is not window and step == global_step:
                whole.merge(window)
            else:
                self._recorded[name] = (global_step, window)
        return {name: self._recorded[name][1].record() for name in windows}

    def _shown(self, quantities: Iterable[Any]) -> list[str]:
        """Names of the quantities whose single values are recorded."""
        kept = (q for q in quantities if isinstance(q, Quantity))
        return [
            q.name for q in kept if q.name not in self._aggregates or self._aggregates[q.name].raw
        ]
