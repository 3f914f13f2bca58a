"""All quantities, and the classes that quantities derive from."""

from gradlens.quantities.along_update import CriticalSharpness, StepLedger
from gradlens.quantities.basics import (
    ClippedGradNorm,
    Distance,
    GradNorm,
    Loss,
    Parameters,
    Time,
    UpdateSize,
)
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
    RelativeUpdate,
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
from gradlens.quantities.group_gradients import GroupGradients
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
from gradlens.quantities.moments import OptimizerState
from gradlens.quantities.optimizer import CABS, Alpha, Stability
from gradlens.quantities.parameter_quantity import ConditionNumber, ParameterNorm, ParameterQuantity
from gradlens.quantities.quantity import (
    CurvatureQuantity,
    GradientCurvatureQuantity,
    OptimizerQuantity,
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
__all__ = ["CABS", "Alpha", "ClippedGradNorm", "Distance", "EarlyStopping", "GradCovariance"]
__all__ += ["GradHist1d", "GradHist2d", "GradNoiseScale", "GradNorm", "GroupGradients", "InnerTest"]
__all__ += ["Loss", "MeanGSNR", "NormTest", "OptimizerState", "OrthoTest", "Parameters"]
__all__ += ["RelativeUpdate", "StepLedger", "Time", "UpdateSize"]
# Of curvature.
__all__ += ["CriticalSharpness", "DirectionalDerivatives", "HessEigenvalues", "HessMaxEV"]
__all__ += ["HessTrace"]
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
__all__ += ["OptimizerQuantity", "ParameterQuantity", "Phase", "Quantity", "SingleStepQuantity"]
__all__ += ["TwoPointQuantity", "UpdateQuantity"]


def __dir__() -> list[str]:
    return list(__all__)
