"""All quantities, and the classes that quantities derive from."""

from gradlens.quantities.basics import Distance, GradNorm, Loss, Parameters, Time, UpdateSize
from gradlens.quantities.curvature_quantities import (
    DirectionalDerivatives,
    HessEigenvalues,
    HessMaxEV,
    HessTrace,
    SpectralDensity,
    TICDiag,
    TICTrace,
)
from gradlens.quantities.geometry import (
    GradientGeometry,
    InputGradientGeometry,
    OutputGradientGeometry,
    UpdateGeometry,
    WeightSignFlips,
)
from gradlens.quantities.grad_hist import GradHist1d, GradHist2d
from gradlens.quantities.gradient_noise import (
    EarlyStopping,
    GradNoiseScale,
    InnerTest,
    MeanGSNR,
    NoiseQuantity,
    NormTest,
    OrthoTest,
)
from gradlens.quantities.layer_quantity import (
    ActivationOutliers,
    AttentionEntropy,
    AttentionLogits,
    DeadNeurons,
    GradientActivation,
    InputMean,
    InputNorm,
    InputStd,
    LayerQuantity,
    MeanTID,
    OutputActivation,
    OutputEntropy,
    OutputNorm,
    VarTID,
)
from gradlens.quantities.optimizer import CABS, Alpha, Stability
from gradlens.quantities.parameter_quantity import ConditionNumber, ParameterNorm, ParameterQuantity
from gradlens.quantities.quantity import (
    CurvatureQuantity,
    GradientCurvatureQuantity,
    Phase,
    Quantity,
    SingleStepQuantity,
    TwoPointQuantity,
    UpdateQuantity,
)
from gradlens.quantities.spectra import (
    GradCovariance,
    InputCovariance,
    OutputGradientCovariance,
    RankMe,
    UpdateSpectrum,
    WeightSpectrum,
)

# What a step, or its update, consists of.
__all__ = ["CABS", "Alpha", "Distance", "EarlyStopping", "GradCovariance", "GradHist1d"]
__all__ += ["GradHist2d", "GradNoiseScale", "GradNorm", "InnerTest", "Loss", "MeanGSNR", "NormTest"]
__all__ += ["OrthoTest", "Parameters", "Time", "UpdateSize"]
# Of curvature.
__all__ += ["DirectionalDerivatives", "HessEigenvalues", "HessMaxEV", "HessTrace"]
__all__ += ["SpectralDensity", "Stability", "TICDiag", "TICTrace"]
# Of layers and single parameters.
__all__ += ["ActivationOutliers", "AttentionEntropy", "AttentionLogits", "ConditionNumber"]
__all__ += ["DeadNeurons", "GradientActivation", "GradientGeometry", "InputCovariance"]
__all__ += ["InputGradientGeometry", "InputMean", "InputNorm", "InputStd", "MeanTID"]
__all__ += ["OutputActivation", "OutputEntropy", "OutputGradientCovariance"]
__all__ += ["OutputGradientGeometry", "OutputNorm", "ParameterNorm", "RankMe", "UpdateGeometry"]
__all__ += ["UpdateSpectrum", "VarTID", "WeightSignFlips", "WeightSpectrum"]
# What quantities derive from.
__all__ += ["CurvatureQuantity", "GradientCurvatureQuantity", "LayerQuantity", "NoiseQuantity"]
__all__ += ["ParameterQuantity", "Phase", "Quantity", "SingleStepQuantity", "TwoPointQuantity"]
__all__ += ["UpdateQuantity"]


def __dir__() -> list[str]:
    return list(__all__)
