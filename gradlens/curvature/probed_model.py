"""The curvature of a probe's loss under a model, at the parameters of each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from gradlens.backpack_adapter.layer_hooks import HookInstaller
from gradlens.curvature.curvature import Curvature
from gradlens.curvature.data_curvature import BatchCurvatures, DataCurvature
from gradlens.curvature.loss_over_data import BatchLoss, LossOverData
from gradlens.curvature.probe import Probe
from gradlens.graph.torch_private import uncompiled_backward
from gradlens.samples.plan import Plans


@final
class ProbedModel:
    """A probe and the model that it is used with.

    The data and the loss are checked at the first step, which takes one more forward pass, and one
    more of the first batch.
    """

    def __init__(self, probe: Probe, model: nn.Module) -> None:
        self._probe = probe
        self._model = model
        self._loss: LossOverData | None = None
        self._plans = Plans()
        function: Any = probe.loss_function
        losses = [function] if isinstance(function, nn.Module) else []
        self._layer_hooks = HookInstaller([model, *losses])
        self._layer_hooks.install_if(False)

    @contextmanager
    def curvature(
        self,
        global_step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None = None,
    ) -> Iterator[Curvature]:
        """A context with the curvature at the parameters' present values.

        Raises ``ValueError`` as ``LossOverData`` does, and whatever the model raises.
        """
        mode = self._probe.mode_of(self._model)
        with self._layer_hooks.installed(), mode, uncompiled_backward():
            if self._loss is None:
                self._loss = self._probe.loss_of(self._model)
            loss = self._loss
            batches = BatchCurvatures(loss, global_step, parameters, self._model, self._plans)
            if loss.batches > 1:
                yield DataCurvature(batches, global_step, parameters, optimizer)
            else:
                found: list[BatchLoss] = []
                loss.each(found.append)
                yield batches.of(found[0], optimizer)

    def close(self) -> None:
        """Forget the hooks on layers."""
        self._layer_hooks.close()


@final
class ProbedModels:
    """The probes of a run, each with its model once it is used."""

    def __init__(self) -> None:
        self._found: dict[Probe, ProbedModel] = {}

    def of(self, probe: Probe, model: nn.Module) -> ProbedModel:
        """The probe with the model, the same at each call."""
        if probe not in self._found:
            self._found[probe] = ProbedModel(probe, model)
        return self._found[probe]

    def close(self) -> None:
        """Forget the hooks on layers."""
        for probed in self._found.values():
            probed.close()
