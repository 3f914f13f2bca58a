"""What networks are made of: entries that make vectors of a batch, and layers on vectors.

A state is ``[N, WIDTH]``. Layers of ``tests.cases.random_layers`` come with those written here,
which are about what training loops meet: parameters that some steps don't use, buffers, random
numbers, other data types, functions of the user's own, scripts, compilation and checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.cases.random_layers import (
    COUPLINGS,
    VECTOR_LAYERS,
    WAYS,
    Called,
    Reversed,
    Sizes,
    Written,
)

WIDTH, LENGTH, SIDE, VOCABULARY = 4, 3, 4, 5

SIZES = Sizes(None, WIDTH)

Make = Callable[[], nn.Module]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# Layers of a state [N, WIDTH], or of a single vector.


class InTurns(nn.Module):
    """One of two layers at each call, or the second one at every other call only."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[self.calls % len(self.layers)](x)


class Running(nn.Module):
    """Scales with a buffer that it then changes in place, or replaces by another one."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.inner = linear()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x) * self.scale.clone()
        with torch.no_grad():
            change = 1 + 0.01 * x.detach().reshape(-1, WIDTH).abs().sum(0).tanh()
            if self.replaces:
                self.scale = self.scale * change.to(self.scale.dtype)
            else:
                self.scale.mul_(change)
        return found


class OnceDifferentiable(torch.autograd.Function):
    """A product without a second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).reshape(-1, WIDTH).sum(0)


class Overwriting(torch.autograd.Function):
    """A gated unit whose backward puts its results into what it has saved, uncounted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * gate.sigmoid()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        open_share = gate.sigmoid()
        of_gate = gradients[0] * x * open_share * (1 - open_share)
        x.data.copy_(gradients[0] * open_share)
        gate.data.copy_(of_gate)
        return x, gate


class Popping(torch.autograd.Function):
    """It takes what it needs out of a list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.stash = [x.detach().tanh()]
        return x.tanh()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 - ctx.stash.pop().square())


class Masking(torch.autograd.Function):
    """A rectified unit as tutorials have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = gradients[0].clone()
        found[x < 0] = 0
        return found


class Complex(nn.Module):
    """A matrix of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.complex64)
        return (x.to(kind) @ self.weight.to(kind)).abs().to(x.dtype)


class Flat(nn.Module):
    """Weight and bias are views of one flat parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(0.5 * torch.randn(WIDTH * WIDTH + WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.flat.split([WIDTH * WIDTH, WIDTH])
        return F.linear(x, weight.view(WIDTH, WIDTH), bias)


class OfAnotherType(nn.Module):
    """A layer whose parameters keep a data type of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.to(self.dtype)
        return self.inner(x.to(self.dtype)).to(x.dtype)


class Named(nn.Module):
    """Returns a dict, of which another module takes what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.inner(x), "unused": None, "inputs": [x]}


def of_named(x: Tensor, inner: nn.Module) -> Tensor:
    return inner(x)["hidden"].tanh()


def on_views(x: Tensor, inner: nn.Module) -> Tensor:
    """In-place operations on views of the state."""
    found = inner(x)
    found[..., :2].mul_(2)
    found[..., 0] += found[..., 1].detach()
    found.view(-1, 2)[:, 1].tanh_()
    return found


def without_gradient(x: Tensor, inner: nn.Module) -> Tensor:
    with torch.no_grad():
        shift = inner(x)
    return x + shift


def gradient_inside(x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a function by torch.func."""
    return torch.func.grad(lambda state: (state @ weight).tanh().square().sum())(x)


def vectorised(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDTH)
    return torch.func.vmap(lambda row: (weight @ row).sin())(rows).reshape(x.shape)


def functional(x: Tensor, inner: nn.Module) -> Tensor:
    doubled = {name: 2 * parameter for name, parameter in inner.named_parameters()}
    return torch.func.functional_call(inner, doubled, (x,))


def jagged(x: Tensor, inner: nn.Module) -> Tensor:
    """A layer on a nested tensor of rows in groups of one and of several."""
    rows = x.reshape(-1, WIDTH)
    offsets = torch.tensor([0, min(1, len(rows)), len(rows)])
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets)
    return inner(nested).values().reshape(x.shape)


def reentrant(x: Tensor, inner: nn.Module) -> Tensor:
    return checkpoint(inner, x, use_reentrant=True)


def hooked(x: Tensor, inner: nn.Module) -> Tensor:
    """The user's own hook on an activation looks at its gradient."""
    found = inner(x)
    if found.requires_grad:
        found.register_hook(lambda gradient: None)
    return found


