"""The diagonal of the generalised Gauss-Newton matrix, from individual gradients.

Sample n's part of the matrix is JₙᵀHₙJₙ, with the Jacobian Jₙ of the network's outputs and the
loss's Hessian Hₙ there. With a root Hₙ = Σₖ sₙₖsₙₖᵀ its diagonal is Σₖ(Jₙᵀsₙₖ)², and Jₙᵀsₙₖ are the
individual gradients of a backward pass that starts from sₙₖ: any network will do whose layers give
individual gradients, at the cost of one backward pass for each output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.products import NotFiniteError
from gradlens.individual.context import individual_gradients
from gradlens.individual.operator import GradientOperator, accumulable

MAX_OUTPUTS = 256
"""More outputs for each sample than these are too many for a Hessian of all their pairs."""


class NoRootError(RuntimeError):
    """Why the diagonal can't be found from individual gradients."""


def roots(ggn: GGNOperator, generator: np.random.Generator) -> Tensor:
    """Columns sₙₖ of a root of the loss's Hessian at outputs ``[N, *C]``, ``[K, N, *C]``.

    ``NoRootError`` if the loss isn't a sum over samples or isn't convex, or if there are more
    than ``MAX_OUTPUTS`` outputs for each sample; ``NotFiniteError`` for a Hessian with NaN or Inf.
    """
    outputs = ggn.outputs
    if outputs.numel() == 0 or outputs.dim() == 0:
        raise NoRootError(f"outputs of shape {list(outputs.shape)} have no samples")
    n, size = len(outputs), outputs[0].numel()
    if size > MAX_OUTPUTS:
        raise NoRootError(f"{size} outputs for each sample are more than {MAX_OUTPUTS}")

    def product(direction: Tensor) -> Tensor:
        found = ggn.loss_hessian_product(direction.reshape(outputs.shape).to(outputs.dtype))
        return accumulable(found).reshape(n, size)

    units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    hessians = torch.stack([product(unit.expand(n, size)) for unit in units], dim=1)
    if not bool(hessians.isfinite().all()):
        raise NotFiniteError("the loss's Hessian at the network's outputs contains NaN or Inf")
    values, vectors = torch.linalg.eigh((hessians + hessians.mT) / 2)
    rounding = torch.finfo(outputs.dtype).eps ** 0.5 * values.abs().max()
    probe = accumulable(normal_like(outputs, generator)).reshape(n, size)
    coupled = product(probe) - (hessians.mT @ probe[:, :, None])[:, :, 0]
    if bool((coupled.abs() > rounding).any()):
        raise NoRootError("the loss is not a sum over samples")
    if bool((values < -rounding).any()):
        raise NoRootError("the loss is not convex in the network's outputs")
    columns = (vectors * values.clamp(min=0).sqrt()[:, None, :]).permute(2, 0, 1)
    return columns.reshape(size, *outputs.shape).to(outputs.dtype)


def samples_jacobians(
    model: nn.Module, ggn: GGNOperator, loss: Tensor, generator: np.random.Generator
) -> SamplesJacobians:
    """Jₙ of every sample, checked; ``NoRootError`` where individual gradients don't give them."""
    by_calls = SamplesJacobians(model, ggn)
    try:
        by_calls.check(generator)
    except NoRootError:
        in_graph = SamplesJacobians(model, ggn, loss)
        in_graph.check(generator)
        return in_graph
    return by_calls


@dataclass(frozen=True)
class SamplesJacobians:
    """Jₙ of every sample, by the individual gradients of backward passes through the network.

    The ``loss`` is needed if parameters are used outside their layers, which its graph tells.
    """

    model: nn.Module
    ggn: GGNOperator
    loss: Tensor | None = None

    def squared(self, start: Tensor) -> dict[str, Tensor]:
        """Σₙ(Jₙᵀsₙ)² for each parameter, of its shape; ``start`` is sₙ ``[N, *C]``."""
        gradients, _ = self._pulled_back(start)
        return {
            name: gradients[name].sum_of_squares() if name in gradients else torch.zeros_like(p)
            for name, p in self.ggn.parameters.items()
        }

    def operators(self, start: Tensor) -> Mapping[str, GradientOperator]:
        """Jₙᵀsₙ by parameter; ``start`` is sₙ ``[N, *C]``."""
        return self._pulled_back(start)[0]

    def check(self, generator: np.random.Generator) -> None:
        """``NoRootError`` unless individual gradients are all that there is of Jₙᵀsₙ.

        They are not if a use of a parameter isn't seen, or if samples meet inside the network.
        """
        start = normal_like(self.ggn.outputs, generator)
        gradients, whole = self._pulled_back(start)
        absent = [n for n, part in whole.items() if bool(part.any()) and n not in gradients]
        if absent:
            raise NoRootError(f"there are no individual gradients of {', '.join(absent)}")
        check_products(self.ggn, gradients, start, generator)

    def _pulled_back(self, start: Tensor) -> tuple[individual_gradients, dict[str, Tensor]]:
        """Individual gradients, and their sums by autograd."""
        parameters, outputs = self.ggn.parameters, self.ggn.outputs
        with individual_gradients(
            self.model, loss_reduction="sum", loss=self.loss, test=False
        ) as gradients:
            whole = derivative([outputs], list(parameters.values()), [start])
        if gradients.batch_size != len(outputs):
            raise NoRootError(
                f"its layers got {gradients.batch_size} samples, its outputs have {len(outputs)} "
                "rows"
            )
        return gradients, dict(zip(parameters, whole, strict=True))


def check_products(
    ggn: GGNOperator,
    gradients: Mapping[str, GradientOperator],
    start: Tensor,
    generator: np.random.Generator,
) -> None:
    """``NoRootError`` unless ``gradients`` are Jₙᵀsₙ of all parameters; ``start`` is sₙ.

    ⟨Jₙᵀsₙ, v⟩ = ⟨sₙ, Jₙv⟩ for a random direction v is fulfilled by other vectors with
    probability zero.
    """
    direction = {name: normal_like(p, generator) for name, p in ggn.parameters.items()}
    pushed_forward = ggn.jacobian_product(list(direction.values()))
    expected = torch.linalg.vecdot(
        accumulable(start).flatten(1), accumulable(pushed_forward).flatten(1)
    )
    difference = -expected.cpu().double()
    norms = torch.zeros_like(difference)
    for name, gradient in gradients.items():
        difference += gradient.dot(direction[name]).cpu().double()
        norms += gradient.squared_norms().cpu().double()
    dtypes = {ggn.outputs.dtype, *(p.dtype for p in ggn.parameters.values())}
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    if not bool(difference.norm() <= rounding * norms.sum().sqrt()):
        raise NoRootError(
            "the samples' gradients are not those of their own outputs: samples meet inside "
            "the network, or a parameter is used where it can't be seen"
        )


def normal_like(like: Tensor, generator: np.random.Generator) -> Tensor:
    """Independent standard normal numbers, of a tensor's shape."""
    return torch.tensor(generator.standard_normal(tuple(like.shape))).to(like.device, like.dtype)
