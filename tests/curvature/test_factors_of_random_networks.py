"""Jacobians of samples, by the layer, the way to call it, the entry or the loss of a network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradlens.curvature.factors import SamplesJacobians, gram_of_starts
from gradlens.curvature.hessian import JacobianOperator
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.random_layers import COUPLINGS
from tests.cases.random_losses import LOSSES
from tests.cases.random_networks import build, draw_batch, each_once
from tests.cases.references import flat, gradients_of, stacked

pytestmark = pytest.mark.slow

SEVERAL = {"two heads", "auxiliary", *(name for name, loss in LOSSES.items() if loss.views > 1)}
"""Losses of networks with several outputs."""
EACH = {name: recipe for name, recipe in each_once().items() if recipe.loss not in SEVERAL}
REFUSED = {*COUPLINGS, "functional linear, checkpointed"}
"""Samples meet, or a checkpoint would have to be recomputed for each pass."""


def dense_jacobian(outputs: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    """``[O, D]``, by one backward pass for each output."""
    return flat(stacked(gradients_of(output, parameters) for output in outputs.flatten()))


@pytest.mark.parametrize("name", EACH)
def test_products_of_jacobians(name: str) -> None:
    """JJᵀ is that of the whole network, or refused where samples meet."""
    network = build(EACH[name])
    batch = draw_batch(network, 0)
    outputs = network(*network.inputs(batch))
    parameters = dict(network.named_parameters())
    dense = dense_jacobian(outputs, parameters)
    rows = len(outputs)
    units = torch.eye(outputs[0].numel(), dtype=outputs.dtype)
    starts = [unit.expand(rows, -1).reshape(outputs.shape).contiguous() for unit in units]
    jacobian = JacobianOperator(outputs, parameters)
    if name in REFUSED:
        with pytest.raises(UnavailableError):
            gram_of_starts(SamplesJacobians(jacobian, network), starts)
        return
    found = gram_of_starts(SamplesJacobians(jacobian, network), starts)
    by_output = dense.unflatten(0, (rows, -1)).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(found, by_output @ by_output.T, rtol=1e-9, atol=1e-10)
