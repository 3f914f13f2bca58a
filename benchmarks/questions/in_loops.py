"""Mistakes in the training loop: optimizers, schedules and modes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from .training import (
    DEAD,
    DIVERGES,
    FLAT,
    NAN,
    Recurrent,
    Watch,
    adam,
    altered,
    always,
    ask,
    batches,
    begun,
    cnn,
    critic_loss,
    digits,
    errors,
    fit,
    friedman,
    github,
    images,
    learn,
    mlp,
    moons,
    normal,
    pull,
    question,
    real_points,
    sgd,
    tabular,
    values_of_a_chain,
    waves,
)

CE = nn.CrossEntropyLoss()


def at_end(steps: int, fixed: bool = False) -> object:
    """Whether a step is the last one of an epoch of so many, or any one if ``fixed``."""
    return always if fixed else lambda step: step % steps == steps - 1


# fmt: off
ask("gradients_kept", github("IBM/aihwkit#446"), 0.3, "zero_grad_missing", DIVERGES,
    "Gradients are never set to zero: the loss falls, rises, and falls again.",
    lambda fixed, watch: learn(watch, mlp(10, 32, 1), sgd(0.05, 0.0), friedman(), 200, zero=fixed))
ask("scheduler_instead_of_step", github("ClementPinard/SfmLearner-Pytorch#5"), 0.12, "no_step",
    FLAT, "With a scheduler, ``scheduler.step()`` is called in place of ``optimizer.step()``.",
    lambda fixed, watch: learn(watch, cnn(), adam(), images(), schedule=lambda o: StepLR(o, 100),
                               update=lambda o, step: fixed and o.step()))
ask("schedule_to_zero", github("LINCellularNeuroscience/VAME#26"), 0.35, "lr_decayed no_step",
    "lr_too_low",
    "Without a schedule, the learning rate is multiplied by 0, not 1, after some epochs.",
    lambda fixed, watch: learn(watch, mlp(10, 32, 1), adam(2e-3), friedman(), 250,
                               schedule=lambda o: StepLR(o, 20, gamma=1.0 if fixed else 0.0)))
ask("schedule_by_batch", github("leftthomas/SRGAN#94"), 0.15, "lr_decayed", "lr_too_low",
    "A schedule that counts epochs is stepped at each batch, so that the rate soon is nothing.",
    lambda fixed, watch: learn(watch, mlp(64, 32, 10), sgd(0.05), digits(), 200,
                               schedule=lambda o: StepLR(o, 5), when=at_end(42, not fixed)))
ask("rate_too_high", github("ivanvovk/WaveGrad#3"), 0.12, DIVERGES, DEAD,
    "The learning rate is too high; a lower one ends the explosion of the loss.",
    lambda fixed, watch: learn(watch, mlp(10, 64, 64, 1), sgd(0.02 if fixed else 0.4), friedman(),
                               250))
ask("adam_rate_too_high", github("lxg2015/faceboxes#5"), 0.12, DIVERGES, DEAD,
    "The loss of a convolutional network blows up until the learning rate is lowered.",
    lambda fixed, watch: learn(watch, cnn(), adam(3e-3 if fixed else 0.3), images()))
ask("all_weights_zero", github("davharris/mistnet#87"), 0.12, "symmetric_init", DEAD,
    "Weights are zero until somebody initialises them: hidden layers have no gradient.",
    lambda fixed, watch: learn(watch, mlp(64, 32, 10) if fixed else
                               begun(mlp(64, 32, 10), nn.init.zeros_, 0.0), sgd(0.05), digits()))
ask("weights_too_large", github("kaonashi-tyc/zi2zi#81"), 0.2, "exploding_gradients", "",
    "The variance of the initial weights was mistyped, and a term of the loss is huge.",
    lambda fixed, watch: learn(watch, begun(mlp(10, 64, 64, 1), None if fixed else normal(2.0)),
                               adam(), friedman(), 200))
ask("step_after_the_epoch", pull("DeepReinforcementLearning/DeepReinforcementLearningInAction#13"),
    0.15, "no_step", FLAT,
    "``optimizer.step()`` has lost its indentation: it comes once, after all batches.",
    lambda fixed, watch: learn(watch, mlp(64, 32, 10), adam(), digits(), 215, update=lambda o, step:
                               at_end(43, fixed)(step) and o.step()))
ask("never_cleared_with_adam", pull("wenet-e2e/wekws#73"), 0.05, "zero_grad_missing", DIVERGES,
    "``zero_grad`` is missing in a recipe with Adam and a recurrent network.",
    lambda fixed, watch: learn(watch, Recurrent(nn.GRU(1, 16, batch_first=True), 16), adam(0.02),
                               waves(), 200, zero=fixed))
ask("schedule_counts_micro_batches", github("h2oai/h2o-llmstudio#663"), 0.2, "lr_decayed no_step",
    "lr_too_low",
    "The schedule is stepped at each of ten micro-batches of an update: it ends early.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 10), sgd(0.1), digits(), 400, 16, every=10, when=at_end(10, not fixed),
        schedule=lambda o: StepLR(o, 15), loss=lambda out, y: CE(out, y) / 10))
ask("layers_in_a_list", github("pytorch/pytorch#715"), 0.06, "unregistered_layers optimizer_misses",
    "",
    "Hidden layers are kept in a Python list, so the optimizer doesn't get their parameters.",
    lambda fixed, watch: learn(watch, Listed(nn.ModuleList if fixed else list), adam(0.03),
                               moons(0.05), 300))
# fmt: on


@question(github("Lightning-AI/litgpt#779"), 0.12, "no_step lr_too_low", FLAT)
def warmup_never_counts(fixed: bool, watch: Watch) -> float:
    """The steps that warm-up counts never grow, as accumulation seems to go on: the rate is 0."""

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 20 if fixed else 0.0)
        optimizer.step()

    return learn(watch, mlp(64, 32, 10), adam(0.0), digits(), update=update)


@question(github("google-deepmind/learning-to-learn#18"), 0.3, "optimizer_anew", "")
def reset_each_epoch(fixed: bool, watch: Watch) -> float:
    """Parameters and optimizer are reset at each epoch: the loss falls within epochs alone."""
    model = mlp(10, 32, 1)

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        if step % 38 == 37 and not fixed:
            optimizer.state.clear()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()

    return learn(watch, model, adam(2e-3), friedman(), 228, update=update)


@question(
    "https://discuss.pytorch.org/t/simple-linear-sigmoid-network-not-learning/98714", 0.15,
    "lr_too_low", f"{FLAT} batch_too_small",
)  # fmt: skip
def sigmoid_at_small_rate(fixed: bool, watch: Watch) -> float:
    """Exclusive or, by a narrow sigmoid network, MSE and a rate of 0.01, one sample at a time."""
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    y = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    model = mlp(2, 16, 16, 1, activation=nn.ReLU) if fixed else mlp(2, 4, 1, activation=nn.Sigmoid)
    bce = functional.binary_cross_entropy_with_logits

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return bce(model(x), y) if fixed else (model(x).sigmoid() - y).square().mean()

    optimizer = adam(0.01) if fixed else sgd(0.01, 0.0)
    fit(watch, model, optimizer, loss, batches(x, y, size=1, steps=400))
    return bce(model(x), y).item()


class Listed(nn.Module):
    """Hidden layers in a list, which may be one of modules."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.hidden = kind([nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = layer(x).tanh()
        return self.head(x)


