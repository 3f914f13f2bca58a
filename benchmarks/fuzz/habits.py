"""What holds for a whole training loop, and what happens between its steps."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz import parts

if TYPE_CHECKING:
    from benchmarks.fuzz.loop import Loop


# Habits: they change the network when it was made.


def frozen_first_part(loop: Loop) -> None:
    for part in loop.model.parts[:1]:
        part.requires_grad_(False)


def tied(loop: Loop) -> None:
    """All linear layers of the same shape share their weight."""
    first: dict[torch.Size, nn.Parameter] = {}
    for module in loop.model.modules():
        if type(module) is nn.Linear and isinstance(vars(module).get("_parameters"), dict):
            weight = module._parameters.get("weight")
            if weight is not None:
                module.weight = first.setdefault(weight.shape, weight)


def hooks_on_modules(loop: Loop) -> None:
    for module in list(loop.model.modules()):
        module.register_forward_hook(lambda *_: None)
        module.register_forward_pre_hook(lambda *_: None)


def backward_hooks_on_modules(loop: Loop) -> None:
    for module in loop.model.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda module, inputs, outputs: None)


def trained(loop: Loop) -> list[nn.Parameter]:
    return [parameter for parameter in loop.model.parameters() if parameter.requires_grad]


def hooks_on_parameters(loop: Loop) -> None:
    """They count, and change the gradient."""

    def hook(gradient: Tensor) -> Tensor:
        loop.count("parameter hooks")
        return gradient * 0.5

    for parameter in trained(loop):
        parameter.register_hook(hook)


def steps_in_backward(loop: Loop) -> None:
    """Parameters descend as soon as their gradients are there, which are freed."""

    def descend(parameter: Tensor) -> None:
        loop.count("descended")
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(0.01 * parameter.grad.to_dense())
        parameter.grad = None

    for parameter in trained(loop):
        parameter.register_post_accumulate_grad_hook(descend)


def contiguous_gradients(loop: Loop) -> None:
    """Gradients are views of one buffer, as in distributed training."""
    sizes = [parameter.numel() for parameter in loop.trainable]
    for dtype in {parameter.dtype for parameter in loop.trainable}:
        buffer = torch.zeros(sum(sizes), dtype=dtype).split(sizes)
        for parameter, view in zip(loop.trainable, buffer, strict=True):
            if parameter.dtype == dtype:
                parameter.grad = view.view_as(parameter)


def by_name(*functions: Callable[[Loop], None]) -> dict[str, Callable[[Loop], None]]:
    return {function.__name__.replace("_", " "): function for function in functions}


HABITS: dict[str, Callable[[Loop], Any]] = {
    "frozen entry": lambda loop: loop.model.entry.requires_grad_(False),
    "eval mode": lambda loop: loop.model.eval(),
    "outputs replaced": lambda loop: loop.model.head.register_forward_hook(
        lambda module, inputs, output: output * 0.5
    ),
    "hooks after accumulation": lambda loop: [
        parameter.register_post_accumulate_grad_hook(lambda _: loop.count("accumulated"))
        for parameter in trained(loop)
    ],
    **by_name(
        *(frozen_first_part, tied, hooks_on_modules, backward_hooks_on_modules),
        *(hooks_on_parameters, steps_in_backward, contiguous_gradients),
    ),
    **dict.fromkeys(
        (
            *("gradients set to zero", "gradients never zeroed", "anomaly mode", "deterministic"),
            *("single-threaded backward", "saved tensors on hooks"),
            *("double precision by default", "random numbers everywhere", "unscaling inside"),
        ),
        lambda loop: None,
    ),
}
"""Those without a function of their own are contexts, or are read by the loop."""


@contextmanager
def default_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anomaly mode": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "deterministic": deterministic,
    "single-threaded backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "saved tensors on hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(), lambda tensor: tensor
    ),
    "double precision by default": default_double,
}
"""Contexts of whole loops."""


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Encoder layers take torch's fast path only where no module of theirs has a forward hook.

    It ignores autocast on CPUs, so that evaluations with hooks of anybody's have other bits.
    """
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def contexts(habits: tuple[str, ...]) -> Iterator[AbstractContextManager[Any]]:
    yield without_fast_path()
    for habit in habits:
        yield CONTEXTS.get(habit, nullcontext)()


