"""Which axes of a layer's tensors count samples and features."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from gradlens.signals.predicates import is_convolution, is_embedding, is_recurrent
from gradlens.torch_private import POOLING, ChannelNorm

_CHANNELS_FIRST = (
    ChannelNorm,
    nn.GroupNorm,
    *POOLING,
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
    """The axis of a layer's tensors that counts the samples, and that of the features.

    ``batch`` is the sample axis of tensors with three axes; others have their samples in axis 0.
    ``dims`` is the number of axes of a batch, where that is known: a tensor with one axis less is a
    single sample. The axes are ``known`` if the layer itself defines them. Otherwise they are
    those of a layer next to it, and a tensor counts as a single sample if its first axis has that
    layer's number of ``channels``. If features are the layer's ``own``, it has no vector but those
    of a single sample's features.
    """

    batch: int = 0
    channel_last: bool = False
    dims: int | None = None
    channels: int | None = None
    known: bool = False
    own: bool = False

    def samples(self, tensor: Tensor, count: int | None = None) -> Tensor:
        """The same numbers as ``[N, S, F]``: samples, positions, features.

        A tensor of one sample without a batch axis gets one. A vector has one number for each
        sample, if there are as many, by the ``count`` of what the model was called with.
        """
        if tensor.dim() == 1 and len(tensor) == count and not self.own:
            return tensor.reshape(-1, 1, 1)
        if tensor.dim() < 2:
            return tensor.reshape(1, 1, -1) if self.channel_last else tensor.reshape(-1, 1, 1)
        if self.is_single(tensor):
            tensor = tensor.unsqueeze(self.batch)
        # Where axis 1 counts the samples, it has no features.
        feature = 1 if not self.channel_last and self.axis_of(tensor) != 1 else -1
        moved = tensor.movedim((self.axis_of(tensor), feature), (0, -1))
        return moved.reshape(moved.shape[0], math.prod(moved.shape[1:-1]), moved.shape[-1])

    def are_last(self, tensor: Tensor) -> bool:
        """Whether features are in the tensor's last axis.

        Behind a convolution of images, pixels that were made positions have its channels there.
        """
        if self.known or tensor.dim() != 3 or self.channels is None:
            return self.channel_last
        _, middle, last = tensor.shape
        return self.channel_last or (last == self.channels and last != middle)

    def axis_of(self, tensor: Tensor) -> int:
        """The axis that counts the samples of a batch."""
        return self.batch if tensor.dim() == 3 else 0

    def is_single(self, tensor: Tensor) -> bool:
        """Whether a tensor is a single sample without a batch axis."""
        if self.dims is None or tensor.dim() != self.dims - 1:
            return False
        first, *others = tensor.shape
        return self.known or (first == self.channels and self.channels not in others)


def find_axes(model: nn.Module) -> dict[nn.Module, Axes]:
    """The axes of each module's tensors.

    Convolutions, pooling, and normalisation of channels have their features in axis 1; linear,
    recurrent and attention layers, embeddings and layer norm in the last one. Any other module,
    such as an activation, is assumed to have them in the same axis as the last of these before it,
    in the order in which modules were registered, or else the first one after it; in axis 1 if
    there is none at all. Recurrent and attention layers define the axis of the samples; modules
    behind them, or in front of the first, are assumed to have the same one.
    """
    modules = list(model.modules())
    own = {module: axes for module in modules if (axes := _own(module)) is not None}
    latest, found = _first(own.values()), dict[nn.Module, Axes]()
    for module in modules:
        if module in own:
            latest = _completed(own[module], latest)
        found[module] = replace(latest, known=latest.known and module in own, own=module in own)
    for module in found.keys() - own.keys():
        inside = [inner for inner in module.modules() if inner in own]
        if inside:
            found[module] = replace(found[inside[-1]], known=False, own=False)
    return found


def _first(own: Iterable[Axes]) -> Axes:
    """The axes that are assumed in front of the first module that defines its own."""
    each = [*own, Axes()]
    batch = next((axes.batch for axes in each if axes.known), 0)
    return Axes(batch, each[0].channel_last)


def _completed(own: Axes, before: Axes) -> Axes:
    if own.known:
        return own
    alike = not (own.channel_last or before.channel_last)
    return replace(before if alike else Axes(before.batch, own.channel_last), known=False)


def _own(module: nn.Module) -> Axes | None:
    """The axes that a module itself defines: that of features, and perhaps that of samples."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return _own(module.self_attn)
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return Axes(0 if module.batch_first else 1, channel_last=True, dims=3, known=True)
    if is_convolution(module):
        dims = len(module.kernel_size) + 2  # type: ignore[arg-type]
        # A matrix behind a convolution of one axis is more likely a batch.
        channels = module.out_channels if dims > 3 else None
        return Axes(dims=dims, channels=channels, known=True)  # type: ignore[arg-type]
    if isinstance(module, _CHANNELS_FIRST):
        return Axes()
    last = isinstance(module, _CHANNELS_LAST) or is_recurrent(module) or is_embedding(module)
    return Axes(channel_last=True) if last else None
