"""Instruments: one panel each, drawn from a history alone.

``BUILT_IN`` are those that a figure has by default, in the order of its groups. An instrument of
your own is a class derived from ``Instrument``, and is added by
``CockpitPlotter(instruments=(*BUILT_IN, Mine()))``. What it may use is exported here too: functions
that read series as arrays (``line``, ``field_line``, ...), that draw and explain them (``curves``,
``band``, ``key``, ...), that set axes (``fit``, ``StepAxis``), and the colours.
"""

from gradlens.history.lines import Line, field_line, line, lines, quantile_lines, rms_lines
from gradlens.history.series import Series
from gradlens.instruments.axes import Drawing
from gradlens.instruments.curvature import (
    CovarianceRanksInstrument,
    CovarianceSpectrumInstrument,
    CriticalSharpnessInstrument,
    HessEigenvaluesInstrument,
    HessMaxEVInstrument,
    HessTraceInstrument,
    LayerSpectraInstrument,
    SpectralDensityInstrument,
    StabilityInstrument,
)
from gradlens.instruments.curves import (
    band,
    beyond,
    curve,
    explain_empty,
    level_line,
    missing,
    thread,
)
from gradlens.instruments.histograms import (
    Histogram1dInstrument,
    Histogram2dInstrument,
    LayerHistogramsInstrument,
    LayerJointHistogramsInstrument,
)
from gradlens.instruments.instrument import Instrument, Options
from gradlens.instruments.layers import (
    ActivationInstrument,
    AggregateInstrument,
    AttentionInstrument,
    CorrelationsInstrument,
    DistanceInstrument,
    GenericInstrument,
    GradNormInstrument,
    KurtosisInstrument,
    LayerConditionsInstrument,
    LayerLinesInstrument,
    LayerMapInstrument,
    LayerRanksInstrument,
    LayerStableRanksInstrument,
    LogitsInstrument,
    OutputEntropyInstrument,
    ParametersInstrument,
    UpdateSizeInstrument,
)
from gradlens.instruments.numbers import (
    AccuracyInstrument,
    BatchSizeInstrument,
    EarlyStoppingInstrument,
    GradNoiseScaleInstrument,
    GroupGradientsInstrument,
    LearningRateInstrument,
    LossesInstrument,
    LossInstrument,
    MeanGSNRInstrument,
    TICInstrument,
    TimeInstrument,
)
from gradlens.instruments.optimizer import (
    ClippingInstrument,
    GradientOverRootInstrument,
    LedgerInstrument,
    MomentCosinesInstrument,
    MomentsInstrument,
    RelativeUpdateInstrument,
)
from gradlens.instruments.panel import (
    Artists,
    Content,
    Curve,
    Drawn,
    Grid,
    Lines,
    Map,
    Panel,
    Picture,
    Shape,
    Shapes,
    any_finite,
    readout,
)
from gradlens.instruments.scales import (
    NumberLabels,
    Ruler,
    Scale,
    StepAxis,
    fit,
    log_if_far,
    log_if_wide,
    number_label,
    step_label,
    without_spikes,
)
from gradlens.instruments.series import in_force, input_to_output, thin, trend
from gradlens.instruments.steps import (
    AlphaInstrument,
    DirectionsInstrument,
    GradientTestsInstrument,
    OverlapInstrument,
)
from gradlens.instruments.style import (
    ALARM,
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    TEXT_SIZE,
    TICK_SIZE,
    Color,
    Entry,
    categorical_colors,
    inside,
    key,
    message,
    sequence_colors,
    size_in_points,
    subtitle,
    tint,
    title,
)

