"""One training step that also finds squared norms of per-sample gradients, by each peer's means."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Step = Callable[[Tensor, Tensor], Tensor]
"""``(inputs, labels)`` to squared norms ``[N]``; gradients are left on the parameters."""


def plain(model: nn.Module) -> Step:
    """No norms at all."""
    loss_function = nn.CrossEntropyLoss()

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss_function(model(inputs), labels).backward()
        return inputs.new_empty(0)

    return step


def backpack_norms(model: nn.Module) -> Step:
    """BackPACK's ``BatchL2Grad``."""
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad

    model, loss_function = extend(model), extend(nn.CrossEntropyLoss())

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        with backpack(BatchL2Grad()):
            loss_function(model(inputs), labels).backward()
        norms = torch.stack([p.batch_l2 for p in model.parameters()]).sum(0) * len(inputs) ** 2
        for parameter in model.parameters():
            del parameter.batch_l2
        return norms

    return step


def backpack_gradients(model: nn.Module) -> Step:
    """BackPACK's ``BatchGrad``: all per-sample gradients."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model, loss_function = extend(model), extend(nn.CrossEntropyLoss())

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        with backpack(BatchGrad()):
            loss_function(model(inputs), labels).backward()
        norms = torch.stack([p.grad_batch.flatten(1).square().sum(1) for p in model.parameters()])
        for parameter in model.parameters():
            del parameter.grad_batch
        return norms.sum(0) * len(inputs) ** 2

    return step


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


PEERS: dict[str, Callable[[nn.Module], Step]] = {
    "BackPACK BatchL2Grad": backpack_norms,
    "BackPACK BatchGrad": backpack_gradients,
    "opacus GradSampleModule": opacus_gradients,
    "opacus ghost norms": opacus_ghost,
    "torch.func vmap": vmapped,
    "loop over samples": loop,
}
