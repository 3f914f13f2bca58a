"""Checks of what a cockpit and its contexts are given, before anything depends on it."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from gradlens.cockpit.aggregation import Aggregate
from gradlens.curvature.probe import Probe
from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import RULES
from gradlens.gradients.per_sample_gradients import checked_losses
from gradlens.graph.fully_shard import Sharding
from gradlens.graph.hooks import takes_hooks
from gradlens.graph.loss import LossReduction
from gradlens.history.series import EXACT
from gradlens.history.spikes import SampleId
from gradlens.quantities.presets import configuration, named
from gradlens.quantities.quantity import Quantity
from gradlens.sinks.sink import Sink
from gradlens.spelling import near
from gradlens.torch_private import LossModule, uncompiled

# Of a cockpit ---------------------------------------------------------------------------------


def checked_quantities(
    given: Iterable[Quantity | Aggregate | str] | str,
) -> tuple[Quantity | Aggregate, ...]:
    """Quantities or their names, and aggregates of them, or those of a preset by its name.

    ``TypeError`` says what to pass instead, and ``ValueError`` which name was most likely meant.
    """
    every = configuration(given) if isinstance(given, str) else given
    if isinstance(every, Quantity | Aggregate):
        raise TypeError(f"{every.name} is a single quantity: pass it inside a list")
    is_dict = isinstance(every, Mapping)  # whose values would be left out
    found = list[Quantity | Aggregate]()
    for each in every:
        one = named(each) if isinstance(each, str) and not is_dict else each
        found.append(_of_kind(one, (Quantity, Aggregate), "", "quantity", QUANTITIES))
    return tuple(found)


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
        instead = "on=gradlens.curvature.Probe(data, loss_function)"
        _of_kind(quantity.on, Probe, f"{quantity.name}: on=", "probe", instead)
        if model is None:
            raise ValueError(
                f"{quantity.name} has a probe, whose outputs the model computes: pass the model, "
                "as in Cockpit(model, ...), instead of its parameters"
            )


def check_loss_function(loss_function: Any, loss_reduction: LossReduction) -> None:
    """``TypeError`` unless it is a module, ``ValueError`` if it contradicts the reduction."""
    if loss_function is None:
        return
    _of_kind(loss_function, nn.Module, "loss_function=", "module", LOSS_FUNCTION)
    plain = uncompiled(loss_function)
    # Others than torch's may do anything with what loss modules inside them return.
    own = _REDUCTIONS.get(vars(plain).get("reduction")) if isinstance(plain, LossModule) else None
    if own not in (None, loss_reduction):
        raise ValueError(
            f"the reduction of {loss_function!r} is a {own}, which contradicts "
            f"loss_reduction={loss_reduction!r}: pass loss_reduction={own!r}. If the training loop "
            f"makes a {loss_reduction} of the module's output, give the module reduction='none' "
            "and reduce its output there"
        )


_REDUCTIONS: Mapping[Any, LossReduction] = {"mean": "mean", "batchmean": "mean", "sum": "sum"}

"""How torch's loss modules reduce their losses, by their ``reduction``."""


def check_budget(budget: float | None, processes: int) -> None:
    """``ValueError`` if there is a budget and several processes."""
    if budget is not None and processes > 1:
        raise ValueError(
            f"budget={budget} thins the schedules by the time that each process has measured, and "
            f"{processes} processes must track the same steps: set the quantities' schedules"
        )


def check_max_bytes(max_bytes: Any) -> None:
    """``ValueError`` unless it is a whole number that isn't negative."""
    if not isinstance(max_bytes, int) or max_bytes < 0:
        raise ValueError(
            f"max_bytes={_short(max_bytes)}: pass a number of bytes, such as 64 * 2**20, or 0"
        )


def check_switches(**given: Any) -> None:
    """``TypeError`` for what is neither True nor False."""
    for name, value in given.items():
        _of_kind(value, bool, f"{name}=", "bool", "True or False")


def checked_rules(diagnose: Any) -> tuple[Rule, ...]:
    """The rules that a run is diagnosed by while it goes on, none of them if it isn't."""
    if isinstance(diagnose, bool):
        return tuple(RULES) if diagnose else ()
    listed = diagnose if isinstance(diagnose, (list, tuple)) else [diagnose]
    instead = "True, False, or a list of rules, as in [*gradlens.diagnosis.rules.RULES, mine]"
    return tuple(_of_kind(each, Rule, "diagnose=", "rule", instead) for each in listed)


