"""A training script as ``gradlens verify`` runs it: each optimizer step is written down in bits.

``python -m gradlens.cli.observed_script FOLDER tracked|plain STEPS SCRIPT [ARGUMENTS]`` ends the
script after so many steps, or never for 0.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradlens.cockpit import cockpit as cockpits
from gradlens.cockpit.cockpit import Cockpit
from gradlens.graph.undisturbed import random_states, training_kept
from gradlens.numerics.checksums import sums_of_bits
from gradlens.numerics.tensors import on_host
from gradlens.numerics.unavailable import first_line
from gradlens.torch_private import unseen

SEED = 0
"""Of all generators before the script begins, whose own seeds replace it."""


class Enough(BaseException):
    """The script has made as many optimizer steps as were asked for."""


class Observed(Cockpit):
    """A cockpit whose file is in ``folder``, so that no run of the user's is touched."""

    made: list[Cockpit]
    folder: Path

    def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
        if options.get("run") is not None:
            options["run"] = self.folder / f"own{len(self.made)}.jsonl"
        super().__init__(params, *arguments, **options)
        self.made.append(self)


class Untracked(Cockpit):
    """A cockpit that records nothing, has no hooks and draws no random numbers."""

    made: list[Cockpit]

    def __init__(self, params: Any, *_: Any, **__: Any) -> None:
        given = [*(params.parameters() if isinstance(params, nn.Module) else params)]
        with training_kept(given):
            super().__init__(
                params if isinstance(params, nn.Module) else given, [], facts=False, autopsy=False
            )
        self._tracking.remove_hooks()
        self.made.append(self)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def forward(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def evaluation(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        pass


class Trace:
    """Writes down each optimizer step: its time, and sums of the bits of what it changes.

    The gradients are those before the step, all else is as after it. ``made`` are the script's
    cockpits, whose models give names to parameters, and have buffers. The time that this takes
    isn't part of the steps' times.
    """

    def __init__(self, path: Path, steps: int, made: list[Cockpit]) -> None:
        self._file = path.open("w", buffering=1)  # by lines, of which a killed process leaves all
        self._steps, self._count = steps, 0
        self._made = made
        self._own = 0.0
        self._keys: list[str] = []
        self._gradients: Mapping[str, int] = {}

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer is about to step."""
        if torch.compiler.is_compiling():
            return
        began = _now(optimizer)
        named = self._named(optimizer).items()
        found = {f"gradient of {name}": p.grad for name, p in named if p.grad is not None}
        self._gradients = _bits(found)
        self._own += _now(optimizer) - began

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """It has stepped; ``Enough`` if no further step is wanted."""
        if torch.compiler.is_compiling():
            return
        began = _now(optimizer)
        self._count += 1
        named = self._named(optimizer)
        buffers = {
            f"buffer {name}{f' of model {number}' if number else ''}": each
            for number, model in enumerate(self._models())
            for name, each in model.named_buffers()
        }
        drawn = zip(GENERATORS, random_states(named.values()), strict=True)
        found = {
            **self._gradients,
            **_bits({f"parameter {name}": each for name, each in named.items()}),
            **_bits(buffers),
            **{name: sha256(repr(state).encode()).hexdigest() for name, state in drawn},
        }
        if [*found] != self._keys:
            self._keys = [*found]
            self._write(self._keys)
        self._write([began - self._own, *found.values()])
        self._own += _now(optimizer) - began
        if self._count == self._steps:
            raise Enough

    def end(self, failure: str) -> None:
        """The script has ended; with which ``failure``, if it has failed."""
        self._write({"failure": failure, "cockpits": len(self._made)})
        self._file.close()

    def _write(self, line: Any) -> None:
        self._file.write(f"{json.dumps(line)}\n")

    def _named(self, optimizer: Optimizer) -> dict[str, Tensor]:
        names = {id(p): name for model in self._models() for name, p in model.named_parameters()}
        found: dict[str, Tensor] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(p), "")
            is_new = name and name not in found  # two models may have parameters of one name
            found[name if is_new else f"number {len(found)}"] = p
        return found

    def _models(self) -> list[nn.Module]:
        models = (cockpit.model for cockpit in self._made)
        return [*dict.fromkeys(model for model in models if model is not None)]


GENERATORS = ("Python's random numbers", "numpy's random numbers", "torch's random numbers")


def _bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    with unseen():
        dense = {
            n: t.detach().to_dense() if t.is_sparse else t.detach() for n, t in tensors.items()
        }
        return {name: int(each) for name, each in on_host(sums_of_bits(dense)).items()}


def _now(optimizer: Optimizer) -> float:
    """Seconds, after all that an accelerator was told to do, if the parameters are on one."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    found = torch.accelerator.current_accelerator() if devices else None
    for device in devices:
        if found is not None and device.type == found.type:
            torch.accelerator.synchronize(device)
    return time.perf_counter()


def main(folder: Path, is_tracked: bool, steps: int, script: str, *arguments: str) -> None:
    """Run the script as ``python SCRIPT ARGUMENTS`` would, and write down what it does."""
    made = list[Cockpit]()
    kind = Observed if is_tracked else Untracked
    own: Any = type("Cockpit", (kind,), {"made": made, "folder": folder})
    # In the place of the class, before the script or an integration imports it.
    cockpits.Cockpit = own  # type: ignore[misc]
    trace = Trace(folder / "trace.jsonl", steps, made)
    register_optimizer_step_pre_hook(trace.before)
    register_optimizer_step_post_hook(trace.after)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    failure = ""
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            failure = f"exit code {stopped.code}"
    except Exception as error:
        traceback.print_exc()
        failure = first_line(error)
    for number, cockpit in enumerate(made if is_tracked else ()):
        cockpit.history.write(folder / f"history{number}.jsonl")
    trace.end(failure)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "tracked", int(sys.argv[3]), *sys.argv[4:])