def changed_on_the_way(x: Tensor, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The user's own hook on an activation changes its gradient."""
    found = inner(x)
    if found.requires_grad:
        found.register_hook(change)
    return found


class Averaging(nn.Module):
    """A hook divides a gradient by a running mean of its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.norm = 1.0

    def divided(self, gradient: Tensor) -> Tensor:
        self.norm = 0.9 * self.norm + 0.1 * float(gradient.detach().norm())
        return gradient / self.norm

    def forward(self, x: Tensor) -> Tensor:
        return changed_on_the_way(x, self.inner, self.divided)


def selective(x: Tensor, inner: nn.Module) -> Tensor:
    """A checkpoint that stores the results of matrix products."""
    products = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)
    found: Tensor = checkpoint(inner, x, use_reentrant=False, context_fn=contexts)
    return found


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(linear(), nn.Tanh()))


def state_kept(x: Tensor, cell: nn.Module) -> Tensor:
    """A recurrence of two steps."""
    rows = x.reshape(-1, WIDTH)
    hidden = torch.zeros_like(rows)
    for _ in range(2):
        hidden = cell(rows, hidden)
    return hidden.reshape(x.shape)


def renormalised(x: Tensor, weight: Tensor) -> Tensor:
    return x @ (weight / weight.norm(dim=0, keepdim=True))


def traced() -> nn.Module:
    return torch.jit.trace(nn.Sequential(linear(), nn.Tanh()), torch.zeros(2, WIDTH))


def compiled(backend: str) -> nn.Module:
    return torch.compile(nn.Sequential(linear(), nn.Tanh()), backend=backend)  # type: ignore[return-value]


class Transposed(nn.Module):
    """A parameter that isn't contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).T)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


LAYERS: dict[str, Make] = {
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "spectral norm by a hook": lambda: nn.utils.spectral_norm(linear()),
    "weight norm by a hook": lambda: nn.utils.weight_norm(linear()),
    "complex": Complex,
    "scalar": lambda: Written(lambda x, scale: x * scale, ()),
    "empty parameter": lambda: Written(lambda x, none: x + none.sum(), (0, WIDTH)),
    "unused parameter": lambda: Written(lambda x, unused: x, (WIDTH,)),
    "in turns": lambda: InTurns(linear(), linear()),
    "every other call": lambda: InTurns(linear(), nn.Tanh()),
    "changing buffer": lambda: Running(replaces=False),
    "replaced buffer": lambda: Running(replaces=True),
    "once differentiable": lambda: Written(
        lambda x, w: OnceDifferentiable.apply(x, w.to(x.dtype)), (WIDTH,)
    ),
    "reversed gradient": lambda: Written(lambda x, inner: Reversed.apply(inner(x)), linear()),
    "flat parameter": Flat,
    "parameter that isn't contiguous": Transposed,
    "double precision inside": lambda: OfAnotherType(torch.float64),
    "half precision inside": lambda: OfAnotherType(torch.bfloat16),
    "dict of outputs": lambda: Written(of_named, Named()),
    "in place on views": lambda: Written(on_views, linear()),
    "without a gradient": lambda: Written(without_gradient, linear()),
    "gradient inside": lambda: Written(gradient_inside, (WIDTH, WIDTH)),
    "vectorised": lambda: Written(vectorised, (WIDTH, WIDTH)),
    "functional call": lambda: Written(functional, linear()),
    "jagged": lambda: Written(jagged, linear()),
    "reentrant checkpoint": lambda: Written(reentrant, linear()),
    "hooked": lambda: Written(hooked, linear()),
    "hook that draws": lambda: Written(
        lambda x, inner: changed_on_the_way(x, inner, lambda g: g * (1 + random.random())),
        linear(),
    ),
    "hook with a running norm": Averaging,
    "selective checkpoint": lambda: Written(selective, linear()),
    "overwriting function": lambda: Written(
        lambda x, gate, inner: Overwriting.apply(inner(x), gate(x)), linear(), linear()
    ),
    "function with a list": lambda: Written(lambda x, inner: Popping.apply(inner(x)), linear()),
    "function with a mask": lambda: Written(lambda x, inner: Masking.apply(inner(x)), linear()),
    "cell": lambda: Written(state_kept, nn.GRUCell(WIDTH, WIDTH)),
    "renormalised": lambda: Written(renormalised, (WIDTH, WIDTH)),
    "noise": lambda: Written(lambda x, w: x * w + 0.1 * torch.randn_like(x), (WIDTH,)),
    "noise of Python": lambda: Written(lambda x, w: x * w * (1 + random.random()), (WIDTH,)),
    "dropout in place": lambda: nn.Sequential(linear(), nn.Dropout(0.3, inplace=True)),
    "alpha dropout": lambda: nn.Sequential(nn.SELU(), nn.AlphaDropout(0.3), linear()),
    "randomised relu": lambda: nn.Sequential(linear(), nn.RReLU()),
    "batch norm without statistics": lambda: nn.Sequential(
        linear(), nn.BatchNorm1d(WIDTH, track_running_stats=False)
    ),
    "batch norm of all batches": lambda: nn.Sequential(
        nn.BatchNorm1d(WIDTH, momentum=None), linear()
    ),
    "not finite": lambda: Written(lambda x, w: (x * w).sqrt(), (WIDTH,)),
    "detached": lambda: Written(lambda x, inner: inner(x).detach() + x, linear()),
    "identity": nn.Identity,
    "traced": traced,
    "scripted": scripted,
    "compiled by eager": lambda: compiled("eager"),
    "compiled by aot_eager": lambda: compiled("aot_eager"),
}

RARE = {"compiled by eager", "compiled by aot_eager", "traced", "scripted", "orthogonal"}
"""Layers that take long."""

COUPLED = {"batch norm without statistics", "batch norm of all batches", "jagged", *COUPLINGS}
"""Layers in which samples meet, or seem to."""

WAYS_OF_VECTORS = (
    "chunks", "rows", "permuted", "flipped", "masked", "masked where", "every other sample",
    "two views", "checkpointed", "residual", "twice", "in place", "written into", "routed",
)  # fmt: skip


def make(name: str, seed: int) -> nn.Module:
    """A layer by its name, such as ``"linear"``, or ``"linear | rows"`` with a way to call it."""
    kind, _, way = name.partition(" | ")
    source = random.Random(seed)

    def bare() -> nn.Module:
        if kind in LAYERS:
            return LAYERS[kind]()
        return (VECTOR_LAYERS | COUPLINGS)[kind](SIZES, source)

    if not way:
        return bare()
    return Called(way, [bare() for _ in range(3 if way == "routed" else 1)], WIDTH, seed)


def draw(source: random.Random) -> str:
    """The name of a layer."""
    own = [name for name in LAYERS if name not in RARE]
    kinds = source.choices(
        [own, list(VECTOR_LAYERS), ["linear"], sorted(COUPLINGS), sorted(RARE)],
        weights=[8, 6, 4, 1.2, 0.3],
    )[0]
    kind = source.choice(kinds)
    way = source.choice(list(WAYS_OF_VECTORS)) if source.random() < 0.15 else ""
    counts = kind in {"in turns", "every other call"}  # so that a checkpoint isn't what it was
    return f"{kind} | {way}" if way and not counts and kind not in RARE else kind


assert set(WAYS_OF_VECTORS) <= set(WAYS)


# Entries: a batch of some kind becomes [N, WIDTH].


class FirstOnes(nn.Module):
    """The first features."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :WIDTH]


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), FirstOnes(), linear())


def last_of(x: Tensor, recurrent: nn.Module) -> Tensor:
    return recurrent(x)[0][:, -1]


def mean_of(x: Tensor, inner: nn.Module) -> Tensor:
    return inner(x).mean(1)


def tied_words(x: Tensor, table: nn.Module) -> Tensor:
    """The table is the output layer, too."""
    words = table(x)
    return (words @ table.weight.T).softmax(-1).matmul(table.weight).mean(1)


def attended(x: Tensor, attention: nn.Module) -> Tensor:
    return attention(x, x, x, need_weights=False)[0].mean(1)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True)


ENTRIES: dict[str, tuple[str, Make]] = {
    "vectors": ("vectors", nn.Identity),
    "linear": ("vectors", linear),
    "perceptron": ("vectors", lambda: nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh())),
    "convolution": ("images", lambda: images(nn.Conv2d(1, 2, 3), nn.ReLU())),
    "convolution, batch norm": (
        "images",
        lambda: images(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU(inplace=True)),
    ),
    "convolution, group norm": (
        "images",
        lambda: images(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.AvgPool2d(2)),
    ),
    "depthwise": (
        "images",
        lambda: images(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 3, groups=2), nn.Dropout2d(0.2)),
    ),
    "transposed convolution": (
        "images",
        lambda: images(nn.ConvTranspose2d(1, 2, 2), nn.MaxPool2d(2), nn.SiLU()),
    ),
    "gru": ("sequences", lambda: Written(last_of, nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "lstm": ("sequences", lambda: Written(last_of, nn.LSTM(WIDTH, WIDTH, batch_first=True))),
    "rnn": ("sequences", lambda: Written(last_of, nn.RNN(WIDTH, WIDTH, batch_first=True))),
    "encoder": ("sequences", lambda: Written(mean_of, encoder())),
    "attention": (
        "sequences",
        lambda: Written(attended, nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    ),
    "positions": ("sequences", lambda: Written(mean_of, linear())),
    "words": ("words", lambda: Written(mean_of, nn.Embedding(VOCABULARY, WIDTH))),
    "sparse words": (
        "words",
        lambda: Written(mean_of, nn.Embedding(VOCABULARY, WIDTH, sparse=True)),
    ),
    "tied words": ("words", lambda: Written(tied_words, nn.Embedding(VOCABULARY, WIDTH))),
    "bag": ("words", lambda: nn.EmbeddingBag(VOCABULARY, WIDTH)),
    "largest of a bag": ("words", lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="max")),
    "sparse bag": ("words", lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True)),
}
"""What an entry reads, and the entry."""


def inputs(kind: str, samples: int, generator: torch.Generator) -> Tensor:
    """What an entry reads: a batch of its kind."""
    if kind == "words":
        return torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    shape = {"vectors": (WIDTH,), "images": (1, SIDE, SIDE), "sequences": (LENGTH, WIDTH)}[kind]
    return torch.randn(samples, *shape, generator=generator)


# Losses of outputs ``[N, CLASSES]``, as modules with the reductions of torch.


CLASSES = 3


class ByHand(nn.Module):
    """A loss of the user's own: ℓₙ = Σⱼ sin²(0.7·fₙⱼ)."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.reduced((0.7 * outputs).sin().square().sum(-1))

    def reduced(self, losses: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


class Distances(ByHand):
    """Distances to two fixed points by ``cdist``."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        points = torch.eye(2, CLASSES, dtype=outputs.dtype)
        return self.reduced(torch.cdist(outputs.reshape(-1, CLASSES), points).square().sum(-1))


class Ctc(ByHand):
    """CTC on three times the same outputs; it has no second derivative."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = outputs.reshape(-1, CLASSES).log_softmax(-1)
        lengths = torch.full((len(rows),), 3), torch.ones(len(rows), dtype=torch.long)
        labels = targets.reshape(-1, 1).clamp(min=1)
        return F.ctc_loss(torch.stack([rows] * 3), labels, *lengths, reduction=self.reduction)


@dataclass(frozen=True)
class Loss:
    """A loss module by its reduction; ``targets`` are ``"labels"`` or ``"vectors"``."""

    module: Callable[[str], nn.Module]
    targets: str = "labels"


LOSSES: dict[str, Loss] = {
    "cross entropy": Loss(lambda r: nn.CrossEntropyLoss(reduction=r)),
    "smoothed": Loss(lambda r: nn.CrossEntropyLoss(reduction=r, label_smoothing=0.1)),
    "squared error": Loss(lambda r: nn.MSELoss(reduction=r), "vectors"),
    "binary": Loss(lambda r: nn.BCEWithLogitsLoss(reduction=r), "vectors"),
    "huber": Loss(lambda r: nn.SmoothL1Loss(reduction=r), "vectors"),
    "absolute error": Loss(lambda r: nn.L1Loss(reduction=r), "vectors"),
    "margin": Loss(lambda r: nn.MultiMarginLoss(reduction=r)),
    "by hand": Loss(ByHand),
    "distances": Loss(Distances),
    "ctc": Loss(Ctc),
}


WITHOUT_LOW_PRECISION = {"margin", "distances", "ctc"}
"""Losses that torch computes in single precision at the least."""


def per_sample(name: str, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """ℓₙ ``[N]``: N times each sample's share of a mean loss, or its share of a sum."""
    found = LOSSES[name].module("none")(outputs, targets)
    if found.dim() < 2:
        return found.reshape(-1)
    return found.mean(-1) if reduction == "mean" else found.sum(-1)


def draw_targets(kind: str, samples: int, generator: torch.Generator) -> Tensor:
    if kind == "labels":
        return torch.randint(CLASSES, (samples,), generator=generator)
    return torch.rand(samples, CLASSES, generator=generator)
