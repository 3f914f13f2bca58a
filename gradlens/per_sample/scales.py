"""Factors of the loss and of gradients that training loops and frameworks multiply them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def loss_scale(info: Mapping[str, Any]) -> float:
    """The factor between the step's loss and ``info["loss"]``; 1 if it isn't given.

    Frameworks divide the losses of micro-batches by their number, and multiply them by a gradient
    scaler's scale, before anybody else can read them.
    """
    return float(info.get("loss_scale", 1.0))


def unscaled_loss(info: Mapping[str, Any]) -> Tensor | None:
    """The step's loss, with its graph; ``None`` if it wasn't passed."""
    loss: Tensor | None = info.get("loss")
    scale = loss_scale(info)
    if loss is None or scale == 1:
        return loss
    with torch.enable_grad():
        return loss / scale


def gradient_scale(info: Mapping[str, Any]) -> float:
    """The factor of the gradients by ``info["scaler"]``, a ``GradScaler``; 1 without it."""
    scaler = info.get("scaler")
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