BUILT_IN: tuple[Instrument, ...] = (
    *(LossInstrument(), LossesInstrument(), AccuracyInstrument(), LearningRateInstrument()),
    *(TimeInstrument(), ParametersInstrument(), AlphaInstrument(), GradNormInstrument()),
    *(ClippingInstrument(), UpdateSizeInstrument(), RelativeUpdateInstrument()),
    *(MomentsInstrument(), GradientOverRootInstrument(), MomentCosinesInstrument()),
    *(DistanceInstrument(), LedgerInstrument(), GradientTestsInstrument()),
    *(GroupGradientsInstrument(), Histogram1dInstrument(), Histogram2dInstrument()),
    *(HessMaxEVInstrument(), StabilityInstrument(), CriticalSharpnessInstrument()),
    *(HessEigenvaluesInstrument(), HessTraceInstrument()),
    *(SpectralDensityInstrument(), DirectionsInstrument(), OverlapInstrument(), TICInstrument()),
    *(MeanGSNRInstrument(), EarlyStoppingInstrument(), BatchSizeInstrument()),
    *(GradNoiseScaleInstrument(), CovarianceSpectrumInstrument(), CovarianceRanksInstrument()),
    *(ActivationInstrument(), AttentionInstrument(), KurtosisInstrument()),
    *(OutputEntropyInstrument(), LogitsInstrument()),
    *(LayerLinesInstrument(), CorrelationsInstrument()),
    *(LayerStableRanksInstrument(), LayerConditionsInstrument(), AggregateInstrument()),
    *(LayerMapInstrument(), LayerRanksInstrument(), LayerHistogramsInstrument()),
    *(LayerJointHistogramsInstrument(), LayerSpectraInstrument()),
)

__all__ = ["BUILT_IN", "Instrument", "Options"]
# What panels show.
__all__ += ["Content", "Curve", "Drawn", "Entry", "Grid", "Lines", "Map", "Panel", "Picture"]
__all__ += ["Ruler", "Shape", "Shapes"]
# What reads series.
__all__ += ["Line", "Series", "field_line", "in_force", "input_to_output", "line", "lines"]
__all__ += ["quantile_lines", "rms_lines", "thin", "trend"]
# What draws lines, words and axes.
__all__ += ["Artists", "Drawing", "any_finite", "band", "beyond", "curve", "explain_empty"]
__all__ += ["level_line", "missing", "readout", "thread"]
__all__ += ["TEXT_SIZE", "TICK_SIZE", "key", "message", "number_label", "step_label", "subtitle"]
__all__ += ["title"]
__all__ += ["NumberLabels", "Scale", "StepAxis", "fit", "inside", "log_if_far", "log_if_wide"]
__all__ += ["size_in_points", "without_spikes"]
# Colours.
__all__ += ["ALARM", "AMBER", "BLUE", "FAINT", "GREEN", "INK", "MUTED", "ORANGE", "PAPER", "PURPLE"]
__all__ += ["SKY", "Color", "categorical_colors", "sequence_colors", "tint"]
# Instruments.
__all__ += ["AccuracyInstrument", "ActivationInstrument", "AggregateInstrument", "AlphaInstrument"]
__all__ += ["AttentionInstrument", "BatchSizeInstrument", "ClippingInstrument"]
__all__ += ["CorrelationsInstrument", "CovarianceRanksInstrument", "CovarianceSpectrumInstrument"]
__all__ += ["CriticalSharpnessInstrument", "DirectionsInstrument", "DistanceInstrument"]
__all__ += ["EarlyStoppingInstrument", "GenericInstrument", "GradNoiseScaleInstrument"]
__all__ += ["GradNormInstrument", "GradientOverRootInstrument", "GradientTestsInstrument"]
__all__ += ["GroupGradientsInstrument"]
__all__ += ["HessEigenvaluesInstrument", "HessMaxEVInstrument", "HessTraceInstrument"]
__all__ += ["Histogram1dInstrument", "Histogram2dInstrument", "KurtosisInstrument"]
__all__ += ["LayerConditionsInstrument", "LayerHistogramsInstrument"]
__all__ += ["LayerJointHistogramsInstrument", "LayerLinesInstrument", "LayerMapInstrument"]
__all__ += ["LayerRanksInstrument", "LayerSpectraInstrument", "LayerStableRanksInstrument"]
__all__ += ["LearningRateInstrument", "LedgerInstrument", "LogitsInstrument", "LossInstrument"]
__all__ += ["LossesInstrument", "MeanGSNRInstrument", "MomentCosinesInstrument"]
__all__ += ["MomentsInstrument", "OutputEntropyInstrument", "OverlapInstrument"]
__all__ += ["ParametersInstrument", "RelativeUpdateInstrument", "SpectralDensityInstrument"]
__all__ += ["StabilityInstrument", "TICInstrument", "TimeInstrument", "UpdateSizeInstrument"]


def __dir__() -> list[str]:
    return list(__all__)
