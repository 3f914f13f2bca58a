"""More healthy loops, whose kinds no table row of ``loops`` can be."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .question import healthy
from .training import (
    Data,
    Recurrent,
    Watch,
    adam,
    batches,
    cnn,
    digits,
    errors,
    fit,
    friedman,
    images,
    in_turn,
    learn,
    misfit,
    mlp,
    moons,
    sgd,
    split,
    tokens,
    waves,
)


@healthy(0.12)
def one_cycle(watch: Watch) -> float:
    model, data = cnn(norm=True), images()
    optimizer = sgd(model, 0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=251)
    learn(watch, model, optimizer, data, 240, update=in_turn(optimizer.step, scheduler.step))
    return errors(model.eval(), data)


@healthy(0.12)
def cosine_with_restarts(watch: Watch) -> float:
    model, data = mlp(64, 64, 10), digits()
    optimizer = sgd(model, 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)
    steps = in_turn(optimizer.step, scheduler.step)
    return learn(watch, model, optimizer, data, 240, update=steps)


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.middle = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=2)
        )
        self.head = nn.Conv2d(48, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        return self.head(torch.cat([h, self.middle(h)], 1))


@healthy(0.3)
def segmentation_with_dice(watch: Watch) -> float:
    data = images()
    model = Segmenter()

    def loss(x: Tensor, _: Tensor) -> Tensor:
        mask = (x > 0.3).float()
        noisy = x + 0.3 * torch.randn_like(x)
        p = model(noisy).sigmoid()
        dice = 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum() + 1)
        return dice + functional.binary_cross_entropy(p, mask)

    losses = fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=200))
    return sum(losses[-10:]) / 10


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = (
            nn.Embedding(8, 32),
            nn.LSTM(32, 48, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(96, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.words(x))[0])


@healthy(0.2)
def tagging_with_padding(watch: Watch) -> float:
    data = tokens()
    model = Tagger()
    tags = (data.x + data.x.roll(2, 1)) % 8  # with roll(1, 1), they are the next tokens
    lengths = torch.randint(4, 13, (len(data.x), 1))
    tags = torch.where(torch.arange(12) < lengths, tags, -100)
    fit(
        watch,
        model,
        adam(model, 1e-2),
        lambda x, y: functional.cross_entropy(model(x).transpose(1, 2), y),
        batches(data.x, tags, steps=250),
    )
    wanted = (data.test_x + data.test_x.roll(2, 1)) % 8
    return (model(data.test_x).argmax(2) != wanted).float().mean().item()


@healthy(0.12)
def averaged_weights(watch: Watch) -> float:
    model, data = mlp(64, 48, 10), digits()
    optimizer = sgd(model, 0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def update(step: int) -> None:
        optimizer.step()
        if step > 120 and step % 10 == 0:
            averaged.update_parameters(model)

    learn(watch, model, optimizer, data, 240, update=update)
    return errors(averaged, data)


@healthy(0.12)
def two_optimizers(watch: Watch) -> float:
    model, data = cnn(), images()
    body = torch.optim.SGD([p for layer in model[:-1] for p in layer.parameters()], 0.05, 0.9)
    head = torch.optim.Adam(model[-1].parameters(), 3e-3)
    steps = in_turn(body.step, head.step, head.zero_grad)
    return learn(watch, model, body, data, 200, update=steps)


@healthy(0.4)
def sparse_regression(watch: Watch) -> float:
    model, data = mlp(10, 64, 1), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean() + 1e-3 * sum(
            p.abs().sum() for p in model.parameters()
        )

    fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=400))
    return misfit(model, data)


@healthy(1.2)
def coupling_flow(watch: Watch) -> float:
    data = moons(0.1)
    nets = nn.ModuleList([mlp(1, 32, 2, activation=nn.Tanh) for _ in range(4)])

    def loss(x: Tensor, _: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for number, net in enumerate(nets):
            a, b = x[:, number % 2 : number % 2 + 1], x[:, 1 - number % 2 : 2 - number % 2]
            scale, shift = net(a).chunk(2, 1)
            scale = scale.tanh()
            b = b * scale.exp() + shift
            total = total + scale[:, 0]
            x = torch.cat([a, b] if number % 2 == 0 else [b, a], 1)
        return (0.5 * x.square().sum(1) + math.log(2 * math.pi) - total).mean()

    losses = fit(watch, nets, adam(nets), loss, batches(data.x, data.y, steps=400))
    return sum(losses[-10:]) / 10 - 0.9


@healthy(0.15)
def pseudo_labels(watch: Watch) -> float:
    data = digits()
    model = mlp(64, 64, 10)
    few = slice(0, 300)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        weak, strong = (
            model(x + 0.1 * torch.randn_like(x)).detach(),
            model(x + 0.5 * torch.randn_like(x)),
        )
        sure = weak.softmax(1).amax(1) > 0.95
        rest = functional.cross_entropy(strong, weak.argmax(1), reduction="none")
        rows = torch.randint(300, (32,))
        known = functional.cross_entropy(model(data.x[few][rows]), data.y[few][rows])
        return known + (rest * sure).mean()

    fit(watch, model, sgd(model, 0.05), loss, batches(data.x, data.y, steps=300))
    return errors(model, data)


@healthy(0.1)
def fourier_features(watch: Watch) -> float:
    image = images().x[7, 0]
    grid = torch.stack(
        torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij"), -1
    ).view(-1, 2)
    bands = torch.randn(2, 24, generator=torch.Generator().manual_seed(0)) * 3
    features = torch.cat([(6.28 * grid @ bands).sin(), (6.28 * grid @ bands).cos()], 1)
    model = mlp(48, 64, 1)
    losses = fit(
        watch,
        model,
        adam(model, 1e-2),
        lambda x, y: (model(x) - y).square().mean(),
        batches(features, image.view(-1, 1), size=64, steps=200),
    )
    return losses[-1]


@healthy(0.15)
def noise_added_to_gradients(watch: Watch) -> float:
    model, data = mlp(64, 48, 10), digits()
    optimizer = sgd(model, 0.05)

    def update(step: int) -> None:
        for p in model.parameters():
            p.grad += 0.01 / (1 + step) ** 0.5 * torch.randn_like(p)
        optimizer.step()

    return learn(watch, model, optimizer, data, 250, update=update)


@healthy(0.15)
def gradual_unfreezing(watch: Watch) -> float:
    model, data = mlp(64, 64, 64, 10), digits()
    learn(
        Watch(), model, adam(model), Data(data.x, (data.y + 1) % 10, data.test_x, data.test_y), 150
    )
    model[-1] = nn.Linear(64, 10)
    optimizer = adam(model)
    for p in model[0].parameters():
        p.requires_grad_(False)

    def update(step: int) -> None:
        optimizer.step()
        if step == 80:
            for p in model[0].parameters():
                p.requires_grad_(True)

    return learn(watch, model, optimizer, data, 200, update=update)


@healthy(0.12)
def recurrent_with_clipping(watch: Watch) -> float:
    data = waves()
    model = Recurrent(nn.LSTM(1, 24, batch_first=True), 24)
    optimizer = adam(model, 1e-2)

    def update(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return learn(watch, model, optimizer, data, 250, update=update)


@healthy(0.5)
def student_of_a_copy(watch: Watch) -> float:
    """Regression to the outputs of a frozen random network."""
    teacher = mlp(10, 24, 1)
    student = mlp(10, 64, 1)
    x = torch.randn(1200, 10)
    with torch.no_grad():
        y = teacher(x)
        y = (y - y.mean()) / y.std()
    data = split(x, y)
    return learn(watch, student, adam(student), data, 300)


@healthy(0.15)
def large_pretrained_copy(watch: Watch) -> float:
    model, data = cnn(), images()
    learn(Watch(), model, adam(model), data, 250)
    tuned = copy.deepcopy(model)
    return learn(watch, tuned, adam(tuned, 1e-4), data, 120)
