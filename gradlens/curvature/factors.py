"""The factors of the Gauss-Newton matrix: roots of the loss's Hessian, and samples' Jacobians.

Sample n's part of the generalised Gauss-Newton matrix is JₙᵀHₙJₙ, with the Jacobian Jₙ of the
network's outputs and the loss's Hessian Hₙ there. With a root Hₙ = Σₖ sₙₖsₙₖᵀ its diagonal is
Σₖ(Jₙᵀsₙₖ)². Jₙᵀ times vectors comes from per-sample gradients of a backward pass that starts from
them, at the network's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.hessian import GGNOperator, JacobianOperator, check_rows
from gradlens.curvature.operator import float64_device, normal_like, signs_like
from gradlens.gradients.collect import BackwardPass, Collector
from gradlens.graph.loss import Batch
from gradlens.graph.undisturbed import undisturbed
from gradlens.history.coverage import few
from gradlens.numerics.tensors import accumulable
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.composed import gram_of_passes
from gradlens.operators.operator import GradientOperator
from gradlens.samples.plan import Plan, Plans
from gradlens.samples.planner import plan_of_rows

_Map: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map, sample by sample, of tensors of the outputs' shape."""

MAX_OUTPUTS = 256
"""Outputs K of each sample up to which a root of the loss's Hessian is computed.

A trade-off: the diagonal takes K backward passes, where Hutchinson's method estimates it from
``samples`` products, and the Hessians of N samples take N·K² numbers: 64 MiB in float64 at N = 128.
"""


def roots(ggn: GGNOperator, generator: np.random.Generator) -> Tensor:
    """Columns sₙₖ ``[K, N, *C]`` of a root of the loss's Hessian at the outputs ``[N, *C]``.

    Raises ``UnavailableError`` if the loss isn't a sum over samples or isn't convex, for more than
    ``MAX_OUTPUTS`` outputs of each sample, and for a Hessian with NaN or Inf.
    """
    outputs = ggn.outputs
    check_rows(outputs)
    n, size = len(outputs), outputs[0].numel()
    if size > MAX_OUTPUTS:
        raise UnavailableError(f"{size} outputs for each sample are more than {MAX_OUTPUTS}")

    def product(direction: Tensor) -> Tensor:
        found = ggn.loss_hessian_product(direction.reshape(outputs.shape).to(outputs.dtype))
        return accumulable(found).reshape(n, size)

    units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    hessians = torch.stack([product(unit.expand(n, size)) for unit in units], dim=1)
    if not bool(hessians.isfinite().all()):
        raise UnavailableError("the loss's Hessian at the network's outputs contains NaN or Inf")
    values, vectors = torch.linalg.eigh((hessians + hessians.mT) / 2)
    rounding = torch.finfo(outputs.dtype).eps ** 0.5 * values.abs().max()
    probe = accumulable(normal_like(outputs, generator)).reshape(n, size)
    coupled = product(probe) - (hessians.mT @ probe[:, :, None])[:, :, 0]
    if bool((coupled.abs() > rounding).any()):
        raise UnavailableError("the loss is not a sum over samples")
    if bool((values < -rounding).any()):
        raise UnavailableError("the loss is not convex in the network's outputs")
    columns = (vectors * values.clamp(min=0).sqrt()[:, None, :]).permute(2, 0, 1)
    return columns.reshape(size, *outputs.shape).to(outputs.dtype)


def signed_sum(columns: Tensor, signs: Tensor) -> Tensor:
    """Σₖ ±sₙₖ ``[N, *C]`` of columns ``[K, N, *C]`` and their signs ``[K, N]``."""
    shape = (*signs.shape, *[1] * (columns.dim() - 2))
    return (columns * signs.to(columns).reshape(shape)).sum(0)


def drawing(ggn: GGNOperator, generator: np.random.Generator) -> Callable[[], Tensor]:
    """A function that draws sₙ ``[N, *C]`` with E[sₙsₙᵀ] = Hₙ: a root of Hₙ times random signs.

    Cross-entropy, also with a weight for each word of a text or pixel of an image or without some
    of them, and losses that are a sum over single outputs have roots in closed form. Whether Hₙ is
    of that form is checked by its product with a random vector, which is wrong with probability
    zero. For other losses the root is computed; raises ``UnavailableError`` as ``roots`` does.
    """
    closed = _closed_form(ggn, generator)
    if closed is not None:
        root, size = closed
        return lambda: root(signs_like(ggn.outputs.detach(), generator)) * size
    columns = roots(ggn, generator)
    samples = columns.new_empty(columns.shape[:2])
    return lambda: signed_sum(columns, signs_like(samples, generator))


