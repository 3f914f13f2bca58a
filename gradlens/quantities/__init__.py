"""All quantities, and the classes that quantities derive from."""

from gradlens.quantities.alpha import Alpha
from gradlens.quantities.cabs import CABS
from gradlens.quantities.directional_derivatives import DirectionalDerivatives
from gradlens.quantities.grad_covariance import GradCovariance
from gradlens.quantities.grad_hist import GradHist1d, GradHist2d
from gradlens.quantities.gradient_geometry import GradientActivation, GradientGeometry, GradNorm
from gradlens.quantities.gradient_noise import (
    EarlyStopping,
    GradNoiseScale,
    InnerTest,
    MeanGSNR,
    NormTest,
    OrthoTest,
)
from gradlens.quantities.hess_eigenvalues import HessEigenvalues, HessMaxEV, SpectralDensity
from gradlens.quantities.hess_trace import HessTrace
from gradlens.quantities.input_moments import InputMean, InputStd, MeanTID, VarTID
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.noise_quantity import NoiseQuantity
from gradlens.quantities.output_activation import DeadNeurons, OutputActivation
from gradlens.quantities.parameter_norm import (
    ConditionNumber,
    ParameterNorm,
    Parameters,
    WeightSignFlips,
)
from gradlens.quantities.parameter_quantity import ParameterQuantity
from gradlens.quantities.performance import Loss, Time
from gradlens.quantities.quantity import (
    CurvatureQuantity,
    GradientCurvatureQuantity,
    Phase,
    Quantity,
    SingleStepQuantity,
    TwoPointQuantity,
    UpdateQuantity,
)
from gradlens.quantities.signal_geometry import (
    InputGradientGeometry,
    InputNorm,
    OutputGradientGeometry,
    OutputNorm,
)
from gradlens.quantities.signal_spectra import InputCovariance, OutputGradientCovariance, RankMe
from gradlens.quantities.stability import Stability
from gradlens.quantities.tic import TICDiag, TICTrace
from gradlens.quantities.update_geometry import Distance, UpdateGeometry, UpdateSize

__all__ = [
    "CABS",
    "Alpha",
    "ConditionNumber",
    "CurvatureQuantity",
    "DeadNeurons",
    "DirectionalDerivatives",
    "Distance",
    "EarlyStopping",
    "GradCovariance",
    "GradHist1d",
    "GradHist2d",
    "GradNoiseScale",
    "GradNorm",
    "GradientActivation",
    "GradientCurvatureQuantity",
    "GradientGeometry",
    "HessEigenvalues",
    "HessMaxEV",
    "HessTrace",
    "InnerTest",
    "InputCovariance",
    "InputGradientGeometry",
    "InputMean",
    "InputNorm",
    "InputStd",
    "LayerQuantity",
    "Loss",
    "MeanGSNR",
    "MeanTID",
    "NoiseQuantity",
    "NormTest",
    "OrthoTest",
    "OutputActivation",
    "OutputGradientCovariance",
    "OutputGradientGeometry",
    "OutputNorm",
    "ParameterNorm",
    "ParameterQuantity",
    "Parameters",
    "Phase",
    "Quantity",
    "RankMe",
    "SingleStepQuantity",
    "SpectralDensity",
    "Stability",
    "TICDiag",
    "TICTrace",
    "Time",
    "TwoPointQuantity",
    "UpdateGeometry",
    "UpdateQuantity",
    "UpdateSize",
    "VarTID",
    "WeightSignFlips",
]


def __dir__() -> list[str]:
    return list(__all__)
