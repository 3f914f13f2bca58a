"""The cockpit: a with-context around ``loss.backward()``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.cockpit.aggregation import PUSHED, Aggregate, Aggregation, pushable
from gradlens.cockpit.budget import Budget
from gradlens.cockpit.gradient_tracking import (
    GradientTracking,
    is_compiled,
    process_group_of,
    unwrapped,
)
from gradlens.cockpit.layer_tracking import LayerTracking
from gradlens.cockpit.pending_update import OpenInterval, PendingUpdate
from gradlens.cockpit.plain import to_plain
from gradlens.cockpit.tracked_step import TrackedStep, recordable
from gradlens.history.coverage import Coverage, CoverageTable
from gradlens.history.history import History, Note, RunFile, Source
from gradlens.per_sample.batchnorm import BatchNormPolicy, check_batchnorm
from gradlens.per_sample.context import check_loss_reduction
from gradlens.per_sample.labelling.batch import LossReduction
from gradlens.per_sample.operators.operator import GradientOperator
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.presets import configuration
from gradlens.quantities.quantity import Quantity, TwoPointQuantity, UpdateQuantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update


class Cockpit:
    """Tracks quantities of a training run.

    ``params`` is the model, which is extended on the spot and whose parameters are known by name,
    or an iterable of parameters whose layers have been extended by ``gradlens.extend`` or
    BackPACK's ``extend``. Parameters that need no gradient are left out. ``loss_reduction`` says
    whether the loss is a ``"mean"`` or a ``"sum"`` over the samples. ``loss_function`` is the loss
    module, which is extended, too, for quantities that need per-sample losses. ``run`` is the path
    of a file that values are written to as they come; an existing one is continued with
    ``resume=True`` and is an error otherwise. ``batchnorm`` says what an per-sample gradient is
    where samples are coupled (``gradlens.per_sample.batchnorm``). ``budget`` is the share of the
    training time that tracking may take, such as 0.05: schedules are thinned to keep to it.

    The context is entered at each step, around the backward pass::

        with cockpit(global_step, loss=loss):
            loss.backward()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[nn.Parameter],
        quantities: Iterable[Quantity | Aggregate] | None = None,
        *,
        loss_reduction: LossReduction = "mean",
        loss_function: nn.Module | None = None,
        batchnorm: BatchNormPolicy = "coupled",
        budget: float | None = None,
        run: str | Path | None = None,
        resume: bool = False,
    ) -> None:
        check_loss_reduction(loss_reduction)
        check_batchnorm(batchnorm)
        _check_loss_function(loss_function)
        chosen = configuration("economy") if quantities is None else quantities
        self._aggregation = Aggregation(chosen)
        self.quantities = _checked(self._aggregation.quantities)
        self.loss_reduction: LossReduction = loss_reduction
        wrapped = params if isinstance(params, nn.Module) else None
        model = None if wrapped is None else unwrapped(wrapped)
        self.model = model
        self.parameters = _trainable(params if model is None else model)
        self.budget = None if budget is None else Budget(budget, self.quantities)
        self._gradients = GradientTracking(
            self.parameters,
            self.model,
            loss_reduction,
            batchnorm,
            None if wrapped is None else process_group_of(wrapped),
            wrapped if wrapped is not None and is_compiled(wrapped) else None,
            loss_function,
        )
        self._layers = LayerTracking(self.model, self.parameters, self.quantities)
        self.history = self._history(run, resume)
        self._past = self._end_of_past()
        writes = run is not None and self._gradients.is_first_process
        self._file = RunFile(run, self.history, resume) if run is not None and writes else None
        self._started = False
        self._foreseen: dict[int, tuple[Quantity, ...]] = {}
        self._pending: PendingUpdate | None = None
        self._interval: OpenInterval | None = None

    def __call__(
        self,
        global_step: int,
        *extensions: BackpropExtension,
        loss: Tensor | None = None,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulating: bool = False,
        info: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> TrackedStep:
        """The context for one step.

        ``extensions`` are BackPACK extensions of the user's own. ``loss`` and ``optimizer`` are
        needed by the quantities that say so; N is found without ``batch_size``, which is checked
        if given. ``scaler`` is the one whose scaled loss backward is called on, before it unscales
        the gradients. ``accumulating`` says that another backward pass of the same step follows:
        the step's values are those of all its micro-batches together, found at the last.
        ``info`` may hold the same under these names, and anything for quantities of the
        user's own. ``debug`` prints what is active.
        """
        known = dict(info or {})
        given = {
            "loss": loss,
            "optimizer": optimizer,
            "batch_size": batch_size,
            "scaler": scaler,
        }
        known |= {name: value for name, value in given.items() if value is not None}
        return TrackedStep(self, int(global_step), extensions, known, accumulating, debug)

    @contextmanager
    def forward(self, global_step: int) -> Iterator[None]:
        """A context for a step's forward pass, where what watches layers must be told the step.

        Without it, steps are expected to follow each other as the last two did. A step may have
        several of them. The backward pass has a context of its own, as ever.
        """
        self._expect([int(global_step)])
        with self._layers.forward(int(global_step)):
            yield

    def evaluation(
        self, global_step: int, name: str = "evaluation"
    ) -> AbstractContextManager[None]:
        """A context for forward passes that no backward pass follows, such as a validation.

        Quantities of layers' inputs and outputs take them all together, whatever their schedule,
        and are recorded under "OutputNorm (evaluation)" and the like, with the ``name`` in
        brackets. Several contexts of the same name and step, before the next step, count together.
        ``ValueError`` if there are no such quantities, or the name is one that aggregates have.
        """
        if name in ("epoch", "window"):
            raise ValueError(f"evaluation(name={name!r}): series of aggregates are called so")
        step = Step(int(global_step), self.parameters, self.loss_reduction)
        record = partial(self._record_evaluation, step.global_step, name)
        note = partial(self._note, step.global_step)
        return self._layers.evaluation(step, name, record, note)

    def create_graph(self, global_step: int) -> bool:
        """Whether backward needs ``create_graph=True`` at this step: never."""
        return False

    def log(
        self,
        global_step: int,
        epoch_count: int | None = None,
        train_loss: float | None = None,
        valid_loss: float | None = None,
        test_loss: float | None = None,
        train_accuracy: float | None = None,
        valid_accuracy: float | None = None,
        test_accuracy: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Record what the training loop itself has found, each under its name here."""
        given = {
            "epoch_count": epoch_count,
            "train_loss": train_loss,
            "valid_loss": valid_loss,
            "test_loss": test_loss,
            "train_accuracy": train_accuracy,
            "valid_accuracy": valid_accuracy,
            "test_accuracy": test_accuracy,
            "learning_rate": learning_rate,
        }
        found = {name: value for name, value in given.items() if value is not None}
        for name in found:
            if self._is_pushed(name):
                raise ValueError(
                    f"{name} is a metric that was pushed: log it, or push it under another name, "
                    f"such as push(epoch_{name}=...)"
                )
        self._record(int(global_step), {name: to_plain(value) for name, value in found.items()})

    def push(self, **metrics: float | Tensor) -> None:
        """Add values of the training loop's own metrics, of which an epoch's statistics matter.

        Numbers, or tensors and arrays of one element. ``tick_epoch`` records their statistics under
        their names; what is pushed afterwards and before the next step is taken in by the same
        record at the next call. ``TypeError`` names a metric that is no number, and ``ValueError``
        one whose name another series has; then none of them is taken in.
        """
        values = {name: pushable(name, value) for name, value in metrics.items()}
        for name in values:
            self._check_pushed(name)
        self._aggregation.push(values)

    def tick_epoch(self, across_processes: bool = False) -> None:
        """An epoch is over: record the statistics of each ``Aggregate`` over it.

        They stand under the last step. ``across_processes`` takes in the values of all processes
        of ``torch.distributed``'s default group, each of which must call it.
        """
        if self._pending is not None:
            self._pending.resolve()
        self._append_aggregated(*self._aggregation.end_epoch(across_processes))

    def coverage(self) -> CoverageTable:
        """Which parameters have per-sample gradients, as of the latest step; print it."""
        coverages = self.history.coverages
        nothing = Coverage(dict.fromkeys(self.parameters, "no tracked step has needed them yet"))
        latest = coverages[max(coverages)] if coverages else nothing
        return CoverageTable(latest, self.history.parameters)

    def get_output(self) -> dict[int, dict[str, Any]]:
        """All values so far: global step -> name -> value."""
        history = self.history
        return {
            step: {name: history[name][step] for name in history.names if step in history[name]}
            for step in history.steps
        }

    def write(self, path: str | Path) -> None:
        """Write everything recorded so far to ``{path}.json``, as a run file.

        ``FileExistsError`` if there is one already. With ``Cockpit(..., run=...)`` values are on
        disk without it.
        """
        self.history.write(f"{path}.json")

    def close(self) -> None:
        """Take in the last update, and close the run's file; the history stays readable."""
        self._close_pending()
        self._close_interval()
        self._append_aggregated(*self._aggregation.rest())
        self._layers.close()
        self._gradients.close()
        if self.budget is not None:
            self.budget.restore()
        if self._file is not None:
            self._file.close()

    def _is_pushed(self, name: str) -> bool:
        return self._aggregation.has_pushed(name) or self.history.sources.get(name) == PUSHED

    def _check_pushed(self, name: str) -> None:
        tracked = any(name == quantity.name for quantity in self.quantities)
        if tracked or (name in self.history and not self._is_pushed(name)):
            raise ValueError(
                f"push({name}=...): there is a series {name!r} of something else, which is kept: "
                f"push it under another name, such as push(pushed_{name}=...)"
            )
        if name in self._past and not self._started:
            raise ValueError(
                f"push({name}=...): the run that is resumed has a record of it under its last "
                "step, which is kept: push it after the next step"
            )

    def _end_of_past(self) -> frozenset[str]:
        """What has a value at the last step of the run that is resumed."""
        history = self.history
        if not history.steps:
            return frozenset()
        last = history.steps[-1]
        self._aggregation.begin_step(last)
        return frozenset(name for name in history.names if last in history[name])

    def _history(self, run: str | Path | None, resume: bool) -> History:
        sources = self._aggregation.sources(self.quantities)
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        history = History(sources, shapes)
        if run is not None and resume and Path(run).exists():
            past = History.load(run)
            history.sources = past.sources | sources
            history.notes.extend(past.notes)
            history.coverages |= past.coverages
            for name in past.names:
                for step, value in past[name].items():
                    history.append(step, {name: value})
        return history

    def _record(self, global_step: int, values: Mapping[str, Any]) -> None:
        self._append(global_step, self._aggregation.take_in(global_step, values))

    def _append(self, global_step: int, values: Mapping[str, Any]) -> None:
        if not values:
            return
        self.history.append(global_step, values)
        if self._file is not None:
            self._file.write_step(global_step, values)

    def _record_evaluation(
        self, global_step: int, evaluation: str, quantity: LayerQuantity, value: Any
    ) -> None:
        name = f"{quantity.name} ({evaluation})"
        view = replace(quantity.view, title=f"{quantity.view.title} ({evaluation})")
        self._know(name, Source(type(quantity).__name__, view))
        self._record(global_step, {name: recordable(quantity, global_step, value)})

    def _append_aggregated(self, global_step: int, values: Mapping[str, Any]) -> None:
        for name in values:
            self._know(name, PUSHED)
        self._append(global_step, values)

    def _know(self, name: str, source: Source) -> None:
        """Remember what a new series comes from."""
        if name not in self.history.sources:
            self.history.sources[name] = source
            if self._file is not None:
                self._file.write_sources(self.history)

    def _cover(self, global_step: int, coverage: Coverage) -> None:
        """Enter into the ledger what per-sample gradients there are, if that has changed."""
        coverages = self.history.coverages
        if coverages and coverages[max(coverages)] == coverage:
            return
        coverages[global_step] = coverage
        if self._file is not None:
            self._file.write_coverage(global_step, coverage)
        for remark in coverage.remarks(self.history.parameters):
            self._note(global_step, remark)

    def _note(self, global_step: int, text: str) -> None:
        """Say something once: as a warning, in the history and in the file."""
        if any(note.text == text for note in self.history.notes):
            return
        note = Note(global_step, text)
        self.history.notes.append(note)
        if self._file is not None:
            self._file.write_note(note)
        warnings.warn(f"gradlens, step {global_step}: {text}", stacklevel=5)

    # Quantities that span the optimizer's step: pending until it is taken, and some of them open
    # until the step after.

    def _begin_step(self, global_step: int) -> None:
        if self.budget is not None:
            self.budget.begin_step(global_step, self._gradients.look_seconds)
        if not self._started:
            self._started = True
            for quantity in self.quantities:
                quantity.start(self.parameters)
        self._close_pending()
        self._aggregation.begin_step(global_step)
        if self._layers.is_repeated(global_step) and self._has_values(global_step):
            self._note(global_step, REPEATED)
        self._layers.announce(global_step)

    def _expect(self, steps: Sequence[int]) -> None:
        """Watch layers in the forward passes to come if one of these steps may need it.

        Without any, there is no telling.
        """
        waiting = [] if self._pending is None else self._pending.quantities
        unfinished = any(isinstance(quantity, TwoPointQuantity) for quantity in waiting)
        self._foreseen = {}
        if self.budget is not None and not self.budget.has_means:
            self._foreseen = dict.fromkeys(steps, ())
        try:
            asked = any(self._may_watch_layers(step) for step in steps)
        except Exception:  # of a table that ends before; if the step comes, it is raised there
            asked = True
        self._gradients.expect(asked or unfinished or not steps)

    def _may_watch_layers(self, global_step: int) -> bool:
        active = self._active_at(global_step)
        return any(quantity.watches_layers(global_step) for quantity in active)

    def _active_at(self, global_step: int) -> tuple[Quantity, ...]:
        """Who has something to do; asked once for each step."""
        if global_step not in self._foreseen:
            active = [q for q in self.quantities if q.is_active(global_step)]
            self._foreseen[global_step] = tuple(active)
        return self._foreseen[global_step]

    def _has_values(self, global_step: int) -> bool:
        known = [q.name for q in self.quantities if q.name in self.history]
        return any(global_step in self.history[name] for name in known)

    def _close_pending(self) -> None:
        if self._pending is not None:
            self._pending.resolve()
            self._pending.close()
        self._pending = None

    def _await_update(
        self,
        step: Step,
        quantities: Sequence[Quantity],
        retained: Mapping[str, GradientOperator],
    ) -> None:
        self._pending = PendingUpdate(step, quantities, retained, self._after_update)

    def _after_update(self, pending: PendingUpdate, update: Update) -> None:
        global_step = pending.step.global_step
        values = {
            quantity.name: recordable(quantity, global_step, quantity.compute(pending.step, update))
            for quantity in pending.quantities
            if isinstance(quantity, UpdateQuantity)
        }
        self._record(global_step, values)
        if any(isinstance(quantity, TwoPointQuantity) for quantity in pending.quantities):
            self._interval = OpenInterval(pending, update)

    def _complete_interval(self, end: Step) -> None:
        interval = self._interval
        assert interval is not None
        named = {quantity.name: quantity for quantity in interval.quantities}
        global_step = interval.start.global_step
        values = interval.values(end)
        plain = {name: recordable(named[name], global_step, v) for name, v in values.items()}
        self._record(global_step, plain)

    def _close_interval(self) -> None:
        self._interval = None


REPEATED = (
    "the step has had a context before, whose values are replaced in the history; the run's file "
    "keeps both. Give each context a step of its own, or each network a cockpit of its own"
)


def _check_loss_function(loss_function: object) -> None:
    if not isinstance(loss_function, (nn.Module, NoneType)):
        raise TypeError(
            f"loss_function={loss_function!r} is not a module: pass one such as "
            "nn.CrossEntropyLoss(); losses of single samples that are found in another way can be "
            "passed to the context, as info={'individual_losses': ...}"
        )


def _checked(quantities: Iterable[Quantity]) -> tuple[Quantity, ...]:
    found = tuple(quantities)
    seen: set[str] = set()
    for quantity in found:
        if not isinstance(quantity, Quantity):
            raise TypeError(
                f"{quantity!r} is not a quantity: pass instances, such as "
                "gradlens.quantities.Loss(), or gradlens.configuration('economy')"
            )
        if quantity.name in seen:
            raise ValueError(
                f"two quantities are called {quantity.name!r}: give one of them another name, as "
                f"in {type(quantity).__name__}(..., name='{quantity.name}2')"
            )
        seen.add(quantity.name)
    return found


def _trainable(params: nn.Module | Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    if isinstance(params, nn.Module):
        named = dict(params.named_parameters())
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
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if not trainable:
        raise ValueError(
            "no parameter needs a gradient (all are frozen, or there is none): there is nothing "
            "to track"
        )
    return trainable