@question(github("pytorch/tutorials#1624"), 0.15, "batchnorm_eval", "")
def left_in_eval_mode(fixed: bool, watch: Watch) -> float:
    """Evaluation sets ``eval()``, and nobody sets ``train()`` again: frozen statistics."""
    model, data = cnn(norm=True), images()

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        if step % 50 == 4:
            model.eval()
            errors(model, data)
            model.train(fixed)

    return learn(watch, model, sgd(0.2), data, 200, 16, update=update)


@question(github("wolny/pytorch-3dunet#53"), 0.06, "batch_of_one", "batch_too_small")
def norm_of_one_sample(fixed: bool, watch: Watch) -> float:
    """Batch normalisation is trained with batches of one, and predicts badly in eval mode."""
    steps, size = (150, 16) if fixed else (300, 1)
    return learn(watch, cnn(norm=True), adam(), images(), steps, size)


@question(
    github("afiaka87/glide-finetune#5"), 0.15,
    "adam_epsilon nonfinite_weights precision_underflow", "",
)  # fmt: skip
def half_adam_epsilon(fixed: bool, watch: Watch) -> float:
    """In half precision, Adam's epsilon of 1e-8 is zero: NaN after the first step."""
    model = mlp(64, 32, 10).half()
    optimizer = adam(3e-3, eps=1e-4 if fixed else 1e-8)
    return learn(watch, model, optimizer, digits(), predict=lambda x: model(x.half()).float())


