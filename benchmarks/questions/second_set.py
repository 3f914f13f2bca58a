"""Questions of a second set, written after the rules, which nobody looked at before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from .question import github, question
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
    mlp,
    moons,
    sgd,
    split,
    tabular,
    waves,
)

# Data -------------------------------------------------------------------------------------------


def with_inputs(data: Data, change: object) -> Data:
    return Data(change(data.x), data.y, change(data.test_x), data.test_y)


@question(github("evandowning/deepreflect#11"), 0.12)
def divided_by_a_maximum_of_zero(fixed: bool, watch: Watch) -> float:
    """Features are divided by their largest value, which is 0 for pixels that are always empty."""
    data = digits(scale=False)
    largest = data.x.amax(0).clamp(min=1.0 if fixed else 0.0)
    model = mlp(64, 32, 10)
    return learn(watch, model, adam(model), with_inputs(data, lambda x: x / largest), 200)


@question("", 0.3)
def mean_and_deviation_exchanged(fixed: bool, watch: Watch) -> float:
    """Inputs have their deviation subtracted and are divided by their mean, which is small."""
    data = friedman()
    mean, std = data.x.mean(0) + 2e-3, data.x.std(0)
    change = (lambda x: (x - mean) / std) if fixed else (lambda x: (x - std) / mean)
    model = mlp(10, 32, 1)
    return learn(watch, model, sgd(model, 0.02), with_inputs(data, change), 250)


@question("", 0.35)
def targets_as_integers(fixed: bool, watch: Watch) -> float:
    """Targets between 0 and 1 are made integers, so that all of them are 0."""
    data = friedman()
    low, high = data.y.min(), data.y.max()
    y, test = ((t - low) / (high - low) for t in (data.y, data.test_y))
    model = mlp(10, 32, 1)
    kept = Data(data.x, y if fixed else y.long().float(), data.test_x, test)
    return learn(watch, model, adam(model), kept, 300)


@question("", 0.12)
def half_precision_inputs_overflow(fixed: bool, watch: Watch) -> float:
    """Counts up to 100,000 are stored in half precision, where large ones are infinite."""
    data = tabular(scale=False)
    model = nn.Sequential(nn.BatchNorm1d(30), mlp(30, 16, 1))
    counts = with_inputs(data, lambda x: x * 30 if fixed else (x * 30).half().float())
    return learn(watch, model, adam(model), counts, 150)


# Loops ------------------------------------------------------------------------------------------


@question("", 0.12)
def step_before_backward(fixed: bool, watch: Watch) -> float:
    """``zero_grad``, ``step``, ``backward``: each step uses gradients that were just cleared."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = adam(model)
    watch.follow(model)
    for step, (x, y) in enumerate(batches(data.x, data.y, steps=200)):
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        if not fixed:
            optimizer.step()
        with watch.step(step, loss, optimizer):
            loss.backward()
        if fixed:
            optimizer.step()
    return errors(model, data)


@question("", 0.12)
def cleared_before_the_step(fixed: bool, watch: Watch) -> float:
    """``backward``, ``zero_grad``, ``step``: nothing is left of the gradients."""
    model, data = cnn(), images()
    optimizer = sgd(model, 0.05)

    def update(step: int) -> None:
        if not fixed:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    return learn(watch, model, optimizer, data, 200, update=update)


@question("", 0.12)
def optimizer_of_a_copy(fixed: bool, watch: Watch) -> float:
    """The optimizer got the parameters of a first model, which was made once more afterwards."""
    data, first = digits(), mlp(64, 32, 10)
    model = first if fixed else mlp(64, 32, 10)
    return learn(watch, model, adam(first), data, 200)


@question("", 0.35)
def momentum_nearly_one(fixed: bool, watch: Watch) -> float:
    """A momentum of 0.999 at a usual rate: the loss swings for ever."""
    model, data = mlp(10, 32, 1), friedman()
    return learn(watch, model, sgd(model, 0.02, 0.9 if fixed else 0.999), data, 250)


