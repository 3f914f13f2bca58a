"""The coordinate check of networks of several widths, which are trained for a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.coordinates.result import CoordinateCheck
from gradlens.curvature.over_data import LossFunction, Split, as_pair
from gradlens.graph.undisturbed import random_states_kept, training_kept, undisturbed
from gradlens.history.lines import Floats
from gradlens.numerics.norms import distances, norm, norms
from gradlens.numerics.tensors import on_host
from gradlens.recorders import ForwardOutput
from gradlens.signals.selection import Selection, Selectors, select, selection
from gradlens.torch_private import tree_map_only

Made: TypeAlias = nn.Module | Callable[[], nn.Module]
Models: TypeAlias = Mapping[Any, Made] | Iterable[tuple[Any, Made]]
Outputs: TypeAlias = Mapping[str, Sequence[Tensor]]
"""The tensors that layers returned in one forward pass, by the layers' names."""

NO_MODEL = (
    "what is to be checked at width {width} is {kind}: pass a function without arguments that "
    "makes a model, such as functools.partial(build, {width}), or a model"
)
NO_WIDTH = "{width!r} is no width: pass a number above 0 for each model"
TOO_FEW = "an exponent takes two widths or more, and these are {widths}"
OTHER_COUNTS = "width {width} has {count} models, and width {first} has {others}: pass as many"
ONE_SEED = "an interval takes two seeds or more: pass functions that make models, or more models"
SAME_SHAPES = (
    "the models of widths {one} and {other} have the same shapes. A lambda in a loop sees the "
    "loop's last width: use functools.partial(build, width)"
)
SAME_WEIGHTS = (
    "the models of a width have the same outputs before training, so that there are no seeds: let "
    "functions draw the weights by torch's random numbers, without seeding them"
)
OTHER_LAYERS = "the model of width {width} has no layer {name}, which that of {other} has"
NO_PAIR = (
    "a batch of the loader is no pair of inputs and targets: pass split=lambda batch: (inputs, "
    "targets)"
)
NO_BATCH = "the loader has no batches: pass at least one"
NO_OUTPUTS = "none of the layers returns a floating-point tensor"


def coordinate_check(
    models: Models,
    loader: Iterable[Any],
    loss_function: LossFunction,
    optimizer: Callable[[nn.Module], Optimizer],
    *,
    steps: int = 4,
    seeds: int = 5,
    layers: Selectors | Selection | None = None,
    exclude: Selectors = (),
    split: Split = as_pair,
) -> CoordinateCheck:
    """How the outputs of layers, and their changes in training, depend on a network's width.

    ``models`` are functions that make a model, by width, as in ``{64: partial(build, 64), ...}``,
    or pairs ``(width, function)``. Each is called for as many ``seeds``, with torch's random
    numbers seeded. Models themselves are as many seeds as there are pairs of their width, and are
    the same afterwards. ``optimizer(model)`` makes the optimizer, with the rates for this width.

    Each model is trained for some ``steps`` on the loader's first batches, which begin again where
    they are too few. The loss is ``loss_function(model(inputs), targets)``; ``split`` makes
    ``(inputs, targets)`` of other batches, and inputs that are a mapping are keyword arguments.
    Before training and after each step, the first batch gives the outputs of ``layers`` and not of
    those to ``exclude`` (see ``gradlens.signals.Selection``), in the model's own mode.

    In the maximal update parametrisation (Yang et al., 2022, arXiv:2203.03466, App. D.1), sizes and
    changes are the same at all widths; in the standard one, changes grow. ``ValueError`` for models
    that have no width to compare, or the same weights.
    """
    by_width = _by_width(models, seeds)
    batches = [_placed_pair(split, batch) for batch in islice(loader, max(steps, 1))]
    if not batches:
        raise ValueError(NO_BATCH)
    chosen, run = selection(layers, exclude), dict[tuple[Any, int], Mapping[str, Floats]]()
    shapes: dict[Any, Any] = {}
    for width, makers in by_width.items():
        for seed, make in enumerate(makers):
            with _seeded(seed), torch.enable_grad():
                model = make()
                shapes[width] = [tuple(each.shape) for each in model.parameters()]
                run[width, seed] = _trained(model, batches, loss_function, optimizer, steps, chosen)
        same = next((each for each in shapes if shapes[each] == shapes[width]), width)
        if same != width:
            raise ValueError(SAME_SHAPES.format(one=same, other=width))
    return _result(by_width, run)


