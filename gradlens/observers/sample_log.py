"""Accumulates losses and gradient norms of single samples by the user's ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.gradients.gradients import SampleLosses, Setting, sample_losses
from gradlens.history.records import ARRAYS, MOST_SAMPLES, Samples
from gradlens.history.spikes import SampleId
from gradlens.observers.autopsy import norms_of
from gradlens.observers.observer import Observer, Outcome, Records, StepContext

WAITING = 16
"""Batches that are taken in together: on an accelerator, each time waits for the device."""
GROWTH = 1.5
"""Everything is written again when there are so many times as many losses as the last time, so that
a killed run keeps two thirds of them, and a run writes it a few dozen times at most."""
FIRST = 1000
"""Losses after which it is written for the first time."""


class _Known(NamedTuple):
    """Of a batch: ℓₙ ``[N]``, and labels and predicted classes ``[N]``, or ``[0]``."""

    losses: Tensor
    labels: Tensor
    predicted: Tensor


class SampleLog(Observer):
    """What is known of each sample: a sum over its losses, and what was last.

    Losses are those that the user passes as ``individual_losses``, or that the loss function's node
    shows; norms are those of tracked steps that have some.
    """

    work = "what is known of single samples"
    of_ids = True

    def __init__(self, setting: Setting, records: Records) -> None:
        self._setting = setting
        self._records = records
        self._places: dict[SampleId, int] = {}
        self._left_out: set[SampleId] = set()
        self._table = np.zeros((len(_COLUMNS), 0))
        self._waiting: list[tuple[Sequence[SampleId], _Known]] = []
        self._step = 0
        self._losses = 0
        self._written = 0.0
        self._has_new = False
        if records.history.samples is not None:
            self._continue(records.history.samples)

    def enter(self, context: StepContext) -> None:
        """Take in the losses of a batch whose samples have ids."""
        self._step = context.global_step
        ids: Sequence[SampleId] = context.info["ids"]
        known = self._known(context.info)
        if known is None:
            self._records.note(self._step, NO_LOSSES)
        elif len(known.losses) != len(ids):
            text = OTHER_COUNT.format(ids=len(ids), samples=len(known.losses))
            self._records.note(self._step, text)
        else:
            self._waiting.append((ids, known))
        if len(self._waiting) >= WAITING:
            self._take_in()
            if self._losses >= max(FIRST, GROWTH * self._written):
                self._write()

    def _known(self, info: Mapping[str, Any]) -> _Known | None:
        """The losses of the batch's samples, with labels and predictions where they have one."""
        loss: Tensor | None = info.get("loss")
        found = None if loss is None else sample_losses(self._setting, loss, info)
        given: Tensor | None = info.get("individual_losses")
        if found is None:
            return None if given is None else _Known(given.detach(), _NOTHING, _NOTHING)
        if given is None:
            return _Known(found.losses, *_classes(found))
        fits = len(found.losses) == len(given)
        return _Known(given.detach(), *(_classes(found) if fits else (_NOTHING, _NOTHING)))

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """Take in the gradient norms of a tracked step."""
        if outcome.error is not None:
            return
        ids: Sequence[SampleId] = context.info["ids"]
        squared = norms_of(outcome.values)
        if squared is None or len(squared) != len(ids) or not bool(squared.isfinite().all()):
            return
        mean = float(squared.mean())
        if mean > 0:
            places = self._places_of(ids)
            known = places >= 0
            relative = (squared / mean).sqrt().numpy()[known]
            np.add.at(self._table[_NORMS], places[known], 1)
            np.add.at(self._table[_NORM_SUM], places[known], relative)
            self._has_new = True

    def close(self) -> None:
        """Write what was not yet written."""
        self._take_in()
        if self._has_new:
            self._write()

    def _take_in(self) -> None:
        waiting, self._waiting = self._waiting, []
        for ids, known_of_batch in waiting:
            losses = known_of_batch.losses.double().cpu().numpy()
            places = self._places_of(ids)
            known = (places >= 0) & np.isfinite(losses)
            places, losses = places[known], losses[known]
            if not len(losses):
                continue
            np.add.at(self._table[_VISITS], places, 1)
            np.add.at(self._table[_LOSS_SUM], places, losses)
            np.add.at(self._table[_EXCESS_SUM], places, losses - np.median(losses))
            self._table[_LAST, places] = losses
            if len(known_of_batch.labels):
                self._table[_LABEL, places] = known_of_batch.labels.cpu().numpy()[known]
                self._table[_PREDICTED, places] = known_of_batch.predicted.cpu().numpy()[known]
            self._losses += len(losses)
            self._has_new = True

    def _places_of(self, ids: Sequence[SampleId]) -> NDArray[np.int64]:
        """The column of each sample in the table; -1 if there is no room for it."""
        places = self._places
        for each in ids:
            if each not in places:
                if len(places) < MOST_SAMPLES:
                    places[each] = len(places)
                elif len(self._left_out) < MOST_SAMPLES:
                    self._left_out.add(each)
        missing = len(places) - self._table.shape[1]
        if missing > 0:
            room = np.zeros((len(_COLUMNS), max(missing, self._table.shape[1])))
            room[_LAST] = np.nan
            room[[_LABEL, _PREDICTED]] = -1
            self._table = np.concatenate([self._table, room], axis=1)
        return np.fromiter((places.get(each, -1) for each in ids), np.int64, len(ids))

    def _write(self) -> None:
        table = self._table[:, : len(self._places)]
        with np.errstate(divide="ignore", invalid="ignore"):
            columns = {
                "visits": table[_VISITS],
                "mean_loss": table[_LOSS_SUM] / table[_VISITS],
                "last_loss": table[_LAST],
                "excess": table[_EXCESS_SUM] / table[_VISITS],
                "norm": table[_NORM_SUM] / table[_NORMS],
                "label": table[_LABEL],
                "predicted": table[_PREDICTED],
            }
        # As it would be read from a file, with no more digits.
        arrays = {name: column.astype(ARRAYS[name]) for name, column in columns.items()}
        left_out = len(self._left_out)
        found = Samples(self._step, tuple(self._places), **arrays, left_out=left_out)
        self._records.take_in(self._step, "samples", found)
        self._written, self._has_new = self._losses, False

    def _continue(self, samples: Samples) -> None:
        """Go on from what a run's file has; norms count as if each sample had one."""
        self._places_of(samples.ids)
        table = self._table[:, : len(samples)]
        table[_VISITS] = samples.visits
        table[_LOSS_SUM] = np.nan_to_num(samples.visits * samples.mean_loss)
        table[_EXCESS_SUM] = np.nan_to_num(samples.visits * samples.excess)
        table[_LAST], table[_LABEL] = samples.last_loss, samples.label
        table[_PREDICTED] = samples.predicted
        table[_NORMS] = np.isfinite(samples.norm)
        table[_NORM_SUM] = np.nan_to_num(samples.norm)
        self._losses = int(table[_VISITS].sum())
        self._written, self._step = self._losses, samples.until


_COLUMNS = (
    _VISITS, _LOSS_SUM, _EXCESS_SUM, _LAST, _NORMS, _NORM_SUM, _LABEL, _PREDICTED
) = range(8)  # fmt: skip
_NOTHING = torch.zeros(0, device="cpu")


def _classes(found: SampleLosses) -> tuple[Tensor, Tensor]:
    """Each sample's class and the most probable one, if there are classes, and one row of each."""
    targets, outputs = found.of.targets, found.of.outputs
    if targets is None or outputs is None or len(found.owners) != len(found.losses):
        return _NOTHING, _NOTHING
    if targets.dim() != 1 or outputs.dim() != 2 or targets.is_floating_point():
        return _NOTHING, _NOTHING
    places = found.owners.argsort()
    return targets[places], outputs[places].argmax(1)


NO_LOSSES = (
    "the losses of single samples can't be computed from this loss at each step, so that only "
    "gradient norms at tracked steps are known for the ids that were passed: pass loss=... "
    "of a loss function such as nn.CrossEntropyLoss, or individual_losses=..."
)
OTHER_COUNT = (
    "{ids} ids were passed, and the loss is that of {samples} samples: pass an id for each sample "
    "of the batch"
)