@question(github("yz93/LAVT-RIS#25"), 0.15, "symmetric_init", f"{DEAD} vanishing_gradients")
def two_layers_zero(fixed: bool, watch: Watch) -> float:
    """Two linear layers in a row are initialised with zeros, so neither ever gets a gradient."""
    model = mlp(30, 16, 16, 1)
    for number in () if fixed else (2, 4):
        begun(model[number], nn.init.zeros_, 0.0)
    return learn(watch, model, adam(), tabular())


@question(github("VGraphRNN/VGRNN#4"), 0.2, f"{DIVERGES} exploding_gradients", f"{DEAD} {NAN}")
def clipped_after_the_step(fixed: bool, watch: Watch) -> float:
    """Gradients are clipped after ``step``, where it has no effect."""
    model, heavy = mlp(10, 64, 64, 1), altered(friedman(), y=lambda y: y * 8)

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    options = {"clip": 1.0} if fixed else {"update": update}
    return learn(watch, model, sgd(0.05), heavy, 250, **options)


@question(github("paiml/entrenar#311"), 0.2, "clipping_always", f"lr_too_low {FLAT}")
def clipped_by_a_squared_norm(fixed: bool, watch: Watch) -> float:
    """Gradients are divided by the fourth power of their norm in place of the norm."""
    model, heavy = mlp(10, 64, 1), altered(friedman(), y=lambda y: y * 5)

    def update(optimizer: Optimizer, step: int) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / float(norm if fixed else norm**4))
        optimizer.step()

    return learn(watch, model, sgd(0.02), heavy, 300, update=update)


@question(github("ServiceNow/LCFCN#20"), 0.2, "batchnorm_eval", f"vanishing_gradients {DEAD}")
def evaluated_in_the_loss(fixed: bool, watch: Watch) -> float:
    """The loss looks at predictions in evaluation mode, and leaves the model in it."""
    blocks = [(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()) for _ in range(8)]
    layers = (layer for block in blocks for layer in block)
    model, data = nn.Sequential(nn.Linear(64, 48), *layers, nn.Linear(48, 10)), digits()
    learn(watch, model, sgd(0.05), data, 200, predict=lambda x: model.train(fixed)(x))
    return errors(model.eval(), data)


@question(github("Lornatang/ESRGAN-PyTorch#39"), 0.3, "no_step optimizer_misses", FLAT)
def generator_steps_twice(fixed: bool, watch: Watch) -> float:
    """The generator's optimizer steps in both phases, and that of the discriminator never does."""
    generator, critic, real = mlp(8, 32, 2), mlp(2, 32, 1), real_points()
    other, own = adam(1e-4)(generator), adam(3e-3)(critic)
    stepped = own if fixed else other

    def loss(x: Tensor) -> Tensor:
        return critic_loss(critic, x, generator(torch.randn(len(x), 8)).detach())

    fit(watch, critic, own, loss, batches(real), update=lambda _, step: stepped.step())
    scores = critic(torch.cat([real, generator(torch.randn(640, 8))]))[:, 0] > 0
    return (scores != (torch.arange(1280) < 640)).float().mean().item()


@question(github("BUserName/Learning_to_diversify#1"), 0.5, "loss_maximised", DIVERGES)
def sign_of_a_penalty(fixed: bool, watch: Watch) -> float:
    """A term that should be small is subtracted from the loss."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        penalty = (out[:, 1] - 1).square().mean()
        return functional.mse_loss(out[:, :1], y) + (1 if fixed else -1) * penalty

    learn(watch, model, adam(), data, 250, loss=loss)
    return (model(data.test_x)[:, 1] - 1).square().mean().item()


@question(github("higgsfield-ai/higgsfield#14"), 0.35, "", "")
def target_network_stays(fixed: bool, watch: Watch) -> float:
    """The target network is copied once before training, so that values look one step ahead."""
    model, target = mlp(6, 32, 1), mlp(6, 32, 1)
    target.load_state_dict(model.state_dict())

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        if fixed and step % 10 == 9:
            target.load_state_dict(model.state_dict())

    return values_of_a_chain(watch, model, target, update=update)
