"""Mistakes in data: scales, order, labels, and axes that are mixed up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .question import github, pull, question
from .training import (
    Data,
    Recurrent,
    Watch,
    adam,
    batches,
    cnn,
    digits,
    fit,
    friedman,
    images,
    learn,
    misfit,
    mlp,
    sgd,
    tabular,
    tokens,
    waves,
)


@question(github("keras-team/keras#255"), 0.15)
def pixels_truncated(fixed: bool, watch: Watch) -> float:
    """Pixels are divided by 255 as integers, so that all of them are zero."""
    data, model = digits(scale=False), mlp(64, 32, 10)
    x = data.x / 255 if fixed else (data.x.int() // 256).float()
    data = data._replace(x=x, test_x=data.test_x / 255)
    return learn(watch, model, adam(model, 5e-3), data)


@question(github("DeepRank/deeprank#16"), 0.25)
def targets_not_scaled(fixed: bool, watch: Watch) -> float:
    """Targets aren't normalised: all samples soon have the same prediction."""
    data, model = friedman(), mlp(10, 32, 32, 1)
    if not fixed:
        data = data._replace(y=data.y * 60 + 300, test_y=data.test_y * 60 + 300)
    return learn(watch, model, sgd(model, 0.02), data, 200)


@question(github("MAC-AutoML/rethinking_performance_estimation_in_NAS#17"), 0.12)
def sorted_by_class(fixed: bool, watch: Watch) -> float:
    """The loader doesn't shuffle, and the files are sorted by class."""
    data, model = images(), cnn()
    order = data.y.argsort()
    data = data._replace(x=data.x[order], y=data.y[order])
    return learn(watch, model, sgd(model, 0.02), data, 168, shuffle=fixed)


@question("https://github.com/Borda/kaggle_image-classify/pull/12", 0.12)
def labels_before_shuffle(fixed: bool, watch: Watch) -> float:
    """Images are shuffled after their labels were taken: the pairs don't belong together."""
    data, order = images(), torch.randperm(len(images().x))
    data, model = data._replace(x=data.x[order], y=data.y[order] if fixed else data.y), cnn()
    return learn(watch, model, adam(model), data)


@question(github("BrainJS/brain.js#278"), 0.12)
def raw_features(fixed: bool, watch: Watch) -> float:
    """Features aren't normalised: some are a thousand times as large as others."""
    model = mlp(30, 32, 1)
    return learn(watch, model, sgd(model, 0.01), tabular(scale=fixed))


@question(github("NNReasoning/What-Can-Neural-Networks-Reason-About#1"), 0.4)
def mixed_scales(fixed: bool, watch: Watch) -> float:
    """Locations to 20, values to 100 and colours to 1 go into the network as they are."""
    data, model = friedman(), mlp(10, 32, 1)
    scale = torch.ones(10) if fixed else torch.tensor([20.0, 20.0, 100.0, 0.1, 0.1] * 2)
    data = data._replace(x=data.x * scale, test_x=data.test_x * scale)
    return learn(watch, model, adam(model, 5e-3), data)


@question(github("leohsuofnthu/Pytorch-IterativeFCN#7"), 0.15)
def iterator_made_anew(fixed: bool, watch: Watch) -> float:
    """``next(iter(loader))`` at each step of an unshuffled loader returns the first batch."""
    data, model = images(), cnn()
    if not fixed:
        data = data._replace(x=data.x[:32], y=data.y[:32])
    return learn(watch, model, adam(model), data, shuffle=fixed)


@question(github("lyhue1991/eat_tensorflow2_in_30_days#23"), 0.12)
def one_label_for_all(fixed: bool, watch: Watch) -> float:
    """The label is read from the path with the wrong separator: all are 0, the loss is too."""
    data, model = tabular(), mlp(30, 16, 1)
    y = data.y if fixed else torch.zeros_like(data.y)
    return learn(watch, model, adam(model), data._replace(y=y))


@question(github("Jingkang50/OpenPSG#56"), 0.2)
def samples_mixed_by_view(fixed: bool, watch: Watch) -> float:
    """Batch and time are swapped by ``view``: each sequence has steps of several samples."""
    model = Recurrent(nn.GRU(1, 16), 16)

    def predict(x: Tensor) -> Tensor:
        by_time = x.transpose(0, 1) if fixed else x.reshape(x.shape[1], x.shape[0], 1)
        return model.head(model.layer(by_time)[0][-1])

    return learn(watch, model, adam(model, 0.01), waves(), 200, 40, predict=predict)


class Decoder(nn.Module):
    """One layer of attention over tokens and their places."""

    def __init__(self, causal: bool = True, softmax_axis: int = -1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8, 24), nn.Embedding(12, 24)
        self.mix, self.out = nn.Linear(24, 72), mlp(24, 48, 8)
        self.causal, self.axis = causal, softmax_axis

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        query, key, value = self.mix(hidden).chunk(3, 2)
        score = query @ key.transpose(1, 2) / 24**0.5
        if self.causal:
            score = score + torch.full(score.shape[1:], -1e9).triu(1)
        return self.out(hidden + score.softmax(self.axis) @ value)

    @torch.no_grad()
    def wrong(self, x: Tensor, y: Tensor) -> float:
        """The share of tokens that are wrong where the network sees only those before."""
        found = [self(x[:, :n])[:, -1].argmax(1) for n in range(3, x.shape[1] + 1)]
        return (torch.stack(found, 1) != y[:, 2:]).float().mean().item()


