"""Losses and gradients that become NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .question import DIVERGES, NAN, ask, github, question
from .training import (
    Watch,
    adam,
    batches,
    begun,
    cnn,
    digits,
    drawn,
    fit,
    friedman,
    images,
    learn,
    mean_of_last,
    misfit,
    mlp,
    sgd,
    waves,
)

LOSS, GRADIENT = NAN.split()

# fmt: off
ask("exponential_of_loss",
    "https://whosebug.com/question/6301115/Weird-behaviour-of-loss-function-in-pytorch", 0.2,
    f"{DIVERGES} {NAN}", "",
    "The loss is the exponential of the cross-entropy, which a few wrong samples overflow.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 10), sgd(0.05), digits(), size=16,
        loss=functional.cross_entropy if fixed else
        lambda out, y: (functional.cross_entropy(out, y) / 0.5).exp()))
# fmt: on


@question(github("MhLiao/DB#14"), 0.4, LOSS, "")
def empty_mask(fixed: bool, watch: Watch) -> float:
    """The loss is divided by the number of masked places, which is 0 in some batches."""
    model, data = mlp(10, 32, 1), friedman()
    valid = (torch.rand(len(data.x), 1) < 0.2).float()

    def loss(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum().clamp(min=1) if fixed else mask.sum()
        return ((model(x) - y).abs() * mask).sum() / count

    fit(watch, model, adam(5e-3), loss, batches(data.x, data.y, valid, size=16, steps=250))
    return misfit(model, data)


@question("https://discuss.pytorch.org/t/94875", 0.3, GRADIENT, "")
def root_of_zero(fixed: bool, watch: Watch) -> float:
    """The root of a squared error has no gradient where the error is zero, as at padded places."""
    model, data = mlp(10, 32, 1), friedman()
    padded = torch.rand(len(data.x), 1) < 0.01

    def loss(x: Tensor, y: Tensor, pad: Tensor) -> Tensor:
        squares = ((model(x) - y) * ~pad).square()
        return (squares + (1e-8 if fixed else 0.0)).sqrt().mean()

    fit(watch, model, adam(5e-3), loss, batches(data.x, data.y, padded))
    return misfit(model, data)


@question(
    "https://discuss.pytorch.org/t/nan-gradient-for-torch-cos-torch-acos/9617", 0.2, GRADIENT, ""
)
def angle_of_equal_vectors(fixed: bool, watch: Watch) -> float:
    """The arc cosine has an infinite gradient where prediction and target point the same way."""
    x = functional.normalize(drawn(800, 3), dim=1)
    y = functional.normalize(x + torch.tensor([0.5, 0.0, 0.0]), dim=1)
    x[::80] = y[::80] = torch.tensor([0.0, 0.0, 1.0])
    model = mlp(3, 32, 3)
    begun(model[2], nn.init.zeros_, 0.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        cosine = (functional.normalize(x + model(x), dim=1) * y).sum(1)
        limit = 1 - 1e-6 if fixed else 1.0
        return cosine.clamp(-limit, limit).acos().mean()

    fit(watch, model, adam(), loss, batches(x, y))
    return loss(x[1:70], y[1:70]).item()


@question("https://e-com-net.com/article/1610541398946250752.htm", 0.6, GRADIENT, "")
def fourth_root(fixed: bool, watch: Watch) -> float:
    """The output is a fourth root, whose gradient is infinite as soon as one argument is 0."""
    model, data = mlp(10, 32, 1), friedman()
    goal = data.y - data.y.min()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = functional.softplus(model(x)) if fixed else model(x).relu() ** 0.25
        return (out - y).square().mean() * 2 + 0.1 * (out - y).abs().mean()

    return mean_of_last(fit(watch, model, adam(5e-3), loss, batches(data.x, goal)))


@question(github("avalonstrel/GatedConvolution_pytorch#27"), 0.15, "nonfinite_input", "")
def constant_image(fixed: bool, watch: Watch) -> float:
    """Images are scaled by their minimum and maximum, which are equal in an empty image."""
    data, model = images(), cnn()
    x = data.x.clone()
    x[700] = 0.5
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    x = (x - low) / ((high - low).clamp(min=1e-6) if fixed else high - low) * 2 - 1
    return learn(watch, model, adam(), data._replace(x=x))


@question(github("NRCan/geo-deep-learning#68"), 0.15, "nonfinite_input", "")
def pixels_without_data(fixed: bool, watch: Watch) -> float:
    """Satellite images have NaN where there is no data, and infinite values."""
    data, model = images(), cnn()
    x = data.x.clone()
    x[5::200, :, 0, :2] = torch.inf
    x[9::200, :, 5:, 6:] = torch.nan
    x = x.nan_to_num(0.0, 0.0, 0.0) if fixed else x
    return learn(watch, model, sgd(0.02), data._replace(x=x))


@question(github("prs-eth/Marigold#111"), 0.3, "nonfinite_target", "")
def depth_missing(fixed: bool, watch: Watch) -> float:
    """The ground truth has NaN in some samples, where depth wasn't measured."""
    model, data = mlp(10, 32, 1), friedman()
    target = data.y.clone()
    target[11::150] = torch.nan

    def loss(out: Tensor, y: Tensor) -> Tensor:
        known = y.isfinite() if fixed else torch.ones_like(y, dtype=torch.bool)
        return (out - y)[known].square().mean()

    return learn(watch, model, adam(5e-3), data._replace(y=target), loss=loss)


@question(github("pytorch/pytorch#41508"), 0.25, LOSS, "")
def attention_all_masked(fixed: bool, watch: Watch) -> float:
    """A sequence is padding only: the softmax of its attention is over nothing but -inf."""
    data, layer, head = waves(), nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleDict({"embed": nn.Linear(1, 16), "attention": layer, "head": head})
    place = torch.randn(20, 16) * 0.5
    empty = torch.zeros(len(data.x), 20, dtype=torch.bool)
    empty[:, :5] = True
    empty[37::150] = True
    if fixed:
        empty[:, -1] = False

    def predict(x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = model["embed"](x) + place
        seen = model["attention"](tokens[:, -1:], tokens, tokens, key_padding_mask=mask)[0]
        return model["head"](seen[:, 0])

    def loss(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (predict(x, mask) - y).square().mean()

    fit(watch, model, adam(5e-3), loss, batches(data.x, data.y, empty, steps=300))
    return misfit(predict, data)


# The model is called with the NaN.
@question(github("ziwei-jiang/PGGAN-PyTorch#1"), 0.15, f"{LOSS} nonfinite_input", "")
def deviation_of_one_sample(fixed: bool, watch: Watch) -> float:
    """A feature is the standard deviation over the batch, and the last batch has one sample."""
    data, model = digits(), mlp(65, 32, 10)
    count = 320 if fixed else 321

    def predict(x: Tensor) -> Tensor:
        return model(torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1))

    part = data._replace(x=data.x[:count], y=data.y[:count])
    return learn(watch, model, adam(5e-3), part, predict=predict)