@question("", 0.12)
def one_cycle_by_epoch(fixed: bool, watch: Watch) -> float:
    """The one-cycle schedule counts batches, but is stepped once an epoch: it stays in warm-up."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=200, div_factor=1e4)

    def update(step: int) -> None:
        optimizer.step()
        if fixed or step % 43 == 42:
            scheduler.step()

    return learn(watch, model, optimizer, data, 199, update=update)


@question("", 0.15)
def plateau_of_the_wrong_mode(fixed: bool, watch: Watch) -> float:
    """``ReduceLROnPlateau`` watches the loss with ``mode="max"``: falling, it cuts the rate."""
    model, data = cnn(), images()
    optimizer = sgd(model, 0.02)
    scheduler = ReduceLROnPlateau(optimizer, "min" if fixed else "max", patience=2, factor=0.1)
    losses: list[float] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = functional.cross_entropy(model(x), y)
        losses.append(value.item())
        return value

    def update(step: int) -> None:
        optimizer.step()
        if step % 5 == 4:
            scheduler.step(sum(losses[-5:]) / 5)

    fit(watch, model, optimizer, loss, batches(data.x, data.y, steps=220), update)
    return errors(model, data)


@question("", 0.12)
def rate_of_ten(fixed: bool, watch: Watch) -> float:
    """A rate of 10 was typed for 0.1 in a network for images."""
    model, data = cnn(), images()
    return learn(
        watch, model, sgd(model, 0.05 if fixed else 10.0, 0.0 if not fixed else 0.9), data, 200
    )


@question("", 0.35)
def plain_rate_for_adam(fixed: bool, watch: Watch) -> float:
    """Adam with a rate of 0.5 jumps over all that it could learn."""
    model, data = mlp(10, 64, 64, 1), friedman()
    return learn(watch, model, adam(model, 3e-3 if fixed else 0.5), data, 250)


@question("", 0.12)
def summed_over_the_batch(fixed: bool, watch: Watch) -> float:
    """The loss is a sum over 256 samples, with a rate for means."""
    model, data = mlp(64, 32, 10), digits()
    how = "mean" if fixed else "sum"
    return learn(
        watch,
        model,
        sgd(model, 0.1),
        data,
        120,
        256,
        loss=lambda out, y: functional.cross_entropy(out, y, reduction=how),
    )


# Losses -----------------------------------------------------------------------------------------


@question("", 0.15)
def sigmoid_before_cross_entropy(fixed: bool, watch: Watch) -> float:
    """A sigmoid in front of ``CrossEntropyLoss``: scores differ by 1 at most."""
    model, data = cnn(), images()
    predict = model if fixed else lambda x: model(x).sigmoid()
    return learn(watch, model, sgd(model, 0.02), data, 60, predict=predict)


@question("", 0.12)
def two_sigmoids(fixed: bool, watch: Watch) -> float:
    """A sigmoid ends the model, and another one is in front of ``BCELoss``."""
    model, data = mlp(30, 16, 1), tabular()
    inner = nn.Identity() if fixed else nn.Sigmoid()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy(inner(out)[:, 0].sigmoid(), y)

    learn(watch, model, sgd(model, 0.05), data, 60, loss=loss)
    with torch.no_grad():
        scores = inner(model(data.test_x))[:, 0].sigmoid()
    return ((scores > 0.5).float() != data.test_y).float().mean().item()


@question("", 0.15)
def relu_on_scores(fixed: bool, watch: Watch) -> float:
    """The scores go through a ReLU before the cross-entropy, and most are dead soon."""
    model, data = mlp(64, 32, 10), digits()
    model[-1].bias.data.fill_(-1.0)
    predict = model if fixed else lambda x: model(x).relu()
    return learn(watch, model, sgd(model, 0.1), data, 200, predict=predict)


@question(github("grey-eye/talking-heads#32"), 0.3)
def deviation_of_equal_features(fixed: bool, watch: Watch) -> float:
    """Features are divided by their standard deviation plus epsilon; that of equal ones is 0."""
    data = friedman()
    model = mlp(10, 32, 32, 1)

    def predict(x: Tensor) -> Tensor:
        h = model[1](model[0](x))
        flat = torch.cat([h, h[:, :1].expand(-1, 4)], 1).view(len(h), -1, 4)
        if fixed:
            scale = (flat.var(2, keepdim=True) + 1e-5).sqrt()
        else:
            scale = flat.std(2, keepdim=True) + 1e-5
        h = (flat / scale).flatten(1)[:, 4:]
        return model[4](model[3](model[2](h)))

    return learn(watch, model, adam(model), data, 300, predict=predict)


@question("", 0.15)
def logarithm_of_softmax(fixed: bool, watch: Watch) -> float:
    """The logarithm of a softmax by hand is infinite where a probability is 0."""
    model, data = mlp(64, 64, 10), digits(scale=False)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        scores = out.log_softmax(1) if fixed else out.softmax(1).log()
        return -scores[torch.arange(len(y)), y].mean()

    return learn(watch, model, adam(model, 1e-2), data, 200, loss=loss)


@question("", 0.45)
def tanh_for_large_targets(fixed: bool, watch: Watch) -> float:
    """The output is a tanh, and targets are between 0 and 30."""
    data = friedman()
    scale = 1.0 if fixed else 10.0
    large = Data(
        data.x,
        data.y * scale + (0 if fixed else 15),
        data.test_x,
        data.test_y * scale + (0 if fixed else 15),
    )
    model = mlp(10, 32, 1)
    if not fixed:
        model.append(nn.Tanh())
    return learn(watch, model, adam(model), large, 300)


@question(github("yifita/deep_cage#16"), 0.5)
def weights_of_penalty_detached(fixed: bool, watch: Watch) -> float:
    """A penalty is computed from detached outputs: it is added, and changes nothing."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        other = out[:, 1] if fixed else out[:, 1].detach()
        return (out[:, :1] - y).square().mean() + 5 * (other - 3).square().mean()

    fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=250))
    with torch.no_grad():
        return (model(data.test_x)[:, 1] - 3).square().mean().item()


