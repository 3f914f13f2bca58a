"""One training step that also finds squared norms of per-sample gradients, by each peer's means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Step = Callable[[Tensor, Tensor], Tensor]
"""``(inputs, labels)`` to squared norms ``[N]``; gradients are left on the parameters."""


Peer = Callable[[nn.Module], Step]


def plain(model: nn.Module) -> Step:
    """No norms at all."""
    loss_function = nn.CrossEntropyLoss()

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss_function(model(inputs), labels).backward()
        return inputs.new_empty(0)

    return step


def by_backpack(extension: str, squared_norms: Callable[[Any], Tensor]) -> Peer:
    """An extension of BackPACK, and what it leaves on a parameter as squared norms ``[N]``."""

    def of(model: nn.Module) -> Step:
        from backpack import backpack, extend, extensions

        model, loss_function = extend(model), extend(nn.CrossEntropyLoss())
        extended = getattr(extensions, extension)()

        def step(inputs: Tensor, labels: Tensor) -> Tensor:
            with backpack(extended):
                loss_function(model(inputs), labels).backward()
            found = torch.stack([squared_norms(parameter) for parameter in model.parameters()])
            for parameter in model.parameters():
                delattr(parameter, extended.savefield)
            return found.sum(0) * len(inputs) ** 2

        return step

    return of


def opacus_gradients(model: nn.Module) -> Step:
    """opacus's ``GradSampleModule``: all per-sample gradients."""
    from opacus import GradSampleModule

    wrapped, loss_function = GradSampleModule(model), nn.CrossEntropyLoss()

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss_function(wrapped(inputs), labels).backward()
        norms = [p.grad_sample.flatten(1).square().sum(1) for p in wrapped.parameters()]
        for parameter in wrapped.parameters():
            parameter.grad_sample = None
        return torch.stack(norms).sum(0)

    return step


def opacus_ghost(model: nn.Module) -> Step:
    """opacus's ghost norms."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True
    )
    loss_function = nn.CrossEntropyLoss()

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss_function(wrapped(inputs), labels).backward()
        return wrapped.get_norm_sample().square()

    return step


def vmapped(model: nn.Module) -> Step:
    """``vmap`` over ``grad``, after the training's own backward pass."""

    def loss_of_one(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = functional_call(model, parameters, (image[None],))
        return nn.functional.cross_entropy(output, label[None])

    gradients_of = vmap(grad(loss_of_one), in_dims=(None, 0, 0))

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        found = gradients_of(parameters, inputs, labels)
        return torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0)

    return step


def loop(model: nn.Module) -> Step:
    """One backward pass for each sample, which add up to that of the batch."""

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        parameters = list(model.parameters())
        norms = []
        for image, label in zip(inputs, labels, strict=True):
            loss = nn.functional.cross_entropy(model(image[None]), label[None])
            found = torch.autograd.grad(loss, parameters)
            norms.append(sum(g.square().sum() for g in found))
            for parameter, gradient in zip(parameters, found, strict=True):
                share = gradient / len(inputs)
                parameter.grad = share if parameter.grad is None else parameter.grad + share
        return torch.stack([torch.as_tensor(norm) for norm in norms])

    return step


PEERS: dict[str, Peer] = {
    "BackPACK BatchL2Grad": by_backpack("BatchL2Grad", lambda p: p.batch_l2),
    "BackPACK BatchGrad": by_backpack(
        "BatchGrad", lambda p: p.grad_batch.flatten(1).square().sum(1)
    ),
    "opacus GradSampleModule": opacus_gradients,
    "opacus ghost norms": opacus_ghost,
    "torch.func vmap": vmapped,
    "loop over samples": loop,
}
