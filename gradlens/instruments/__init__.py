"""Instruments: one panel each, drawn from a history alone.

``BUILT_IN`` are those that a figure has by default, in the order of its groups. An instrument of
your own is a class derived from ``Instrument``, and is added by
``CockpitPlotter(instruments=(*BUILT_IN, Mine()))``. What it may use is exported here too: functions
that read series as arrays (``line``, ``field_line``, ...), that draw and explain them (``curves``,
``band``, ``key``, ...), that set axes (``fit``, ``StepAxis``), and the colours.
"""

from gradlens.history.lines import Line, field_line, line, lines, quantile_lines, rms_lines
from gradlens.history.series import Series
from gradlens.instruments.activation import ActivationInstrument
from gradlens.instruments.aggregate import AggregateInstrument
from gradlens.instruments.alpha import AlphaInstrument
from gradlens.instruments.axes import Drawing
from gradlens.instruments.batch_size import BatchSizeInstrument
from gradlens.instruments.covariance import (
    CovarianceRanksInstrument,
    CovarianceSpectrumInstrument,
)
from gradlens.instruments.directions import DirectionsInstrument, OverlapInstrument
from gradlens.instruments.drawing import (
    band,
    beyond,
    curve,
    explain_empty,
    missing,
    thread,
    zero_line,
)
from gradlens.instruments.early_stopping import EarlyStoppingInstrument
from gradlens.instruments.generic import GenericInstrument
from gradlens.instruments.grad_noise_scale import GradNoiseScaleInstrument
from gradlens.instruments.gradient_tests import GradientTestsInstrument
from gradlens.instruments.hess_eigenvalues import HessEigenvaluesInstrument
from gradlens.instruments.hess_max_ev import HessMaxEVInstrument
from gradlens.instruments.hess_trace import HessTraceInstrument
from gradlens.instruments.histograms import (
    Histogram1dInstrument,
    Histogram2dInstrument,
    LayerHistogramsInstrument,
    LayerJointHistogramsInstrument,
)
from gradlens.instruments.instrument import Instrument, Options
from gradlens.instruments.layer_covariance import LayerRanksInstrument
from gradlens.instruments.layer_lines import CorrelationsInstrument, LayerLinesInstrument
from gradlens.instruments.layer_map import LayerMapInstrument
from gradlens.instruments.layer_spectra import (
    LayerConditionsInstrument,
    LayerSpectraInstrument,
    LayerStableRanksInstrument,
)
from gradlens.instruments.norms import DistanceInstrument, GradNormInstrument, UpdateSizeInstrument
from gradlens.instruments.numbers import (
    AccuracyInstrument,
    LearningRateInstrument,
    LossesInstrument,
    LossInstrument,
    MeanGSNRInstrument,
    TICInstrument,
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
    Ruler,
    Shape,
    Shapes,
    any_finite,
    readout,
)
from gradlens.instruments.parameters import ParametersInstrument
from gradlens.instruments.scales import (
    NumberLabels,
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
from gradlens.instruments.spectral_density import SpectralDensityInstrument
from gradlens.instruments.stability import StabilityInstrument
from gradlens.instruments.step_time import TimeInstrument
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
    sequence_key,
    size_in_points,
    subtitle,
    tint,
    title,
)

BUILT_IN: tuple[Instrument, ...] = (
    LossInstrument(),
    LossesInstrument(),
    AccuracyInstrument(),
    LearningRateInstrument(),
    TimeInstrument(),
    ParametersInstrument(),
    AlphaInstrument(),
    GradNormInstrument(),
    UpdateSizeInstrument(),
    DistanceInstrument(),
    GradientTestsInstrument(),
    Histogram1dInstrument(),
    Histogram2dInstrument(),
    HessMaxEVInstrument(),
    StabilityInstrument(),
    HessEigenvaluesInstrument(),
    HessTraceInstrument(),
    SpectralDensityInstrument(),
    DirectionsInstrument(),
    OverlapInstrument(),
    TICInstrument(),
    MeanGSNRInstrument(),
    EarlyStoppingInstrument(),
    BatchSizeInstrument(),
    GradNoiseScaleInstrument(),
    CovarianceSpectrumInstrument(),
    CovarianceRanksInstrument(),
    ActivationInstrument(),
    LayerLinesInstrument(),
    CorrelationsInstrument(),
    LayerStableRanksInstrument(),
    LayerConditionsInstrument(),
    AggregateInstrument(),
    LayerMapInstrument(),
    LayerRanksInstrument(),
    LayerHistogramsInstrument(),
    LayerJointHistogramsInstrument(),
    LayerSpectraInstrument(),
)

__all__ = [
    "ALARM",
    "AMBER",
    "BLUE",
    "BUILT_IN",
    "FAINT",
    "GREEN",
    "INK",
    "MUTED",
    "ORANGE",
    "PAPER",
    "PURPLE",
    "SKY",
    "TEXT_SIZE",
    "TICK_SIZE",
    "AccuracyInstrument",
    "ActivationInstrument",
    "AggregateInstrument",
    "AlphaInstrument",
    "Artists",
    "BatchSizeInstrument",
    "Color",
    "Content",
    "CorrelationsInstrument",
    "CovarianceRanksInstrument",
    "CovarianceSpectrumInstrument",
    "Curve",
    "DirectionsInstrument",
    "DistanceInstrument",
    "Drawing",
    "Drawn",
    "EarlyStoppingInstrument",
    "Entry",
    "GenericInstrument",
    "GradNoiseScaleInstrument",
    "GradNormInstrument",
    "GradientTestsInstrument",
    "Grid",
    "HessEigenvaluesInstrument",
    "HessMaxEVInstrument",
    "HessTraceInstrument",
    "Histogram1dInstrument",
    "Histogram2dInstrument",
    "Instrument",
    "LayerConditionsInstrument",
    "LayerHistogramsInstrument",
    "LayerJointHistogramsInstrument",
    "LayerLinesInstrument",
    "LayerMapInstrument",
    "LayerRanksInstrument",
    "LayerSpectraInstrument",
    "LayerStableRanksInstrument",
    "LearningRateInstrument",
    "Line",
    "Lines",
    "LossInstrument",
    "LossesInstrument",
    "Map",
    "MeanGSNRInstrument",
    "NumberLabels",
    "Options",
    "OverlapInstrument",
    "Panel",
    "ParametersInstrument",
    "Picture",
    "Ruler",
    "Scale",
    "Series",
    "Shape",
    "Shapes",
    "SpectralDensityInstrument",
    "StabilityInstrument",
    "StepAxis",
    "TICInstrument",
    "TimeInstrument",
    "UpdateSizeInstrument",
    "any_finite",
    "band",
    "beyond",
    "categorical_colors",
    "curve",
    "explain_empty",
    "field_line",
    "fit",
    "in_force",
    "input_to_output",
    "inside",
    "key",
    "line",
    "lines",
    "log_if_far",
    "log_if_wide",
    "message",
    "missing",
    "number_label",
    "quantile_lines",
    "readout",
    "rms_lines",
    "sequence_colors",
    "sequence_key",
    "size_in_points",
    "step_label",
    "subtitle",
    "thin",
    "thread",
    "tint",
    "title",
    "trend",
    "without_spikes",
    "zero_line",
]


def __dir__() -> list[str]:
    return list(__all__)
