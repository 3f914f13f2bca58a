"""The cockpit: a with-context around ``loss.backward()``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from backpack import backpack
from backpack.context import CTX
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.history import History, Note, RunFile, Source
from gradlens.individual.consistency import Discrepancy, inconsistent, remark_on
from gradlens.individual.context import UNSEEN, check_loss_reduction, listen, stop_listening
from gradlens.individual.extension import IndividualGradients
from gradlens.individual.gathering import LossReduction, ReducedGradients
from gradlens.individual.tap import extend
from gradlens.plain import to_plain
from gradlens.presets import configuration
from gradlens.quantities import Quantity
from gradlens.step import Step


class Cockpit:
    """Tracks quantities of a training run.

    ``params`` is the model, which is extended on the spot and whose parameters are known by name,
    or an iterable of parameters whose layers have been extended by ``gradlens.extend`` or
    BackPACK's ``extend``. Parameters that need no gradient are left out. ``loss_reduction`` says
    whether the loss is a ``"mean"`` or a ``"sum"`` over the samples. ``run`` is the path of a file
    that values are written to as they come; an existing one is continued with ``resume=True`` and
    is an error otherwise.

    The context is entered at each step, around the backward pass::

        with cockpit(global_step, loss=loss):
            loss.backward()
    """

    def __init__(
        self,
        params: nn.Module | Iterable[nn.Parameter],
        quantities: Iterable[Quantity] | None = None,
        *,
        loss_reduction: LossReduction = "mean",
        run: str | Path | None = None,
        resume: bool = False,
    ) -> None:
        check_loss_reduction(loss_reduction)
        self.quantities = _checked(configuration("economy") if quantities is None else quantities)
        self.loss_reduction: LossReduction = loss_reduction
        self.model = extend(params) if isinstance(params, nn.Module) else None
        self.parameters = _trainable(params)
        self.history = self._history(run, resume)
        self._file = None if run is None else RunFile(run, self.history, resume)
        self._consistent: bool | None = None

    def __call__(
        self,
        global_step: int,
        *extensions: BackpropExtension,
        loss: Tensor | None = None,
        optimizer: Optimizer | None = None,
        batch_size: int | None = None,
        info: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> TrackedStep:
        """The context for one step.

        ``extensions`` are BackPACK extensions of the user's own. ``loss`` and ``optimizer`` are
        needed by the quantities that say so; N is found without ``batch_size``, which is checked
        if given. ``info`` may hold the same under these names, and anything for quantities of the
        user's own. ``debug`` prints what is active.
        """
        known = dict(info or {})
        given = {"loss": loss, "optimizer": optimizer, "batch_size": batch_size}
        known |= {name: value for name, value in given.items() if value is not None}
        return TrackedStep(self, global_step, extensions, known, debug)

    def close(self) -> None:
        """Close the run's file; the history stays readable."""
        if self._file is not None:
            self._file.close()

    def _history(self, run: str | Path | None, resume: bool) -> History:
        sources = {q.name: Source(type(q).__name__, q.view) for q in self.quantities}
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        history = History(sources, shapes)
        if run is not None and resume and Path(run).exists():
            past = History.load(run)
            history.notes.extend(past.notes)
            for name in past.names:
                for step, value in past[name].items():
                    history.append(step, {name: value})
        return history

    def _record(self, global_step: int, values: Mapping[str, Any]) -> None:
        if not values:
            return
        self.history.append(global_step, values)
        if self._file is not None:
            self._file.write_step(global_step, values)

    def _note(self, global_step: int, text: str) -> None:
        """Say something once: as a warning, in the history and in the file."""
        if any(note.text == text for note in self.history.notes):
            return
        note = Note(global_step, text)
        self.history.notes.append(note)
        if self._file is not None:
            self._file.write_note(note)
        warnings.warn(f"gradlens, step {global_step}: {text}", stacklevel=5)


