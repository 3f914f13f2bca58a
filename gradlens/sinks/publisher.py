"""Passes each record of a run on to sinks."""

from __future__ import annotations

import atexit
import math
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gradlens.history.histograms import Histogram, by_parameter, histogram
from gradlens.history.history import History
from gradlens.history.json_lines import Value
from gradlens.history.lines import Line, number_lines
from gradlens.history.records import NOUNS, Source
from gradlens.history.scalars import scalars_of
from gradlens.history.series import Series
from gradlens.sinks.sink import Sink

Report = Callable[[str, Exception], None]
"""Called with what failed, and the exception."""

Contents: TypeAlias = dict[tuple[str, str, str], float | Histogram]
"""What values say, by series, the parameter or layer that it is about, empty for the whole network,
and the part of the value."""


class Publisher:
    """The sinks of a run.

    What a record costs doesn't depend on the number of earlier ones. If a sink raises an exception,
    or the values of a series can't be read, ``report`` is called, and the sink or the series is
    left out from then on.
    """

    def __init__(self, sinks: Sequence[Sink], report: Report) -> None:
        self._outlets = [_Outlet(sink) for sink in sinks]
        self._report = report
        self._by_layer = any(sink.layers for sink in sinks)
        self._unreadable: set[str] = set()
        self._stamps: dict[str, dict[int, Value]] = {}
        """The last record of each series of time stamps, whose differences are the numbers."""
        # The functions of W&B and others were registered before, and are called after this one.
        self._at_exit = partial(_close, tuple(sinks))
        atexit.register(self._at_exit)

    def record(
        self,
        step: int,
        values: Mapping[str, Any],
        sources: Mapping[str, Source],
        parameters: Mapping[str, Any],
    ) -> None:
        """Pass on values that were recorded at a step."""
        read: Contents = {}
        for name, value in values.items():
            read |= self._contents(step, name, value, sources.get(name), parameters)
        self._each(self._outlets, lambda outlet: outlet.record(step, read))

    def note(self, step: int, text: str) -> None:
        self._each(self._outlets, lambda outlet: outlet.sink.note(step, text))

    def close(self) -> None:
        """Close the sinks; none of them gets anything from then on."""
        atexit.unregister(self._at_exit)
        # First of all without sinks, which a note on a failure doesn't go to.
        outlets, self._outlets = self._outlets, []
        self._each(outlets, lambda outlet: outlet.sink.close())

    def _each(self, outlets: Sequence[_Outlet], call: Callable[[_Outlet], None]) -> None:
        """Call a function with each sink; one that fails is left out from then on."""
        for outlet in outlets:
            try:
                call(outlet)
            except Exception as error:
                self._outlets = [other for other in self._outlets if other is not outlet]
                self._report(f"the sink {type(outlet.sink).__name__}", error)

    def _contents(
        self, step: int, name: str, found: Any, source: Source | None, parameters: Mapping[str, Any]
    ) -> Contents:
        """What a value says; nothing if it can't be read."""
        if name in self._unreadable:
            return {}
        records = Series.of({**self._stamps.get(name, {}), step: found})
        value = records[step]
        if source is not None and "Time" in source.kinds:
            self._stamps[name] = {step: value}
        try:
            scalars = scalars_of(name, records, source, parameters)
            lines = {("", one.part): one.line for one in scalars}
            histograms = {"": histogram(step, value)} if _is_histogram(value) else {}
            if self._by_layer:
                lines |= _of_layers(records.only([step]))
                histograms |= by_parameter(step, value) if histograms else {}
        except Exception as error:
            self._unreadable.add(name)
            self._report(f"reading {name} for sinks", error)
            return {}
        contents: Contents = {(name, layer, ""): one for layer, one in histograms.items()}
        numbers = {(name, *at): _number(step, line) for at, line in lines.items()}
        return {at: number for at, number in numbers.items() if number is not None} | contents


def publish(history: History, sinks: Sequence[Sink], report: Report) -> None:
    """Pass a whole history on to sinks, and close them."""
    publisher = Publisher(sinks, report)
    for step in history:
        publisher.record(step, history[step], history.sources, history.parameters)
    for note in history.notes:
        publisher.note(note.step, note.text)
    for finding in history.findings:
        publisher.note(finding.step, finding.sentence)
    publisher.close()


@dataclass
class _Outlet:
    """A sink, and the last step at which each name was passed on to it."""

    sink: Sink
    _last: dict[str, int] = field(default_factory=dict)

    def record(self, step: int, read: Contents) -> None:
        """Pass on what is about the whole network, and the layers that the sink names.

        Left out is what was passed on within the last ``every`` steps before this one.
        """
        sink = self.sink
        scalars: dict[str, float] = {}
        histograms: dict[str, Histogram] = {}
        for (series, layer, part), content in read.items():
            if layer and not any(is_inside(layer, wanted) for wanted in sink.layers):
                continue
            name = tag(sink.prefix, series, "_".join(filter(None, (layer, part))))
            every = sink.histograms_every if isinstance(content, Histogram) else sink.every
            if name in self._last and 0 < step - self._last[name] < every:
                continue
            self._last[name] = step
            if isinstance(content, Histogram):
                histograms[name] = content
            else:
                scalars[name] = content
        if scalars or histograms:
            sink.record(step, scalars, histograms)


def _close(sinks: Sequence[Sink]) -> None:
    """Write what a program has left without closing its cockpit."""
    for sink in sinks:
        with suppress(Exception):  # such as of a run of W&B that is over
            sink.close()


def _is_histogram(value: Any) -> bool:
    """Whether it is one of one dimension."""
    is_any = isinstance(value, Mapping) and {"hist", "edges"} <= value.keys()
    return is_any and np.ndim(value["hist"]) == 1


def _number(step: int, line: Line) -> float | None:
    """The number at a step, unless it is NaN for a reason."""
    places = np.flatnonzero(line.steps == step)
    if not places.size:
        return None
    number = float(line.values[places[0]])
    return None if math.isnan(number) and line.reason else number


def _of_layers(records: Series) -> dict[tuple[str, str], Line]:
    found = {}
    for place, line in number_lines(records).items():
        layer, *words = [word for word in place.split("/") if word not in NOUNS] or [""]
        if layer:  # else it is about the whole network
            found[layer, "_".join(words)] = line
    return found


ALLOWED = frozenset(string.ascii_letters + string.digits + "_-./")
"""TensorBoard, W&B and MLflow take all of these, and MLflow takes few others."""

WORDS = {"s/step": "seconds_per_step", "λ": "lambda"}
"""What names of scalars have instead of signs that aren't allowed."""


def tag(prefix: str, series: str, part: str = "") -> str:
    """``prefix/series`` or ``prefix/series_part`` in ASCII."""
    name = "_".join(filter(None, (_ascii(series), _ascii(part))))
    return "/".join(filter(None, (prefix, name)))


def is_inside(name: str, layer: str) -> bool:
    """Whether a name is that of a layer or parameter, or of one inside it."""
    return f"{name}.".startswith(f"{layer}.")


def _ascii(text: str) -> str:
    for sign, word in WORDS.items():
        text = text.replace(sign, word)
    return "".join(map(_plain, unicodedata.normalize("NFKD", text)))


def _plain(sign: str) -> str:
    if sign in ALLOWED:
        return sign
    if unicodedata.combining(sign) or sign in "()[]{}":
        return ""
    return "_" if sign.isascii() else f"u{ord(sign):04x}"
