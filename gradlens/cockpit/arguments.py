"""Checks of what a cockpit and its contexts are given, before anything depends on it."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from os import PathLike
from types import NoneType
from typing import Any

import numpy as np
import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens import sinks
from gradlens.backpack_adapter.loss_modules import own_reduction
from gradlens.cockpit.aggregate import Aggregate
from gradlens.curvature.probe import Probe
from gradlens.graph.loss import LossReduction
from gradlens.history.spikes import SampleId
from gradlens.quantities.presets import configuration
from gradlens.quantities.quantity import Quantity
from gradlens.sinks.sink import Sink
from gradlens.spelling import near, similar

READ = (
    "loss", "loss_scale", "optimizer", "batch_size", "scaler", "individual_losses", "outputs", "ids"
)  # fmt: skip
"""What gradlens itself reads from ``info``."""

UNLIKELY = ("optimizer", "batch_size", "individual_losses")
"""Keys of ``info`` that others are hardly similar to by chance. "scale" and "output", say, may be
for a quantity of the user's own."""

MISSPELT = 0.85
"""Least similarity at which a key is taken for a misspelt one of these. That of "optimiser" is
0.89, and that of "individual_outputs" is 0.74."""


# Of a cockpit ---------------------------------------------------------------------------------


def checked_quantities(given: Any) -> tuple[Quantity | Aggregate, ...]:
    """Quantities, and aggregates of them, or those of a preset by its name.

    ``TypeError`` says what to pass instead, and ``ValueError`` which preset was most likely meant.
    """
    if isinstance(given, str):
        return tuple(configuration(given))
    if not isinstance(given, Iterable):
        raise TypeError(f"{_short(given)} is not a list of quantities: {_instead(given)}")
    found = tuple(given)
    for one in found:
        if not isinstance(one, (Quantity, Aggregate)):
            raise TypeError(f"{_short(one)} is not a quantity: {_instead(one)}")
    return found


def _instead(given: Any) -> str:
    """What to pass instead of something that isn't a list of quantities, or is none of them."""
    if isinstance(given, (Quantity, Aggregate)):
        return f"pass a list, as in [{type(given).__name__}(...)]"
    if isinstance(given, type) and issubclass(given, (Quantity, Aggregate)):
        return f"pass instances in a list, as in [{given.__name__}()]"
    if isinstance(given, (list, tuple)):
        return 'join the lists, as in [*gradlens.configuration("economy"), ...]'
    return (
        "pass a list of instances, such as [gradlens.quantities.Loss()], or a preset, such as "
        'gradlens.configuration("economy")'
    )


def check_together(quantities: Iterable[Quantity]) -> None:
    """``ValueError`` if two quantities have one name, or one is in another cockpit."""
    seen: set[str] = set()
    for quantity in quantities:
        if quantity.in_cockpit:
            raise ValueError(
                f"{quantity.name} is in another cockpit, whose values it may depend on: make new "
                "quantities for each cockpit, as gradlens.configuration does at each call"
            )
        if quantity.name in seen:
            raise ValueError(
                f"two quantities are called {quantity.name!r}: give one of them another name, as "
                f"in {type(quantity).__name__}(..., name='{quantity.name}2')"
            )
        seen.add(quantity.name)


def check_probes(quantities: Iterable[Quantity], model: nn.Module | None) -> None:
    """``TypeError`` for what isn't a probe, ``ValueError`` for a probe without a model."""
    for quantity in quantities:
        if quantity.on is None:
            continue
        if not isinstance(quantity.on, Probe):
            raise TypeError(
                f"{quantity.name}: on={_short(quantity.on)} is not a probe: pass "
                "on=gradlens.curvature.Probe(data, loss_function)"
            )
        if model is None:
            raise ValueError(
                f"{quantity.name} has a probe, whose outputs the model computes: pass the model, "
                "as in Cockpit(model, ...), instead of its parameters"
            )


def check_loss_function(loss_function: Any, loss_reduction: LossReduction) -> None:
    """``TypeError`` unless it is a module, ``ValueError`` if it contradicts the reduction."""
    if loss_function is None:
        return
    if not isinstance(loss_function, nn.Module):
        raise TypeError(
            f"loss_function={_short(loss_function)} is not a module: pass one such as "
            "nn.CrossEntropyLoss(); losses of single samples that are found in another way can be "
            "passed to the context, as info={'individual_losses': ...}"
        )
    own = own_reduction(loss_function)
    if own not in (None, loss_reduction):
        raise ValueError(
            f"the reduction of {loss_function!r} is a {own}, which contradicts "
            f"loss_reduction={loss_reduction!r}: pass loss_reduction={own!r}. If the training loop "
            f"makes a {loss_reduction} of the module's output, give the module reduction='none' "
            "and reduce its output there"
        )


