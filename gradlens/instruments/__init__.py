"""Instruments: one panel each, drawn from a history alone.

``MAIN`` and ``LAYERS`` list what the two screens show, in the order of its groups. To add an
instrument, write its class in a file of its own and enter it in one of the two.
"""

from gradlens.instruments.activation import ActivationInstrument
from gradlens.instruments.aggregate import AggregateInstrument
from gradlens.instruments.alpha import AlphaInstrument
from gradlens.instruments.batch_size import BatchSizeInstrument
from gradlens.instruments.covariance import (
    CovarianceRanksInstrument,
    CovarianceSpectrumInstrument,
)
from gradlens.instruments.early_stopping import EarlyStoppingInstrument
from gradlens.instruments.generic import GenericInstrument
from gradlens.instruments.grad_noise_scale import GradNoiseScaleInstrument
from gradlens.instruments.gradient_tests import GradientTestsInstrument
from gradlens.instruments.hess_eigenvalues import HessEigenvaluesInstrument
from gradlens.instruments.hess_max_ev import HessMaxEVInstrument
from gradlens.instruments.hess_trace import HessTraceInstrument
from gradlens.instruments.histogram_1d import Histogram1dInstrument
from gradlens.instruments.histogram_2d import Histogram2dInstrument
from gradlens.instruments.instrument import Drawing, Instrument
from gradlens.instruments.layer_covariance import LayerRanksInstrument
from gradlens.instruments.layer_histograms import LayerHistogramsInstrument
from gradlens.instruments.layer_lines import CorrelationsInstrument, LayerLinesInstrument
from gradlens.instruments.layer_map import LayerMapInstrument
from gradlens.instruments.layer_shares import LayerSharesInstrument
from gradlens.instruments.layer_spectra import (
    LayerConditionsInstrument,
    LayerSpectraInstrument,
    LayerStableRanksInstrument,
)
from gradlens.instruments.logged import (
    AccuracyInstrument,
    LearningRateInstrument,
    LossesInstrument,
)
from gradlens.instruments.loss import LossInstrument
from gradlens.instruments.mean_gsnr import MeanGSNRInstrument
from gradlens.instruments.norms import DistanceInstrument, GradNormInstrument, UpdateSizeInstrument
from gradlens.instruments.parameters import ParametersInstrument
from gradlens.instruments.spectral_density import SpectralDensityInstrument
from gradlens.instruments.stability import StabilityInstrument
from gradlens.instruments.step_time import TimeInstrument
from gradlens.instruments.tic import TICInstrument

MAIN: tuple[Instrument, ...] = (
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
)

LAYERS: tuple[Instrument, ...] = (
    LayerMapInstrument(),
    LayerRanksInstrument(),
    LayerHistogramsInstrument(),
    LayerSharesInstrument(),
    LayerSpectraInstrument(),
)

__all__ = [
    "LAYERS",
    "MAIN",
    "AccuracyInstrument",
    "ActivationInstrument",
    "AggregateInstrument",
    "AlphaInstrument",
    "BatchSizeInstrument",
    "CorrelationsInstrument",
    "CovarianceRanksInstrument",
    "CovarianceSpectrumInstrument",
    "DistanceInstrument",
    "Drawing",
    "EarlyStoppingInstrument",
    "GenericInstrument",
    "GradNoiseScaleInstrument",
    "GradNormInstrument",
    "GradientTestsInstrument",
    "HessEigenvaluesInstrument",
    "HessMaxEVInstrument",
    "HessTraceInstrument",
    "Histogram1dInstrument",
    "Histogram2dInstrument",
    "Instrument",
    "LayerConditionsInstrument",
    "LayerHistogramsInstrument",
    "LayerLinesInstrument",
    "LayerMapInstrument",
    "LayerRanksInstrument",
    "LayerSharesInstrument",
    "LayerSpectraInstrument",
    "LayerStableRanksInstrument",
    "LearningRateInstrument",
    "LossInstrument",
    "LossesInstrument",
    "MeanGSNRInstrument",
    "ParametersInstrument",
    "SpectralDensityInstrument",
    "StabilityInstrument",
    "TICInstrument",
    "TimeInstrument",
    "UpdateSizeInstrument",
]
