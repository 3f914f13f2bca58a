"""Which axes of a layer's tensors are samples and features."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from gradlens.signals.predicates import is_convolution, is_embedding, is_recurrent

_CHANNELS_FIRST = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.LocalResponseNorm,
)
_CHANNELS_LAST = (
    nn.Linear,
    nn.Bilinear,
    nn.LayerNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class Axes:
    """Where a layer's tensors have their samples, and whether their last axis is the features'.

    ``batch`` is that of tensors of three axes; others have their samples in axis 0. ``dims`` is how
    many axes a batch has, where that is known: a tensor of one axis less is a single sample. All
    this is ``known`` if the layer itself says so, and otherwise as in a layer near it, by whose
    number of ``channels`` a single sample is told.
    """

    batch: int = 0
    channel_last: bool = False
    dims: int | None = None
    channels: int | None = None
    known: bool = False

    def samples(self, tensor: Tensor) -> Tensor:
        """The same numbers as ``[N, S, F]``: samples, positions, features.

        A tensor of one sample without a batch axis gets one.
        """
        if tensor.dim() < 2:
            return tensor.reshape(1, 1, -1) if self.channel_last else tensor.reshape(-1, 1, 1)
        if self._is_single(tensor):
            tensor = tensor.unsqueeze(self.batch)
        batch = self.batch if tensor.dim() == 3 else 0
        feature = -1 if self.channel_last else 1
        moved = tensor.movedim((batch, feature), (0, -1))
        return moved.reshape(moved.shape[0], math.prod(moved.shape[1:-1]), moved.shape[-1])

    def _is_single(self, tensor: Tensor) -> bool:
        if self.dims is None or tensor.dim() != self.dims - 1:
            return False
        first, *others = tensor.shape
        return self.known or (first == self.channels and self.channels not in others)


def find_axes(model: nn.Module) -> dict[nn.Module, Axes]:
    """The axes of each module's tensors.

    Convolutions, pooling, and normalisation of channels have their features in axis 1; linear,
    recurrent and attention layers, embeddings and layer norm in the last one. Any other module,
    such as an activation, has them where the one of these before it has them, in the order in
    which modules were registered, else the one after it; axis 1 if there is none at all. Recurrent
    and attention layers say which axis the samples are in; those behind them, or in front of the
    first, are taken to have them in the same one.
    """
    modules = list(model.modules())
    own = {module: axes for module in modules if (axes := _own(module)) is not None}
    latest, found = _first(own.values()), dict[nn.Module, Axes]()
    for module in modules:
        if module in own:
            latest = _completed(own[module], latest)
        found[module] = latest if module in own else replace(latest, known=False)
    for module in found.keys() - own.keys():
        inside = [inner for inner in module.modules() if inner in own]
        if inside:
            found[module] = replace(found[inside[-1]], known=False)
    return found


def _first(own: Iterable[Axes]) -> Axes:
    """What to take for known in front of all that have axes of their own."""
    each = [*own, Axes()]
    batch = next((axes.batch for axes in each if axes.known), 0)
    return Axes(batch, each[0].channel_last)


def _completed(own: Axes, before: Axes) -> Axes:
    if own.known:
        return own
    alike = not (own.channel_last or before.channel_last)
    return replace(before if alike else Axes(before.batch, own.channel_last), known=False)


def _own(module: nn.Module) -> Axes | None:
    """What a module says itself: where its features are, and perhaps its samples."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return _own(module.self_attn)
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return Axes(0 if module.batch_first else 1, channel_last=True, dims=3, known=True)
    if is_convolution(module):
        dims = len(module.kernel_size) + 2  # type: ignore[arg-type]
        # A matrix behind a convolution of one axis is rather a batch.
        channels = module.out_channels if dims > 3 else None
        return Axes(dims=dims, channels=channels, known=True)  # type: ignore[arg-type]
    if isinstance(module, _CHANNELS_FIRST):
        return Axes()
    last = isinstance(module, _CHANNELS_LAST) or is_recurrent(module) or is_embedding(module)
    return Axes(channel_last=True) if last else None
