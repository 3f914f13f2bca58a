"""Quantities from configurations of Taiyi."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from gradlens import quantities
from gradlens.quantities.quantity import Quantity
from gradlens.schedules import Linear, linear
from gradlens.signals.selection import Selector
from gradlens.spelling import near

Build: TypeAlias = Callable[..., Quantity]
Entry: TypeAlias = str | Sequence[str]

_WEIGHT: dict[str, Any] = {"parameters": "weight"}

_COVARIANCE = ("MaxEig", "StableRank", "Condition", "Condition20", "Condition50", "Condition80")

_SAME = ("InputMean", "InputStd", "RankMe", "MeanTID", "VarTID")
_OF_THEIR_NAMES: Mapping[str, Build] = {
    **{name: getattr(quantities, name) for name in _SAME},
    "InputSndNorm": quantities.InputNorm,
    "OutputGradSndNorm": partial(quantities.OutputGradientGeometry, correlation=False),
    "WeightNorm": partial(quantities.ParameterNorm, **_WEIGHT),
    "WeightGradNorm": partial(quantities.GradientGeometry, correlation=False, **_WEIGHT),
    "LinearDeadNeuronNum": quantities.DeadNeurons,
    "WeightParamJump": partial(quantities.WeightSignFlips, **_WEIGHT),
}

QUANTITIES: Mapping[str, tuple[str, Build]] = {
    **{name: (name, build) for name, build in _OF_THEIR_NAMES.items()},
    **{
        f"InputCov{number}": ("InputCovariance", quantities.InputCovariance)
        for number in _COVARIANCE
    },
    "BackwardOutputEigOfCov": ("OutputGradientCovariance", quantities.OutputGradientCovariance),
}
"""The name of the series and the quantity, by Taiyi's name."""

_SCHEDULE = re.compile(r"\s*linear\(\s*(\d+)\s*,\s*(\d+)\s*\)\s*")
_EXAMPLE = "{'Linear': ['InputMean', ['WeightNorm', 'linear(5,2)']]}"


def from_taiyi(config: Mapping[Selector, Entry | Sequence[Entry]]) -> list[Quantity]:
    """The quantities of a configuration of Taiyi.

    A configuration is ``{selector: [quantity, [quantity, "linear(5,2)"]]}``. A selector is a
    layer's name, a class, or the name of a class. A quantity is Taiyi's name of it, tracked at
    every step, or at steps 2, 7, 12, ... by ``"linear(5,2)"``.

    Series have Taiyi's names, except that those of eigenvalues are one series,
    ``InputCovariance`` or ``OutputGradientCovariance``. A quantity that several selectors have with
    the same schedule becomes one. If it has several schedules, the names of the series after the
    first end with the schedule. Neurons are dead if all their outputs are ≤ 0; in Taiyi, ≤ −2.

    ``TypeError`` or ``ValueError`` names what is not a configuration, or is unknown. A selector
    that matches nothing raises ``ValueError`` when the cockpit is made.
    """
    layers: dict[tuple[str, Linear], list[Selector]] = {}
    builds: dict[str, Build] = {}
    for selector, text, schedule in _entries(config):
        name, build = _known(text, selector)
        builds[name] = build
        chosen = layers.setdefault((name, schedule), [])
        if selector not in chosen:
            chosen.append(selector)
    found: dict[str, Quantity] = {}
    for (name, schedule), selectors in layers.items():
        words = f"linear({schedule.interval},{schedule.offset})"
        when = "every step" if schedule == linear(1) else words
        series = f"{name}, {when}" if name in found else name
        found[series] = builds[name](schedule, layers=selectors, name=series)
    return list(found.values())


def _known(text: str, selector: Selector) -> tuple[str, Build]:
    if text not in QUANTITIES:
        raise ValueError(
            f"{text!r} for {selector!r} is not a quantity of Taiyi{near(text, QUANTITIES)}; one "
            f"with a schedule is a list, as in {_EXAMPLE}"
        )
    return QUANTITIES[text]


def _entries(
    config: Mapping[Selector, Entry | Sequence[Entry]],
) -> Iterator[tuple[Selector, str, Linear]]:
    """Selector, name of the quantity, and schedule of each entry."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{config!r} is not a configuration: pass a dict, such as {_EXAMPLE}")
    for selector, entries in config.items():
        is_module = isinstance(selector, type) and issubclass(selector, nn.Module)
        if not isinstance(selector, str) and not is_module:
            raise TypeError(
                f"{selector!r} is not a layer's name, a class, or the name of a class: use one of "
                "these as the key"
            )
        if not isinstance(entries, (str, list, tuple)) or not entries:
            raise TypeError(
                f"{entries!r} for {selector!r} is not a list of quantities: write, for example, "
                f"{_EXAMPLE}"
            )
        for entry in [entries] if isinstance(entries, str) else entries:
            match [entry] if isinstance(entry, str) else entry:
                case [str(quantity)]:
                    yield selector, quantity, linear(1)
                case [str(quantity), str(schedule)]:
                    yield selector, quantity, _schedule(schedule, quantity)
                case _:
                    raise ValueError(
                        f"{entry!r} for {selector!r} is not a quantity: use 'Name' or "
                        "['Name', 'linear(interval,offset)']"
                    )


def _schedule(text: str, quantity: str) -> Linear:
    found = _SCHEDULE.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} for {quantity} is not a schedule: write 'linear(interval,offset)', such as "
            "'linear(5,2)'"
        )
    interval, offset = (int(number) for number in found.groups())
    # linear(0,0) is every step in Taiyi.
    return linear(max(interval, 1), offset)
