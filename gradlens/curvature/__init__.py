"""Curvature of the loss of a mini-batch or of a data set: products, eigenvalues, traces, diagonals.

``HessianOperator``, ``GGNOperator``, ``FisherOperator``, ``EmpiricalFisherOperator`` and
``GradCovarianceOperator`` are matrices as scipy ``LinearOperator`` objects over the concatenated
parameters, and ``JacobianOperator`` is that of a network's outputs. Each is that of a mini-batch,
and its ``over_data`` that of all batches of a data set. The functions analyse any symmetric matrix
by its products with vectors: they find ``eigenpairs``, the trace (``hutchinson``), the diagonal
(``hutchinson_diagonal``), the ``frobenius_norm``, the ``log_determinant`` and the
``spectral_density``; ``InverseOperator`` multiplies by the inverse.
``LowRankGGN`` has all non-zero eigenvalues of a mini-batch's generalised Gauss-Newton matrix, its
eigenvectors, and each sample's ``DirectionalDerivatives`` along them; ``ntk`` is the empirical
neural tangent kernel between samples.
``Curvature`` is what quantities are given: both matrices of one step's loss, or of that of a
``Probe``, their diagonals and the traces of these.
"""

from gradlens.curvature.curvature import Curvature, LossCurvature
from gradlens.curvature.diagonals import LossDiagonal
from gradlens.curvature.directions import (
    DirectionalDerivatives,
    Directions,
    LowRankGGN,
    directional_derivatives,
)
from gradlens.curvature.eigenpairs import Eigenpairs, eigenpairs
from gradlens.curvature.estimate import (
    DiagonalEstimate,
    Estimate,
    LogDeterminant,
    SpectralDensity,
    frobenius_norm,
    hutchinson,
    hutchinson_blocks,
    hutchinson_diagonal,
    log_determinant,
    spectral_density,
)
from gradlens.curvature.fisher import (
    EmpiricalFisherOperator,
    FisherOperator,
    GradCovarianceOperator,
)
from gradlens.curvature.hessian import GGNOperator, HessianOperator, JacobianOperator
from gradlens.curvature.inverse import InverseOperator, Solution
from gradlens.curvature.operator import CurvatureOperator, SymmetricMatrix
from gradlens.curvature.over_data import BatchLoss, BatchOutputs, LossOverData, SumOverData
from gradlens.curvature.probe import Probe
from gradlens.curvature.tangent_kernel import ntk

# Matrices of losses.
__all__ = ["BatchLoss", "BatchOutputs", "Curvature", "CurvatureOperator", "EmpiricalFisherOperator"]
__all__ += ["FisherOperator", "GGNOperator", "GradCovarianceOperator", "HessianOperator"]
__all__ += ["JacobianOperator", "LossCurvature", "LossDiagonal", "LossOverData", "Probe"]
__all__ += ["SumOverData"]
# What is computed of any symmetric matrix.
__all__ += ["DiagonalEstimate", "Eigenpairs", "Estimate", "InverseOperator", "LogDeterminant"]
__all__ += ["Solution", "SpectralDensity", "SymmetricMatrix", "eigenpairs", "frobenius_norm"]
__all__ += ["hutchinson", "hutchinson_blocks", "hutchinson_diagonal", "log_determinant"]
__all__ += ["spectral_density"]
# Directions of large curvature, and inner products of samples' Jacobians.
__all__ += ["DirectionalDerivatives", "Directions", "LowRankGGN", "directional_derivatives", "ntk"]


def __dir__() -> list[str]:
    return list(__all__)
