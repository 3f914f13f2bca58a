"""Per-sample losses, from an extended loss module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradlens.backpack_adapter.layer_calls import LossExtension, stored_inputs
from gradlens.gradients.losses import OTHER_LOSS, adds_up
from gradlens.graph.hooks import without_hooks
from gradlens.graph.loss import Batch, LossReduction
from gradlens.graph.undisturbed import buffers_kept, training_kept
from gradlens.numerics.host import on_host
from gradlens.numerics.norms import inner, norm
from gradlens.numerics.precision import accumulable
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.torch_private import LossModule, backward_pass_id, uncompiled, unseen

_REDUCTIONS: dict[Any, LossReduction] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}


def own_reduction(module: nn.Module | None) -> LossReduction | None:
    """How a loss module itself reduces its losses; ``None`` if it doesn't, or that isn't known.

    Of a module that isn't derived from torch's loss modules nothing is known: it may do anything
    with what loss modules inside it return.
    """
    plain = None if module is None else uncompiled(module)
    return _REDUCTIONS.get(vars(plain).get("reduction")) if isinstance(plain, LossModule) else None


class PerSampleLosses(LossExtension):
    """BackPACK extension that finds ℓₙ when backprop passes a loss module that has been extended.

    Several loss modules add up. No exception of a loss module's leaves it: ``unavailable`` is the
    reason why there are no per-sample losses although a module was called. ``samples`` returns the
    number of samples, or ``None`` if it isn't known: a module that was called with another number
    of rows, such as one for each token, isn't called again, since its rows aren't losses of
    samples.
    """

    def __init__(
        self,
        loss_reduction: LossReduction = "mean",
        samples: Callable[[], int | None] = lambda: None,
    ) -> None:
        super().__init__("individual_losses")
        self._loss_reduction = loss_reduction
        self._samples = samples
        self._reason = ""
        self._has_other_rows = False
        self._values: list[Tensor] = []
        self._proportional: list[Tensor] = []
        self._are_proportional: bool | None = None
        self._precision = 0.0
        self._backward_pass: int | None = None

    @property
    def values(self) -> Tensor | None:
        """``[N]``: N times sample n's contribution to a mean loss, itself under a sum loss.

        ``None`` where they are unavailable, or no loss module has been called.
        """
        if self.unavailable or self._has_other_rows or not self._values:
            return None
        return torch.stack(self._values).sum(0)

    @property
    def unavailable(self) -> str:
        """Why there are none although a loss module was called; empty if there are some."""
        if self._reason:
            return self._reason
        if len({len(values) for values in self._values}) > 1:
            return SEVERAL_SIZES
        if self._are_proportional is None:  # read once, since that waits for the device
            self._are_proportional = all(on_host(self._proportional))
        return "" if self._are_proportional else NOT_PROPORTIONAL

    def refuse(self, reason: str) -> None:
        """Make the values unavailable, for a reason."""
        self._reason = self._reason or reason

    def check_sum(self, loss: Tensor, factor: float) -> None:
        """Make the values unavailable if they don't add up to ``loss``, up to rounding.

        Backward was called on ``factor`` times the loss.
        """
        values = self.values
        if values is None or not factor:
            return
        scale = Batch(len(values), loss_reduction=self._loss_reduction).scale * factor
        if not adds_up(values / scale, loss, loss.dtype, self._precision):
            self.refuse(OTHER_LOSS)

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK when the gradient at the module's output is known."""
        if not isinstance(module, LossModule) or g_out[0] is None:
            return
        self._begin(backward_pass_id())
        try:
            inputs = stored_inputs(module)
            samples = self._samples()
            if samples and _rows(module, inputs) != samples:
                self._has_other_rows = True
                return
            shares, proportional = _contributions(module, inputs, g_out[0].detach())
        except UnavailableError as reason:
            self._reason = str(reason)
        except Exception as error:  # the user's backward pass goes on
            self._reason = FAILED.format(module=type(module).__name__, error=first_line(error))
        else:
            batch = Batch(len(shares), loss_reduction=self._loss_reduction)
            # A module's output may be in half precision, and the loss in single.
            self._precision = max(self._precision, torch.finfo(g_out[0].dtype).eps)
            self._values.append(shares * batch.scale)
            self._proportional.append(proportional)
            self._are_proportional = None

    def _begin(self, backward_pass: int) -> None:
        """Only the latest backward pass counts: others are for gradients of the user's own."""
        if backward_pass != self._backward_pass:
            self._backward_pass, self._reason, self._precision = backward_pass, "", 0.0
            self._values, self._proportional, self._are_proportional = [], [], None
            self._has_other_rows = False


