"""Which axes of a layer's tensors are samples and features."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from gradlens.signals.predicates import is_attention, is_convolution, is_embedding, is_recurrent

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
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_SEQUENCES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclass(frozen=True)
class Axes:
    """Where a layer's tensors have their samples, and whether their last axis is the features'.

    ``dims`` is how many axes a batch has, where the layer decides that.
    """

    batch: int = 0
    channel_last: bool = False
    dims: int | None = None

    def samples(self, tensor: Tensor) -> Tensor:
        """The same numbers as ``[N, S, F]``: samples, positions, features.

        A tensor of one sample without a batch axis gets one.
        """
        if tensor.dim() < 2:
            return tensor.reshape(1, 1, -1) if self.channel_last else tensor.reshape(-1, 1, 1)
        if self.dims is not None and tensor.dim() == self.dims - 1:
            tensor = tensor[None]
        batch = self.batch if tensor.dim() > 2 else 0
        feature = -1 if self.channel_last else 1
        moved = tensor.movedim((batch, feature), (0, -1))
        return moved.reshape(moved.shape[0], math.prod(moved.shape[1:-1]), moved.shape[-1])


def find_axes(model: nn.Module) -> dict[nn.Module, Axes]:
    """The axes of each module's tensors.

    Convolutions, pooling, and normalisation of channels have their features in axis 1; linear,
    recurrent and attention layers, embeddings and layer norm in the last one. Any other module,
    such as an activation, has them where the one of these before it has them, in the order in
    which modules were registered, else the one after it; axis 1 if there is none at all.
    """
    modules = list(model.modules())
    known = {module: axes for module in modules if (axes := _known(module)) is not None}
    found: dict[nn.Module, Axes] = {}
    first = next(iter(known.values()), Axes())
    latest = Axes(channel_last=first.channel_last)
    for module in modules:
        if module in known:
            latest = Axes(channel_last=known[module].channel_last)
        found[module] = known.get(module, _of_container(module, known) or latest)
    return found


def _of_container(module: nn.Module, known: dict[nn.Module, Axes]) -> Axes | None:
    inside = [known[inner] for inner in module.modules() if inner in known]
    return Axes(channel_last=inside[-1].channel_last) if inside else None


def _known(module: nn.Module) -> Axes | None:
    if is_convolution(module):
        return Axes(dims=len(module.kernel_size) + 2)  # type: ignore[arg-type]
    if isinstance(module, _CHANNELS_FIRST):
        return Axes()
    if isinstance(module, _CHANNELS_LAST) or is_recurrent(module) or is_embedding(module):
        return Axes(batch=_batch_axis(module), channel_last=True)
    return Axes(batch=_batch_axis(module), channel_last=True) if is_attention(module) else None


def _batch_axis(module: nn.Module) -> int:
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    return 0 if not isinstance(module, _SEQUENCES) or module.batch_first else 1
