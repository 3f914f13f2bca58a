"""Configurations of Taiyi as ordinary quantities."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from gradlens import quantities
from gradlens.quantities.quantity import Quantity
from gradlens.schedules import Schedule, linear
from gradlens.signals.selection import Selector, near

Build: TypeAlias = Callable[..., Quantity]
Entry: TypeAlias = str | Sequence[str]

_WEIGHT: dict[str, Any] = {"parameters": "weight"}

QUANTITIES: Mapping[str, tuple[str, Build]] = {
    "InputSndNorm": ("InputSndNorm", quantities.InputNorm),
    "OutputGradSndNorm": (
        "OutputGradSndNorm",
        partial(quantities.OutputGradientGeometry, correlation=False),
    ),
    "WeightNorm": ("WeightNorm", partial(quantities.ParameterNorm, **_WEIGHT)),
    "WeightGradNorm": (
        "WeightGradNorm",
        partial(quantities.GradientGeometry, correlation=False, **_WEIGHT),
    ),
    "InputMean": ("InputMean", quantities.InputMean),
    "InputStd": ("InputStd", quantities.InputStd),
    **dict.fromkeys(
        (
            "InputCovMaxEig",
            "InputCovStableRank",
            "InputCovCondition",
            "InputCovCondition20",
            "InputCovCondition50",
            "InputCovCondition80",
        ),
        ("InputCovariance", quantities.InputCovariance),
    ),
    "BackwardOutputEigOfCov": (
        "OutputGradientCovariance",
        quantities.OutputGradientCovariance,
    ),
    "RankMe": ("RankMe", quantities.RankMe),
    "LinearDeadNeuronNum": ("LinearDeadNeuronNum", quantities.DeadNeurons),
    "MeanTID": ("MeanTID", quantities.MeanTID),
    "VarTID": ("VarTID", quantities.VarTID),
    "WeightParamJump": ("WeightParamJump", partial(quantities.WeightSignFlips, **_WEIGHT)),
}
"""By Taiyi's names: that of the series, and the quantity."""

_SCHEDULE = re.compile(r"linear\(\s*(\d+)\s*,\s*(\d+)\s*\)")


def from_taiyi(config: Mapping[Selector, Entry | Sequence[Entry]]) -> list[Quantity]:
    """The quantities that a configuration of Taiyi asks for.

    It is ``{selector: [quantity, [quantity, "linear(5,2)"]]}``: a layer's name, a class or its
    name, with names of Taiyi's quantities, at every step or at steps 2, 7, 12, ... They are
    called as in Taiyi, except for what is told by one spectrum, ``InputCovariance`` or
    ``OutputGradientCovariance``; one with another schedule than the first of its name says so.
    Quantities are found with the same schedule for several selectors become one. ``ValueError``
    names what isn't known; a selector that matches nothing is one when the cockpit is made.

    A dead neuron is one whose outputs are all ≤ 0, whereas Taiyi has −2.
    """
    layers: dict[tuple[str, str], list[Selector]] = {}
    builds: dict[str, Build] = {}
    for selector, text, schedule in _entries(config):
        if text not in QUANTITIES:
            raise ValueError(f"Taiyi has no quantity {text!r}{near(text, QUANTITIES)}")
        name, builds[QUANTITIES[text][0]] = QUANTITIES[text]
        _parsed(schedule, text)
        chosen = layers.setdefault((name, schedule.replace(" ", "")), [])
        if selector not in chosen:
            chosen.append(selector)
    found: dict[str, Quantity] = {}
    for (name, schedule), selectors in layers.items():
        series = f"{name}, {schedule or 'every step'}" if name in found else name
        found[series] = builds[name](_parsed(schedule, name), layers=selectors, name=series)
    return list(found.values())


def _entries(
    config: Mapping[Selector, Entry | Sequence[Entry]],
) -> Iterator[tuple[Selector, str, str]]:
    """Selector, quantity and schedule, which is empty for every step."""
    for selector, entries in config.items():
        if not isinstance(selector, str) and not (
            isinstance(selector, type) and issubclass(selector, nn.Module)
        ):
            raise TypeError(f"{selector!r} is no layer's name, class, or name of a class")
        for entry in [entries] if isinstance(entries, str) else entries:
            words = [entry] if isinstance(entry, str) else list(entry)
            if not 1 <= len(words) <= 2 or not all(isinstance(word, str) for word in words):
                raise ValueError(
                    f"{entry!r} for {selector!r} is no quantity: use 'Name' or "
                    "['Name', 'linear(interval,offset)']"
                )
            yield selector, words[0], words[1] if len(words) == 2 else ""


def _parsed(schedule: str, quantity: str) -> Schedule:
    if not schedule:
        return linear(1)
    found = _SCHEDULE.fullmatch(schedule.strip())
    if found is None:
        raise ValueError(
            f"{schedule!r} for {quantity} is no schedule: write 'linear(interval,offset)', such as "
            "'linear(5,2)'"
        )
    interval, offset = (int(number) for number in found.groups())
    # Every step is linear(0,0) in Taiyi.
    return linear(max(interval, 1), offset)