def _closed_form(
    ggn: GGNOperator, generator: np.random.Generator
) -> tuple[_Map, float | Tensor] | None:
    """A product with a root of the loss's Hessian, and what it is multiplied by, if that is known.

    Of cross-entropy up to a factor, of a sum over single outputs, or of weighted cross-entropy.
    """
    outputs = ggn.outputs.detach()
    probe = normal_like(outputs, generator)
    curved = ggn.loss_hessian_product(probe)
    if outputs.dim() > 1:
        hessian, root = _of_cross_entropy(outputs.softmax(1), 1)
        factor = _factor(curved, hessian(probe))
        if factor is not None:
            return root, factor**0.5
    diagonal = ggn.loss_hessian_product(torch.ones_like(outputs))
    close = torch.finfo(probe.dtype).eps ** 0.5 * (diagonal * probe).norm()
    if bool((curved - diagonal * probe).norm() <= close) and not bool((diagonal < 0).any()):
        return lambda signs: signs, diagonal.sqrt()
    for axis in dict.fromkeys([1, outputs.dim() - 1]) if outputs.dim() > 2 else ():
        weights = _weights_of_rows(ggn, axis, generator)
        if weights is not None:
            _, root = _of_cross_entropy(outputs.softmax(axis), axis)
            return root, weights.sqrt()
    return None


def _weights_of_rows(ggn: GGNOperator, axis: int, generator: np.random.Generator) -> Tensor | None:
    """The weights w ≥ 0 ``[N, ..., 1, ...]`` of a sum of cross-entropies, with classes on an axis.

    ``None`` if the loss isn't one, by products with two random vectors that must agree on them.
    """
    outputs = ggn.outputs.detach()
    hessian, _ = _of_cross_entropy(outputs.softmax(axis), axis)
    found: list[Tensor] = []
    for probe in (normal_like(outputs, generator) for _ in range(2)):
        curved, expected = ggn.loss_hessian_product(probe), hessian(probe)
        size = expected.square().sum(axis, keepdim=True)
        weights = (curved * expected).sum(axis, keepdim=True) / size
        found.append(weights)
        if _factor(curved, weights * expected) is None or bool((weights < 0).any()):
            return None
    return found[0] if _factor(*found) is not None else None


def _of_cross_entropy(p: Tensor, axis: int) -> tuple[_Map, _Map]:
    """diag(p) − ppᵀ = RRᵀ with R = diag(√p) − p√pᵀ, for the probabilities p of an axis.

    In place, since outputs for each word of a text and of a vocabulary are large.
    """

    def hessian(u: Tensor) -> Tensor:
        return less_sums(p * u)

    def root(u: Tensor) -> Tensor:
        return less_sums(p.sqrt().mul_(u))

    def less_sums(products: Tensor) -> Tensor:
        return products.sub_(p * products.sum(axis, keepdim=True))

    return hessian, root


def _factor(curved: Tensor, expected: Tensor) -> float | None:
    """c ≥ 0 with ``curved`` = c·``expected`` to half of the digits; ``None`` if there is none."""
    factor = float((curved * expected).sum() / expected.square().sum())
    difference = (curved - factor * expected).norm()
    agrees = difference <= torch.finfo(curved.dtype).eps ** 0.5 * curved.norm()
    return factor if bool(agrees) and factor >= 0 else None


# Jacobians of samples --------------------------------------------------------------------------


