"""Instruments: one panel each, drawn from a history alone.

``MAIN`` and ``LAYERS`` list what the two screens show, in the order of its groups. To add an
instrument, write its class in a file of its own and enter it in one of the two.
"""

from gradlens.instruments.covariance import (
    CovarianceRanksInstrument,
    CovarianceSpectrumInstrument,
)
from gradlens.instruments.generic import GenericInstrument
from gradlens.instruments.grad_norm import GradNormInstrument
from gradlens.instruments.gradient_tests import GradientTestsInstrument
from gradlens.instruments.histogram_1d import Histogram1dInstrument
from gradlens.instruments.histogram_2d import Histogram2dInstrument
from gradlens.instruments.instrument import Drawing, Instrument
from gradlens.instruments.layer_covariance import LayerRanksInstrument, LayerTraceInstrument
from gradlens.instruments.layer_histograms import LayerHistogramsInstrument
from gradlens.instruments.loss import LossInstrument
from gradlens.instruments.mean_gsnr import MeanGSNRInstrument
from gradlens.instruments.parameters import ParametersInstrument
from gradlens.instruments.step_time import TimeInstrument

MAIN: tuple[Instrument, ...] = (
    LossInstrument(),
    TimeInstrument(),
    ParametersInstrument(),
    GradNormInstrument(),
    GradientTestsInstrument(),
    Histogram1dInstrument(),
    Histogram2dInstrument(),
    MeanGSNRInstrument(),
    CovarianceSpectrumInstrument(),
    CovarianceRanksInstrument(),
)

LAYERS: tuple[Instrument, ...] = (
    LayerTraceInstrument(),
    LayerRanksInstrument(),
    LayerHistogramsInstrument(),
)

__all__ = [
    "LAYERS",
    "MAIN",
    "CovarianceRanksInstrument",
    "CovarianceSpectrumInstrument",
    "Drawing",
    "GenericInstrument",
    "GradNormInstrument",
    "GradientTestsInstrument",
    "Histogram1dInstrument",
    "Histogram2dInstrument",
    "Instrument",
    "LayerHistogramsInstrument",
    "LayerRanksInstrument",
    "LayerTraceInstrument",
    "LossInstrument",
    "MeanGSNRInstrument",
    "ParametersInstrument",
    "TimeInstrument",
]
