"""Instruments: one panel each, drawn from a history alone.

``MAIN`` and ``LAYERS`` list what the two screens show, in the order of its groups. To add an
instrument, write its class in a file of its own and enter it in one of the two.
"""

from gradlens.instruments.alpha import AlphaInstrument
from gradlens.instruments.covariance import (
    CovarianceRanksInstrument,
    CovarianceSpectrumInstrument,
)
from gradlens.instruments.generic import GenericInstrument
from gradlens.instruments.grad_noise_scale import GradNoiseScaleInstrument
from gradlens.instruments.grad_norm import GradNormInstrument
from gradlens.instruments.gradient_tests import GradientTestsInstrument
from gradlens.instruments.hess_eigenvalues import HessEigenvaluesInstrument
from gradlens.instruments.hess_trace import HessTraceInstrument
from gradlens.instruments.histogram_1d import Histogram1dInstrument
from gradlens.instruments.histogram_2d import Histogram2dInstrument
from gradlens.instruments.instrument import Drawing, Instrument
from gradlens.instruments.layer_covariance import LayerRanksInstrument, LayerTraceInstrument
from gradlens.instruments.layer_histograms import LayerHistogramsInstrument
from gradlens.instruments.logged import (
    AccuracyInstrument,
    LearningRateInstrument,
    LossesInstrument,
)
from gradlens.instruments.loss import LossInstrument
from gradlens.instruments.mean_gsnr import MeanGSNRInstrument
from gradlens.instruments.parameters import ParametersInstrument
from gradlens.instruments.spectral_density import SpectralDensityInstrument
from gradlens.instruments.stability import StabilityInstrument
from gradlens.instruments.step_time import TimeInstrument

MAIN: tuple[Instrument, ...] = (
    LossInstrument(),
    LossesInstrument(),
    AccuracyInstrument(),
    LearningRateInstrument(),
    TimeInstrument(),
    ParametersInstrument(),
    GradNormInstrument(),
    AlphaInstrument(),
    GradientTestsInstrument(),
    Histogram1dInstrument(),
    Histogram2dInstrument(),
    HessEigenvaluesInstrument(),
    SpectralDensityInstrument(),
    HessTraceInstrument(),
    StabilityInstrument(),
    MeanGSNRInstrument(),
    GradNoiseScaleInstrument(),
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
    "AccuracyInstrument",
    "AlphaInstrument",
    "CovarianceRanksInstrument",
    "CovarianceSpectrumInstrument",
    "Drawing",
    "GenericInstrument",
    "GradNoiseScaleInstrument",
    "GradNormInstrument",
    "GradientTestsInstrument",
    "HessEigenvaluesInstrument",
    "HessTraceInstrument",
    "Histogram1dInstrument",
    "Histogram2dInstrument",
    "Instrument",
    "LayerHistogramsInstrument",
    "LayerRanksInstrument",
    "LayerTraceInstrument",
    "LearningRateInstrument",
    "LossInstrument",
    "LossesInstrument",
    "MeanGSNRInstrument",
    "ParametersInstrument",
    "SpectralDensityInstrument",
    "StabilityInstrument",
    "TimeInstrument",
]
