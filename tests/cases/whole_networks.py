"""Networks as people train them, as data: how to build one, a batch for it, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.utils import parametrizations

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class WholeNetwork:
    """``build()`` gives the model and ``batch(n)`` n samples, along every tensor's first axis.

    ``loss(model, batch, divisor)`` is the sum of the samples' losses over ``divisor(whole batch)``;
    under a sum loss the divisor is one.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch, Any], Tensor]
    divisor: Callable[[Batch], Any]


def count(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def classify(model: nn.Module, batch: Batch, divisor: Any) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"], reduction="sum") / divisor


def regress(model: nn.Module, batch: Batch, divisor: Any) -> Tensor:
    """A loss of the user's own, without any module."""
    return (model(batch["x"]) * 0.7).sin().square().sum() / divisor


def vectors(*shape: int, classes: int = 3) -> Callable[[int], Batch]:
    return lambda n: {
        "x": torch.randn(n, *shape, dtype=torch.float64),
        "y": torch.randint(classes, (n,)),
    }


def tokens(length: int, vocabulary: int = 11, classes: int = 3) -> Callable[[int], Batch]:
    return lambda n: {
        "x": torch.randint(vocabulary, (n, length)),
        "y": torch.randint(classes, (n,)),
    }


# Convolutional networks.


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += shortcut
        return self.relu(y)


class ResNet18(nn.Module):
    """He et al., 2016, with ``width`` instead of 64 channels."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    BasicBlock(widths[i], widths[i + 1], 1 if i == 0 else 2),
                    BasicBlock(widths[i + 1], widths[i + 1], 1),
                )
                for i in range(4)
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(self.layers(x)).flatten(1))


def resnet18_with_statistics() -> nn.Module:
    """In eval mode, as far from the initial statistics as after some training."""
    model = ResNet18(width=4, classes=3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


class GroupedConvolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.ReLU6(inplace=True),
            nn.Conv2d(4, 6, 1),
            nn.GroupNorm(3, 6),
            nn.Conv2d(6, 4, 3, stride=2, groups=2),
            nn.Hardswish(inplace=True),
            nn.Flatten(),
            nn.Linear(16, 3),
        )


# Attention.


class Block(nn.Module):
    """Pre-norm, with its heads written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.projection(attended)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Dosovitskiy et al., 2021: bare parameters for class token and positions."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.blocks = nn.Sequential(Block(width, 2), Block(width, 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Encoder(nn.Module):
    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            4, 2, 8, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)
        self.batch_axis = 0 if batch_first else 1

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x.movedim(0, self.batch_axis))
        return self.head(encoded.movedim(self.batch_axis, 0).mean(1))


class Attention(nn.Module):
    """Queries, keys and values that differ, or, without ``cross``, are the same."""

    def __init__(self, batch_first: bool, cross: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **options)
        self.head = nn.Linear(4, 3)
        self.batch_axis = 0 if batch_first else 1
        self.cross = cross

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(0, self.batch_axis)
        key, value = (x.sin(), x.cos()) if self.cross else (x, x)
        attended, weights = self.attention(x, key, value)
        return self.head(attended.movedim(self.batch_axis, 0).mean(1)) + weights[:, :1, 0]


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transformer(x, x[:, :2].cos()).mean(1))


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert_config())


def bert_for_masked_words() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def _bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def labelled_text(length: int) -> Callable[[int], Batch]:
    """Token labels; some are left out, and the last sample has no label at all."""

    def batch(n: int) -> Batch:
        words = torch.randint(11, (n, length))
        labels = words.where(torch.rand(n, length) < 0.7, -100)
        labels[:, 1] = words[:, 1]
        if n > 1:
            labels[-1] = -100
        return {"input_ids": words, "labels": labels}

    return batch