def _by_width(models: Models, seeds: int) -> dict[Any, list[Callable[[], nn.Module]]]:
    """What makes each model, by ascending width, as many times as there are seeds."""
    found: dict[Any, list[Callable[[], nn.Module]]] = {}
    for width, made in models.items() if isinstance(models, Mapping) else models:
        if not (isinstance(width, (int, float, np.number)) and 0 < width < np.inf):
            raise ValueError(NO_WIDTH.format(width=width))
        if not callable(made):
            raise TypeError(NO_MODEL.format(width=width, kind=type(made).__name__))
        is_model = isinstance(made, nn.Module)
        makers = [lambda made=made: made] if is_model else [made] * seeds
        found.setdefault(width, []).extend(makers)
    widths = sorted(found)
    if len(widths) < 2:
        raise ValueError(TOO_FEW.format(widths=widths))
    first, others = widths[0], len(found[widths[0]])
    for width in widths:
        if len(found[width]) != others:
            count = len(found[width])
            raise ValueError(
                OTHER_COUNTS.format(width=width, count=count, first=first, others=others)
            )
    if others < 2:
        raise ValueError(ONE_SEED)
    return {width: found[width] for width in widths}


def _placed_pair(split: Split, batch: Any) -> tuple[Any, Any]:
    if split is as_pair and not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise ValueError(NO_PAIR)
    return split(batch)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers begin at a seed, and are the same after the context as before."""
    is_used = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if is_used else ()
    with torch.random.fork_rng(devices), random_states_kept():
        torch.manual_seed(seed)
        yield


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """A model's parameters, buffers and gradients are the same after the context as before."""
    parameters = [*model.parameters()]
    copies = [each.detach().clone() for each in parameters]
    with undisturbed(model), training_kept(parameters):
        try:
            yield
        finally:
            for each, copy in zip(parameters, copies, strict=True):
                each.data.copy_(copy)


def _trained(
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    loss_function: LossFunction,
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: int,
    chosen: Selection,
) -> Mapping[str, Floats]:
    """Sizes and changes ``[2, T + 1]`` of each layer's outputs, while a model is trained."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    own = [tree_map_only(Tensor, lambda each: each.to(device), pair) for pair in batches]
    with _kept(model):
        optimizer = make_optimizer(model)
        start = _outputs(model, own[0][0], chosen)
        found = [_sizes(start, start)]
        for step in range(steps):
            inputs, targets = own[step % len(own)]
            optimizer.zero_grad()
            loss_function(_called(model, inputs), targets).backward()
            optimizer.step()
            found.append(_sizes(start, _outputs(model, own[0][0], chosen)))
    values = on_host(found)
    return {name: np.array([each[name].tolist() for each in values]).T for name in values[0]}


def _called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _outputs(model: nn.Module, inputs: Any, chosen: Selection) -> Outputs:
    """What layers return for these inputs, with the same random numbers each time."""
    names = [*select(model, chosen)]
    recorder = ForwardOutput().layers(model, chosen)
    with recorder, _seeded(0), torch.no_grad():
        _called(model, inputs)
    data = dict(zip(names, recorder.data, strict=True))
    return {
        name: [each for each in tensors if each.is_floating_point()]
        for name, tensors in data.items()
        if any(each.is_floating_point() and each.numel() for each in tensors)
    }


def _sizes(start: Outputs, now: Outputs) -> dict[str, Tensor]:
    """For each layer ``[2]``, the root mean square of its outputs, and of their changes."""
    found = {}
    for name, tensors in now.items():
        root = sum(each.numel() for each in tensors) ** 0.5
        before = start.get(name, ())
        alike = [each.shape for each in before] == [each.shape for each in tensors]
        size = norm(torch.stack(norms(tensors)))
        change = norm(torch.stack(distances(tensors, before))) if alike else size * torch.nan
        found[name] = torch.stack([size, change]) / root
    return found


def _result(
    by_width: Mapping[Any, Sequence[object]], run: Mapping[tuple[Any, int], Mapping[str, Floats]]
) -> CoordinateCheck:
    """The table of all models; ``ValueError`` if they can't be compared."""
    widths, count = [*by_width], len(next(iter(by_width.values())))
    layers = tuple(run[widths[0], 0])
    if not layers:
        raise ValueError(NO_OUTPUTS)
    for one, found in run.items():
        for other in run:
            missing = [name for name in run[other] if name not in found]
            if missing:
                texts = {"width": one[0], "name": missing[0], "other": other[0]}
                raise ValueError(OTHER_LAYERS.format(**texts))
    table = np.array(
        [[[run[width, s][name] for s in range(count)] for width in widths] for name in layers]
    )  # [L, W, S, 2, T + 1]
    if not np.ptp(table[..., 0, 0], axis=-1).any():
        raise ValueError(SAME_WEIGHTS)
    sizes, changes = np.moveaxis(table, -2, 0)
    return CoordinateCheck(np.array(widths, dtype=np.float64), layers, sizes, changes)
