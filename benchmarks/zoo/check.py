"""What gradlens finds on a network, compared with one backward pass for each sample."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.zoo.network import Batch, Network, NotBuiltError
from benchmarks.zoo.reference import Reference, batch_gradients, normalisations, reference

STEPS = 3

ALLOWED = 1e-9
"""Largest relative deviation that is put down to rounding, where all is float64."""

ALLOWED_LOW = 1e-4
"""The same where a network computes in float32 inside, as many normalisations do."""

FLOOR = 1e-4
"""A parameter's numbers are compared at least on this scale, relative to the network's largest."""

FLOOR_LOW = 1e-3
"""The same where a network computes in float32 inside."""

SMALL = 0.1
"""A network's largest gradient counts as this much at least, since losses are of the order of one.

What cancels leaves rounding errors of that order behind, however small all gradients are.
"""

Mode = Literal["eval", "train"]


@dataclass
class Row:
    """What three steps of one network in one mode have shown.

    ``found`` are the numbers of samples that gradlens found, ``witnesses`` how they are known,
    ``coverage`` the smallest percentage of trainable elements with a gradient that were covered
    and ``deviation`` the largest relative deviation. ``reasons`` say what is missing. ``obstacle``
    says why there is no reference. ``error`` is an exception from gradlens.
    """

    network: Network
    mode: Mode
    found: list[int | None] = field(default_factory=list)
    witnesses: list[str] = field(default_factory=list)
    coverage: float = 100.0
    deviation: float = 0.0
    worst: str = ""
    allowed: float = ALLOWED
    reasons: Counter[str] = field(default_factory=Counter)
    coupled: tuple[str, ...] = ()
    obstacle: str = ""
    error: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether there are numbers that deviate, or that belong to another number of samples."""
        return not self.deviation <= self.allowed

    @property
    def is_full(self) -> bool:
        """Whether everything is covered, and right."""
        return self.coverage == 100 and not self.is_wrong and not self.error


def check(network: Network, mode: Mode, steps: int = STEPS) -> Row:
    """Run the network; ``NotBuiltError`` if it can't be trained by itself."""
    row = Row(network, mode)
    model, twin = _built(network, mode), _built(network, mode)
    import gradlens

    for _ in range(steps):
        batch = network.batch()
        twin.load_state_dict(model.state_dict())
        expected = _reference(network, twin, batch)
        try:
            gradlens.extend(model)
            _step(row, model, batch, expected)
        except Exception as error:
            row.error = row.error or f"{type(error).__name__}: {first_line(error)}"
            row.coverage = 0.0
        _descend(model, expected.gradients)
    return row


def _built(network: Network, mode: Mode) -> nn.Module:
    """In float64 and without dropout; the same each time."""
    torch.manual_seed(zlib.crc32(network.name.encode()))
    try:
        model = network.build().to(network.dtype)
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {first_line(error)}") from error
    without_dropout(model)
    if mode == "eval" and normalisations(model):
        _settle(network, model)
    return model.train(mode == "train")


def _settle(network: Network, model: nn.Module) -> None:
    """Give batch normalisations the statistics of a batch, as training would have done."""
    live = normalisations(model.train())
    before = [module.momentum for module in live]
    for module in live:
        module.momentum = 1.0
    try:
        with torch.no_grad():
            network.loss(model, network.batch())
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {first_line(error)}") from error
    for module, momentum in zip(live, before, strict=True):
        module.momentum = momentum


