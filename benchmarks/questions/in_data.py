"""Mistakes in data: scales, order, labels, and axes that are mixed up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from .training import (
    DEAD,
    DIVERGES,
    FLAT,
    NAN,
    Data,
    Recurrent,
    Watch,
    adam,
    altered,
    ask,
    batches,
    cnn,
    digits,
    fit,
    friedman,
    github,
    images,
    learn,
    misfit,
    mlp,
    pull,
    question,
    sgd,
    stack,
    tabular,
    tokens,
    waves,
)

BCE = functional.binary_cross_entropy_with_logits
SIZES = torch.tensor([20.0, 20.0, 100.0, 0.1, 0.1] * 2)


def unit_digits() -> Data:
    """Digits whose pixels are between 0 and 1."""
    return altered(digits(scale=False), x=lambda x: x / 255)


# fmt: off
ask("pixels_truncated", github("keras-team/keras#255"), 0.15, "input_constant", FLAT,
    "Pixels are divided by 255 as integers, so that all of them are zero.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 10), adam(5e-3),
        unit_digits() if fixed else unit_digits()._replace(x=torch.zeros_like(digits().x))))
ask("targets_not_scaled", github("DeepRank/deeprank#16"), 0.25, "target_scale",
    f"{DIVERGES} {DEAD} {NAN}",
    "Targets aren't normalised: all samples soon have the same prediction.",
    lambda fixed, watch: learn(
        watch, mlp(10, 32, 32, 1), sgd(0.02),
        friedman() if fixed else altered(friedman(), y=lambda y: y * 60 + 300), 200))
ask("raw_features", github("BrainJS/brain.js#278"), 0.12, "input_scale input_offset",
    f"{DIVERGES} dead_units",
    "Features aren't normalised: some are a thousand times as large as others.",
    lambda fixed, watch: learn(watch, mlp(30, 32, 1), sgd(0.01), tabular(scale=fixed)))
ask("mixed_scales", github("NNReasoning/What-Can-Neural-Networks-Reason-About#1"), 0.4,
    "input_scale", "dead_units",
    "Locations to 20, values to 100 and colours to 1 go into the network as they are.",
    lambda fixed, watch: learn(
        watch, mlp(10, 32, 1), adam(5e-3),
        friedman() if fixed else altered(friedman(), x=lambda x: x * SIZES)))
ask("iterator_made_anew", github("leohsuofnthu/Pytorch-IterativeFCN#7"), 0.15, "batch_repeated",
    "overfitting",
    "``next(iter(loader))`` at each step of an unshuffled loader returns the first batch.",
    lambda fixed, watch: learn(
        watch, cnn(), adam(), images() if fixed else
        images()._replace(x=images().x[:32], y=images().y[:32]), shuffle=fixed))
ask("one_label_for_all", github("lyhue1991/eat_tensorflow2_in_30_days#23"), 0.12,
    "class_imbalance", "",
    "The label is read from the path with the wrong separator: all are 0, the loss is too.",
    lambda fixed, watch: learn(
        watch, mlp(30, 16, 1), adam(),
        tabular() if fixed else tabular()._replace(y=torch.zeros_like(tabular().y))))
ask("labels_not_shifted", github("KempnerInstitute/KempnerForge#154"), 0.4, "target_seen", "",
    "A language model's labels are its inputs, not shifted: it copies, and the loss goes to 0.",
    lambda fixed, watch: continue_sequences(watch, Decoder(), tokens().y if fixed else tokens().x))
ask("future_is_seen", github("huggingface/transformers#48745"), 0.2, "target_seen", "",
    "The decoder has no causal mask: each position sees the token that it has to predict.",
    lambda fixed, watch: continue_sequences(watch, Decoder(causal=fixed), tokens().y))
ask("attention_over_queries", github("karpathy/minGPT#132"), 0.2, "softmax_axis", "",
    "The softmax of attention is taken over queries, so that the future leaks.",
    lambda fixed, watch: continue_sequences(watch, Decoder(softmax_axis=-1 if fixed else -2),
                                            tokens().y))
ask("divided_by_255_twice", pull("magenta/magenta#925"), 0.15, "input_constant",
    f"{FLAT} lr_too_low no_gradient",
    "Pixels are divided by 255 when they are loaded, and again before the network.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 10), sgd(0.1), altered(
            digits(scale=False), x=lambda x: x / (255.0 if fixed else 255.0**2)), 200))
# fmt: on


@question(github("MAC-AutoML/rethinking_performance_estimation_in_NAS#17"), 0.12, "data_order", "")
def sorted_by_class(fixed: bool, watch: Watch) -> float:
    """The loader doesn't shuffle, and the files are sorted by class."""
    order = images().y.argsort()
    data = images()._replace(x=images().x[order], y=images().y[order])
    return learn(watch, cnn(), sgd(0.02), data, 168, shuffle=fixed)


