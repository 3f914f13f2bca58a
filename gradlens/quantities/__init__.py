"""All quantities."""

from gradlens.quantities.alpha import Alpha
from gradlens.quantities.cabs import CABS
from gradlens.quantities.distance import Distance
from gradlens.quantities.early_stopping import EarlyStopping
from gradlens.quantities.grad_covariance import GradCovariance
from gradlens.quantities.grad_hist import GradHist1d, GradHist2d
from gradlens.quantities.grad_noise_scale import GradNoiseScale
from gradlens.quantities.grad_norm import GradNorm
from gradlens.quantities.gradient_tests import InnerTest, NormTest, OrthoTest
from gradlens.quantities.hess_eigenvalues import HessEigenvalues
from gradlens.quantities.hess_max_ev import HessMaxEV
from gradlens.quantities.hess_trace import HessTrace
from gradlens.quantities.loss import Loss
from gradlens.quantities.mean_gsnr import MeanGSNR
from gradlens.quantities.parameters import Parameters
from gradlens.quantities.quantity import (
    CurvatureQuantity,
    GradientCurvatureQuantity,
    Quantity,
    SingleStepQuantity,
    TwoPointQuantity,
    UpdateQuantity,
)
from gradlens.quantities.spectral_density import SpectralDensity
from gradlens.quantities.stability import Stability
from gradlens.quantities.tic import TICDiag, TICTrace
from gradlens.quantities.time import Time
from gradlens.quantities.update_size import UpdateSize

__all__ = [
    "CABS",
    "Alpha",
    "CurvatureQuantity",
    "Distance",
    "EarlyStopping",
    "GradCovariance",
    "GradHist1d",
    "GradHist2d",
    "GradNoiseScale",
    "GradNorm",
    "GradientCurvatureQuantity",
    "HessEigenvalues",
    "HessMaxEV",
    "HessTrace",
    "InnerTest",
    "Loss",
    "MeanGSNR",
    "NormTest",
    "OrthoTest",
    "Parameters",
    "Quantity",
    "SingleStepQuantity",
    "SpectralDensity",
    "Stability",
    "TICDiag",
    "TICTrace",
    "Time",
    "TwoPointQuantity",
    "UpdateQuantity",
    "UpdateSize",
]
