"""The empirical neural tangent kernel of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.curvature.factors import MAX_BYTES, SamplesJacobians, gram_of_starts
from gradlens.curvature.hessian import JacobianOperator
from gradlens.curvature.over_data import BatchOutputs, NetworkOverData
from gradlens.numerics.unavailable import UnavailableError


def ntk(
    model: nn.Module,
    x: Any,
    other: Any = None,
    *,
    parameters: Sequence[str] | None = None,
    trace: bool = False,
) -> Tensor:
    """The empirical neural tangent kernel J(x) J(x')ᵀ (Jacot et al., 2018), without building J.

    ``x`` and ``other`` are inputs of N and M samples that the model is called with, a mapping as
    keyword arguments; without ``other``, both are x. For outputs ``[N, *C]``, the kernel is
    ``[N, M, *C, *C]`` in float64: for K outputs of each sample, the entry n, m, i, j is the inner
    product of ∂fᵢ(xₙ)/∂θ and ∂fⱼ(x'ₘ)/∂θ, as in ``torch.func``'s tutorial and in neural-tangents
    with ``trace_axes=()``. With ``trace``, it is the sum over equal outputs i = j, ``[N, M]``,
    which isn't divided by K, as neural-tangents divides it. ``parameters`` are names of
    parameters, or of modules for all of theirs; by default, all that require a gradient.

    It takes one backward pass for each output of a sample, in the memory of all layers' inputs and
    output gradients; with ``trace``, those of one pass at a time. The model runs in its present
    mode, and is left as it was. Of a model that several processes train, each has the kernel of its
    own inputs.

    Raises ``ValueError`` for a model whose outputs aren't one tensor or differ from one forward
    pass to the next; ``UnavailableError`` where samples are coupled, as by ``BatchNorm`` in train
    mode, where a parameter has no per-sample gradients, for more than 2 GiB, and for NaN or Inf.
    """
    inputs = [x] if other is None else [x, other]
    network = NetworkOverData(model, [(each, ()) for each in inputs], parameters, joined=False)
    jacobians: list[SamplesJacobians] = []
    kernels: list[Tensor] = []

    def add(batch: BatchOutputs) -> None:
        jacobian = JacobianOperator(batch.output, network.parameters)
        jacobians.append(SamplesJacobians(jacobian, model))
        if len(jacobians) == len(inputs):  # while sharded parameters are whole
            kernels.append((_trace if trace else _kernel)(*jacobians))

    network.each_outputs(add)
    return kernels[0]


def _trace(one: SamplesJacobians, other: SamplesJacobians | None = None) -> Tensor:
    shape, other_shape = one.jacobian.outputs.shape, (other or one).jacobian.outputs.shape
    if shape[1:] != other_shape[1:]:
        raise ValueError(OTHER_OUTPUTS.format(one=[*shape], other=[*other_shape]))
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for start, another in zip(_units(one), _units(other or one), strict=True):
        total = total + gram_of_starts(one, [start], other, [another])
    return total


def _kernel(one: SamplesJacobians, other: SamplesJacobians | None = None) -> Tensor:
    outputs, others = one.jacobian.outputs, (other or one).jacobian.outputs
    needed = outputs.numel() * others.numel() * torch.float64.itemsize
    if needed > MAX_BYTES:
        raise UnavailableError(LARGE_KERNEL.format(gib=needed / 2**30))
    gram = gram_of_starts(one, [*_units(one)], other, [*_units(other or one)])
    n, m = len(outputs), len(others)
    kernel = gram.reshape(-1, n, others.numel() // m, m).permute(1, 3, 0, 2)
    return kernel.reshape(n, m, *outputs.shape[1:], *others.shape[1:])


def _units(of: SamplesJacobians) -> Iterator[Tensor]:
    """For each output of a sample, a tensor of all samples' outputs that is one there."""
    like = of.jacobian.outputs.detach()
    for number in range(like[0].numel()):
        unit = torch.zeros_like(like, memory_format=torch.contiguous_format)
        unit.view(len(like), -1)[:, number] = 1.0
        yield unit


OTHER_OUTPUTS = (
    "the outputs have shapes {one} and {other}, so that there is no trace over equal ones: leave "
    "out trace, or pass inputs of the same shape"
)
LARGE_KERNEL = (
    f"the kernel would take {{gib:.1f}} GiB, more than {MAX_BYTES / 2**30:.0f}: pass fewer samples "
    "at once, a model that returns fewer outputs, or trace=True"
)
