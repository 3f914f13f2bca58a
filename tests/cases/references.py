"""Slow and plain computations to compare with, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import gradlens

Contribution = Callable[[Tensor, slice], Tensor]
"""``(output of some samples, which ones)`` to their share of the batch loss, a scalar."""


def gradients_of(
    value: Tensor | None, parameters: Mapping[str, Tensor], create_graph: bool = False
) -> dict[str, Tensor]:
    """By name, dense, and zero where there is no dependence. The graph of the value stays."""
    if value is None or not value.requires_grad:
        return {name: torch.zeros_like(each) for name, each in parameters.items()}
    found = torch.autograd.grad(
        value,
        [*parameters.values()],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return {name: each.to_dense() for name, each in zip(parameters, found, strict=True)}


def stacked(rows: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Those of samples ``[N, *P]``, by name."""
    listed = [*rows]
    return {name: torch.stack([row[name] for row in listed]) for name in listed[0]}


def per_sample_gradients_by_loop(
    model: nn.Module, inputs: Tensor, contribution: Contribution, scale: float
) -> dict[str, Tensor]:
    """gₙ ``[N, *P]``, sample by sample through the whole network, on a copy without hooks."""
    model = without_hooks(model)
    samples = [slice(n, n + 1) for n in range(len(inputs))]
    shares = (scale * contribution(model(inputs[each]), each) for each in samples)
    return stacked(gradients_of(each, dict(model.named_parameters())) for each in shares)


def per_sample_gradients_of_losses(losses: Iterable[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """gₙ ``[N, *P]`` of losses ``[N]`` that depend on one sample each, from their own graph."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return stacked(gradients_of(loss, parameters) for loss in losses)


def right_gradients(
    model: nn.Module,
    losses: Tensor,
    order: Tensor | slice = slice(None),
    context: gradlens.per_sample_gradients | None = None,
    **options: Any,
) -> gradlens.per_sample_gradients:
    """Per-sample gradients in a backward pass of the mean of the losses ``[N]``: right, or missing.

    ``order`` says which loss is that of the first sample, and so on. The pass is in a new context
    with the ``options``, unless there is one from earlier steps.
    """
    expected = per_sample_gradients_of_losses(losses, model)
    if context is None:
        context = gradlens.per_sample_gradients(model, **options)
    with context as gradients:
        losses.mean().backward()
    for name in gradients:
        found, wanted = gradients[name].dense(), expected[name][order]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    return gradients


def assert_covered(model: nn.Module, losses: Tensor, **options: Any) -> None:
    """All parameters have the gradients of the losses, as ``right_gradients`` compares them."""
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert right_gradients(model, losses, **options).keys() == names


def without_hooks(model: nn.Module) -> nn.Module:
    clone = copy.deepcopy(model)
    for module in clone.modules():
        module._forward_hooks.clear()
        module._forward_hooks_with_kwargs.clear()
    return clone


def as_function(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The trainable parameters ``[D]``, and the outputs as a function of them."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in parameters.values()]

    def outputs(flat: Tensor) -> Tensor:
        pairs = zip(parameters.items(), flat.split(sizes), strict=True)
        named = {name: part.reshape(p.shape) for (name, p), part in pairs}
        return functional_call(model, named, (inputs,))

    return torch.cat([p.detach().flatten() for p in parameters.values()]), outputs


def second_derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """``[D, D]``; torch.func.hessian goes forward, which uses the deprecated torch.jit."""
    return jacrev(jacrev(function))(at)


def dense_hessian(model: nn.Module, loss: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """``[D, D]``, of the loss of the outputs as it is."""
    parameters, outputs = as_function(model, inputs)
    return second_derivative(lambda flat: loss(outputs(flat)), parameters)


def dense_ggn(model: nn.Module, loss: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """``[D, D]``, of the loss of the outputs as it is."""
    parameters, outputs = as_function(model, inputs)
    values = outputs(parameters).detach()
    jacobian = jacrev(outputs)(parameters).flatten(0, -2)
    inner = second_derivative(lambda flat: loss(flat.reshape(values.shape)), values.flatten())
    return jacobian.T @ inner @ jacobian


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """``[N, D]``."""
    rows = [each if each.dim() > 1 else each[:, None] for each in gradients.values()]
    return torch.cat([each.flatten(1) for each in rows], dim=1)


def squared_error(target: Tensor, reduction: str) -> Contribution:
    """Each sample's share of the mean or sum over samples of the mean squared error."""

    def contribution(output: Tensor, samples: slice) -> Tensor:
        losses = (output - target[samples]).square().flatten(1).mean(1)
        return losses.sum() / (len(target) if reduction == "mean" else 1)

    return contribution


def numbers(record: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """All numbers in a record that have a mean, with their paths."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            if key != "least_unit":
                yield from numbers(value, (*path, key))
    elif isinstance(record, (int, float)) and not isinstance(record, bool):
        yield path, record


def expected_statistics(values: Sequence[float]) -> dict[str, float]:
    """The statistics of ``gradlens.Aggregate``, all numbers at once."""
    q1, median, q3 = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "mean": np.mean(values), "std": np.std(values), "min": min(values), "q1": q1,
        "median": median, "q3": q3, "max": max(values), "iqr": q3 - q1, "count": len(values),
    }  # fmt: skip
