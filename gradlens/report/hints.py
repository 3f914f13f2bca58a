"""What to look for in a panel, in a sentence or two: see the page about the instruments."""

from __future__ import annotations

from collections.abc import Mapping

HINTS: Mapping[str, str] = {
    "Loss": "Healthy: it falls, with noise. A loss that is flat from the start has vanishing "
    "gradients or steps that are too short; one that jumps has steps that are too long.",
    "train_loss": "Healthy: they go together. A gap that opens is overfitting.",
    "Time": "Peaks are steps at which more is tracked. Healthy: the rest is flat.",
    "Alpha": "−1 is where a step began, 0 the minimum of the fitted parabola, 1 as high as the "
    "start on the other side. Healthy: between −1 and 1.",
    "GradNorm": "It need not fall. Growth by decades means that gradients explode.",
    "UpdateSize": "Healthy: it follows the schedule of the learning rate.",
    "Distance": "Healthy: it grows ever more slowly, about as the logarithm of the step.",
    "NormTest": "Healthy: below 1. Above 1, the noise of the mini-batch is larger than the "
    "gradient: at the end of training a larger batch or a smaller learning rate makes progress.",
    "GradHist1d": "Healthy: a peak at zero with tails to both sides. A needle at zero means that "
    "gradients vanish, a range that grows by decades that they explode.",
    "GradHist2d": "Healthy: a cloud around zero. A thin vertical line means that parameters of all "
    "sizes get no gradient.",
    "HessMaxEV": "Plain gradient descent is unstable above 2/η. If it is negative, the loss curves "
    "downwards in all directions.",
    "Stability": "Healthy: sharpness is below the threshold, or hovers at it with full batches.",
    "HessEigenvalues": "Healthy: a few large ones, in classification about as many as classes.",
    "SpectralDensity": "Healthy: a bulk at zero and outliers to the right.",
    "DirectionalDerivatives": "The gradient soon lies in few directions of large curvature, and is "
    "mostly noise along them: where the ratio is above 4, one step is signal.",
    "HessTrace": "Healthy: it settles. Below zero, negative curvature prevails.",
    "TICTrace": "Healthy: it stays small. If it rises while the training loss falls, look at the "
    "test loss.",
    "TICDiag": "Healthy: it stays small. If it rises while the training loss falls, look at the "
    "test loss.",
    "MeanGSNR": "Healthy: it falls slowly from its value at the start.",
    "GradNoiseScale": "It grows while the loss falls. Batches far below it are dominated by noise, "
    "and batches far above it are waste.",
    "CABS": "Healthy: at most about the batch size in use.",
    "EarlyStopping": "Above zero the gradient can't be told from noise, and going on fits noise.",
    "GradCovariance": "Healthy: the trace is shared by many eigenvalues. If the first one is "
    "almost all of it, one kind of samples dominates the direction of training.",
}
"""By the kind of the quantity, or the name of the logged series."""
