"""Losses for signals, with the reductions of PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.reduction import reduced

FRAMES = (16, 32, 64)
"""Lengths of the frames of which spectra are compared."""


def alignment(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Connectionist temporal classification (Graves et al., 2006), for each sound.

    ``outputs`` are logits ``[N, classes, T]``, where class 0 stands for no sound.
    """
    samples, said = targets.shape
    shares = outputs.log_softmax(1).permute(2, 0, 1)
    frames, sounds = (torch.full((samples,), length) for length in (outputs.shape[2], said))
    losses = F.ctc_loss(shares, targets, frames, sounds, reduction="none")
    return reduced(losses / said, reduction)


def scaled_error(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Absolute errors relative to those of a usual forecast (Hyndman and Koehler, 2006).

    The last column of ``targets`` is the error of the usual forecast.
    """
    errors = (outputs - targets[:, :-1]).abs().mean(1)
    return reduced(errors / targets[:, -1], reduction)


def count_likelihood(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood of a negative binomial distribution (Salinas et al., 2020).

    ``outputs`` ``[N, T, 2]`` are logarithms of the mean and of the dispersion.
    """
    logarithm, spread = outputs.unbind(2)
    shape = (-spread).exp()
    total = F.softplus(logarithm + spread)  # log(1 + mean * dispersion)
    likelihood = (
        (targets + shape).lgamma()
        - shape.lgamma()
        - (targets + 1).lgamma()
        + targets * (logarithm + spread - total)
        - shape * total
    )
    return reduced(-likelihood.mean(1), reduction)


def spectral(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Absolute errors of signals and of their spectra at several resolutions (Défossez, 2020)."""
    losses = (outputs - targets).abs().flatten(1).mean(1)
    for frame in FRAMES:
        first, second = (_spectrum(x.flatten(1), frame) for x in (outputs, targets))
        losses = losses + (first - second).abs().flatten(1).mean(1)
    return reduced(losses, reduction)


def _spectrum(signals: Tensor, frame: int) -> Tensor:
    """How loud each frequency is in each frame."""
    window = torch.hann_window(frame)
    parts = torch.stft(signals, frame, window=window, normalized=True, return_complex=True)
    return (parts.real**2 + parts.imag**2 + 1e-3).sqrt()
