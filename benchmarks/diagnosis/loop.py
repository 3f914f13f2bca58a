"""The training loop of the suite, under a cockpit or without."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.training import Batch, Split, Training, batches, model_of
from gradlens import Cockpit, GradlensWarning, configuration
from gradlens.quantities import (
    ActivationOutliers,
    AttentionEntropy,
    AttentionLogits,
    OptimizerState,
    OutputEntropy,
    RelativeUpdate,
)
from gradlens.schedules import linear
from gradlens.signals.predicates import computes_attention

TRACKED_EVERY = 10
"""Steps from one tracked step to the next."""
VALIDATED_EVERY = 10
"""Steps from one validation to the next."""
ENDS = 10
"""Steps that the loss at the start and at the end is a mean over."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run: its loss at each step, and the validation loss by step.

    ``alarmed`` is the step at which the first alarm was given while the run went on.
    """

    losses: list[float] = field(default_factory=list)
    validated: dict[int, float] = field(default_factory=dict)
    alarmed: int | None = None

    @property
    def start(self) -> float:
        """The larger one of the first loss and the mean of the first three.

        The first batch may happen to be an easy one.
        """
        return max(self.losses[0], fmean(self.losses[:3]))

    @property
    def end(self) -> float:
        """The mean loss of the last steps."""
        return fmean(self.losses[-ENDS:])

    @property
    def peak(self) -> float:
        """The largest loss, infinite if one isn't finite."""
        return max(loss if math.isfinite(loss) else math.inf for loss in self.losses)

    @property
    def valid_end(self) -> float:
        """The mean of the last two validation losses, infinite if one isn't finite."""
        loss = fmean([*self.validated.values()][-2:])
        return loss if math.isfinite(loss) else math.inf

    @property
    def valid_start(self) -> float:
        """The validation loss before the first step."""
        return self.validated[0]

    @property
    def valid_least(self) -> float:
        """The smallest validation loss."""
        return min(self.validated.values())


OF_LAYERS = ActivationOutliers, OptimizerState, OutputEntropy, RelativeUpdate
OF_ATTENTION = AttentionEntropy, AttentionLogits
"""Quantities that rules on single layers read, besides the preset."""


class Tracked:
    """The economy preset and ``OF_LAYERS`` every few steps, with the run's file at ``path``.

    ``alarmed`` is the step of the first alarm, if there are alarms while the run goes on.
    """

    alarmed: int | None = None

    def __init__(self, model: nn.Module, training: Training, path: Path, diagnose: bool) -> None:
        live: dict[str, Any] = {"diagnose": True} if diagnose else {}
        schedule = linear(TRACKED_EVERY)
        has_attention = any(map(computes_attention, model.modules()))
        of_layers = (*OF_LAYERS, *(OF_ATTENTION if has_attention else ()))
        quantities = [*configuration("economy", schedule), *(each(schedule) for each in of_layers)]
        self.cockpit = Cockpit(
            model, quantities, run=path, loss_reduction=training.declared, **live
        )
        self._is_live, self._parts = diagnose, training.micro_batches

    def step(
        self, step: int, loss: Tensor, optimizer: torch.optim.Optimizer, ids: Tensor, left: int
    ) -> AbstractContextManager[Any]:
        """The context of a backward pass, behind which so many others are ``left`` in its step."""
        if self._is_live and self.alarmed is None:
            findings = self.cockpit.history.findings
            if any(finding.is_alarm for finding in findings):
                self.alarmed = step - 1
        return self.cockpit(
            step,
            loss=loss,
            loss_scale=1 / self._parts,
            optimizer=optimizer,
            accumulating=left > 0,
            info={"ids": ids},
        )


def train(
    training: Training, seed: int, path: Path | None = None, diagnose: bool = False
) -> Outcome:
    """Run it, under a cockpit with the run's file at ``path`` if there is one.

    Weights, batches and what the network draws depend on the seed alone.
    """
    split = training.data(seed)
    model = model_of(training, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradlensWarning)
        tracked = None if path is None else Tracked(model, training, path, diagnose)
        outcome = _train(training, seed, split, model, tracked)
        if tracked is None:
            return outcome
        tracked.cockpit.close()
    return replace(outcome, alarmed=tracked.alarmed)


def _train(
    training: Training, seed: int, split: Split, model: nn.Module, tracked: Tracked | None
) -> Outcome:
    outcome = Outcome()
    make_optimizer: Any = training.optimizer  # torch's base class has no rate
    optimizer = make_optimizer([*training.trained(model)], lr=training.rate, **training.options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for step, batch in batches(training, split, seed):
            if step % VALIDATED_EVERY == 0 or step == training.steps - 1:
                outcome.validated[step] = validation_loss(training, model, split)
                if tracked is not None:
                    tracked.cockpit.log(step, valid_loss=outcome.validated[step])
            for group in optimizer.param_groups:
                rate = training.rate * group.get("factor", 1.0)
                group["lr"] = rate * training.schedule(step, training.steps)
            if training.zeroed(step):
                optimizer.zero_grad()
            outcome.losses.append(backward(training, model, optimizer, step, batch, tracked))
            if training.clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            if training.updated(step):
                optimizer.step()
    return outcome


def backward(
    training: Training,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    batch: Batch,
    tracked: Tracked | None,
) -> float:
    """Forward and backward passes of a batch, in as many parts as it has; the batch's loss."""
    total, count = 0.0, training.micro_batches
    for number, part in enumerate(parts(batch, count)):
        training.mode(model)
        outputs = outputs_of(training, model, part.inputs)
        loss = training.loss(outputs, part.targets) / count
        left = count - 1 - number
        with tracked.step(step, loss, optimizer, part.ids, left) if tracked else nullcontext():
            loss.backward()
        total += loss.item()
    return total


def parts(batch: Batch, count: int) -> Iterator[Batch]:
    """Equal parts of a batch, each with samples."""
    columns = (batch.ids.chunk(count), batch.inputs.chunk(count), batch.targets.chunk(count))
    return (Batch(*part) for part in zip(*columns, strict=True))


def outputs_of(training: Training, model: nn.Module, inputs: Tensor) -> Tensor:
    """The network's outputs, in the precision of the training."""
    if training.precision is None:
        return model(inputs)
    with torch.autocast("cpu", training.precision):
        outputs: Tensor = model(inputs)
    return outputs.float()


def validation_loss(training: Training, model: nn.Module, split: Split) -> float:
    """In evaluation mode, over all samples that aren't trained on."""
    loss = training.valid_loss or training.loss
    model.eval()
    with torch.no_grad():
        return loss(outputs_of(training, model, split.valid_inputs), split.valid_targets).item()
