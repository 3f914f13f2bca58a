"""All quantities."""

from gradlens.quantities.grad_covariance import GradCovariance
from gradlens.quantities.grad_hist import GradHist1d, GradHist2d
from gradlens.quantities.grad_norm import GradNorm
from gradlens.quantities.gradient_tests import InnerTest, NormTest, OrthoTest
from gradlens.quantities.loss import Loss
from gradlens.quantities.mean_gsnr import MeanGSNR
from gradlens.quantities.parameters import Parameters
from gradlens.quantities.quantity import Quantity, SingleStepQuantity
from gradlens.quantities.time import Time

__all__ = [
    "GradCovariance",
    "GradHist1d",
    "GradHist2d",
    "GradNorm",
    "InnerTest",
    "Loss",
    "MeanGSNR",
    "NormTest",
    "OrthoTest",
    "Parameters",
    "Quantity",
    "SingleStepQuantity",
    "Time",
]