@question("https://github.com/Borda/kaggle_image-classify/pull/12", 0.12, "labels_random", "")
def labels_before_shuffle(fixed: bool, watch: Watch) -> float:
    """Images are shuffled after their labels were taken: the pairs don't belong together."""
    data, order = images(), torch.randperm(len(images().x))
    data = data._replace(x=data.x[order], y=data.y[order] if fixed else data.y)
    return learn(watch, cnn(), adam(), data)


@question(github("Jingkang50/OpenPSG#56"), 0.2, "samples_mixed", FLAT)
def samples_mixed_by_view(fixed: bool, watch: Watch) -> float:
    """Batch and time are swapped by ``view``: each sequence has steps of several samples."""
    model = Recurrent(nn.GRU(1, 16), 16)

    def predict(x: Tensor) -> Tensor:
        by_time = x.transpose(0, 1) if fixed else x.reshape(x.shape[1], x.shape[0], 1)
        return model.head(model.layer(by_time)[0][-1])

    return learn(watch, model, adam(0.01), waves(), 200, 40, predict=predict)


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


def continue_sequences(watch: Watch, model: Decoder, targets: Tensor) -> float:
    """Trains to predict the targets, and returns how bad the model continues sequences.

    That is the share of tokens that are wrong where the network sees only those before.
    """
    data = tokens()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    fit(watch, model, adam(0.01), loss, batches(data.x, targets, steps=250))
    with torch.no_grad():
        found = [model(data.test_x[:, :n])[:, -1].argmax(1) for n in range(3, 13)]
    return (torch.stack(found, 1) != data.test_y[:, 2:]).float().mean().item()


@question(github("evandowning/deepreflect#11"), 0.12, "nonfinite_input", "")
def divided_by_a_maximum_of_zero(fixed: bool, watch: Watch) -> float:
    """Features are divided by their largest value, which is 0 for pixels that are always empty."""
    data = digits(scale=False)
    largest = data.x.amax(0).clamp(min=1.0 if fixed else 0.0)
    shares = altered(data, x=lambda x: x / largest)
    return learn(watch, mlp(64, 32, 10), adam(), shares, 200)


@question(github("JeasunLok/ResNet-pytorch#1"), 0.15, "", "overfitting")
def test_set_not_normalised(fixed: bool, watch: Watch) -> float:
    """Inputs for training are normalised, those for testing aren't."""
    model = mlp(30, 16, 1)
    data = tabular()._replace(test_x=tabular(scale=fixed).test_x)

    def log(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        if step % 20 == 19:
            watch.log(step, valid_loss=BCE(model(data.test_x)[:, 0], data.test_y).item())

    return learn(watch, model, adam(), data, 200, update=log)


@question(github("mdbloice/Augmentor#205"), 0.35, "labels_random label_noise", FLAT)
def masks_not_augmented(fixed: bool, watch: Watch) -> float:
    """Images are moved at random, and their masks stay where they were."""
    data = images()
    model = stack(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def loss(x: Tensor) -> Tensor:
        moved = x.roll(int(torch.randint(8, ())), 3)
        return BCE(model(moved), ((moved if fixed else x) > 0.3).float())

    fit(watch, model, adam(), loss, batches(data.x, steps=200))
    wrong = (model(data.test_x) > 0) != (data.test_x > 0.3)
    return wrong.float().mean().item() / 0.4


@question(pull("RomRoc/objdet_fizyr_colab#5"), 0.12, "labels_random label_noise", DIVERGES)
def labels_numbered_anew(fixed: bool, watch: Watch) -> float:
    """Classes are numbered in the order of a set, which is another one at each resumed epoch."""
    numbers, seen = torch.arange(10), 0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal numbers, seen
        if seen % 42 == 41 and not fixed:
            numbers = torch.randperm(10)
        seen += 1
        return functional.cross_entropy(out, numbers[y])

    return learn(watch, cnn(), adam(), images(), 210, loss=loss)


@question(github("keras-team/keras#6447"), 0.15, "nonfinite_input", "")
def values_missing_in_a_table(fixed: bool, watch: Watch) -> float:
    """Some cells of the table are empty, which is NaN: all predictions are the same."""
    data = tabular()
    holes = torch.rand(data.x.shape, generator=torch.Generator().manual_seed(0)) < 0.002
    x = data.x.masked_fill(holes, 0.0 if fixed else float("nan"))
    return learn(watch, mlp(30, 16, 1), adam(), data._replace(x=x))


@question(github("pytorch/pytorch#5059"), 0.25, "batch_repeated samples_duplicated", "overfitting")
def workers_draw_the_same(fixed: bool, watch: Watch) -> float:
    """Samples are drawn by four workers with the same seed, which is also that of each epoch."""
    model, data = mlp(10, 64, 1), friedman()

    def generated() -> Iterator[tuple[Tensor, ...]]:
        for step in range(320):
            seed = step if fixed else step // 4 % 3
            rows = torch.randint(1200, (16,), generator=torch.Generator().manual_seed(seed))
            yield data.x[rows], data.y[rows]

    fit(watch, model, adam(5e-3), lambda x, y: functional.mse_loss(model(x), y), generated())
    return misfit(model, data)
