"""Exceptions that are raised anywhere inside gradlens while a network is trained.

``python -m tests.cases.injected_exceptions`` raises one in each function of gradlens that training
calls, in one of its calls, and compares with training without gradlens.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from backpack import extend
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.quantities import Quantity
from gradlens.quantities.quantity import Phase
from gradlens.reductions import Reduction

STEPS = 4


class InjectedError(Exception):
    """What is raised on purpose."""


def inject() -> Any:
    raise InjectedError("on purpose")


# Quantities that fail.


@dataclass(eq=False)
class AllPhases(Quantity):
    """Raises an exception in the method that is ``failing``, at step 1."""

    phases = tuple(Phase)
    needs = ("loss",)
    retains_gradients = True

    failing: str = ""

    def _at(self, method: str, global_step: int) -> None:
        if method == self.failing and global_step == 1:
            inject()

    def should_compute(self, global_step: int) -> bool:
        self._at("should_compute", global_step)
        return True

    def start(self, parameters: Any) -> None:
        self._at("start", 1)

    def adapt_to(self, step: Any) -> None:
        self._at("adapt_to", step.global_step)

    def before_backward(self, curvature: Any) -> Any:
        self._at("before_backward", curvature.global_step)

    def after_backward(self, step: Any, earlier: Any) -> Any:
        self._at("after_backward", step.global_step)

    def after_update(self, step: Any, update: Any, earlier: Any) -> Any:
        self._at("after_update", step.global_step)

    def at_next_step(self, start: Any, update: Any, end: Any, earlier: Any) -> Any:
        self._at("at_next_step", start.global_step)
        return object() if self.failing == "recording" and start.global_step == 1 else 1.0

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        self._at("reductions_at", global_step)
        return ()

    def extension_hooks(self, global_step: int) -> list[Callable[[nn.Module], None]]:
        self._at("extension_hooks", global_step)
        return [lambda module: self._at("a hook on a module", global_step)]


# Training.


def network() -> nn.Module:
    """Extended by BackPACK, for hooks of extensions."""
    layers = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )
    return extend(layers)  # type: ignore[no-any-return]


def train(
    tracked: list[Quantity] | None, before: Callable[[], Any] = lambda: None, **options: Any
) -> tuple[list[Tensor], Cockpit | None]:
    """Losses, gradients, weights and buffers of all steps, and the cockpit."""
    torch.manual_seed(0)
    model, loss_function = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    cockpit = None
    if tracked is not None:
        cockpit = Cockpit(model, tracked, loss_function=loss_function, **options)
    numbers = []
    before()
    for step in range(STEPS):
        # Without a gradient of the inputs, torch warns of BackPACK's hooks.
        inputs = torch.randn(4, 1, 4, 4, requires_grad=True)
        labels = torch.randint(3, (4,))
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        if cockpit is None:
            loss.backward()
        else:
            with cockpit(step, loss=loss, optimizer=optimizer):
                loss.backward()
        numbers += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        numbers += [each.clone() for each in model.state_dict().values()]
        numbers.append(torch.get_rng_state())
    return numbers, cockpit


PLAIN, _ = train(None)


def is_same(numbers: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(numbers, PLAIN, strict=True))


# An exception anywhere in gradlens.

PACKAGE = str(Path(gradlens.__file__).parent)

OUTERMOST = {
    # Called by the user's loop or by torch: what they call is contained.
    *("Cockpit.__call__", "Cockpit.__call__.<locals>.<dictcomp>"),
    *("TrackedStep.__init__", "TrackedStep.__enter__", "TrackedStep.__exit__"),
    *("TrackedStep._enter", "TrackedStep._exit", "TrackedStep._finish"),
    *("LossFactor.finding", "LossFactor._follow", "LossFactor._intercept", "LossFactor._receive"),
    *("Gradients.begin", "Gradients.called_on", "Gradients.receive_factor"),
    *("BackwardPass._reach", "ModelCalls.__call__"),
    *("Reducer._accumulated", "Reducer._complete"),
    "PendingUpdate.__init__.<locals>.<lambda>",
    *("PendingUpdate._stepped", "PendingUpdate.resolve"),
    "Tracking.close",
    # Checks of what the user has passed.
    *("step_number", "check_extensions", "checked_info", "checked_info.<locals>.<dictcomp>"),
    *(
        "_loss",
        "_optimizer",
        "StepValues.check_needs",
        "Run.has_recorded",
    ),
    # Hooks on nodes, which contain what they call.
    *("GraphLosses.reach", "BackwardPass._hand_on", "BackwardPass._arrive", "recompute"),
    "BackwardPass._hand_on.<locals>.<listcomp>",
    *("OwnedHook.__call__", "OwnedHook.owner", "is_traced", "in_transform"),
    *("BackwardCall.__torch_function__", "_release", "keeps_graph"),
    # What is looked up before a step, or to see that nothing has changed.
    *("_bits", "_sum_of_bits", "sums_of_bits"),
    "sums_of_bits.<locals>.<dictcomp>",
    # What a context is made of before anything can be contained.
    *("GradientScale.__init__", "unscaled_optimizers", "unscaled_optimizers.<locals>.<setcomp>"),
    *("StepValues.__init__", "unseen"),
}


def everything() -> list[Quantity]:
    return [
        *gradlens.configuration("full"),
        quantities.OutputNorm(),
        quantities.OutputGradientGeometry(),
        quantities.GradNoiseScale(),
        AllPhases(),
    ]


@contextmanager
def traced(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[Callable[[], None]]:
    before = sys.gettrace()
    try:
        yield lambda: sys.settrace(trace)
    finally:
        sys.settrace(before)


def is_inner(code: CodeType) -> bool:
    """Whether a function of gradlens is neither the boundary's nor outermost."""
    if not code.co_filename.startswith(PACKAGE) or code.co_qualname in OUTERMOST:
        return False
    return "boundary" not in code.co_filename and "<genexpr>" not in code.co_qualname


@cache
def functions_called() -> dict[CodeType, int]:
    """The functions of gradlens that training calls, and how often."""
    found: dict[CodeType, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_inner(frame.f_code):
            found[frame.f_code] = found.get(frame.f_code, 0) + 1

    with traced(trace) as start, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train(everything(), before=start)
    return found


def problem_with(code: CodeType, call: int) -> str:
    """What is wrong if a function raises an exception when it is called for that time."""
    calls = 0

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is code
        if event == "call" and frame.f_code is code and calls == call:
            sys.settrace(None)  # The rest of training is faster without.
            inject()

    with traced(trace) as start, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            numbers, _ = train(everything(), before=start)
        except InjectedError:
            return "it is raised in the user's loop"
    return "" if is_same(numbers) else "training is another one"


def main() -> None:
    """Raise an exception in each function, and print what was found."""
    torch.set_num_threads(1)
    source, started = random.Random(0), time.perf_counter()
    functions = functions_called()
    found = {
        code.co_qualname: problem_with(code, source.randint(1, calls))
        for code, calls in functions.items()
    }
    problems = {name: problem for name, problem in found.items() if problem}
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    seconds = time.perf_counter() - started
    print(f"{len(functions)} functions in {seconds:.0f} s, {len(problems)} wrong")
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