def checked_sinks(
    given: Iterable[Sink], model: nn.Module | None, parameters: Collection[str]
) -> tuple[Sink, ...]:
    """The sinks.

    ``TypeError`` says what to pass instead of something else, and ``ValueError`` names a layer of a
    sink that the network doesn't have.
    """
    found = tuple(given)
    modules = () if model is None else (name for name, _ in model.named_modules())
    known = {*parameters, *modules}
    for sink in found:
        _of_kind(sink, Sink, "", "sink", SINKS)
        for name in sink.layers:
            if name not in known:
                raise ValueError(
                    f"the network has no layer or parameter {name!r}{near(name, known)}"
                )
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside ``DistributedDataParallel`` or ``torch.compile``.

    ``TypeError`` for what ``torch.jit.script`` has compiled.
    """
    if not takes_hooks(model):
        raise TypeError(
            "the model was compiled by torch.jit.script, whose layers take no hooks and whose "
            "graph doesn't show them: track the model that it was made of, or compile that by "
            "torch.compile"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "FullyShardedDataParallel joins the parameters of several layers in one tensor, so "
            "that the layers' own aren't in the loss's graph: use fully_shard, which replaces it"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    inner = uncompiled(model)
    return model if inner is model else unwrapped(inner)


def trainable_parameters(
    params: Any, sharding: Sharding | None = None
) -> Mapping[str, nn.Parameter]:
    """The parameters that need a gradient by name, ``param_0`` and so on without a model.

    ``params`` is a module or an iterable of parameters; ``TypeError`` for anything else,
    ``ValueError`` if there are none. Sharded parameters are given as the optimizer has them.
    """
    if isinstance(params, nn.Module):
        shards = {} if sharding is None else sharding.shards()
        named = {name: shards.get(id(p), p) for name, p in params.named_parameters()}
    elif isinstance(params, (Tensor, str)) or not isinstance(params, Iterable):
        kind = f"the class {params.__name__}" if isinstance(params, type) else type(params).__name__
        raise TypeError(
            f"params is {kind}: pass the model itself, or an iterable of its parameters"
        )
    else:
        named = {f"param_{index}": parameter for index, parameter in enumerate(params)}
    for name, parameter in named.items():
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"{name} is a {type(parameter).__name__}: pass the model, or an iterable of its "
                "parameters"
            )
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"{name} has no shape yet: run the lazy module once before tracking it"
            )
        if not parameter.is_leaf:
            raise TypeError(
                f"{name} is computed from other tensors, and gets no gradient of its own: pass "
                "the model, or an iterable of its parameters"
            )
    if not named:
        raise ValueError(
            "there are no parameters, and nothing to track: an iterator such as "
            "model.parameters() is empty after its first use, so pass the model instead"
        )
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if not trainable:
        raise ValueError(
            "no parameter needs a gradient, since all are frozen: there is nothing to track "
            "before one has requires_grad_(True)"
        )
    return trainable


# Of a context ---------------------------------------------------------------------------------


def step_number(global_step: Any) -> int:
    """The global step as an int.

    ``TypeError`` if it isn't a whole number, ``ValueError`` if it isn't from 0 to 2**53 - 1.
    """
    try:
        step = operator.index(global_step)
    except (TypeError, RuntimeError):  # the latter for tensors without numbers
        raise TypeError(
            f"global_step={_short(global_step)} is not a whole number: pass the number of the "
            "training step, and all else by name, as in cockpit(step, loss=loss)"
        ) from None
    if not 0 <= step < EXACT:  # since other programs read a file's whole numbers as floats
        raise ValueError(
            f"global_step={_short(step)} is not from 0 to 2**53 - 1: pass the number of the "
            "training step, counted from 0"
        )
    return step


def check_accumulating(given: Any) -> None:
    """``TypeError`` for what is no truth value, such as a text, which counts as true."""
    instead = "True for all parts of a step but the last one"
    _of_kind(given, (bool, int, np.bool_, Tensor), "accumulating=", "bool", instead)


def check_extensions(extensions: Sequence[Any]) -> None:
    """``TypeError`` names what is no extension of BackPACK's."""
    for extension in extensions:
        _of_kind(extension, BackpropExtension, "", "BackpropExtension", EXTENSIONS)


