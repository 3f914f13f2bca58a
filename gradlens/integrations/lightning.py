"""A callback of Lightning's ``Trainer`` that tracks a training."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradlens.cockpit.aggregation import Aggregate
from gradlens.cockpit.arguments import checked_quantities
from gradlens.cockpit.cockpit import Cockpit
from gradlens.history.histograms import Histogram
from gradlens.integrations.callbacks import (
    HOW_TO_PASS,
    BackwardPasses,
    LatestNumbers,
    arguments_of_callback,
)
from gradlens.messages import GradlensWarning
from gradlens.quantities.quantity import Quantity
from gradlens.sinks import Sink, TensorBoard, WandB

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
except ImportError as error:
    raise ImportError(
        "CockpitCallback needs Lightning, version 2 or later: pip install 'gradlens[lightning]'"
    ) from error


class CockpitCallback(Callback):
    """Tracks the trainings of a ``Trainer``, each with a ``Cockpit`` of its own.

    ``options`` are the other arguments of ``gradlens.Cockpit``. The model is the
    ``LightningModule``, or its submodule with the dotted name ``module``. Global steps are those
    of the trainer's loggers: optimizer steps under automatic optimisation, batches under manual
    optimisation, where a step of several batches has the number of the first one. Where a batch has
    several backward passes, ``backward_pass`` says which of them is tracked, counted from 0;
    without it, that is the first one, with a warning.

    With ``log``, numbers are passed on to the trainer's loggers, each under its own step and at
    most every ``log_every_n_steps``, as "gradlens/NormTest", or "gradlens/generator/NormTest" with
    ``module="generator"``. The progress bar shows those that ``prog_bar`` names, such as
    "NormTest", and callbacks find these in ``trainer.callback_metrics``. Of several processes, the
    first one alone has them.

    A ``fit`` that continues a training (``ckpt_path=...``, or a second ``fit`` of the same trainer)
    continues the run's file and the quantities. ``fast_dev_run`` writes no file.

    ``TypeError`` if an option is none of the cockpit's. When training starts, ``ValueError`` if the
    strategy divides the model's parameters in a way that can't be tracked.
    """

    def __init__(
        self,
        quantities: Iterable[Quantity | Aggregate | str] | str | None = None,
        *,
        module: str | None = None,
        backward_pass: int | None = None,
        log: bool = True,
        prog_bar: Collection[str] = (),
        **options: Any,
    ) -> None:
        inspect.signature(Cockpit).bind(None, quantities, **options)
        self._quantities = None if quantities is None else checked_quantities(quantities)
        self._module = module
        self._passes = BackwardPasses(backward_pass)
        self._logs = log
        self._prefix = "gradlens" if module is None else f"gradlens/{module}"
        self._latest = LatestNumbers(prog_bar, prefix=self._prefix)
        self._options = options
        self._cockpit: Cockpit | None = None
        self._state: dict[str, Any] = {}
        """That of the cockpit at the end of a training, or of a checkpoint."""
        self._is_training = False
        self._step = 0
        self._goes_on = False
        """Whether the step has a later batch."""
        self._batch: Any = None
        self._contexts = ExitStack()

    @property
    def cockpit(self) -> Cockpit:
        """That of the present training, or the last one; ``RuntimeError`` before the first."""
        if self._cockpit is None:
            raise RuntimeError("there is no cockpit before training starts: call trainer.fit first")
        return self._cockpit

    def context_arguments(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor, batch: Any
    ) -> dict[str, Any]:
        """The keyword arguments of the context around a backward pass, which ``loss`` is passed to.

        Override it to add others, such as ``"batch_size": len(batch["labels"])`` or
        ``"info": {"ids": batch["id"]}``. ``batch`` is that of ``training_step``.
        """
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        return {
            "loss": loss,
            "loss_scale": scale / trainer.accumulate_grad_batches,
            "optimizer": self._optimizer(trainer),
            "scaler": scaler,
            "accumulating": self._accumulates(trainer),
        }

    # Hooks of the trainer, in the order in which they are called.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the cockpit, when the model is on its device and in its wrapper."""
        self._close()
        state = self._state if trainer.global_step else {}
        self._cockpit = self._new_cockpit(trainer, pl_module)
        self._is_training, self._goes_on = True, False
        if state:
            try:
                self._cockpit.load_state_dict(state, strict=False)
            except ValueError as error:
                text = f"gradlens: quantities start anew, since {error}"
                warnings.warn(text, GradlensWarning, stacklevel=2)
        self._state = {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Enter the context of the step's forward pass."""
        self._contexts.close()
        if pl_module.automatic_optimization:
            self._step = trainer.global_step
        elif not self._goes_on:
            self._step = trainer.fit_loop.total_batch_idx
        self._passes.begin_batch()
        self._batch = batch
        self._contexts.enter_context(self.cockpit.forward(self._step))

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Enter the context of the step, if this is the backward pass that is tracked."""
        if self._passes.begin():
            self._contexts.close()
            arguments = self.context_arguments(trainer, pl_module, loss, self._batch)
            with arguments_of_callback():
                self._contexts.enter_context(self.cockpit(self._step, **arguments))
            self._goes_on = arguments["accumulating"]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the context of the step."""
        if self._passes.is_tracked:
            self._contexts.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave the context of a forward pass that no backward pass followed, and log numbers."""
        self._contexts.close()
        self._batch = None
        for name, value in self._latest.take().items():
            pl_module.log(name, value, True, logger=False, rank_zero_only=trainer.world_size > 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the statistics of each ``Aggregate`` over the epoch."""
        self._contexts.close()
        self.cockpit.tick_epoch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the cockpit."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the open context with the exception, and close the cockpit."""
        self._contexts.__exit__(type(exception), exception, exception.__traceback__)
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the cockpit, if the trainer was stopped by one of Lightning's tuners."""
        self._close()

    # Checkpoints.

    @property
    def state_key(self) -> str:
        """What the state is called in a checkpoint."""
        return self._generate_state_key(module=self._module)

    def state_dict(self) -> dict[str, Any]:
        """The cockpit's state for a checkpoint."""
        return self.cockpit.state_dict() if self._is_training else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next ``fit`` continue from the state of a checkpoint."""
        self._state = state_dict

    # What the cockpit is given.

    def _new_cockpit(self, trainer: Trainer, pl_module: LightningModule) -> Cockpit:
        options = {"how_to_pass": HOW_TO_PASS, **self._options}
        if trainer.fast_dev_run:
            options["run"] = None
        if trainer.global_step:
            options["resume"] = True
        options["sinks"] = [*options.get("sinks", ()), *self._sinks(trainer)]
        # Quantities belong to one cockpit.
        return Cockpit(self._model(trainer, pl_module), deepcopy(self._quantities), **options)

    def _sinks(self, trainer: Trainer) -> list[Sink]:
        """Those for the trainer's loggers and progress bar."""
        shown: list[Sink] = [] if trainer.barebones else [self._latest]
        every = trainer.log_every_n_steps
        loggers = trainer.loggers if self._logs and every else []
        return shown + [sink_of(each, prefix=self._prefix, every=every) for each in loggers]

    def _model(self, trainer: Trainer, pl_module: LightningModule) -> nn.Module:
        """The model inside the strategy's wrapper; ``ValueError`` if that can't be tracked."""
        model = trainer.strategy.model
        strategy = type(trainer.strategy).__name__
        if model is not pl_module and not isinstance(model, DistributedDataParallel):
            raise ValueError(STRATEGY.format(strategy=strategy, model=type(model).__name__))
        if self._module is None:
            return model
        if trainer.world_size > 1:
            raise ValueError(MODULE.format(module=self._module, strategy=strategy))
        return pl_module.get_submodule(self._module)

    def _optimizer(self, trainer: Trainer) -> Optimizer | None:
        """The optimizer of tracked parameters, if there is one such."""
        tracked = {id(parameter) for parameter in self.cockpit.parameters.values()}
        held = [
            (each, {id(parameter) for group in each.param_groups for parameter in group["params"]})
            for each in trainer.optimizers
        ]
        found = [optimizer for optimizer, parameters in held if tracked & parameters]
        return found[0] if len(found) == 1 and isinstance(found[0], Optimizer) else None

    def _accumulates(self, trainer: Trainer) -> bool:
        """Whether the optimizer's step comes after a later batch."""
        batches = trainer.fit_loop.batch_idx + 1
        is_last = trainer.is_last_batch or batches == trainer.num_training_batches
        return batches % trainer.accumulate_grad_batches > 0 and not is_last

    def _close(self) -> None:
        if self._is_training:
            self._is_training = False
            self._contexts.close()
            try:
                self._state = self.cockpit.state_dict()
            finally:
                self.cockpit.close()


def sink_of(logger: Logger, **options: Any) -> Sink:
    """The sink that writes to a logger; ``options`` are those of ``Sink``.

    TensorBoard and W&B get histograms and notes, other loggers numbers alone.
    """
    if isinstance(logger, TensorBoardLogger):
        return TensorBoard(logger.experiment, **options)
    if isinstance(logger, WandbLogger):
        return WandB(logger.experiment, **options)
    return LoggedNumbers(logger, **options)


@final
class LoggedNumbers(Sink):
    """Passes numbers on to a logger, each with its own step."""

    def __init__(self, logger: Logger, **options: Any) -> None:
        super().__init__(**options)
        self._logger = logger

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        if scalars:
            self._logger.log_metrics(dict(scalars), step)

    def note(self, step: int, text: str) -> None:
        """Loggers have no place for it."""

    def close(self) -> None:
        self._logger.save()


STRATEGY = (
    "{strategy} wraps the model in {model}, which joins or divides its parameters in a way that "
    'gradlens can\'t track: use one device, strategy="ddp", or ModelParallelStrategy with '
    "fully_shard in configure_model, or leave CockpitCallback out"
)
MODULE = (
    'module="{module}" can\'t be tracked under {strategy}, whose processes exchange gradients of '
    "the whole model: track the whole model, without module=..., or train on one device"
)
