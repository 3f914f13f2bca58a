"""From histories to the cards of a page: pure functions."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Line
from gradlens.history.records import Source
from gradlens.history.series import Series
from gradlens.history.undefined import Undefined
from gradlens.instruments import BUILT_IN, Instrument, LayerMapInstrument
from gradlens.instruments.axes import plot_panels
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.panel import Drawn, Grid, Lines, Map, Panel, Shapes
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.shapes import GREY
from gradlens.instruments.style import BLUE, DOT, Color
from gradlens.plotting.comparison import Number, numbers, run_colors
from gradlens.plotting.rendering import cannot_be_drawn
from gradlens.plotting.screen import EPOCHS, GROUPS, main_parts, panels

MOST = 1000
"""Largest number of missing values of a series that a page has, evenly over all of them."""

INFINITE = "infinite"
UNKNOWN = "not a number"


Gaps = Mapping[float, str]
"""Why there is no finite number, by the steps where there is none."""


def gaps(line: Line, records: Sequence[Series]) -> Gaps:
    """The missing values of a line that was made of the records of some series."""
    places = np.flatnonzero(~np.isfinite(line.values))
    if places.size > MOST:
        places = places[np.linspace(0, places.size - 1, MOST).astype(np.int64)]
    # Where no record has a reason, that of the line is the instrument's own.
    own = UNKNOWN if any(series.reason for series in records) else line.reason or UNKNOWN
    found = {}
    for step, value in zip(line.steps[places].tolist(), line.values[places], strict=True):
        reasons = filter(None, (reason(series.get(int(step))) for series in records))
        found[step] = INFINITE if np.isinf(value) else next(reasons, own)
    return found


def reason(value: Any) -> str:
    """Why a record has no number: its own reason, or that of the first of its entries with one."""
    if isinstance(value, Undefined):
        return value.reason
    if isinstance(value, Mapping):
        return next(filter(None, map(reason, value.values())), str(value.get("reason") or ""))
    return ""


WORDS = {"clipped": "share of elements out of range"}
"""What the part of a series is."""


@dataclass(frozen=True, eq=False)
class Card:
    """A panel of a page, what to look for in it, the gaps of its curves, or all of it as a PNG."""

    panel: Panel
    hint: str = ""
    gaps: tuple[Gaps, ...] = ()
    picture: str = ""

    @property
    def words(self) -> str:
        """What the numbers are."""
        shown = self.panel.content
        if isinstance(shown, (Drawn, Grid)):
            return ""
        return shown.words + f"{DOT}{GREY}" * (isinstance(shown, Map) and shown.has_grey)

    @property
    def why(self) -> str:
        """Why there is nothing to draw, where there is nothing."""
        shown = self.panel.content
        return shown.why if isinstance(shown, Lines) else ""

    @property
    def entries(self) -> list[tuple[str, Color]]:
        """What its key explains, and the colours of that."""
        match self.panel.content:
            case Lines() as lines:
                return [(curve.name, curve.color) for curve in lines.all_curves]
            case Shapes() as shapes:
                return [(entry.label, entry.color) for entry in shapes.key]
            case _:
                return []


def cards(
    runs: Mapping[str, History], instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Card, ...]:
    """The cards of a page, group by group: those of one run, or of a comparison."""
    single = next(iter(runs.values()))
    found = _of_one(single, instruments) if len(runs) == 1 else _of_several(runs)
    return tuple(sorted(found, key=lambda card: GROUPS.index(card.panel.group)))


# One run ------------------------------------------------------------------------------------


def _of_one(history: History, instruments: Sequence[Instrument]) -> list[Card]:
    """The panels of a figure, numbers of what has no lines among them, and maps of layers.

    Shapes beside the lines of a panel have a card of their own, and those at single steps are shown
    at all steps. What only matplotlib draws is a picture.
    """
    main = panels(main_parts(history, instruments), history)
    maps = panels(LayerMapInstrument().parts(history), history)
    found: list[Card] = []
    titles: dict[str, str] = {}
    shown: set[str] = set()
    for panel in (*main, *(replace(one, group="layers") for one in maps)):
        name, content = panel.names[0], panel.content
        hint = _hint((*history.sources.get(name, Source()).kinds, name))
        titles = dict.fromkeys(panel.names, panel.title) | titles
        if isinstance(content, Lines):
            found.append(_lines_card(panel, repeat([history[name] for name in panel.names]), hint))
            shown |= {*panel.names} if panel in main else set()
        elif isinstance(content, Shapes) and content.over_steps is not None:
            found.append(Card(replace(panel, content=content.over_steps), hint))
        elif isinstance(content, (Drawn, Grid)):
            found.append(_picture(panel, step_axis(history), hint))
        else:
            found.append(Card(panel, hint))
        if isinstance(content, (Lines, Map)) and content.beside is not None:
            title = f"{panel.title}: {content.beside.title}"
            found.append(Card(replace(panel, title=title, content=content.beside), hint))
    for one in history.scalars():
        if one.series not in shown | {EPOCHS}:
            title = titles.get(one.series, one.view.title or one.series)
            number = Number(one, f"{title}: {one.part}" if one.part else title, {"": one.line})
            panel = number.panel({"": one.name}, {"": BLUE}, WORDS.get(one.part, ""))
            found.append(_lines_card(panel, [(history[one.series],)]))
    return found


def _picture(panel: Panel, axis: StepAxis, hint: str) -> Card:
    """The card of what only matplotlib draws, or of why that fails."""
    written = io.BytesIO()
    try:
        figure = plot_panels([replace(panel, title="")], axis).figure
        figure.savefig(written, format="png", dpi=200)
    except Exception as error:
        message = cannot_be_drawn(panel.names, error)
        return Card(replace(panel, content=Lines(message=message)), hint)
    png = base64.b64encode(written.getvalue()).decode()
    return Card(panel, hint, picture=f"data:image/png;base64,{png}")


def _lines_card(panel: Panel, records: Iterable[Sequence[Series]], hint: str = "") -> Card:
    """The card of some lines; ``records`` are those that each curve was made of."""
    assert isinstance(panel.content, Lines)
    found = zip(panel.content.all_curves, records, strict=False)
    return Card(panel, hint, tuple(gaps(curve.line, series) for curve, series in found))


def _hint(kinds: Iterable[str]) -> str:
    return next((HINTS[kind] for kind in kinds if kind in HINTS), "")


# Several runs -------------------------------------------------------------------------------


def _of_several(runs: Mapping[str, History]) -> list[Card]:
    """A card for each number that a run has, with a line for each run."""
    colors = run_colors([*runs])
    found: list[Card] = []
    for one in numbers(runs):
        name = one.scalar.name
        words = name if name.endswith(one.words) else f"{name} · {one.words}"
        panel = one.panel({run: run for run in runs}, colors, words)
        records = [(runs[run][one.scalar.series],) for run in one.lines]
        found.append(_lines_card(panel, records, _hint(one.scalar.kinds)))
    return found


HINTS: Mapping[str, str] = {
    "Loss": "Healthy: it falls, with noise. A loss that is flat from the start has vanishing "
    "gradients or steps that are too short; one that jumps has steps that are too long.",
    "train_loss": "Healthy: they go together. A gap that opens is overfitting.",
    "Time": "Peaks are steps at which more is tracked. Healthy: the rest is flat.",
    "Alpha": "−1 is where a step began, 0 the minimum of the fitted parabola, 1 as high as the "
    "start on the other side. Healthy: between −1 and 1.",
    "GradNorm": "It need not fall. Growth by decades means that gradients explode.",
    "ClippedGradNorm": "The norm that the optimizer takes. A limit that is reached at each step "
    "sets the length of all steps.",
    "UpdateSize": "Healthy: it follows the schedule of the learning rate.",
    "RelativeUpdate": "Healthy: about a thousandth after the start. New biases have more.",
    "OptimizerState": "Healthy: g/√v is about 1. Above 2.3, √v is too small for the gradient, and "
    "spikes of the loss follow: lower β₂ or the learning rate.",
    "Distance": "Healthy: it grows ever more slowly, about as the logarithm of the step.",
    "NormTest": "Healthy: below 1. Above 1, the noise of the mini-batch is larger than the "
    "gradient: at the end of training a larger batch or a smaller learning rate makes progress.",
    "GradHist1d": "Healthy: a peak at zero with tails to both sides. A needle at zero means that "
    "gradients vanish, a range that grows by decades that they explode.",
    "GradHist2d": "Healthy: a cloud around zero. A thin vertical line means that parameters of all "
    "sizes get no gradient.",
    "HessMaxEV": "Plain gradient descent is unstable above 2/η. If it is negative, the loss curves "
    "downwards in all directions.",
    "Stability": "Healthy: sharpness is below the threshold, or hovers at it with full batches.",
    "CriticalSharpness": "Healthy: at or below the threshold. Above it, the step has raised "
    "the loss of its own batch.",
    "StepLedger": "Healthy: ΔL follows gᵀd, and ½dᵀHd takes a part of it. Where the rest is as "
    "large, the loss isn't quadratic over a step.",
    "HessEigenvalues": "Healthy: a few large ones, in classification about as many as classes.",
    "SpectralDensity": "Healthy: a bulk at zero and outliers to the right.",
    "DirectionalDerivatives": "The gradient soon lies in few directions of large curvature, and is "
    "mostly noise along them: where the ratio is above 4, one step is signal.",
    "HessTrace": "Healthy: it settles. Below zero, negative curvature prevails.",
    "TICTrace": "Healthy: it stays small. If it rises while the training loss falls, look at the "
    "test loss.",
    "TICDiag": "Healthy: it stays small. If it rises while the training loss falls, look at the "
    "test loss.",
    "MeanGSNR": "Healthy: it falls slowly from its value at the start.",
    "GradNoiseScale": "It grows while the loss falls. Batches far below it are dominated by noise, "
    "and batches far above it are waste.",
    "CABS": "Healthy: at most about the batch size in use.",
    "EarlyStopping": "Above zero the gradient can't be told from noise, and going on fits noise.",
    "AttentionLogits": "Healthy: tens at most. A head whose scores grow from step to step comes "
    "before a training that diverges.",
    "AttentionEntropy": "Healthy: some heads fall. Near zero, each query looks at one key.",
    "ActivationOutliers": "Healthy: all layers are of similar size. One that grows by decades, "
    "with a kurtosis in the hundreds, has a few channels far beyond the others.",
    "OutputEntropy": "Healthy: both fall as classes are learned. At zero entropy with one class "
    "for all, predictions have collapsed.",
    "WeightSpectrum": "Healthy: it grows slowly. If the stable rank falls towards 1, the outputs "
    "of this matrix are along one direction.",
    "UpdateSpectrum": "Healthy: it follows the schedule of the learning rate.",
    "GradCovariance": "Healthy: the trace is shared by many eigenvalues. If the first one is "
    "almost all of it, one kind of samples dominates the direction of training.",
}
"""What to look for in a panel, by the kind of the quantity or the name of the logged series."""
