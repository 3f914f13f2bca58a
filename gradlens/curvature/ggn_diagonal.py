"""The diagonal of the generalised Gauss-Newton matrix, from individual gradients.

Sample n's part of the matrix is JₙᵀHₙJₙ, with the Jacobian Jₙ of the network's outputs and the
loss's Hessian Hₙ there. With a root Hₙ = Σₖ sₙₖsₙₖᵀ its diagonal is Σₖ(Jₙᵀsₙₖ)², and Jₙᵀsₙₖ are the
individual gradients of a backward pass that starts from sₙₖ: any network will do whose layers give
individual gradients, at the cost of one backward pass for each output.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative, differentiable_gradient
from gradlens.individual.context import individual_gradients

MAX_OUTPUTS = 256
"""More outputs for each sample than these are too many for a Hessian of all their pairs."""


class NoRootError(RuntimeError):
    """Why the diagonal can't be found from individual gradients."""


def roots(loss: Tensor, outputs: Tensor) -> Tensor:
    """Columns sₙₖ of a root of the loss's Hessian at ``outputs`` ``[N, *C]``, ``[K, N, *C]``.

    ``NoRootError`` if the loss isn't a sum over samples or isn't convex, or if there are more
    than ``MAX_OUTPUTS`` outputs for each sample.
    """
    n, size = len(outputs), outputs[0].numel()
    if size > MAX_OUTPUTS:
        raise NoRootError(f"{size} outputs for each sample are more than {MAX_OUTPUTS}")
    gradient = differentiable_gradient(loss, [outputs])
    units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    rows = [
        derivative(gradient, [outputs], [unit.expand(n, size).reshape(outputs.shape)])[0]
        for unit in units
    ]
    hessians = torch.stack([row.reshape(n, size) for row in rows], dim=1)
    signs = torch.eye(n, size, dtype=outputs.dtype, device=outputs.device) * 2 - 1
    (product,) = derivative(gradient, [outputs], [signs.reshape(outputs.shape)])
    block_product = (hessians @ signs[:, :, None]).reshape(outputs.shape)
    values, vectors = torch.linalg.eigh((hessians + hessians.mT) / 2)
    rounding = 10 * size * n * torch.finfo(outputs.dtype).eps * values.abs().max()
    if bool(((product - block_product).abs() > rounding).any()):
        raise NoRootError("the loss is not a sum over samples")
    if bool((values < -rounding).any()):
        raise NoRootError("the loss is not convex in the network's outputs")
    columns = (vectors * values.clamp(min=0).sqrt()[:, None, :]).permute(2, 0, 1)
    return columns.reshape(size, *outputs.shape).to(outputs.dtype)


def pulled_back(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], outputs: Tensor, start: Tensor
) -> dict[str, Tensor]:
    """Σₙ(Jₙᵀsₙ)² for each parameter, of its shape; ``start`` is sₙ ``[N, *C]``.

    ``NoRootError`` names a parameter that has no individual gradients.
    """
    with individual_gradients(model, loss_reduction="sum") as gradients:
        found = derivative([outputs], list(parameters.values()), [start])
    if gradients.coupling or gradients.batch_size != len(outputs):
        raise NoRootError("its layers don't treat samples one by one")
    used = [name for name, part in zip(parameters, found, strict=True) if bool(part.any())]
    absent = [name for name in used if name not in gradients]
    if absent:
        raise NoRootError(f"there are no individual gradients of {', '.join(absent)}")
    return {
        name: gradients[name].sum_of_squares() if name in gradients else torch.zeros_like(p)
        for name, p in parameters.items()
    }
