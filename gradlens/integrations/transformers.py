"""A callback of the ``Trainer`` of transformers that tracks a training."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from gradlens.cockpit.aggregation import Aggregate
from gradlens.cockpit.arguments import checked_quantities
from gradlens.cockpit.cockpit import Cockpit
from gradlens.integrations.callbacks import (
    HOW_TO_PASS,
    BackwardPasses,
    LatestNumbers,
    RecordedSampler,
    arguments_of_callback,
)
from gradlens.messages import GradlensWarning
from gradlens.quantities.quantity import Quantity

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_utils import get_last_checkpoint
    from transformers.training_args import TrainingArguments
except ImportError as error:
    raise ImportError(
        "CockpitCallback needs transformers and accelerate: pip install 'gradlens[transformers]'"
    ) from error

STATE_FILE = "gradlens.pt"
"""The file with the cockpit's state in each of the Trainer's checkpoints."""


class CockpitCallback(TrainerCallback):
    """Tracks the trainings of a ``Trainer``, each with a ``Cockpit`` of its own.

    It is made with the trainer, whose ``train`` it replaces, and added to it::

        trainer.add_callback(CockpitCallback(trainer, quantities, run="run.jsonl"))

    ``options`` are the other arguments of ``gradlens.Cockpit``. Global steps are those of the
    trainer, from 0 on: a step consists of all micro-batches of one update. Where a micro-batch has
    several backward passes, ``backward_pass`` says which of them is tracked, counted from 0;
    without it, that is the first one, with a warning. With ``ids``, samples are known by their
    numbers in the data set, as ``gradlens samples`` lists them; the epoch in which a training is
    resumed is left out. With ``log``, the latest values are added to
    the trainer's own logs of the loss, as ``gradlens/NormTest`` and the like.

    ``cockpit`` is that of the present training, or of the last one; ``None`` before the first.
    Checkpoints contain its state, and a training that is resumed from one continues the quantities
    and the run's file. Another training of the same trainer writes to a file of its own:
    ``run-2.jsonl`` and so on.

    ``TypeError`` if an option is none of the cockpit's. When training starts, ``ValueError`` if the
    model's parameters are divided or copied in a way that can't be tracked.
    """

    def __init__(
        self,
        trainer: Trainer,
        quantities: Iterable[Quantity | Aggregate | str] | str | None = None,
        *,
        run: str | Path | None = None,
        backward_pass: int | None = None,
        ids: bool = False,
        log: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"{type(trainer).__name__} is no transformers.Trainer: {USE}")
        inspect.signature(Cockpit).bind(None, quantities, **options)
        self.cockpit: Cockpit | None = None
        self._trainer = trainer
        self._quantities = None if quantities is None else checked_quantities(quantities)
        self._run = None if run is None else Path(run)
        self._ids = ids
        self._log = log
        self._options = options
        self._is_training = False
        self._trainings = 0
        self._checkpoint: Path | None = None
        self._latest = LatestNumbers()
        self._contexts = ExitStack()
        self._step = 0
        self._passes = BackwardPasses(backward_pass)
        self._batch: Any = None
        self._batches: BatchSampler | None = None
        self._sampler: RecordedSampler | None = None
        self._loader_batch_size = 0
        self._numbers: list[int] = []
        # No event of a callback says that training has failed, or which checkpoint it resumes.
        trainer.train = partial(self._train, trainer.train)  # type: ignore[method-assign]

    def _train(self, train: Any, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does, and close the cockpit in any case."""
        given = inspect.signature(train).bind(*args, **kwargs).arguments
        folder = given.get("resume_from_checkpoint")
        if folder is True:
            folder = get_last_checkpoint(str(self._trainer.args.output_dir))
        self._checkpoint = Path(folder) if folder else None
        self._call_first()
        try:
            return train(*args, **kwargs)
        except BaseException as error:
            self._contexts.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._close()

    def _call_first(self) -> None:
        """Let callbacks that report logs be called later, since they are called in order."""
        callbacks = self._trainer.callback_handler.callbacks
        if self not in callbacks:
            warnings.warn(NOT_ADDED, GradlensWarning, stacklevel=3)
            return
        callbacks.remove(self)
        callbacks.insert(0, self)

    # Events of the trainer, in the order in which they come.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make a cockpit; with ``auto_find_batch_size``, this comes again for a smaller batch."""
        self._close()
        self._check_model()
        resumes = state.global_step > 0
        if not resumes:
            self._trainings += 1
        self.cockpit = self._new_cockpit(resumes)
        if resumes:
            self._load_state(self.cockpit)
        self._is_training = True
        self._begin_batch(state.global_step)
        accelerator = self._trainer.accelerator
        accelerator.backward = partial(self._backward, accelerator.backward)
        step = partial(self._training_step, self._trainer.training_step)
        self._trainer.training_step = step  # type: ignore[method-assign]
        if self._ids:
            self._record_numbers(kwargs.get("train_dataloader"), resumes)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the context of the forward pass."""
        if self._is_training and self.cockpit is not None:
            self._begin_batch(state.global_step)
            self._contexts.close()
            self._contexts.enter_context(self.cockpit.forward(self._step))

    on_substep_end = on_step_begin  # the next micro-batch's

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the statistics of each ``Aggregate`` over the epoch."""
        if self._is_training and self.cockpit is not None:
            self._contexts.close()
            self.cockpit.tick_epoch()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the cockpit's state to the checkpoint."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if self._is_training and self.cockpit is not None and args.should_save and folder.is_dir():
            torch.save(self.cockpit.state_dict(), folder / STATE_FILE)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the latest values to logs of the training loss."""
        if self._log and self._is_training and logs is not None and "loss" in logs:
            found = self._latest.take()
            logs |= found
            state.log_history[-1] |= found

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the cockpit."""
        self._close()

    # Tracking.

    def context_arguments(self, loss: Tensor, batch: Any) -> dict[str, Any]:
        """The keyword arguments of the context around a backward pass, which ``loss`` is passed to.

        Override it to add others, such as ``"batch_size": len(batch["labels"])``. ``batch`` are the
        inputs of ``training_step``, or ``None`` where a trainer has a loop of its own.
        """
        trainer = self._trainer
        return {
            **({"info": {"ids": self._numbers}} if self._numbers else {}),
            "loss": loss,
            "loss_scale": 1 / trainer.current_gradient_accumulation_steps,
            "optimizer": trainer.optimizer,
            "scaler": trainer.accelerator.scaler,
            "accumulating": not trainer.accelerator.sync_gradients,
        }

    def _backward(self, backward: Any, loss: Tensor, **kwargs: Any) -> None:
        """The accelerator's ``backward``, in the context of the step."""
        assert self.cockpit is not None
        step = self._trainer.state.global_step
        if step != self._step:  # trainers with a loop of their own may leave out its beginning
            self._begin_batch(step)
        if not self._passes.begin():
            backward(loss, **kwargs)
            return
        self._contexts.close()
        arguments = self.context_arguments(loss, self._batch)
        with ExitStack() as stack:
            with arguments_of_callback():
                stack.enter_context(self.cockpit(step, **arguments))
            backward(loss, **kwargs)

    def _training_step(self, training_step: Any, model: Any, inputs: Any, *args: Any) -> Tensor:
        """The trainer's ``training_step``, whose inputs are those of the context."""
        self._batch = inputs
        if self._sampler is not None:
            self._numbers = self._sampler.take(self._loader_batch_size)
        try:
            found: Tensor = training_step(model, inputs, *args)
            return found
        finally:
            self._batch, self._numbers = None, []

    def _record_numbers(self, loader: Any, resumes: bool) -> None:
        """Keep the numbers that the sampler of a data loader gives, until the training ends."""
        batches = getattr(loader, "batch_sampler", None)
        if type(batches) is not BatchSampler or self._trainer.args.world_size > 1:
            warnings.warn(NO_NUMBERS.format(loader=type(loader).__name__), GradlensWarning, 2)
            return
        self._batches, self._loader_batch_size = batches, batches.batch_size
        self._sampler = RecordedSampler(batches.sampler, resumes)
        batches.sampler = self._sampler

    def _begin_batch(self, step: int) -> None:
        self._step = step
        self._passes.begin_batch()

    def _close(self) -> None:
        """Leave the model and the accelerator as they were."""
        self._contexts.close()
        if self._is_training and self.cockpit is not None:
            self._is_training = False
            vars(self._trainer.accelerator).pop("backward", None)
            vars(self._trainer).pop("training_step", None)
            if self._batches is not None and self._sampler is not None:
                self._batches.sampler = self._sampler.sampler
                self._batches = self._sampler = None
            self.cockpit.close()

    # What the cockpit is given.

    def _check_model(self) -> None:
        trainer, model = self._trainer, self._trainer.model_wrapped
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            by = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP"
            raise ValueError(DIVIDED.format(by=by))
        if isinstance(model, nn.DataParallel):
            raise ValueError(COPIED)

    def _new_cockpit(self, resumes: bool) -> Cockpit:
        options = {"how_to_pass": HOW_TO_PASS, **self._options}
        if resumes:
            options["resume"] = True
        if self._log:
            self._latest = LatestNumbers()
            options["sinks"] = [*options.get("sinks", ()), self._latest]
        # Quantities belong to one cockpit.
        quantities, run = deepcopy(self._quantities), self._run
        if run is not None and self._trainings > 1:
            run = run.with_stem(f"{run.stem}-{self._trainings}")
        return Cockpit(self._trainer.model_wrapped, quantities, run=run, **options)

    def _load_state(self, cockpit: Cockpit) -> None:
        file = None if self._checkpoint is None else self._checkpoint / STATE_FILE
        if file is None or not file.is_file():
            warnings.warn(NO_STATE.format(file=file), GradlensWarning, stacklevel=2)
            return
        cockpit.load_state_dict(torch.load(file, weights_only=True), strict=False)


USE = "CockpitCallback(trainer, ...) takes the trainer that it is added to"
NOT_ADDED = (
    "gradlens: a CockpitCallback of this trainer isn't among its callbacks, so that it tracks "
    "nothing: call trainer.add_callback(callback)"
)
DIVIDED = (
    "{by} divides the model's parameters among processes in a way that gradlens can't track: train "
    "with one process or with DistributedDataParallel (torchrun), or leave CockpitCallback out"
)
COPIED = (
    "torch.nn.DataParallel copies the model to each GPU, which gradlens can't track: start one "
    "process for each GPU by torchrun or `accelerate launch`, or make only one GPU visible"
)
NO_NUMBERS = (
    "gradlens: ids=True has no effect, since the numbers of samples can't be read off the sampler "
    "of a {loader} in this training: return info={{'ids': ...}} from context_arguments, which an "
    "own subclass of CockpitCallback overrides and which gets the batch"
)
NO_STATE = (
    "gradlens: {file} isn't there, since the checkpoint was saved without CockpitCallback: "
    "quantities that depend on earlier steps start anew"
)