def check_run(run: Any) -> None:
    """``TypeError`` unless it is a path, or none was given."""
    if not isinstance(run, (str, PathLike, NoneType)):
        raise TypeError(
            f'run={_short(run)} is no path: pass that of a file, such as run="run.jsonl"'
        )


def check_budget(budget: float | None, processes: int) -> None:
    """``ValueError`` if there is a budget and several processes."""
    if budget is not None and processes > 1:
        raise ValueError(
            f"budget={budget} thins the schedules by the time that each process has measured, and "
            f"{processes} processes must track the same steps: set the quantities' schedules"
        )


def check_max_bytes(max_bytes: Any) -> None:
    """``TypeError`` unless it is a whole number, ``ValueError`` if it is negative."""
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
        raise TypeError(
            f"max_bytes={_short(max_bytes)} is not a whole number: pass a number of bytes, such as "
            "64 * 2**20"
        )
    if max_bytes < 0:
        raise ValueError(f"max_bytes={max_bytes} is negative: pass 0 or more")


def check_steps_in_memory(steps_in_memory: Any) -> None:
    """``ValueError`` unless it is a positive whole number or ``None``."""
    if steps_in_memory is None:
        return
    if type(steps_in_memory) is not int or steps_in_memory < 1:
        raise ValueError(
            f"steps_in_memory={_short(steps_in_memory)}: pass how many of the latest steps are "
            "kept in memory (at least 1), or None to keep all"
        )


def checked_sinks(given: Any) -> tuple[Sink, ...]:
    """The sinks; ``TypeError`` says what to pass instead of something else."""
    if isinstance(given, (Sink, str)) or not isinstance(given, Iterable):
        raise TypeError(f"sinks={_short(given)} is not a list of sinks: {A_SINK}")
    found = tuple(given)
    for sink in found:
        if not isinstance(sink, Sink):
            raise TypeError(f"{_short(sink)} is not a sink: {A_SINK}")
    return found


A_SINK = (
    "pass a list of instances, such as sinks=[gradlens.sinks.TensorBoard(writer)], of the classes "
    f"{', '.join(sorted({*sinks.__all__} - {'Sink'}))}, or of your own"
)


def check_sink_layers(
    sinks: Iterable[Sink], model: nn.Module | None, parameters: Collection[str]
) -> None:
    """``ValueError`` names a layer of a sink that the network doesn't have."""
    modules = () if model is None else (name for name, _ in model.named_modules())
    known = {*parameters, *modules}
    for sink in sinks:
        for name in sink.layers:
            if name not in known:
                raise ValueError(
                    f"the network has no layer or parameter {name!r}{near(name, known)}"
                )


# Of a context ---------------------------------------------------------------------------------


MOST_STEPS = 2**53
"""A run's steps are less than this: its file can't be read with larger ones, since other programs
read whole numbers as floats."""


def step_number(global_step: Any) -> int:
    """The global step as an int.

    ``TypeError`` if it isn't a whole number, ``ValueError`` if it isn't from 0 to 2**53 - 1.
    """
    try:
        if _is_bool(global_step):
            raise TypeError
        step = operator.index(global_step)
    except (TypeError, RuntimeError):  # the latter for tensors without numbers
        hint = ", and the loss by name, as in cockpit(step, loss=loss)" * _is_loss(global_step)
        raise TypeError(
            f"global_step={_short(global_step)} is not a whole number: pass the number of the "
            f"training step{hint}"
        ) from None
    if not 0 <= step < MOST_STEPS:
        raise ValueError(
            f"global_step={_short(step)} is not from 0 to 2**53 - 1: pass the number of the "
            "training step, counted from 0"
        )
    return step


def check_extensions(extensions: Sequence[Any]) -> None:
    """``TypeError`` names what is no extension of BackPACK's."""
    for extension in extensions:
        if not isinstance(extension, BackpropExtension):
            raise TypeError(
                f"{_short(extension)} is no BackpropExtension: pass instances of BackPACK's "
                "extensions, and all else by name, as in cockpit(global_step, loss=loss)"
            )