@final
class SamplesJacobians:
    """Transposed Jacobians Jₙᵀ times vectors, by per-sample gradients of passes from the outputs.

    ``plans`` hold from step to step which rows belong to which sample. ``together`` is the number
    of consecutive rows of the outputs that belong to one sample. Raises ``UnavailableError`` if a
    parameter has no per-sample gradients, or if samples are coupled inside the network.
    """

    def __init__(
        self,
        jacobian: JacobianOperator,
        model: nn.Module | None = None,
        plans: Plans | None = None,
        together: int = 1,
    ) -> None:
        check_rows(jacobian.outputs)
        self.jacobian = jacobian
        self._model = model
        self._graph = jacobian.graph
        self._plan = self._planned(Plans() if plans is None else plans, together)
        absent = self._plan.unavailable
        if absent:
            reason = next(iter(absent.values()))
            raise UnavailableError(
                f"there are no per-sample gradients of {few([*absent])}: {reason}"
            )
        if self._plan.coupling:
            raise UnavailableError(
                "a normalisation over the batch couples the samples; in eval mode, as on a Probe, "
                "it doesn't"
            )

    @property
    def samples(self) -> int:
        """N."""
        return self._plan.samples or 0

    def _planned(self, plans: Plans, together: int) -> Plan:
        # Of the graph's parameters alone: a plan also holds where others were frozen, or are new.
        parameters = {
            name: parameter
            for name, parameter in self.jacobian.parameters.items()
            if isinstance(parameter, nn.Parameter) and parameter in self._graph
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        key = hash((self._graph.key(names), together))

        def make() -> Plan:
            with undisturbed(self._model), torch.enable_grad():
                samples = len(self.jacobian.outputs) // together
                plan = plan_of_rows(self._graph, parameters, samples, together=together)
            # One without all parameters is kept even if it may not hold for other graphs, and isn't
            # made again: nothing is computed from it.
            return replace(plan, uses={}, holds=True, read=False) if plan.unavailable else plan

        return plans.find(key, self._graph, make)[0]

    def operators(self, start: Tensor, kept: Tensor | None = None) -> dict[str, GradientOperator]:
        """Jₙᵀsₙ by parameter name, with sₙ ``[N, *C]`` in ``start``.

        Of the samples whose indices are ``kept``, or of all. Raises ``UnavailableError`` where a
        parameter's per-sample gradients can't be computed.
        """
        plan = self._plan if kept is None else self._plan.part(kept)
        collector = Collector({})
        batch = Batch(plan.samples, plan.known_by, "sum")
        with undisturbed(self._model):
            BackwardPass(self._graph, plan, batch, collector).run(start)
        if collector.unavailable:
            name, reason = next(iter(collector.unavailable.items()))
            raise UnavailableError(f"there are no per-sample gradients of {name}: {reason}")
        found = {name: collector.take(name) for name in self.jacobian.parameters}
        return {name: operator for name, operator in found.items() if operator is not None}

    def passes(self, starts: Sequence[Tensor]) -> list[dict[str, GradientOperator]]:
        """The operators of several starts, which are all kept.

        ``UnavailableError`` as ``operators``, and if they took more than ``MAX_BYTES``.
        """
        first = self.operators(starts[0])
        needed = sum(each.nbytes for each in first.values()) * len(starts)
        if needed > MAX_BYTES:
            raise UnavailableError(TOO_LARGE.format(gib=needed / 2**30))
        return [first, *map(self.operators, starts[1:])]


MAX_BYTES = 2**31
"""Layers' inputs and output gradients of all backward passes may take 2 GiB.

As for BackPACK's matrices: most GPUs have no more than a few times as much memory to spare.
"""

TOO_LARGE = (
    "the layers' inputs and output gradients of all backward passes would take {gib:.1f} GiB, more "
    f"than {MAX_BYTES / 2**30:.0f}: take fewer samples at once"
)


def gram_of_starts(
    one: SamplesJacobians,
    starts: Sequence[Tensor],
    other: SamplesJacobians | None = None,
    other_starts: Sequence[Tensor] = (),
) -> Tensor:
    """⟨Jₙᵀsₙₖ, J'ₘᵀs'ₘₗ⟩ of all pairs of samples n, m and starts k, l, in float64 ``[K·N, L·M]``.

    Without another J', of the same one and its starts. Rows are those of the first start, followed
    by those of the next one. ``UnavailableError`` as ``passes``, and for NaN or Inf.
    """
    passes = one.passes(starts)
    others = passes if other is None else other.passes(other_starts)
    columns = sum(map(len, starts if other is None else other_starts))
    device = float64_device(starts[0].device)
    gram = torch.zeros(sum(map(len, starts)), columns, dtype=torch.float64, device=device)
    for name in [name for name in passes[0] if name in others[0]]:
        operators = [each.pop(name) for each in passes]
        of_others = None if other is None else [each.pop(name) for each in others]
        gram += gram_of_passes(operators, of_others).to(device)
    if not bool(gram.isfinite().all()):
        raise UnavailableError("the per-sample gradients contain NaN or Inf")
    return gram
