"""Curvature of the mini-batch loss: products, eigenvalues, traces, diagonals and densities.

``HessianOperator`` and ``GGNOperator`` are the matrices, as scipy ``LinearOperator`` objects over
the concatenated parameters. The functions analyse any symmetric matrix by its products with
vectors: they find ``eigenpairs``, the trace (``hutchinson``, ``hutch_plus_plus``), the diagonal
(``hutchinson_diagonal``) and the ``spectral_density``. ``LossCurvature`` is what quantities are
given: both matrices of one step's loss, their diagonals and the traces of these.
"""

from gradlens.curvature.density import SpectralDensity, spectral_density
from gradlens.curvature.diagonal import DiagonalEstimate, hutchinson_diagonal
from gradlens.curvature.eigenpairs import Eigenpairs, eigenpairs
from gradlens.curvature.empirical_fisher import EmpiricalFisherOperator
from gradlens.curvature.exchangeable import xdiag, xtrace
from gradlens.curvature.fisher import FisherOperator
from gradlens.curvature.frobenius import frobenius_norm
from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.grad_covariance import GradCovarianceOperator
from gradlens.curvature.hessian import HessianOperator
from gradlens.curvature.inverse import InverseOperator, Solution
from gradlens.curvature.jacobian import JacobianOperator
from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.loss_diagonal import LossDiagonal
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.products import SymmetricMatrix
from gradlens.curvature.sum_over_data import SumOverData
from gradlens.curvature.trace import Estimate, hutch_plus_plus, hutchinson, hutchinson_blocks

__all__ = [
    "CurvatureOperator",
    "DiagonalEstimate",
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
    "Solution",
    "SpectralDensity",
    "SumOverData",
    "SymmetricMatrix",
    "eigenpairs",
    "frobenius_norm",
    "hutch_plus_plus",
    "hutchinson",
    "hutchinson_blocks",
    "hutchinson_diagonal",
    "spectral_density",
    "xdiag",
    "xtrace",
]
