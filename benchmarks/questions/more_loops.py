"""Healthy loops of a second set, written after the rules."""

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
    learn,
    misfit,
    mlp,
    moons,
    sgd,
    split,
    tabular,
    tokens,
    waves,
)


@healthy(0.12)
def smoothed_labels(watch: Watch) -> float:
    model, data = cnn(norm=True), images()
    learn(
        watch,
        model,
        sgd(model, 0.05),
        data,
        200,
        loss=lambda out, y: functional.cross_entropy(out, y, label_smoothing=0.2),
    )
    return errors(model.eval(), data)


@healthy(0.15)
def focal_loss_of_rare_class(watch: Watch) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2400, 10, generator=generator)
    score = x[:, :4].sum(1) + 0.3 * torch.randn(2400, generator=generator)
    data = split(x, (score > score.quantile(0.9)).float())
    model = mlp(10, 32, 1)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        each = functional.binary_cross_entropy_with_logits(out[:, 0], y, reduction="none")
        weight = torch.where(y > 0, 0.75, 0.25)
        return (weight * (1 - (-each).exp()).square() * each).mean()

    return learn(watch, model, adam(model), data, 300, loss=loss)


@healthy(0.3)
def several_labels(watch: Watch) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1600, 12, generator=generator)
    y = (x[:, :6] + x[:, 6:] > 0).float()
    model = mlp(12, 48, 6)
    train, test = slice(0, 1200), slice(1200, None)
    fit(
        watch,
        model,
        adam(model),
        lambda a, b: functional.binary_cross_entropy_with_logits(model(a), b),
        batches(x[train], y[train], steps=250),
    )
    return ((model(x[test]) > 0).float() != y[test]).float().mean().item()


@healthy(0.4)
def huber_with_outliers(watch: Watch) -> float:
    data = friedman()
    generator = torch.Generator().manual_seed(0)
    wild = torch.rand(data.y.shape, generator=generator) < 0.03
    noisy = Data(
        data.x,
        torch.where(wild, data.y + 15 * torch.randn(data.y.shape, generator=generator), data.y),
        data.test_x,
        data.test_y,
    )
    model = mlp(10, 32, 1)
    learn(watch, model, adam(model), noisy, 300, loss=lambda out, y: functional.huber_loss(out, y))
    return misfit(model, data)


@healthy(0.35)
def one_sample_at_a_time(watch: Watch) -> float:
    model, data = mlp(10, 32, 1), friedman()
    return learn(watch, model, sgd(model, 0.005, 0.0), data, 800, 1)


@healthy(0.12)
def heavy_dropout(watch: Watch) -> float:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.6), nn.Linear(256, 10))
    learn(watch, model, adam(model), digits(), 250)
    return errors(model.eval(), digits())


@healthy(0.4)
def adagrad(watch: Watch) -> float:
    model, data = mlp(10, 32, 1), friedman()
    return learn(watch, model, torch.optim.Adagrad(model.parameters(), 0.05), data, 300)


@healthy(0.12)
def rmsprop_on_images(watch: Watch) -> float:
    model, data = cnn(), images()
    return learn(watch, model, torch.optim.RMSprop(model.parameters(), 1e-3), data, 250)


@healthy(0.12)
def one_cycle(watch: Watch) -> float:
    model, data = cnn(norm=True), images()
    optimizer = sgd(model, 0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=251)

    def update(step: int) -> None:
        optimizer.step()
        scheduler.step()

    learn(watch, model, optimizer, data, 240, update=update)
    return errors(model.eval(), data)


@healthy(0.12)
def cosine_with_restarts(watch: Watch) -> float:
    model, data = mlp(64, 64, 10), digits()
    optimizer = sgd(model, 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60)

    def update(step: int) -> None:
        optimizer.step()
        scheduler.step()

    return learn(watch, model, optimizer, data, 240, update=update)


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
    tags = (data.x + data.x.roll(1, 1)) % 8
    lengths = torch.randint(4, 13, (len(data.x), 1))
    tags = torch.where(torch.arange(12) < lengths, tags, -100)
    fit(
        watch,
        model,
        adam(model, 1e-2),
        lambda x, y: functional.cross_entropy(model(x).transpose(1, 2), y),
        batches(data.x, tags, steps=250),
    )
    wanted = (data.test_x + data.test_x.roll(1, 1)) % 8
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


@healthy(0.4)
def normalised_weights(watch: Watch) -> float:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(10, 32)),
        nn.Tanh(),
        nn.utils.parametrizations.weight_norm(nn.Linear(32, 1)),
    )
    return learn(watch, model, adam(model), friedman(), 300)


@healthy(0.12)
def two_optimizers(watch: Watch) -> float:
    model, data = cnn(), images()
    body = torch.optim.SGD([p for layer in model[:-1] for p in layer.parameters()], 0.05, 0.9)
    head = torch.optim.Adam(model[-1].parameters(), 3e-3)

    def update(step: int) -> None:
        body.step()
        head.step()
        head.zero_grad()

    return learn(watch, model, body, data, 200, update=update)


@healthy(0.4)
def sparse_regression(watch: Watch) -> float:
    model, data = mlp(10, 64, 1), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean() + 1e-3 * sum(
            p.abs().sum() for p in model.parameters()
        )

    fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=400))
    return misfit(model, data)


@healthy(2.0)
def mixture_density(watch: Watch) -> float:
    data = friedman()
    model = mlp(10, 48, 9)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        weight, mean, spread = model(x).chunk(3, 1)
        each = torch.distributions.Normal(mean, functional.softplus(spread) + 0.05).log_prob(y)
        return -(weight.log_softmax(1) + each).logsumexp(1).mean()

    losses = fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=300))
    return 1 + sum(losses[-10:]) / 10


@healthy(1.2)
def coupling_flow(watch: Watch) -> float:
    data = moons(0.1)
    nets = nn.ModuleList([mlp(1, 32, 2, act=nn.Tanh) for _ in range(4)])

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
def full_batch_descent(watch: Watch) -> float:
    model, data = mlp(30, 16, 1), tabular()
    return learn(watch, model, sgd(model, 0.3, 0.0), data, 200, 1000)


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
