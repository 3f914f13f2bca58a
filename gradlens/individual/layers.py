"""A model's modules with their taps, as one walk through it finds them, and what they tell of N."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.nn.modules.loss import _Loss

from gradlens.individual.graph import Node
from gradlens.individual.recomputed import batch_axis
from gradlens.individual.rules import has_rule, uses_batch_statistics
from gradlens.individual.tap import CallListener, Tap, tap_of


@dataclass(frozen=True)
class Layer:
    """A module under its name in the model; ``tap`` is ``None`` where it has not been extended."""

    name: str
    module: nn.Module
    tap: Tap | None


class Layers:
    """All modules of a model, after its forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._all = tuple(Layer(name, m, tap_of(m)) for name, m in model.named_modules())

    def listen(self, listener: CallListener) -> None:
        """Let the listener hear of completed calls."""
        for tap in self._taps:
            tap.listeners.append(listener)

    def stop_listening(self, listener: CallListener) -> None:
        """The opposite of ``listen``."""
        for tap in self._taps:
            if listener in tap.listeners:
                tap.listeners.remove(listener)

    @cached_property
    def _taps(self) -> tuple[Tap, ...]:
        return tuple(layer.tap for layer in self._all if layer.tap is not None)

    @cached_property
    def shapes_of_calls(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of outputs at the latest calls."""
        calls = [tap.last_call for tap in self._taps]
        return tuple(call.shape for call in calls if call is not None)

    @cached_property
    def parameters_slept_through(self) -> frozenset[int]:
        """``id`` of parameters in layers that were not watched at their latest calls."""
        slept = [layer for layer in self._all if layer.tap is not None and layer.tap.slept]
        parameters = [p for layer in slept for p in layer.module._parameters.values()]
        return frozenset(id(p) for p in parameters if p is not None)

    @cached_property
    def parametrised(self) -> tuple[Node, ...]:
        """Where weights come from that are computed from parameters, whatever their shapes."""
        return tuple(tap.parametrised for tap in self._taps if tap.parametrised is not None)

    @cached_property
    def normalise_over_batch(self) -> bool:
        """Whether one of them does, in the mode that it is in."""
        return any(uses_batch_statistics(each.module, each.module.training) for each in self._all)

    @cached_property
    def samples(self) -> int | None:
        """N, by the layer that was called last, unless another one knows better."""
        return self.samples_where_axes_are_known or self._samples_of_last_call

    @cached_property
    def samples_where_axes_are_known(self) -> int | None:
        """N, by layers that say which axis counts the samples, and put positions first."""
        second = self.prefixes_of_positions_first
        for layer in self._all:
            if layer.tap is None or layer.tap.latest is None or layer.tap.last_call is None:
                continue
            inside = bool(second) and layer.name.startswith(second)
            recurrent = isinstance(layer.module, nn.RNNBase) and not layer.module.batch_first
            if (inside or recurrent) and len(layer.tap.last_call.shape) == 3:
                return layer.tap.last_call.shape[1]
        return None

    @property
    def _samples_of_last_call(self) -> int | None:
        taps = [
            (layer.tap.last_call, layer.module, layer.tap.latest)
            for layer in self._all
            if layer.tap is not None and not isinstance(layer.module, _Loss)
        ]
        seen = [(c, module, latest) for c, module, latest in taps if c is not None and c.shape]
        if not seen:
            return None
        # A frozen layer remembers no inputs, so nothing tells whether its call is part of the loss.
        pending = [entry for entry in seen if entry[2] is not None] or seen
        call, module, _ = max(pending, key=lambda entry: entry[0].number)
        axis = batch_axis(module)
        return call.shape[axis] if len(call.shape) > axis else None

    @cached_property
    def prefixes_of_positions_first(self) -> tuple[str, ...]:
        """How names begin of parameters in modules that compute on ``[T, N, D]``."""
        return tuple(f"{name}." if name else "" for name in self._positions_first())

    def _positions_first(self) -> Iterator[str]:
        layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        for layer in self._all:
            module = layer.module
            folded = isinstance(module, layers) and not module.self_attn.batch_first
            if folded or isinstance(module, nn.MultiheadAttention):
                yield layer.name

    @cached_property
    def recurrent_parameters(self) -> frozenset[str]:
        """Names that are left to their layers: inside these, positions look like samples."""
        return frozenset(
            f"{layer.name}.{name}" if layer.name else name
            for layer in self._all
            if isinstance(layer.module, nn.RNNBase)
            for name in layer.module._parameters
        )

    @cached_property
    def well_known_parameters(self) -> frozenset[int]:
        """``id`` of parameters that the calls of their layers may tell all about.

        Not those of modules that are not called, have no rule, or whose leading axis may not be
        the batch.
        """
        batch_comes_second = any(
            isinstance(layer.module, nn.MultiheadAttention) and not layer.module.batch_first
            for layer in self._all
        )
        called = [layer for layer in self._all if layer.tap is not None and layer.tap.latest]
        return frozenset(
            id(parameter)
            for layer in (() if batch_comes_second else called)
            if _tells_all(layer.module)
            for parameter in layer.module._parameters.values()
            if parameter is not None
        )


def _tells_all(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return True
    return has_rule(module) and not isinstance(module, nn.Embedding)
