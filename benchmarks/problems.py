"""Networks to measure on, with random data of the right shape.

The sizes are those of the DeepOBS networks (Schneider et al., 2019, arXiv:1903.05499).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

PLAIN_SGD = partial(SGD, lr=0.01)


@dataclass(frozen=True)
class Problem:
    """``build()`` gives the network, ``shape`` is that of one sample.

    Its elements are real numbers, or with ``words`` so many different words. The network gives so
    many rows for each sample as there are ``labels`` of it.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 10
    batch_size: int = 128
    words: int = 0
    labels: int = 1
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = PLAIN_SGD

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """Inputs ``[n, *shape]`` and labels ``[n · labels]``."""
        labels = torch.randint(self.classes, (n * self.labels,))
        if self.words:
            return torch.randint(self.words, (n, *self.shape)), labels
        return torch.randn(n, *self.shape), labels


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def mlp(widths: tuple[int, ...] = (784, 1000, 500, 100, 10)) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def c2d2() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(7 * 7 * 64, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


def c3d3() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Flatten(), nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )


def all_cnn_c() -> nn.Module:
    """Springenberg et al., 2015 (arXiv:1412.6806)."""
    inside, layers = 3, list[nn.Module]()
    for outside, kernel, stride, padding in (
        *((96, 3, 1, 1), (96, 3, 1, 1), (96, 3, 2, 1)),
        *((192, 3, 1, 1), (192, 3, 1, 1), (192, 3, 2, 1)),
        *((192, 3, 1, 0), (192, 1, 1, 0), (100, 1, 1, 0)),
    ):
        layers += [nn.Conv2d(inside, outside, kernel, stride, padding), nn.ReLU()]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Residual(nn.Module):
    """A basic block of He et al., 2016 (arXiv:1512.03385)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = 1 if inside == outside else 2
        self.inner = nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)),
            *(nn.ReLU(), nn.Conv2d(outside, outside, 3, 1, 1, bias=False)),
            nn.BatchNorm2d(outside),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            convolution = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]``."""
        return torch.relu(self.inner(x) + self.shortcut(x))


def resnet(widths: tuple[int, ...]) -> nn.Module:
    """With a stem for small images, and two blocks of each width but the first, the stem's."""
    blocks = [block for i, o in pairwise(widths) for block in (Residual(i, o), Residual(o, o))]
    first, last = widths[0], widths[-1]
    stem = (nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))
    return nn.Sequential(*stem, *blocks, *head)


class Encoder(nn.Module):
    """Two transformer layers and a mean over positions."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(1000, width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        logits: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return logits


class Transformers(nn.Module):
    """A network of the transformers library, which gives logits ``[..., C]`` as rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T]``."""
        logits: Tensor = self.inner(input_ids=x).logits
        return logits.flatten(0, -2)


TINY = {"vocab_size": 1000, "num_labels": 10, "pad_token_id": 0, "bos_token_id": 1}


def gpt2() -> nn.Module:
    """With a label for each text; four blocks."""
    options = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 128, "eos_token_id": 1}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    library = transformers_library()
    config = library.GPT2Config(**TINY, **options, **dropout)
    return Transformers(library.GPT2ForSequenceClassification(config))


def gpt2_small() -> nn.Module:
    """Of 124 million parameters, as transformers configures it, with random weights."""
    library = transformers_library()
    return Transformers(library.GPT2LMHeadModel(library.GPT2Config()))


def llama() -> nn.Module:
    """With a label for each text; four blocks."""
    widths = {"hidden_size": 128, "intermediate_size": 344}
    options = {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 128}
    library = transformers_library()
    config = library.LlamaConfig(**TINY, **widths, **options, eos_token_id=1)
    return Transformers(library.LlamaForSequenceClassification(config))


def transformers_library() -> Any:
    # It is imported with them wherever it is installed, and some builds don't match torch's.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    return importlib.import_module("transformers")


PROBLEMS: dict[str, Problem] = {
    "logistic regression": Problem(logistic_regression, (1, 28, 28)),
    "MLP": Problem(mlp, (1, 28, 28)),
    "2c2d": Problem(c2d2, (1, 28, 28)),
    "3c3d": Problem(c3d3, (3, 32, 32)),
    "All-CNN-C": Problem(all_cnn_c, (3, 32, 32), classes=100, batch_size=32),
    "GPT-2": Problem(gpt2, (64,), batch_size=16, words=1000),
    "ResNet-18": Problem(partial(resnet, (64, 64, 128, 256, 512)), (3, 32, 32), batch_size=16),
}

NAMED: dict[str, Problem] = {
    "ResNet-14": Problem(partial(resnet, (32, 32, 64, 128)), (3, 32, 32), batch_size=64),
    "Llama": Problem(llama, (64,), batch_size=16, words=1000),
    "GPT-2 small": Problem(
        gpt2_small,
        (128,),
        classes=50257,
        batch_size=4,
        words=50257,
        labels=128,
        optimizer=partial(AdamW, lr=1e-4),
    ),
}
"""Problems that are run by name only."""


def _of_width(width: int) -> Problem:
    return Problem(partial(mlp, (784, width, width, 10)), (1, 28, 28))


def _of_depth(depth: int) -> Problem:
    return Problem(partial(mlp, (784, *[256] * depth, 10)), (1, 28, 28))


def _of_length(length: int) -> Problem:
    return Problem(Encoder, (length,), batch_size=16, words=1000)


SCALED: dict[str, dict[int, Problem]] = {
    "batch size": {
        n: Problem(c3d3, (3, 32, 32), batch_size=n) for n in (8, 16, 32, 64, 128, 256, 512)
    },
    "width": {width: _of_width(width) for width in (64, 128, 256, 512, 1024, 2048)},
    "depth": {depth: _of_depth(depth) for depth in (1, 2, 4, 8, 16, 32)},
    "sequence length": {length: _of_length(length) for length in (8, 16, 32, 64, 128, 256)},
}
"""Problems that grow in one way, by what grows."""


def problem_of(name: str) -> Problem:
    """One of ``PROBLEMS`` or ``NAMED``, or "width 64" and the like."""
    if name in PROBLEMS or name in NAMED:
        return (PROBLEMS | NAMED)[name]
    what, size = name.rsplit(" ", 1)
    return SCALED[what][int(size)]
