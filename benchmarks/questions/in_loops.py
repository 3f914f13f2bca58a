"""Mistakes in the training loop: optimizers, schedules and modes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from .question import github, question
from .training import (
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
    tabular,
)

CE = nn.CrossEntropyLoss()


@question(github("IBM/aihwkit#446"), 0.3)
def gradients_kept(fixed: bool, watch: Watch) -> float:
    """Gradients are never set to zero: the loss falls, rises, and falls again."""
    model, data = mlp(10, 32, 1), friedman()
    return learn(watch, model, sgd(model, 0.05, 0.0), data, 200, zero=fixed)


@question(github("ClementPinard/SfmLearner-Pytorch#5"), 0.12)
def scheduler_instead_of_step(fixed: bool, watch: Watch) -> float:
    """With a scheduler, ``scheduler.step()`` is called in place of ``optimizer.step()``."""
    model, data = cnn(), images()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 100)

    def update(step: int) -> None:
        if fixed:
            optimizer.step()
        scheduler.step()

    return learn(watch, model, optimizer, data, update=update)


@question(github("LINCellularNeuroscience/VAME#26"), 0.35)
def schedule_to_zero(fixed: bool, watch: Watch) -> float:
    """Without a schedule, the learning rate is multiplied by 0, not 1, after some epochs."""
    model, data = mlp(10, 32, 1), friedman()
    optimizer = adam(model, 2e-3)
    scheduler = StepLR(optimizer, 20, gamma=1.0 if fixed else 0.0)

    def update(step: int) -> None:
        optimizer.step()
        scheduler.step()

    return learn(watch, model, optimizer, data, 250, update=update)


@question(github("leftthomas/SRGAN#94"), 0.15)
def schedule_by_batch(fixed: bool, watch: Watch) -> float:
    """A schedule that counts epochs is stepped at each batch, so that the rate soon is nothing."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = sgd(model, 0.05)
    scheduler = StepLR(optimizer, 5, gamma=0.1)

    def update(step: int) -> None:
        optimizer.step()
        if not fixed or step % 42 == 41:
            scheduler.step()

    return learn(watch, model, optimizer, data, 200, update=update)


@question(github("Lightning-AI/litgpt#779"), 0.12)
def warmup_never_counts(fixed: bool, watch: Watch) -> float:
    """The steps that warm-up counts never grow, as accumulation seems to go on: the rate is 0."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = adam(model, 0.0)
    counted = 0

    def update(step: int) -> None:
        nonlocal counted
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, counted / 20)
        optimizer.step()
        counted += fixed

    return learn(watch, model, optimizer, data, update=update)


@question(github("google-deepmind/learning-to-learn#18"), 0.3)
def reset_each_epoch(fixed: bool, watch: Watch) -> float:
    """Parameters and optimizer are reset at each epoch: the loss falls within epochs alone."""
    model, data = mlp(10, 32, 1), friedman()
    optimizer = adam(model, 2e-3)

    def update(step: int) -> None:
        optimizer.step()
        if step % 38 == 37 and not fixed:
            optimizer.state.clear()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()

    return learn(watch, model, optimizer, data, 228, update=update)


@question(github("ivanvovk/WaveGrad#3"), 0.12)
def rate_too_high(fixed: bool, watch: Watch) -> float:
    """The learning rate is too high; a lower one ends the explosion of the loss."""
    model, data = mlp(10, 64, 64, 1), friedman()
    optimizer = sgd(model, 0.02 if fixed else 0.4)
    return learn(watch, model, optimizer, data, 250)


@question(github("lxg2015/faceboxes#5"), 0.12)
def adam_rate_too_high(fixed: bool, watch: Watch) -> float:
    """The loss of a convolutional network blows up until the learning rate is lowered."""
    model = cnn()
    return learn(watch, model, adam(model, 3e-3 if fixed else 0.3), images())


@question("https://discuss.pytorch.org/t/simple-linear-sigmoid-network-not-learning/98714", 0.15)
def sigmoid_at_small_rate(fixed: bool, watch: Watch) -> float:
    """Exclusive or, by a narrow sigmoid network, MSE and a rate of 0.01, one sample at a time."""
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    y = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    model = mlp(2, 16, 16, 1, act=nn.ReLU) if fixed else mlp(2, 4, 1, act=nn.Sigmoid)
    optimizer = adam(model, 0.01) if fixed else sgd(model, 0.01, 0.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        if fixed:
            return functional.binary_cross_entropy_with_logits(out, y)
        return (out.sigmoid() - y).square().mean()

    fit(watch, model, optimizer, loss, batches(x, y, size=1, steps=400))
    return functional.binary_cross_entropy_with_logits(model(x), y).item()


@question(github("pytorch/pytorch#715"), 0.06)
def layers_in_a_list(fixed: bool, watch: Watch) -> float:
    """Hidden layers are kept in a Python list, so the optimizer doesn't get their parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
            self.hidden = nn.ModuleList(layers) if fixed else layers
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.hidden:
                x = layer(x).tanh()
            return self.head(x)

    model = Net()
    return learn(watch, model, adam(model, 0.03), moons(0.05), 300)