def checked_info(info: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``info`` and the arguments given to a context by name, without those not given.

    ``TypeError`` or ``ValueError`` names what is of the wrong kind.
    """
    if not isinstance(info, Mapping):
        raise TypeError(f"info={_short(info)} is no dict: pass info={{'ids': ids}} and the like")
    known = {**info, **{name: value for name, value in given.items() if value is not None}}
    for name, check in _CHECKED.items():
        value = known.pop(name, None)
        if value is not None:
            known[name] = value if check is None else check(value)
    return known


def _loss(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"one of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(
        f"loss= must be a tensor with one element, got {got}: pass the loss that backward is "
        "called on (loss.mean() or loss.sum() of individual losses, without .item())"
    )


def _samples(batch_size: Any) -> int:
    try:
        return operator.index(batch_size)
    except TypeError as error:
        instead = "the number of samples as an int, such as len(labels)"
        raise TypeError(f"batch_size={_short(batch_size)}: pass {instead}") from error


def _loss_scale(scale: Any) -> float:
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale == 0:
        raise ValueError(
            f"loss_scale={_short(scale)}: pass the factor between the step's loss and the tensor "
            "that is passed as loss=..., such as 1 / 4 for a loss divided by 4"
        )
    return float(scale)


FRAMEWORKS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
"""Packages whose wrappers of optimizers change no parameters themselves."""


def _optimizer(optimizer: Any) -> Optimizer:
    """The optimizer; that of a framework's wrapper, which has no hooks, is its ``optimizer``.

    Other wrappers may change parameters after the step of their own optimizer, as Lookahead's.
    """
    instead = "the instance whose step() updates the parameters"
    _of_kind(optimizer, Optimizer, "optimizer=", "torch.optim.Optimizer", instead)
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and type(optimizer).__module__.startswith(FRAMEWORKS):
        return inner
    if getattr(optimizer, "param_groups", None) is None:
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer={kind}(...) has no param_groups: pass {instead}")
    return optimizer


def _closure(closure: Any) -> Callable[[], Any]:
    if callable(closure) and not isinstance(closure, Tensor):
        found: Callable[[], Any] = closure
        return found
    raise TypeError(
        f"closure={_short(closure)} is no function: pass one without arguments that computes the "
        "loss again, such as lambda: loss_function(model(inputs), labels)"
    )


def _of_samples(words: str, given: Any) -> tuple[SampleId, ...]:
    listed = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    if isinstance(listed, (list, tuple)):
        found: list[Any] = [e.item() if isinstance(e, (np.generic, Tensor)) else e for e in listed]
        if {*map(type, found)} <= {int, str}:
            return tuple(found)
    raise TypeError(words.format(given=_short(given)))


def _of_kind(value: object, kind: Any, name: str, noun: str, instead: str) -> Any:
    """An instance of a class; ``TypeError`` says what to pass ``instead`` of anything else."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}{_short(value)} is not a {noun}: pass {instead}")
    return value


IDS = (
    "info={{'ids': {given}}} are no ids of samples: pass a whole number or a text for each sample, "
    "such as its number in the data set"
)
GROUPS = (
    "info={{'groups': {given}}} are no groups of samples: pass a whole number or a text for each "
    "sample, such as its class or domain"
)
QUANTITIES = (
    "a list of instances or of names, such as [gradlens.quantities.Loss()], or the name of a "
    'preset, such as "economy"'
)
LOSS_FUNCTION = (
    "one such as nn.CrossEntropyLoss(); losses of single samples that are found in another way can "
    "be passed to the context, as individual_losses=..."
)
SINKS = "a list of instances, such as sinks=[gradlens.sinks.TensorBoard(writer)]"
SCALER = "the instance whose scale() is called on the loss"
EXTENSIONS = "BackPACK's extensions, and all else by name, as in cockpit(global_step, loss=loss)"


def _short(value: object) -> str:
    """A value in one line."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # of an int with thousands of digits
        return f"{type(value).__name__} object"


_CHECKED: Mapping[str, Callable[[Any], Any] | None] = {
    "loss": _loss,
    "loss_scale": _loss_scale,
    "optimizer": _optimizer,
    "batch_size": _samples,
    "individual_losses": checked_losses,
    "ids": partial(_of_samples, IDS),
    "groups": partial(_of_samples, GROUPS),
    "scaler": partial(
        _of_kind, kind=GradScaler, name="scaler=", noun="torch.amp.GradScaler", instead=SCALER
    ),
    "closure": _closure,
    "outputs": None,
}
"""What gradlens itself reads from ``info``, and the function that checks it, if there is one."""