class TrackedStep:
    """One step's context, as ``Cockpit.__call__`` returns it."""

    def __init__(
        self,
        cockpit: Cockpit,
        global_step: int,
        extensions: Sequence[BackpropExtension],
        info: Mapping[str, Any],
        debug: bool,
    ) -> None:
        self._cockpit = cockpit
        self._global_step = global_step
        self._extensions = extensions
        self._info = info
        self._debug = debug
        self._active: list[Quantity] = []
        self._gradients: ReducedGradients | None = None
        self._exit = ExitStack()

    def __enter__(self) -> None:
        step = self._global_step
        self._active = [
            quantity
            for quantity in self._cockpit.quantities
            if quantity.should_compute(step) or quantity.reductions_at(step)
        ]
        if not self._active and not self._extensions:
            return
        self._check_info()
        if self._debug:
            print(f"[Step {step}] active: {', '.join(q.name for q in self._active) or 'nothing'}")
        with self._exit as stack:
            self._enter_extensions(stack)
            self._exit = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()
        if error is not None or not self._active:
            self._drop()
            return
        if self._gradients is not None:
            self._gradients.finish()
        try:
            self._compute()
        finally:
            self._drop()

    def _drop(self) -> None:
        if self._gradients is not None:
            self._gradients.stop()
        self._gradients = None

    def _check_info(self) -> None:
        for quantity in self._active:
            for needed in quantity.needs:
                if needed not in self._info:
                    raise ValueError(
                        f"{quantity.name} needs the {needed} at step {self._global_step}: pass "
                        f"{needed}=... to the context, as in cockpit(global_step, {needed}="
                        f"{needed})"
                    )
        loss = self._info.get("loss")
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss= must be a tensor with one element, got {shape}: pass the loss that "
                "backward is called on (loss.mean() or loss.sum() of individual losses)"
            )

    def _enter_extensions(self, stack: ExitStack) -> None:
        step, cockpit = self._global_step, self._cockpit
        extensions = list(self._extensions)
        hooks = []
        for quantity in self._active:
            extensions += quantity.extensions(step)
            hooks += quantity.extension_hooks(step)
        own = [ext for ext in extensions if isinstance(ext, IndividualGradients)]
        foreign = _distinct([ext for ext in extensions if not isinstance(ext, IndividualGradients)])
        if own:
            self._gradients = self._reduced_gradients()
            stack.callback(self._stop_listening)
            if cockpit.model is not None:
                listen(cockpit.model, self._gradients)
            else:
                foreign.append(IndividualGradients(cockpit.loss_reduction, self._gradients))
        if foreign or hooks:
            # Entering a context of BackPACK replaces the outer one, which may be another cockpit's.
            outer, outer_hook = CTX.get_active_exts(), CTX.get_extension_hook()

            def run_hooks(module: nn.Module) -> None:
                for hook in (outer_hook, *hooks):
                    hook(module)

            stack.enter_context(
                backpack(*outer, *foreign, extension_hook=run_hooks, debug=self._debug)
            )

    def _reduced_gradients(self) -> ReducedGradients:
        wanted = {r for quantity in self._active for r in quantity.reductions_at(self._global_step)}
        if self._cockpit._consistent is None:
            wanted.add(Discrepancy())
        return ReducedGradients(
            self._cockpit.parameters,
            self._cockpit.loss_reduction,
            wanted,
            self._info.get("batch_size"),
            trust_gradients=self._cockpit._consistent is True,
        )

    def _stop_listening(self) -> None:
        if self._cockpit.model is not None and self._gradients is not None:
            stop_listening(self._cockpit.model, self._gradients)

    def _compute(self) -> None:
        step = self._step()
        failure: Exception | None = None
        values: dict[str, Any] = {}
        self._take_notes(step)
        with torch.no_grad():
            for quantity in self._active:
                try:
                    self._compute_one(quantity, step, values)
                except Exception as error:  # what the others have found is kept
                    failure = failure or error
        self._cockpit._record(self._global_step, values)
        if self._gradients is not None and self._gradients.error is not None:
            failure = self._gradients.error
        if failure is not None:
            raise failure

    def _compute_one(self, quantity: Quantity, step: Step, values: dict[str, Any]) -> None:
        if quantity.should_compute(step.global_step):
            try:
                value = to_plain(quantity.compute(step))
            except TypeError as error:
                raise TypeError(f"{quantity.name}: {error}") from error
            values[quantity.name] = value
            if quantity.verbose:
                print(f"[Step {step.global_step}] {quantity.name}: {value}")
        quantity.update(step)

    def _step(self) -> Step:
        gradients, info = self._gradients, self._info
        return Step(
            self._global_step,
            self._cockpit.parameters,
            info.get("batch_size") if gradients is None else gradients.batch_size,
            info.get("loss"),
            info.get("optimizer"),
            info,
            {} if gradients is None else gradients.values,
            {} if gradients is None else gradients.means,
        )

    def _take_notes(self, step: Step) -> None:
        gradients, cockpit = self._gradients, self._cockpit
        if gradients is None or gradients.error is not None or not step.means:
            return
        for layer in sorted(gradients.coupling):
            cockpit._note(step.global_step, COUPLED.format(layer=layer))
        absent = [name for name in cockpit.parameters if name not in step.means]
        if absent:
            reasons = {name: gradients.missing.get(name, UNSEEN) for name in absent}
            cockpit._note(step.global_step, _coverage(cockpit.parameters, reasons))
        if cockpit._consistent is None:
            wrong = inconsistent(step.by_parameter(Discrepancy()), gradients.epsilon)
            cockpit._consistent = None if wrong is None else not wrong
            if wrong:
                cockpit._note(step.global_step, remark_on(wrong))


COUPLED = (
    "layer {layer!r} normalises over the batch, which couples the samples: individual gradients "
    "are not defined. What is tracked are each sample's contributions to the batch gradient; put "
    "the layer into eval mode for values of samples on their own"
)


def _coverage(parameters: Mapping[str, nn.Parameter], reasons: Mapping[str, str]) -> str:
    total = sum(parameter.numel() for parameter in parameters.values())
    absent = sum(parameters[name].numel() for name in reasons)
    share = 100 * (total - absent) / total
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    details = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    return (
        f"individual gradients cover {share:.4g} % of the trainable parameters, and quantities "
        f"that use them describe these alone. Missing are {details}"
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
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if not trainable:
        raise ValueError(
            "no parameter needs a gradient (all are frozen, or there is none): there is nothing "
            "to track"
        )
    return trainable


def _distinct(extensions: Iterable[BackpropExtension]) -> list[BackpropExtension]:
    """One of each class, the user's own first."""
    by_class: dict[type[BackpropExtension], BackpropExtension] = {}
    for extension in extensions:
        by_class.setdefault(type(extension), extension)
    return list(by_class.values())