def without_dropout(model: nn.Module) -> None:
    """Set all probabilities of dropping something, and sizes of noise, to zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if re.search(r"drop|jitter", name) and type(value) is float:
                setattr(module, name, 0.0)


def _reference(network: Network, model: nn.Module, batch: Batch) -> Reference:
    """Of single samples, or of two copies of each if the single ones don't add up.

    For one image in some layouts, torch's gradients of a normalisation in eval mode are wrong.
    """
    try:
        found = reference(network, model, batch)
        if _obstacle(found):
            found = min(found, reference(network, model, batch, 2), key=lambda r: r.inconsistency)
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {first_line(error)}") from error
    if not 0 < found.largest < float("inf"):
        raise NotBuiltError("its loss has no gradient, or one that isn't finite")
    if _obstacle(found) and _is_random(network, model, batch):
        raise NotBuiltError("its forward pass is random")
    return found


def _is_random(network: Network, model: nn.Module, batch: Batch) -> bool:
    """Whether the same batch has another gradient each time."""
    first, second = (batch_gradients(network, model, batch) for _ in range(2))
    distance = max(float((first[name] - second[name]).abs().max()) for name in first)
    return distance > ALLOWED * max(float(gradient.abs().max()) for gradient in first.values())


def _step(row: Row, model: nn.Module, batch: Batch, expected: Reference) -> None:
    """One step with gradlens, and what it adds to the row."""
    import gradlens

    network = row.network
    plain = batch_gradients(network, model, batch)
    model.zero_grad()
    loss = network.loss(model, batch)
    frozen = bool(normalisations(model))
    options: dict[str, Any] = {"batchnorm": "frozen"} if frozen else {}
    if network.told:
        options["batch_size"] = network.samples
    with gradlens.per_sample_gradients(
        model, loss=loss, loss_reduction="mean", **options
    ) as individual:
        loss.backward()
    row.allowed = max(row.allowed, _allowed(expected))
    row.obstacle = row.obstacle or _obstacle(expected)
    row.found.append(individual.batch_size)
    row.witnesses.append(str(getattr(getattr(individual, "batch", None), "known_by", "")))
    row.coupled = tuple(sorted(getattr(individual, "coupling", ())))
    dense = {name: individual[name].dense() for name in individual}
    _compare(row, dense, expected)
    _explain(row, individual, dense, expected)
    if not frozen:
        _disturbed(row, model, plain, expected)


def _allowed(expected: Reference) -> float:
    """More where the reference itself adds up to the gradient with larger rounding errors."""
    least = ALLOWED_LOW if expected.low_precision else ALLOWED
    return max(least, 10 * expected.inconsistency if not _obstacle(expected) else 0.0)


def _obstacle(expected: Reference) -> str:
    if expected.inconsistency > (1e-3 if expected.low_precision else 1e-6):
        return f"samples meet (single ones add up to {expected.inconsistency:.0e} beside)"
    return ""


def _compare(row: Row, dense: Mapping[str, Tensor], expected: Reference) -> None:
    """The largest deviation of the step, of which samples that change places are one."""
    floor = _floor(expected)
    for name, rows in dense.items():
        if row.obstacle:  # without a reference, rows add up to the batch's gradient at least
            deviation = _deviation(rows.mean(0), expected.gradients[name], floor)
        else:
            deviation = _deviation(rows, expected.rows[name], floor)
        row.deviation, row.worst = max((row.deviation, row.worst), (deviation, name))


def _floor(expected: Reference) -> float:
    floor = FLOOR_LOW if expected.low_precision else FLOOR
    return floor * max(expected.largest, SMALL)


def _deviation(rows: Tensor, against: Tensor, floor: float) -> float:
    if rows.shape != against.shape:
        return float("inf")
    scale = max(float(against.abs().max()), floor)
    deviation = float((rows - against).abs().max()) / scale
    return deviation if deviation == deviation else float("inf")


def _explain(row: Row, individual: Any, dense: Mapping[str, Tensor], expected: Reference) -> None:
    """Coverage, and the reasons for what is missing."""
    live = {
        name: rows[0].numel() for name, rows in expected.rows.items() if bool((rows != 0).any())
    }
    covered = sum(size for name, size in live.items() if name in dense)
    row.coverage = min(row.coverage, 100 * covered / sum(live.values()))
    for name in live.keys() - dense.keys():
        try:
            _ = individual[name]
        except KeyError as error:
            row.reasons[str(error.args[0]).split(": ", 1)[-1]] += 1


def _disturbed(
    row: Row, model: nn.Module, plain: Mapping[str, Tensor], expected: Reference
) -> None:
    """Whether the gradient that the optimizer gets is another one than without gradlens."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.to_dense()
            deviation = _deviation(gradient, plain[name], _floor(expected))
            if deviation > row.allowed:
                row.error = f"p.grad of {name} is another one than without gradlens"


def _descend(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """A small step downhill, so that what is zero at first isn't later."""
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter -= 0.05 * gradients[name] / largest


def first_line(error: BaseException) -> str:
    """The first line of its text, cut after 160 characters."""
    return (str(error).strip().splitlines() or [""])[0][:160]