def checked_info(info: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """``info`` and the arguments given to a context by name, without those not given.

    ``TypeError`` or ``ValueError`` names what is of the wrong kind.
    """
    if not isinstance(info, Mapping):
        hint = ": pass the loss as loss=..." if _is_loss(info) else ""
        raise TypeError(f"info={_short(info)} is not a dict{hint}")
    known = {**info, **{name: value for name, value in given.items() if value is not None}}
    known = {name: value for name, value in known.items() if value is not None or name not in READ}
    for name in READ:
        if name in known:
            known[name] = _CHECKED[name](known[name])
    return known


def notes_on(info: Mapping[str, Any], parameters: Set[int]) -> Iterator[str]:
    """What is most likely a mistake; ``parameters`` are the ``id``s of those tracked."""
    optimizer = info.get("optimizer")
    if optimizer is not None and not _has_any_of(optimizer, parameters):
        yield OTHER_OPTIMIZER
    for key in info.keys() - {*READ}:
        meant = [name for name in similar(key, UNLIKELY, MISSPELT) if name not in info]
        if meant:
            yield MISSPELT_KEY.format(key=key, meant=meant[0])


def _has_any_of(optimizer: Optimizer, parameters: Set[int]) -> bool:
    groups: Iterable[Mapping[str, Any]] = optimizer.param_groups
    return any(id(parameter) in parameters for group in groups for parameter in group["params"])


def _loss(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"one of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(
        f"loss= must be a tensor with one element, got {got}: pass the loss that backward is "
        "called on (loss.mean() or loss.sum() of individual losses, without .item())"
    )


def _loss_scale(scale: Any) -> float:
    if not isinstance(scale, (int, float)):
        raise TypeError(
            f"loss_scale={_short(scale)} is no number: pass the factor between the step's loss and "
            "the tensor that is passed as loss=..., such as 1 / 4 for a loss divided by 4"
        )
    if not math.isfinite(scale) or scale == 0:
        raise ValueError(
            f"loss_scale={scale}: pass the factor between the step's loss and the tensor that is "
            "passed as loss=..., which is neither 0 nor infinite"
        )
    return float(scale)


def _optimizer(optimizer: Any) -> Optimizer:
    """The optimizer; that of Accelerate's wrapper, which has no hooks, is its ``optimizer``."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={_short(optimizer)} is no torch.optim.Optimizer: pass the instance whose "
            "step() updates the parameters"
        )
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _batch_size(batch_size: Any) -> int:
    try:
        return operator.index(batch_size)
    except TypeError:
        raise TypeError(
            f"batch_size={_short(batch_size)} is not a whole number: pass the number of samples, "
            "such as len(labels), or leave it out"
        ) from None


def _scaler(scaler: Any) -> torch.amp.GradScaler:
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"scaler={_short(scaler)} is no torch.amp.GradScaler: pass that of the loop"
        )
    return scaler


def _individual_losses(losses: Any) -> Tensor:
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"individual_losses={_short(losses)} is no tensor: pass the losses of single samples, "
            "of shape [N]"
        )
    return losses


def _ids(given: Any) -> tuple[SampleId, ...]:
    listed = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    if isinstance(listed, (list, tuple)):
        kinds = {*map(type, listed)}
        if not kinds <= {int, str}:
            listed = [e.item() if isinstance(e, (np.generic, Tensor)) else e for e in listed]
            kinds = {*map(type, listed)}
        if kinds <= {int, str}:
            return tuple(listed)
    raise TypeError(
        f"info={{'ids': {_short(given)}}} are no ids of samples: pass a whole number or a text for "
        "each sample, such as its number in the data set"
    )


def _outputs(outputs: Any) -> Any:
    return outputs


_CHECKED = {
    "loss": _loss,
    "loss_scale": _loss_scale,
    "optimizer": _optimizer,
    "batch_size": _batch_size,
    "scaler": _scaler,
    "individual_losses": _individual_losses,
    "outputs": _outputs,
    "ids": _ids,
}
"""The function that checks each entry of ``info`` which gradlens reads."""


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)


def _is_loss(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _short(value: object) -> str:
    """What a value is, in one line."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (nn.Module, Quantity)) or type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__} object"
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # of an int with thousands of digits
        return f"{type(value).__name__} object"


OTHER_OPTIMIZER = (
    "the optimizer that was passed has none of the cockpit's parameters: updates are measured when "
    "the next context is entered, and nothing else is known of the optimizer's steps. Unless it "
    "updates copies, pass the optimizer of the tracked model, made of the parameters that the "
    "model has now"
)
MISSPELT_KEY = "info has the key {key!r}, which gradlens doesn't read: did you mean {meant!r}?"
