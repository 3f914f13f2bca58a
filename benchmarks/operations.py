"""Per-sample gradients behind each operation of torch, by the inputs that torch tests it with.

A network multiplies a batch by a parameter, and hands it to the operation. Whichever samples meet
in that, and in whichever order they come out: what is given must be what goes through the rows of
one sample of the batch. ``python -m benchmarks.operations`` examines all of them, and takes a
minute or two.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import gradlens
from gradlens.torch_private import tree_leaves, tree_map_only

INPUTS = 10
"""Inputs of an operation, of those that torch has for it."""

IN_PLACE = {"cauchy", "exponential", "geometric", "log_normal", "normal", "uniform"}
"""Operations that overwrite what they are called with, whose gradient there isn't the batch's."""


class Scaled(nn.Module):
    """A batch ``[N, *P]`` times a parameter, and what an operation makes of that."""

    def __init__(self, operation: Any, given: Any, batch: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.9 + 0.2 * torch.rand(batch.shape[1:], dtype=batch.dtype))
        self.name = operation.name
        self._operation = operation
        self._given = given
        self._batch = batch
        self.hidden = torch.empty(0)

    def forward(self, batch: Tensor) -> list[Tensor]:
        """What can be differentiated of what the operation returns."""
        self.hidden = batch * self.weight
        own = (self._given.input, self._given.args, self._given.kwargs)
        first, others, options = tree_map_only(Tensor, self._replaced, own)
        torch.manual_seed(1)
        found = tree_leaves(self._operation(first, *others, **options))
        found = [each for each in found if isinstance(each, Tensor) and each.grad_fn is not None]
        return [each for each in found if each.numel() and not each.is_complex()]

    def _replaced(self, tensor: Tensor) -> Tensor:
        return self.hidden if tensor is self._batch else tensor


def networks() -> Iterator[tuple[Scaled, Tensor]]:
    """Networks with an operation each, and their batches."""
    for operation in op_db:
        inputs = operation.sample_inputs("cpu", torch.float64, requires_grad=False)
        for given in islice(inputs if operation.name not in IN_PLACE else (), INPUTS):
            batch = next((e for e in tree_leaves(given.input) if isinstance(e, Tensor)), None)
            if batch is not None and is_batch(batch):
                yield Scaled(operation, given, batch), batch


def is_batch(tensor: Tensor) -> bool:
    """Whether a tensor has some rows, and few elements."""
    has_rows = tensor.dim() > 0 and tensor.layout == torch.strided and 1 < len(tensor) <= 10
    return has_rows and tensor.is_floating_point() and tensor.numel() <= 1000


def squared(model: Scaled, batch: Tensor) -> Tensor:
    """The loss: squared errors of all that the operation returns."""
    found = model(batch)
    torch.manual_seed(2)
    return sum(((e - torch.randn_like(e)).square().mean() for e in found), start=torch.zeros(()))


def examine(model: Scaled, batch: Tensor) -> str:
    """What is given of the parameter: ``"right"``, ``"refused"`` or ``"wrong"``; or nothing."""
    try:
        (gradient,) = torch.autograd.grad(squared(model, batch), model.hidden)
    except (RuntimeError, ValueError, TypeError, AssertionError):
        return ""  # it can't be differentiated, or not on this device
    expected = len(batch) * gradient * batch
    gradients = gradlens.per_sample_gradients(model)
    with gradients:
        squared(model, batch.clone()).backward()
    if "weight" not in gradients:
        return "refused"
    found = gradients["weight"].dense()
    if not expected.isfinite().all():
        return ""
    return "right" if torch.allclose(found, expected, 1e-7, 1e-9) else "wrong"


def main() -> None:
    """Examine all operations, and print what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    for model, batch in networks():
        result = examine(model, batch)
        found[result] += 1
        if result == "wrong":
            print(f"wrong: {model.name} of a batch {list(batch.shape)}")
    print(f"{found['right']} right, {found['refused']} refused, {found['wrong']} wrong")
    raise SystemExit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