@question(github("pytorch/tutorials#1624"), 0.15)
def left_in_eval_mode(fixed: bool, watch: Watch) -> float:
    """Evaluation sets ``eval()``, and nobody sets ``train()`` again: frozen statistics."""
    model, data = cnn(norm=True), images()
    batch = batches(data.x, data.y, steps=200, size=16)
    optimizer = sgd(model, 0.2)

    def update(step: int) -> None:
        optimizer.step()
        if step % 50 == 4:
            model.eval()
            errors(model, data)
            model.train(fixed)

    fit(watch, model, optimizer, lambda x, y: CE(model(x), y), batch, update)
    model.eval()
    return errors(model, data)


@question(github("wolny/pytorch-3dunet#53"), 0.06)
def norm_of_one_sample(fixed: bool, watch: Watch) -> float:
    """Batch normalisation is trained with batches of one, and predicts badly in eval mode."""
    model, data = cnn(norm=True), images()
    batch = batches(data.x, data.y, steps=300 if not fixed else 150, size=16 if fixed else 1)
    fit(watch, model, adam(model), lambda x, y: CE(model(x), y), batch)
    model.eval()
    return errors(model, data)


@question(github("afiaka87/glide-finetune#5"), 0.15)
def half_adam_epsilon(fixed: bool, watch: Watch) -> float:
    """In half precision, Adam's epsilon of 1e-8 is zero: NaN after the first step."""
    model = mlp(64, 32, 10).half()
    optimizer = adam(model, 3e-3, eps=1e-4 if fixed else 1e-8)

    def predict(x: Tensor) -> Tensor:
        return model(x.half()).float()

    return learn(watch, model, optimizer, digits(), predict=predict)


@question(github("davharris/mistnet#87"), 0.12)
def all_weights_zero(fixed: bool, watch: Watch) -> float:
    """Weights are zero until somebody initialises them: hidden layers have no gradient."""
    model = mlp(64, 32, 10)
    if not fixed:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return learn(watch, model, sgd(model, 0.05), digits())


@question(github("yz93/LAVT-RIS#25"), 0.15)
def two_layers_zero(fixed: bool, watch: Watch) -> float:
    """Two linear layers in a row are initialised with zeros, so neither ever gets a gradient."""
    model = mlp(30, 16, 16, 1)
    if not fixed:
        for layer in (model[2], model[4]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    return learn(watch, model, adam(model), tabular())


@question(github("kaonashi-tyc/zi2zi#81"), 0.2)
def weights_too_large(fixed: bool, watch: Watch) -> float:
    """The variance of the initial weights was mistyped, and a term of the loss is huge."""
    model, data = mlp(10, 64, 64, 1), friedman()
    if not fixed:
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=2.0)
    return learn(watch, model, adam(model), data, 200)