# Between two steps.


def evaluation(loop: Loop) -> None:
    """Without gradients, in eval mode."""
    loop.model.eval()
    with torch.no_grad():
        loop.remember("evaluation", loop.outputs(5))
    loop.model.train()


def evaluation_recorded(loop: Loop) -> None:
    with loop.watch.evaluation():
        evaluation(loop)


def evaluation_in_train_mode(loop: Loop) -> None:
    with torch.inference_mode():
        loop.remember("evaluation", loop.outputs(4))


def copied(loop: Loop) -> None:
    """An average of the parameters in a copy of the model, as is usual for evaluations."""
    twin = copy.deepcopy(loop.model)
    loop.remember("of a copy", loop.outputs(3, twin))
    loop.kept.append(twin)


def averaged(loop: Loop) -> None:
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    average.update_parameters(loop.model)
    loop.remember("of the average", loop.outputs(3, average))


def state_dict(loop: Loop) -> None:
    """Save and load."""
    buffer = io.BytesIO()
    states = [optimizer.state_dict() for optimizer in loop.optimizers]
    torch.save({"model": loop.model.state_dict(), "optimizers": states}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    loop.remember("keys", list(loaded["model"]))
    loop.model.load_state_dict(loaded["model"])
    for optimizer, state in zip(loop.optimizers, loaded["optimizers"], strict=True):
        optimizer.load_state_dict(state)


def grown(loop: Loop) -> None:
    """The network gets a layer, which the optimizer trains too."""
    with torch.random.fork_rng(devices=[]):
        layer = parts.linear().to(loop.dtype)
    loop.model.parts.append(layer)
    for optimizer in loop.optimizers[:1]:
        optimizer.add_param_group({"params": list(layer.parameters())})


def shrunk(loop: Loop) -> None:
    if len(loop.model.parts):
        del loop.model.parts[-1]


def frozen_later(loop: Loop) -> None:
    for parameter in loop.trainable[: len(loop.trainable) // 2]:
        parameter.requires_grad_(False)


def other_training(loop: Loop) -> None:
    """Another model is trained."""
    other = nn.Linear(2, 2)
    other(torch.randn(3, 2)).sum().backward()
    loop.remember("other", other.weight.grad)


def gradients_forgotten(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None


def rate_changed(loop: Loop) -> None:
    for optimizer in loop.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5


BETWEEN: dict[str, Callable[[Loop], Any]] = {
    "evaluation with gradients": lambda loop: loop.remember("evaluation", loop.outputs(2)),
    "thawed": lambda loop: loop.model.requires_grad_(True),
    "scripted": lambda loop: loop.remember(  # the tracked head, as for a deployment
        "of a script", torch.jit.script(loop.model.head)(torch.ones(1, parts.WIDTH).to(loop.dtype))
    ),
    "resumed": lambda loop: loop.watch.resume(loop),
    "epoch": lambda loop: loop.watch.end_epoch(),
    "reparametrised": lambda loop: setattr(  # other data, as by some quantisation and pruning
        loop.model.head.weight, "data", loop.model.head.weight.data.clone() * 0.9
    ),
    "replaced": lambda loop: setattr(  # another parameter from now on
        loop.model.head, "weight", nn.Parameter(loop.model.head.weight.detach().clone())
    ),
    "garbage collected": lambda loop: gc.collect(),
    **by_name(
        *(evaluation, evaluation_recorded, evaluation_in_train_mode, copied, averaged, state_dict),
        *(grown, shrunk, frozen_later, other_training, gradients_forgotten, rate_changed),
    ),
}