@question("", 0.15)
def absolute_errors_of_probabilities(fixed: bool, watch: Watch) -> float:
    """The mean absolute error of a softmax to one-hot labels hardly has a gradient."""
    model, data = mlp(64, 32, 10), digits()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if fixed:
            return functional.cross_entropy(out, y)
        return (out.softmax(1) - functional.one_hot(y, 10)).abs().mean()

    return learn(watch, model, sgd(model, 0.05), data, 200, loss=loss)


# Models -----------------------------------------------------------------------------------------


@question("", 0.25)
def constant_weights(fixed: bool, watch: Watch) -> float:
    """All weights begin as 0.1: units of a layer stay the same."""
    model, data = mlp(10, 32, 32, 1), friedman()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.1)
            nn.init.zeros_(layer.bias)
    return learn(watch, model, adam(model), data, 300)


@question("", 0.15)
def normal_weights_of_size_one(fixed: bool, watch: Watch) -> float:
    """Weights are drawn with a deviation of 1, and the first loss is in the thousands."""
    model, data = mlp(64, 128, 128, 128, 10), digits()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    return learn(watch, model, sgd(model, 0.02), data, 150)


@question("", 0.2)
def eight_sigmoids(fixed: bool, watch: Watch) -> float:
    """Eight layers with sigmoids: gradients of the first ones are next to nothing."""
    act = nn.ReLU if fixed else nn.Sigmoid
    model, data = mlp(64, *[48] * 8, 10, act=act), digits()
    return learn(watch, model, adam(model, 1e-3), data, 300)


@question("", 0.15)
def biases_far_below_zero(fixed: bool, watch: Watch) -> float:
    """Biases begin at -10: hardly any unit is ever active."""
    model, data = mlp(64, 64, 64, 10), digits()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.bias, -10.0)
    return learn(watch, model, sgd(model, 0.05), data, 200)


