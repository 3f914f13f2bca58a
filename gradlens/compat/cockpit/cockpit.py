"""cockpit's class ``Cockpit``, around gradlens's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.cockpit.cockpit import Cockpit as TrackingCockpit
from gradlens.cockpit.tracked_step import TrackedStep
from gradlens.compat.cockpit.quantities import Output
from gradlens.compat.cockpit_log import array_as_json, output_of
from gradlens.history.history import History
from gradlens.history.run_file import OwnFiles
from gradlens.quantities.quantity import Quantity

_LOGS: dict[Path, Path] = {}
"""By the path that ``write`` was called with: the file that it has written in this process."""


def log_of(logpath: str | Path) -> Path:
    """The file that ``write(logpath)`` has written in this process; otherwise the path itself."""
    return _LOGS.get(Path(logpath).absolute(), Path(logpath))


class Cockpit:
    """Tracks quantities as ``gradlens.Cockpit`` does, with cockpit's names and forms of values.

    ``params`` and ``quantities`` are as in cockpit: without quantities, nothing is tracked.
    ``options`` are further arguments of ``gradlens.Cockpit``, such as ``loss_reduction="sum"``.
    """

    BACKPACK_CONV_SAVE_MEMORY = True
    """Has no effect: per-sample gradients of convolutions take bounded memory in either case."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        quantities: Iterable[Quantity] | None = None,
        **options: Any,
    ) -> None:
        self.params = list(params)
        self.quantities: list[Quantity] = []
        self._options = options
        self._files = OwnFiles()
        for quantity in quantities or ():
            self.add(quantity)

    def add(self, quantity: Quantity) -> None:
        """Track another quantity; possible until the first context is entered.

        ``ValueError`` if it is no quantity, ``RuntimeError`` if it comes too late.
        """
        if not isinstance(quantity, Quantity):
            raise ValueError(
                f"{quantity!r} is no quantity: pass an instance, such as Loss(linear(1))"
            )
        if "_tracking" in vars(self):
            raise RuntimeError(
                f"{quantity.name} comes after the first step: add quantities before it, or track "
                "this one by a second cockpit, whose context can be inside that of the first"
            )
        self.quantities.append(quantity)

    @cached_property
    def _tracking(self) -> TrackingCockpit:
        """gradlens's cockpit, which is made when quantities are complete."""
        tracking = TrackingCockpit(self.params, self.quantities, **self._options)
        for quantity in self.quantities:
            if isinstance(quantity, Output):
                quantity.read_from(tracking)
        return tracking

    @property
    def history(self) -> History:
        """Everything recorded so far, in gradlens's own forms."""
        return self._tracking.history

    def __call__(
        self,
        global_step: int,
        *exts: BackpropExtension,
        info: Mapping[str, Any] | None = None,
        debug: bool = False,
    ) -> TrackedStep:
        """The context for one step's backward pass."""
        return self._tracking(global_step, *exts, info=info, debug=debug)

    def create_graph(self, global_step: int) -> bool:
        """Whether backward needs ``create_graph=True`` at this step: never."""
        return False

    def log(self, global_step: int, *values: Any, **named: Any) -> None:
        """Record what the training loop has found, as ``gradlens.Cockpit.log``."""
        self._tracking.log(global_step, *values, **named)

    @property
    def output(self) -> dict[int, dict[str, Any]]:
        """As ``get_output``."""
        return self.get_output()

    def get_output(self) -> dict[int, dict[str, Any]]:
        """All values so far in cockpit's forms: global step -> name -> value."""
        return output_of(self.history)

    def write(self, logpath: str | Path) -> Path:
        """Write ``get_output`` to ``{logpath}.json`` as JSON, and return where it is.

        A later call writes the file anew; one that isn't this cockpit's is kept, and the log is
        written beside it, with a warning. ``CockpitPlotter().plot(logpath)`` draws what was
        written. ``cockpit.history.write("run.jsonl")`` keeps more: notes, reasons of NaN, and
        facts.
        """
        text = json.dumps(self.get_output(), default=array_as_json, indent=4)
        written = self._files.write(f"{logpath}.json", [text.encode()])
        _LOGS[Path(logpath).absolute()] = written
        return written
