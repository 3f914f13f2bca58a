"""Per-sample losses, from an extended loss module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradlens.hooks.layer_calls import LossExtension, stored_inputs
from gradlens.hooks.plain_copy import without_hooks
from gradlens.hooks.torch_private import LossModule
from gradlens.per_sample.labelling.batch import Batch, LossReduction


class PerSampleLosses(LossExtension):
    """BackPACK extension that finds ℓₙ when backprop passes a loss module that has been extended.

    ``values`` is ``[N]``: N times sample n's contribution to a mean loss, that contribution itself
    under a sum loss; ``None`` while no loss module with one loss for each sample has been called.
    Several loss modules add up.
    """

    def __init__(self, loss_reduction: LossReduction = "mean") -> None:
        super().__init__("individual_losses")
        self.values: Tensor | None = None
        self._loss_reduction = loss_reduction

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK when the gradient at the module's output is known."""
        if not isinstance(module, LossModule) or g_out[0] is None:
            return
        with torch.no_grad():
            shares = _shares(module, stored_inputs(module), g_out[0])
            if shares is None:
                return
            batch = Batch(len(shares), loss_reduction=self._loss_reduction)
            values = shares * batch.scale
            fits = self.values is not None and len(self.values) == len(values)
            self.values = self.values + values if fits else values  # type: ignore[operator]


def _shares(module: LossModule, inputs: tuple[Any, ...], gradient: Tensor) -> Tensor | None:
    """Each sample's contribution to the loss, whose ``gradient`` is that at the output, ``[N]``."""
    clone = without_hooks(module)
    assert isinstance(clone, LossModule)
    total = clone.forward(*inputs)
    clone.reduction = "none"
    elements = clone.forward(*inputs)
    if elements.dim() == 0 or len(elements) != len(inputs[0]):
        return None
    if module.reduction == "none":  # the user reduces them
        return (
            (elements * gradient).flatten(1).sum(1) if elements.dim() > 1 else elements * gradient
        )
    shares = elements.flatten(1).sum(1) if elements.dim() > 1 else elements
    # What a mean divides by depends on the loss: elements, class weights, valid tokens.
    sum_of_shares = shares.sum()
    shares = torch.where(sum_of_shares == 0, shares, shares * (total.sum() / sum_of_shares))
    return shares * gradient.sum()