def next_word(model: nn.Module, batch: Batch, divisor: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return (
        F.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        / divisor
    )


def masked_word(model: nn.Module, batch: Batch, divisor: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / divisor


def loss_inside(model: nn.Module, batch: Batch, divisor: Any) -> Tensor:
    """The model's own loss, the mean over the samples that it gets."""
    return model(**batch).loss * count(batch) / divisor


# Recurrent networks.


class LastState(nn.Module):
    def __init__(self, recurrent: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.recurrent = recurrent(4, 3, **options)
        self.head = nn.Linear(3 * (1 + self.recurrent.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        if not self.recurrent.batch_first:
            return self.head(self.recurrent(x.transpose(0, 1))[0][-1])
        return self.head(self.recurrent(x)[0][:, -1])


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 3)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class WordModel(nn.Module):
    """Positions first throughout, torch's default, with a head on all of them."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.inner: nn.Module = nn.LSTM(4, 4)
        if not recurrent:
            layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
            self.inner = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        states = self.inner(self.embedding(x.T))
        states = states[0] if isinstance(states, tuple) else states
        return self.head(states).mean(0)


class Conditional(nn.Module):
    """An embedding of single indices ``[N]``."""

    def __init__(self) -> None:
        super().__init__()
        self.label, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.label(x).tanh())


# The rest.


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.bilinear, self.head = nn.Bilinear(3, 3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bilinear(self.left(x).tanh(), self.right(x)).relu_())


class Parametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = parametrizations.spectral_norm(nn.Conv1d(2, 4, 3, padding=1))
        self.hidden = parametrizations.weight_norm(nn.Linear(12, 4))
        self.rotation = parametrizations.orthogonal(nn.Linear(4, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(self.convolution(x).flatten(1)).tanh()
        return self.head(self.rotation(x))


class Recursive(nn.Module):
    """A layer that is used three times, and a weight that is used in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.shared(x).tanh()
        return self.head(x @ self.shared.weight)


class LoRA(nn.Module):
    """Hu et al., 2021: W is frozen, B A is trained."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features))
        self.b = nn.Parameter(torch.randn(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


class Pair(nn.Module):
    """Returns a dict of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, tuple[Tensor, Any]]:
        return {"first": (self.one(x), None), "second": (self.two(x), "text")}


class ReadsPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = Pair(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.pair(x)
        return self.head(found["first"][0].exp() * found["second"][0])


class WithPenaltyOfSamples(nn.Module):
    """Several losses in one sum, each over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)


class Frames(nn.Module):
    """A convolutional network on the frames of films, and a recurrent one on what it makes of them.

    ``time_first`` folds them in the other order.
    """

    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.linear, self.gain = nn.Linear(4, 5), nn.Parameter(torch.rand(5))
        self.recurrent, self.head = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 3)
        self.time_first = time_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        frames = self.norm(self.convolution(x.flatten(0, 1)).relu()).tanh().mean((2, 3))
        states = (self.linear(frames) * self.gain).unflatten(0, x.shape[:2])
        states, _ = self.recurrent(states.transpose(0, 1) if self.time_first else states)
        return self.head(states[:, -1])


class Windows(nn.Module):
    """Attention inside windows of four positions, with a table of relative positions (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.heads = nn.Linear(3, 6), nn.LayerNorm(6), 2
        self.qkv, self.proj, self.head = nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, 3)
        self.table, self.scale = nn.Parameter(torch.randn(7, 2)), nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        x = self.embed(x)
        windows = x.reshape(samples * length // 4, 4, 6)
        split = self.qkv(self.norm(windows)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        places = torch.arange(4)
        bias = self.table[places[:, None] - places + 3].permute(2, 0, 1)
        scores = (q @ k.mT * self.scale.exp() + bias).softmax(-1)
        mixed = self.proj((scores @ v).transpose(1, 2).flatten(2))
        return self.head((x + mixed.reshape(x.shape)).tanh().mean(1))


class Twins(nn.Module):
    """One encoder for both parts of a pair, called on all of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.encoder(torch.cat([x[:, 0], x[:, 1]])).chunk(2)
        return self.head((first - second).square())


def several_losses(model: nn.Module, batch: Batch, divisor: Any) -> Tensor:
    assert isinstance(model, WithPenaltyOfSamples)
    hidden = model.body(batch["x"]).tanh()
    loss = F.cross_entropy(model.head(hidden), batch["y"], reduction="sum")
    reconstruction = F.mse_loss(hidden @ model.body.weight, batch["x"], reduction="sum")
    return (loss + 0.1 * reconstruction) / divisor


def case(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    loss: Callable[[nn.Module, Batch, Any], Tensor] = classify,
    divisor: Callable[[Batch], Any] = count,
) -> WholeNetwork:
    return WholeNetwork(build, batch, loss, divisor)


WHOLE_NETWORKS = {
    "ResNet-18 in eval mode": case(resnet18_with_statistics, vectors(3, 32, 32)),
    "depthwise and grouped convolutions": case(GroupedConvolutions, vectors(4, 6, 6)),
    "ViT": case(ViT, vectors(3, 8, 8)),
    "encoder": case(lambda: Encoder(False), vectors(3, 4)),
    "encoder, batch first": case(lambda: Encoder(True), vectors(3, 4)),
    "encoder, norm first": case(lambda: Encoder(False, True), vectors(3, 4)),
    "encoder, as many positions as samples": case(lambda: Encoder(False), vectors(4, 4)),
    "self-attention": case(lambda: Attention(False, False), vectors(3, 4)),
    "self-attention, batch first": case(lambda: Attention(True, False), vectors(4, 4)),
    "cross-attention": case(lambda: Attention(False, True), vectors(3, 4)),
    "cross-attention, batch first": case(lambda: Attention(True, True), vectors(3, 4)),
    "attention with biases of keys": case(
        lambda: Attention(True, True, add_bias_kv=True), vectors(3, 4)
    ),
    "attention of several widths": case(
        lambda: Attention(True, True, kdim=4, vdim=4), vectors(3, 4)
    ),
    "encoder and decoder": case(EncoderDecoder, vectors(3, 4)),
    "GPT-2": case(
        gpt2, labelled_text(5), next_word, lambda batch: (batch["labels"][:, 1:] >= 0).sum()
    ),
    "GPT-2, eager attention": case(
        lambda: gpt2(attn_implementation="eager"),
        labelled_text(5),
        next_word,
        lambda batch: (batch["labels"][:, 1:] >= 0).sum(),
    ),
    "BERT, loss inside": case(
        bert,
        lambda n: {"input_ids": torch.randint(11, (n, 5)), "labels": torch.randint(3, (n,))},
        loss_inside,
    ),
    "BERT, tied embeddings": case(
        bert_for_masked_words,
        labelled_text(5),
        masked_word,
        lambda batch: (batch["labels"] >= 0).sum(),
    ),
    "LSTM": case(lambda: LastState(nn.LSTM, batch_first=True), tokens(4)),
    "LSTM, bidirectional, two layers": case(
        lambda: LastState(nn.LSTM, bidirectional=True, num_layers=2, batch_first=True), tokens(3)
    ),
    "LSTM, batch second, two layers": case(lambda: LastState(nn.LSTM, num_layers=2), tokens(3)),
    "GRU": case(lambda: LastState(nn.GRU), tokens(4)),
    "RNN": case(lambda: LastState(nn.RNN, nonlinearity="relu"), tokens(3)),
    "word model, LSTM": case(lambda: WordModel(True), tokens(5)),
    "word model, transformer": case(lambda: WordModel(False), tokens(5)),
    "embedding of one index": case(
        Conditional, lambda n: {"x": torch.arange(n), "y": torch.arange(n) % 3}
    ),
    "cells in a loop": case(CellLoop, vectors(3, 4)),
    "bilinear": case(TwoInputs, vectors(4)),
    "parametrised": case(lambda: Parametrised().eval(), vectors(2, 3)),
    "used several times": case(Recursive, vectors(4)),
    "LoRA": case(
        lambda: nn.Sequential(LoRA(nn.Linear(4, 4)), nn.ReLU(True), LoRA(nn.Linear(4, 3))),
        vectors(4),
    ),
    "frames of films": case(Frames, vectors(3, 3, 4, 4)),
    "frames of films, time first": case(lambda: Frames(True), vectors(3, 3, 4, 4)),
    "windows": case(Windows, vectors(8, 3)),
    "twins": case(Twins, vectors(2, 2, 5)),
    "dicts and tuples": case(ReadsPair, vectors(4)),
    "several losses": case(WithPenaltyOfSamples, vectors(4), several_losses),
    "loss as a function": case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ELU(True)), vectors(4), regress
    ),
}
