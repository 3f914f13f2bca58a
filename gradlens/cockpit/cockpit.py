"""The cockpit: a with-context around ``loss.backward()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.cockpit.aggregation import Aggregate, Aggregation
from gradlens.cockpit.arguments import (
    check_accumulating,
    check_budget,
    check_extensions,
    check_loss_function,
    check_max_bytes,
    check_probes,
    check_switches,
    check_together,
    checked_info,
    checked_quantities,
    checked_rules,
    checked_sinks,
    step_number,
    trainable_parameters,
    unwrapped,
)
from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import Budget
from gradlens.cockpit.checkpoint import load_tracking, state_of_tracking
from gradlens.cockpit.run import Run
from gradlens.cockpit.tracked_step import TrackedStep
from gradlens.cockpit.tracking import Tracking
from gradlens.cockpit.updates import Updates
from gradlens.cockpit.values import LATER, loggable
from gradlens.diagnosis.diagnose import diagnose
from gradlens.diagnosis.opening import opening
from gradlens.diagnosis.rule import Rule
from gradlens.facts.recorder import FactRecorder
from gradlens.gradients.gradients import Setting, replicas_of
from gradlens.gradients.per_sample_gradients import check_loss_reduction
from gradlens.graph.fully_shard import sharding_of
from gradlens.graph.loss import LossReduction
from gradlens.history.coverage import Coverage, CoverageTable
from gradlens.history.history import LATEST, History
from gradlens.history.html import count, table
from gradlens.history.run_file import OwnFiles
from gradlens.observers.autopsy import Autopsies
from gradlens.observers.live_diagnosis import LiveDiagnosis
from gradlens.observers.observer import Observer
from gradlens.observers.sample_log import SampleLog
from gradlens.parts.assembly import BatchAssembly
from gradlens.parts.part import MAX_BYTES
from gradlens.parts.processes import Processes, process_group_of, processes_apart
from gradlens.quantities.quantity import Quantity
from gradlens.quantities.step import Step
from gradlens.samples.batchnorm import BatchNormPolicy, check_batchnorm
from gradlens.sinks.sink import Sink
from gradlens.torch_private import unseen


class Cockpit:
    """Tracks quantities of a training run.

    Enter its context at each step, around the backward pass::

        cockpit = gradlens.Cockpit(model, "economy", loss_function=loss_function)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()

    ``params``
        The model, on which hooks are registered, or an iterable of parameters whose layers have
        been extended by ``gradlens.extend`` or BackPACK's ``extend``. Only with the model do values
        have the names of the parameters. Parameters that need no gradient are left out.
    ``quantities``
        A list of quantities, or the name of a preset (``gradlens.configuration``). The default is
        the preset "economy".
    ``loss_reduction``
        Whether the loss is a ``"mean"`` or a ``"sum"`` over the samples.
    ``run``
        The path of a file to which values are written as soon as they are known. Arrays are kept
        there alone.
    ``resume``
        Continue the file ``run`` if it exists. Without it, an existing file is an error.
    ``sinks``
        Where each record is also sent, such as to TensorBoard (``gradlens.sinks``).
    ``loss_function``
        The loss module: its reduction is checked, and it runs uncompiled where that is needed.
    ``batchnorm``
        What a per-sample gradient is if batch normalisation couples the samples: ``"coupled"``,
        ``"frozen"`` or ``"skip"`` (``gradlens.samples.batchnorm``).
    ``budget``
        The share of the training time that tracking may take, such as 0.05. Expensive quantities
        are then tracked only at some steps of their schedules.
    ``strict``
        Raise exceptions. By default, a value that can't be computed is a NaN with its reason, and
        training goes on. This is for those who develop quantities.
    ``max_bytes``
        The memory for per-sample gradients of earlier micro-batches, if quantities need those of
        the whole batch. If it isn't enough, these are NaN, and say how much would be.
    ``facts``
        Record some numbers of the batch, the loss and the gradients at each step, from which
        ``gradlens.diagnose`` finds what is wrong, and warn of gradients that aren't set to zero.
    ``diagnose``
        Look for faults while training runs. Each one is a warning, once, and is stored in the run.
        Pass rules to use others, as in ``[*gradlens.diagnosis.rules.RULES, mine]``.
    ``autopsy``
        Read the loss at each step, and find the samples and layers that cause a jump
        (``History.spikes``). By default, this is done on the CPU, and on other devices only with
        ``diagnose``, since reading the loss waits for the device. It is never done if several
        processes train, since each would see only its own samples.

    ``how_to_pass``
        What notes and reasons add behind "to the context", if a callback of a framework enters it:
        how users give that what to pass.

    ``ValueError`` if the reduction of the loss module contradicts ``loss_reduction``.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[nn.Parameter],
        quantities: Iterable[Quantity | Aggregate | str] | str | None = None,
        *,
        loss_reduction: LossReduction = "mean",
        loss_function: nn.Module | None = None,
        batchnorm: BatchNormPolicy = "coupled",
        budget: float | None = None,
        run: str | Path | None = None,
        resume: bool = False,
        sinks: Iterable[Sink] = (),
        strict: bool = False,
        max_bytes: int = MAX_BYTES,
        facts: bool = True,
        diagnose: bool | Sequence[Rule] = False,
        autopsy: bool | None = None,
        how_to_pass: str = "",
    ) -> None:
        check_max_bytes(max_bytes)
        check_switches(resume=resume, strict=strict, facts=facts, autopsy=autopsy or False)
        rules = checked_rules(diagnose)
        check_loss_reduction(loss_reduction)
        check_batchnorm(batchnorm)
        check_loss_function(loss_function, loss_reduction)
        given = checked_quantities("economy" if quantities is None else quantities)
        aggregation = Aggregation(given)
        self.quantities = aggregation.quantities
        check_together(self.quantities)
        wrapped = params if isinstance(params, nn.Module) else None
        self.model = None if wrapped is None else unwrapped(wrapped)
        sharding = sharding_of(self.model)
        self.parameters = trainable_parameters(
            params if self.model is None else self.model, sharding
        )
        sinks = checked_sinks(sinks, self.model, self.parameters)
        check_probes(self.quantities, self.model)
        for quantity in self.quantities:
            quantity.choose(self.model, self.parameters)
        setting = Setting(
            self.parameters,
            self.model,
            loss_reduction,
            batchnorm,
            sharding=sharding,
            replicas=replicas_of(wrapped),
        )
        device = next(iter(self.parameters.values())).device
        processes = Processes(process_group_of(setting.replicas, sharding), device)
        check_budget(budget, processes.count)
        self.budget = None
        if budget is not None:
            self.budget = Budget(budget, [each.name for each in self.quantities], device)
        writes = processes.rank == 0
        self._run = Run(aggregation, self.parameters, run, resume, writes, sinks, how_to_pass)
        self._files = OwnFiles()
        boundary = Boundary(self._run.note_now, strict)
        alone = processes.count == 1 and not processes_apart(setting)
        wants_autopsy = (bool(rules) or device.type == "cpu") if autopsy is None else autopsy
        updates = Updates(self._run.record, boundary, processes.of_all)
        recorders = [FactRecorder(setting, self._run)] if facts else []
        waits = any(each.phases[-1] in LATER for each in self.quantities)
        of_optimizer: list[Observer] = [*([updates] if waits else []), *recorders]
        observers: list[Observer] = [
            *recorders,
            *([Autopsies(setting, self._run)] if wants_autopsy and alone else []),
            *([LiveDiagnosis(self._run, rules)] if rules else []),
            SampleLog(setting, self._run),
        ]
        self._tracking = Tracking(
            setting=setting,
            wrapped=wrapped,
            loss_function=loss_function,
            quantities=self.quantities,
            run=self._run,
            boundary=boundary,
            updates=updates,
            assembly=BatchAssembly(setting, processes, max_bytes),
            observers=observers,
            of_optimizer=of_optimizer,
            budget=self.budget,
            says_opening=facts and writes,
        )
        for quantity in self.quantities:
            quantity.join_cockpit()

    @property
    def history(self) -> History:
        """All values so far, with notes and coverage."""
        tracking, boundary = self._tracking, self._tracking.boundary
        with boundary.contain("reading what is complete"):
            boundary.tell(tracking.observers, lambda observer: observer.flush())
        return self._run.history

    def __repr__(self) -> str:
        """What is tracked, in one line."""
        parameters = count(len(self.parameters), "parameter")
        model = "" if self.model is None else f"{type(self.model).__name__}, "
        quantities = count(len(self.quantities), "quantity")
        return f"Cockpit({model}{parameters}, {quantities}, {self.history!r})"

    def _repr_html_(self) -> str:
        """What is wrong by now, and the quantities with their latest values, for notebooks."""
        schedules = {q.name: repr(q.schedule) for q in self.quantities}
        history = self.history
        rows = [(*row, schedules.get(row[0], "")) for row in history.latest_values()]
        notes = [f"step {note.step}: {note.text}" for note in history.notes]
        found = diagnose(history)
        findings = [f"step {each.step}: {each.sentence}" for each in found]
        short = opening(history, found)
        return table(repr(self), (*LATEST, "schedule"), rows, notes, findings, short)

    @property
    def loss_reduction(self) -> LossReduction:
        """Whether the loss is a ``"mean"`` or a ``"sum"`` over the samples."""
        return self._tracking.setting.loss_reduction

    def __call__(
        self,
        global_step: int,
        *extensions: BackpropExtension,
        loss: Tensor | None = None,
        loss_scale: float | None = None,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        individual_losses: Tensor | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Callable[[], Tensor] | None = None,
        accumulating: bool = False,
        info: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> TrackedStep:
        """The context for one step.

        ``global_step``
            The number of the step, a whole number from 0 to 2**53 - 1.
        ``extensions``
            Your own BackPACK extensions, which run in the backward pass.
        ``loss``, ``optimizer``
            Needed by some quantities; an error names what is missing. Without ``loss``, the loss is
            the tensor whose ``backward`` method is called.
        ``loss_scale``
            The factor by which ``loss`` differs from the step's loss if a framework has divided or
            scaled it: 1/4 for a loss that was divided by four micro-batches.
        ``batch_size``
            The number of samples N. It is usually found without it, and is checked if given.
        ``individual_losses``
            The losses of single samples, ``[N]``. If the loss was computed from them, they say
            which sample is which where that can't be found otherwise.
        ``scaler``
            The gradient scaler, if backward is called on ``scaler.scale(loss)``.
        ``closure``
            A function that computes the loss of the step's whole batch again, without a backward
            pass. It is needed by quantities that compare it with that after the update, and is
            called in the optimizer's step.
        ``accumulating``
            Another backward pass of the same step follows. The values of a step are those of all
            its micro-batches together.
        ``info``
            The same by name, ``"ids"`` and ``"groups"`` of the samples, ``"outputs"``, and anything
            that quantities of your own need.
        ``debug``
            Log what is tracked at this step.
        """
        step = step_number(global_step)
        check_accumulating(accumulating)
        if extensions:
            check_extensions(extensions)
        given = {
            "loss": loss,
            "loss_scale": loss_scale,
            "optimizer": optimizer,
            "batch_size": batch_size,
            "individual_losses": individual_losses,
            "scaler": scaler,
            "closure": closure,
        }
        with unseen():
            known = checked_info({} if info is None else info, given)
        return TrackedStep(self._tracking, step, extensions, known, accumulating, debug)

    def forward(self, global_step: int) -> AbstractContextManager[None]:
        """A context for a step's forward pass, which says the number of the step.

        Hooks on layers depend on the step. Without this context, the next step is assumed to come
        at the distance of the last ones, if that was the same. A step may have several forward
        contexts. The backward pass needs its own context in any case.
        """
        return self._tracking.forward(step_number(global_step))

    def evaluation(
        self, global_step: int, name: str = "evaluation"
    ) -> AbstractContextManager[None]:
        """A context for forward passes without a backward pass, such as a validation.

        Quantities of the inputs and outputs of layers are computed from all forward passes in it,
        independent of their schedules. They are recorded as "OutputNorm (evaluation)" and so on,
        with ``name`` in brackets. Several contexts of the same name and step, before the next step,
        are taken together. ``ValueError`` if there are no such quantities, or if ``name`` is
        "epoch" or "window".
        """
        if name in ("epoch", "window"):
            raise ValueError(
                f"evaluation(name={name!r}): series of aggregates are called so: give another name"
            )
        step = Step(step_number(global_step), self.parameters, self.loss_reduction)
        return self._tracking.evaluation(step, name)

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
        **others: Any,
    ) -> None:
        """Record values that your training loop has computed, such as a validation loss.

        ``others`` may have any names, and be numbers, arrays, tensors, or lists and dicts of these.
        ``TypeError`` names a value that can't be recorded, and ``ValueError`` a name that another
        series has; nothing is recorded in these cases.
        """
        given = {
            "epoch_count": epoch_count,
            "train_loss": train_loss,
            "valid_loss": valid_loss,
            "test_loss": test_loss,
            "train_accuracy": train_accuracy,
            "valid_accuracy": valid_accuracy,
            "test_accuracy": test_accuracy,
            "learning_rate": learning_rate,
            **others,
        }
        with unseen():
            found = {n: loggable(n, each) for n, each in given.items() if each is not None}
        self._run.log(step_number(global_step), found)

    def push(self, **metrics: float | Tensor) -> None:
        """Add values of your own metrics, whose statistics are recorded at the end of an epoch.

        They are numbers, or tensors and arrays of one element. ``tick_epoch`` records their
        statistics under their names. If values are pushed after it and before the next step, the
        next call adds them to the same record. ``TypeError`` names a metric that is no number, and
        ``ValueError`` one whose name another series has; none of them is added in these cases.
        """
        with unseen():
            self._run.push(metrics)

    def tick_epoch(self) -> None:
        """End an epoch: record the statistics of each ``Aggregate`` and of pushed metrics.

        They are recorded under the last step. Values of quantities are those of all processes that
        train the model together, pushed metrics are this process's own.
        """
        self._tracking.updates.resolve()
        self._run.end_epoch()

    def coverage(self) -> CoverageTable:
        """Which parameters have per-sample gradients, as of the latest step; print it."""
        nothing = Coverage(dict.fromkeys(self.parameters, "no tracked step has needed them yet"))
        return CoverageTable(self.history.latest("coverage") or nothing, self.history.parameters)

    def get_output(self) -> dict[int, dict[str, Any]]:
        """All values so far: global step -> name -> value."""
        return {step: self.history[step] for step in self.history}

    def write(self, path: str | Path) -> Path:
        """Write everything recorded so far as a run file, and return where it is.

        The ending ``.jsonl`` is added to a path without it. A later call writes the file anew; one
        that isn't this cockpit's is kept, and the run is written beside it, with a warning.
        With ``Cockpit(..., run=...)`` values are on disk without it.
        """
        file = path if Path(path).suffix == ".jsonl" else f"{path}.jsonl"
        return self._files.write(file, self.history.json_lines())

    def state_dict(self) -> dict[str, Any]:
        """Everything that later values depend on, to be saved with the model and the optimizer.

        Call it between steps and evaluations: after the optimizer's step, and before the next
        context and ``close``. It consists of dicts, lists, numbers, strings and tensors, which
        ``torch.load(weights_only=True)`` reads. As in torch's own ``state_dict``, tensors are not
        copied; a cockpit never changes them in place. The largest is the start point of
        ``Distance``, which has the size of the model. Recorded values are not contained: they are
        in the history and the run's file.
        """
        with unseen():
            return state_of_tracking(self._tracking)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from the state of a cockpit of the same network.

        Call it before the next context, before or after the model and the optimizer are loaded.
        Later values are then those of an uninterrupted run. Values of the history from after the
        state are removed. What waited for the update or the next step, such as ``Alpha``, is a NaN
        with the reason at this one step. A quantity that is not in the state starts anew, with a
        note. ``ValueError`` names a quantity that is only in the state, unless ``strict`` is false,
        and a quantity that can't continue from its state.
        """
        load_tracking(self._tracking, state, strict)

    def close(self) -> None:
        """Record the last update, and close the run's file. The history can still be read."""
        with unseen():
            self._tracking.close()