def continue_sequences(watch: Watch, model: Decoder, targets: Tensor) -> float:
    """Trains to predict the targets, and returns how bad the model continues sequences."""
    data = tokens()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    fit(watch, model, adam(model, 0.01), loss, batches(data.x, targets, steps=250))
    return model.wrong(data.test_x, data.test_y)


@question(github("KempnerInstitute/KempnerForge#154"), 0.4)
def labels_not_shifted(fixed: bool, watch: Watch) -> float:
    """A language model's labels are its inputs, not shifted: it copies, and the loss goes to 0."""
    data = tokens()
    return continue_sequences(watch, Decoder(), data.y if fixed else data.x)


@question(github("huggingface/transformers#48745"), 0.2)
def future_is_seen(fixed: bool, watch: Watch) -> float:
    """The decoder has no causal mask: each position sees the token that it has to predict."""
    return continue_sequences(watch, Decoder(causal=fixed), tokens().y)


@question(github("karpathy/minGPT#132"), 0.2)
def attention_over_queries(fixed: bool, watch: Watch) -> float:
    """The softmax of attention is taken over queries, so that the future leaks."""
    return continue_sequences(watch, Decoder(softmax_axis=-1 if fixed else -2), tokens().y)


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


@question(pull("magenta/magenta#925"), 0.15)
def divided_by_255_twice(fixed: bool, watch: Watch) -> float:
    """Pixels are divided by 255 when they are loaded, and again before the network."""
    data, model = digits(scale=False), mlp(64, 32, 10)
    scale = 255.0 if fixed else 255.0**2
    data = data._replace(x=data.x / scale, test_x=data.test_x / scale)
    return learn(watch, model, sgd(model, 0.1), data, 200)


@question(github("JeasunLok/ResNet-pytorch#1"), 0.15)
def test_set_not_normalised(fixed: bool, watch: Watch) -> float:
    """Inputs for training are normalised, those for testing aren't."""
    model = mlp(30, 16, 1)
    data = tabular()._replace(test_x=tabular(scale=fixed).test_x)

    def log(step: int) -> None:
        optimizer.step()
        if step % 20 == 19:
            scores = model(data.test_x)[:, 0]
            loss = functional.binary_cross_entropy_with_logits(scores, data.test_y)
            watch.log(step, valid_loss=loss.item())

    optimizer = adam(model)
    return learn(watch, model, optimizer, data, 200, update=log)


@question(github("mdbloice/Augmentor#205"), 0.35)
def masks_not_augmented(fixed: bool, watch: Watch) -> float:
    """Images are moved at random, and their masks stay where they were."""
    data = images()
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def loss(x: Tensor, _: Tensor) -> Tensor:
        mask = (x > 0.3).float()
        moved = x.roll(int(torch.randint(8, ())), 3)
        return functional.binary_cross_entropy_with_logits(model(moved), mask)

    def aligned(x: Tensor, _: Tensor) -> Tensor:
        x = x.roll(int(torch.randint(8, ())), 3)
        return functional.binary_cross_entropy_with_logits(model(x), (x > 0.3).float())

    fit(watch, model, adam(model), aligned if fixed else loss, batches(data.x, data.y, steps=200))
    wrong = (model(data.test_x) > 0) != (data.test_x > 0.3)
    return wrong.float().mean().item() / 0.4


@question(pull("RomRoc/objdet_fizyr_colab#5"), 0.12)
def labels_numbered_anew(fixed: bool, watch: Watch) -> float:
    """Classes are numbered in the order of a set, which is another one at each resumed epoch."""
    model, data = cnn(), images()
    optimizer = adam(model)
    numbers = torch.arange(10)
    seen = 0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal numbers, seen
        if seen % 42 == 41 and not fixed:
            numbers = torch.randperm(10)
        seen += 1
        return functional.cross_entropy(out, numbers[y])

    return learn(watch, model, optimizer, data, 210, loss=loss)


@question(github("keras-team/keras#6447"), 0.15)
def values_missing_in_a_table(fixed: bool, watch: Watch) -> float:
    """Some cells of the table are empty, which is NaN: all predictions are the same."""
    data, model = tabular(), mlp(30, 16, 1)
    holes = torch.rand(data.x.shape, generator=torch.Generator().manual_seed(0)) < 0.002
    x = data.x.masked_fill(holes, 0.0 if fixed else float("nan"))
    return learn(watch, model, adam(model), data._replace(x=x), 150)


@question(github("pytorch/pytorch#5059"), 0.25)
def workers_draw_the_same(fixed: bool, watch: Watch) -> float:
    """Samples are drawn by four workers with the same seed, which is also that of each epoch."""
    model, data, count = mlp(10, 64, 1), friedman(), 0

    def generated() -> object:
        nonlocal count
        for step in range(320):
            seed = step if fixed else step // 4 % 3
            rows = torch.randint(1200, (16,), generator=torch.Generator().manual_seed(seed))
            yield data.x[rows], data.y[rows]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(model(x), y)

    fit(watch, model, adam(model, 5e-3), loss, generated())
    return misfit(model, data)