def _contributions(
    module: LossModule, inputs: Sequence[Any], gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Each sample's contribution ``[N]`` to what backward is called on, and whether they are known.

    In single precision at least. The second is a scalar tensor, since reading it here would wait
    for the device. ``gradient`` is that at the module's output. ``UnavailableError`` if the module
    has no losses of single samples.
    """
    leaves = [_leaf(each) for each in inputs]
    needed = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    with (
        training_kept(needed),
        buffers_kept(module),
        unseen(),
        torch.enable_grad(),
    ):
        elements = _output(module, "none", leaves)
        if elements.dim() == 0 or len(elements) != _rows(module, inputs):
            raise UnavailableError(NO_LOSSES.format(module=type(module).__name__))
        if elements.shape == gradient.shape:
            weighted = accumulable(elements) * accumulable(gradient)
            return _by_sample(weighted), torch.ones((), dtype=torch.bool, device="cpu")
        parts = _by_sample(elements)
        if isinstance(module, nn.CTCLoss) and module.reduction == "mean":
            parts = parts / torch.as_tensor(leaves[3], device=parts.device).clamp(min=1)
        total = _output(module, module.reduction, leaves)
        weight, proportional = _ratio(total.sum(), parts, needed)
    return accumulable(parts) * (weight * accumulable(gradient).sum()), proportional


def _rows(module: LossModule, inputs: Sequence[Any]) -> int:
    """How many rows a module was called with."""
    rows: int = inputs[0].shape[int(isinstance(module, nn.CTCLoss))]
    return rows


def _leaf(value: Any) -> Any:
    """A tensor in single precision or more, so that a module computes in that, whatever autocast.

    Gradients in half precision would vanish.
    """
    if not isinstance(value, Tensor):
        return value
    return accumulable(value).requires_grad_(value.requires_grad)


def _output(module: LossModule, reduction: str, inputs: Sequence[Any]) -> Tensor:
    clone = without_hooks(module)
    assert isinstance(clone, LossModule)
    clone.reduction = reduction
    own = [*clone.named_parameters(), *clone.named_buffers()]
    found: Tensor = functional_call(clone, {n: accumulable(t) for n, t in own}, tuple(inputs))
    return found


def _by_sample(elements: Tensor) -> Tensor:
    """Sums over all axes but the first, ``[N]``."""
    return elements.flatten(1).sum(1) if elements.dim() > 1 else elements


def _ratio(total: Tensor, parts: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The w of total = w·Σₙ partsₙ, and whether there is one: scalar tensors.

    What a mean divides by depends on the loss: samples, elements, class weights, valid tokens. As
    it doesn't depend on the inputs, w is the ratio of the gradients, also where the parts cancel.
    """
    whole, of_parts = (
        torch.cat([g.flatten() for g in torch.autograd.grad(x, inputs, materialize_grads=True)])
        for x in (total, parts.sum())
    )
    size = norm(of_parts)
    divisor = torch.where(size > 0, size, 1)
    weight = inner(whole, of_parts / divisor) / divisor
    # To half of the digits: both gradients have rounding errors of many operations.
    rest = norm(whole - weight * of_parts) <= torch.finfo(size.dtype).eps ** 0.5 * norm(whole)
    vanish = (size > 0) | (parts == 0).all()
    return weight, (rest & vanish) | weight.isnan()


NO_LOSSES = "{module} has no loss for each sample, also with reduction='none'"
FAILED = "{module} could not be called once more with reduction='none' ({error})"
SEVERAL_SIZES = "loss modules were called with different numbers of samples"
NOT_PROPORTIONAL = (
    "it isn't certain that the loss module's output is in proportion to the sum of its losses with "
    "reduction='none', from which the contributions of single samples are computed"
)
