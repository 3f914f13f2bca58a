"""Curvature of the loss of a mini-batch or of a data set: products, eigenvalues, traces, diagonals.

``HessianOperator``, ``GGNOperator``, ``FisherOperator``, ``EmpiricalFisherOperator`` and
``GradCovarianceOperator`` are matrices as scipy ``LinearOperator`` objects over the concatenated
parameters, and ``JacobianOperator`` is that of a network's outputs. Each is that of a mini-batch,
and its ``over_data`` that of all batches of a data set. The functions analyse any symmetric matrix
by its products with vectors: they find ``eigenpairs``, the trace (``hutchinson``), the diagonal
(``hutchinson_diagonal``), the ``frobenius_norm`` and the ``spectral_density``; ``InverseOperator``
multiplies by the inverse.
``LowRankGGN`` has all non-zero eigenvalues of a mini-batch's generalised Gauss-Newton matrix, its
eigenvectors, and each sample's ``DirectionalDerivatives`` along them.
``Curvature`` is what quantities are given: both matrices of one step's loss, or of that of a
``Probe``, their diagonals and the traces of these.
"""

from gradlens.curvature.curvature import Curvature, LossCurvature
from gradlens.curvature.density import SpectralDensity, spectral_density
from gradlens.curvature.diagonals import LossDiagonal
from gradlens.curvature.directions import (
    DirectionalDerivatives,
    Directions,
    LowRankGGN,
    directional_derivatives,
)
from gradlens.curvature.eigenpairs import Eigenpairs, eigenpairs
from gradlens.curvature.estimate import Estimate
from gradlens.curvature.fisher import (
    EmpiricalFisherOperator,
    FisherOperator,
    GradCovarianceOperator,
)
from gradlens.curvature.hessian import GGNOperator, HessianOperator
from gradlens.curvature.hutchinson import (
    DiagonalEstimate,
    frobenius_norm,
    hutchinson,
    hutchinson_blocks,
    hutchinson_diagonal,
)
from gradlens.curvature.inverse import InverseOperator, Solution
from gradlens.curvature.jacobian import JacobianOperator
from gradlens.curvature.loss_over_data import BatchLoss, LossOverData, SumOverData
from gradlens.curvature.network_over_data import BatchOutputs
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.probe import Probe
from gradlens.curvature.products import SymmetricMatrix

__all__ = [
    "BatchLoss",
    "BatchOutputs",
    "Curvature",
    "CurvatureOperator",
    "DiagonalEstimate",
    "DirectionalDerivatives",
    "Directions",
    "Eigenpairs",
    "EmpiricalFisherOperator",
    "Estimate",
    "FisherOperator",
    "GGNOperator",
    "GradCovarianceOperator",
    "HessianOperator",
    "InverseOperator",
    "JacobianOperator",
    "LossCurvature",
    "LossDiagonal",
    "LossOverData",
    "LowRankGGN",
    "Probe",
    "Solution",
    "SpectralDensity",
    "SumOverData",
    "SymmetricMatrix",
    "directional_derivatives",
    "eigenpairs",
    "frobenius_norm",
    "hutchinson",
    "hutchinson_blocks",
    "hutchinson_diagonal",
    "spectral_density",
]


def __dir__() -> list[str]:
    return list(__all__)