class Wrong(nn.Module):
    """A recurrent network that gets ``[N, T, D]`` and takes its axes for those of ``[T, N, D]``."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(1, 16, batch_first=fixed), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@question("", 0.1)
def batch_first_forgotten(fixed: bool, watch: Watch) -> float:
    """``batch_first=True`` is missing: the layer runs over the samples, and sees one step each."""
    model, data = Wrong(fixed), waves()
    return learn(watch, model, adam(model, 1e-2), data, 250)


class Pooled(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.axis = 1 if fixed else 0
        self.layer, self.head = nn.Linear(8, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x.view(-1, 8, 8)).relu()
        h = h.amax(self.axis, keepdim=True).expand_as(h)
        return self.head(h.mean(1))


@question("", 0.4)
def pooled_over_the_batch(fixed: bool, watch: Watch) -> float:
    """The maximum is taken over the batch in place of positions: all have the same output."""
    model, data = Pooled(fixed), digits()
    return learn(watch, model, adam(model), data, 300)


class MadeInForward(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.last = nn.Linear(32, 10) if fixed else None

    def forward(self, x: Tensor) -> Tensor:
        last = nn.Linear(32, 10) if self.last is None else self.last
        return last(self.first(x).relu())


@question("", 0.12)
def layer_made_in_forward(fixed: bool, watch: Watch) -> float:
    """The last layer is made in ``forward``, with new weights at each step."""
    model, data = MadeInForward(fixed), digits()
    return learn(watch, model, adam(model), data, 200)


class NoGrad(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.encoder, self.head = mlp(10, 32, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.fixed):
            h = self.encoder(x)
        return self.head(h)


@question("", 0.35)
def encoder_under_no_grad(fixed: bool, watch: Watch) -> float:
    """A new encoder runs under ``no_grad``, as the old pretrained one did."""
    model, data = NoGrad(fixed), friedman()
    return learn(watch, model, adam(model), data, 300)


@question("", 0.2)
def dropout_of_what_is_kept(fixed: bool, watch: Watch) -> float:
    """``Dropout(0.98)`` is written by somebody who means the share that is kept."""
    p = 0.02 if fixed else 0.98
    model, data = (
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 10)),
        digits(),
    )
    learn(watch, model, sgd(model, 0.05), data, 200)
    return errors(model.eval(), data)


@question("", 0.2)
def batches_of_two_with_norm(fixed: bool, watch: Watch) -> float:
    """BatchNorm in batches of two: statistics are hardly better than noise."""
    model, data = (
        nn.Sequential(mlp(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)),
        digits(),
    )
    learn(watch, model, sgd(model, 0.02), data, 150 if fixed else 400, 64 if fixed else 2)
    return errors(model.eval(), data)


@question("", 0.5)
def long_plain_recurrence(fixed: bool, watch: Watch) -> float:
    """A plain recurrent network has to remember the first of 60 steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 60, 1, generator=generator)
    data = split(x, x[:, 0])
    layer = nn.GRU(1, 24, batch_first=True) if fixed else nn.RNN(1, 24, batch_first=True)
    model = Recurrent(layer, 24)
    if fixed:
        with torch.no_grad():
            layer.bias_hh_l0[24:48] = 3.0
    return learn(watch, model, adam(model, 1e-2), data, 300)


@question(github("amanshenoy/multilogue-net#8"), 0.6)
def one_in_fifty(fixed: bool, watch: Watch) -> float:
    """One sample in fifty is positive: the network says no to all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 10, generator=generator)
    score = x[:, :3].sum(1) + torch.randn(3000, generator=generator)
    data = split(x, (score > score.quantile(0.98)).float())
    model = mlp(10, 16, 1)
    weight = torch.tensor(30.0 if fixed else 1.0)
    learn(
        watch,
        model,
        sgd(model, 0.05, 0.0),
        data,
        120,
        loss=lambda out, y: functional.binary_cross_entropy_with_logits(
            out[:, 0], y, pos_weight=weight
        ),
    )
    with torch.no_grad():
        found = model(data.test_x)[:, 0] > 0
    return 1 - found[data.test_y > 0].float().mean().item()


@question("", 0.2)
def weights_cut_each_step(fixed: bool, watch: Watch) -> float:
    """Weights are clipped to ±0.01 after each step, as a critic's, in a plain classifier."""
    model, data = mlp(64, 32, 32, 10), digits()
    optimizer = adam(model)

    def update(step: int) -> None:
        optimizer.step()
        for parameter in model.parameters() if not fixed else ():
            parameter.data.clamp_(-0.01, 0.01)

    return learn(watch, model, optimizer, data, 200, update=update)


@question("", 0.15)
def moons_with_a_line(fixed: bool, watch: Watch) -> float:
    """A single linear layer for two moons, which no line parts."""
    data = moons()
    model = mlp(2, 32, 2) if fixed else nn.Sequential(nn.Linear(2, 32), nn.Linear(32, 2))
    return learn(watch, model, adam(model, 1e-2), data, 300) * (1.0 if fixed else 3.0)
