"""Mistakes in the training loop: optimizers, schedules and modes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from .question import github, pull, question
from .training import (
    Recurrent,
    Watch,
    adam,
    batches,
    cnn,
    digits,
    drawn,
    errors,
    fit,
    friedman,
    images,
    learn,
    mlp,
    moons,
    sgd,
    tabular,
    waves,
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
    model = mlp(2, 16, 16, 1, activation=nn.ReLU) if fixed else mlp(2, 4, 1, activation=nn.Sigmoid)
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


@question(pull("DeepReinforcementLearning/DeepReinforcementLearningInAction#13"), 0.15)
def step_after_the_epoch(fixed: bool, watch: Watch) -> float:
    """``optimizer.step()`` has lost its indentation: it comes once, after all batches."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = adam(model)

    def update(step: int) -> None:
        if fixed or step % 43 == 42:
            optimizer.step()

    return learn(watch, model, optimizer, data, 215, update=update)


@question(pull("wenet-e2e/wekws#73"), 0.05)
def never_cleared_with_adam(fixed: bool, watch: Watch) -> float:
    """``zero_grad`` is missing in a recipe with Adam and a recurrent network."""
    model, data = Recurrent(nn.GRU(1, 16, batch_first=True), 16), waves()
    return learn(watch, model, adam(model, 0.02), data, 200, zero=fixed)


@question(github("VGraphRNN/VGRNN#4"), 0.2)
def clipped_after_the_step(fixed: bool, watch: Watch) -> float:
    """Gradients are clipped after ``step``, where it has no effect."""
    data = friedman()
    heavy = data._replace(y=data.y * 8, test_y=data.test_y * 8)
    model = mlp(10, 64, 64, 1)
    optimizer = sgd(model, 0.05)

    def update(step: int) -> None:
        if fixed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not fixed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return learn(watch, model, optimizer, heavy, 250, update=update)


@question(github("paiml/entrenar#311"), 0.2)
def clipped_by_a_squared_norm(fixed: bool, watch: Watch) -> float:
    """Gradients are divided by the fourth power of their norm in place of the norm."""
    data = friedman()
    heavy = data._replace(y=data.y * 5, test_y=data.test_y * 5)
    model = mlp(10, 64, 1)
    optimizer = sgd(model, 0.02, 0.9)

    def update(step: int) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / float(norm if fixed else norm**4))
        optimizer.step()

    return learn(watch, model, optimizer, heavy, 300, update=update)


@question(github("h2oai/h2o-llmstudio#663"), 0.2)
def schedule_counts_micro_batches(fixed: bool, watch: Watch) -> float:
    """The schedule is stepped at each of ten micro-batches of an update: it ends early."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = sgd(model, 0.1)
    scheduler = StepLR(optimizer, 15, gamma=0.1)

    def update(step: int) -> None:
        if step % 10 == 9:
            optimizer.step()
            optimizer.zero_grad()
        if not fixed or step % 10 == 9:
            scheduler.step()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y) / 10

    return learn(watch, model, optimizer, data, 400, 16, loss=loss, update=update, zero=False)


@question(github("ServiceNow/LCFCN#20"), 0.2)
def evaluated_in_the_loss(fixed: bool, watch: Watch) -> float:
    """The loss looks at predictions in evaluation mode, and leaves the model in it."""
    blocks = [(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()) for _ in range(8)]
    layers = (layer for block in blocks for layer in block)
    model, data = nn.Sequential(nn.Linear(64, 48), *layers, nn.Linear(48, 10)), digits()

    def predict(x: Tensor) -> Tensor:
        return model.train(fixed)(x)

    learn(watch, model, sgd(model, 0.05), data, 200, predict=predict)
    return errors(model.eval(), data)


@question(github("Lornatang/ESRGAN-PyTorch#39"), 0.3)
def generator_steps_twice(fixed: bool, watch: Watch) -> float:
    """The generator's optimizer steps in both phases, and that of the discriminator never does."""
    generator, critic = mlp(8, 32, 2), mlp(2, 32, 1)
    real = drawn(640, 2) * 0.3 + torch.tensor([2.0, -1.0])
    other, own = adam(generator, 1e-4), adam(critic, 3e-3)
    bce = functional.binary_cross_entropy_with_logits

    def loss(x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 8)).detach()
        scores = critic(torch.cat([x, fake]))
        return bce(scores, torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)]))

    fit(watch, critic, own, loss, batches(real), lambda _: (own if fixed else other).step())
    scores = critic(torch.cat([real, generator(torch.randn(640, 8))]))[:, 0] > 0
    return (scores != (torch.arange(1280) < 640)).float().mean().item()


@question(github("nothinglo/Deep-Photo-Enhancer#57"), 0.3)
def similarity_subtracted(fixed: bool, watch: Watch) -> float:
    """The loss has a minus sign that a similarity needs and an error doesn't."""
    data, model = digits(), mlp(64, 32, 64)
    data = data._replace(y=data.x, test_y=data.test_x)
    sign = 1 if fixed else -1

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return sign * functional.l1_loss(out, y)

    return learn(watch, model, adam(model, 5e-3), data, 200, loss=loss)


@question(github("BUserName/Learning_to_diversify#1"), 0.5)
def sign_of_a_penalty(fixed: bool, watch: Watch) -> float:
    """A term that should be small is subtracted from the loss."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        penalty = (out[:, 1] - 1).square().mean()
        return functional.mse_loss(out[:, :1], y) + (1 if fixed else -1) * penalty

    fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=250))
    return (model(data.test_x)[:, 1] - 1).square().mean().item()


@question(github("higgsfield-ai/higgsfield#14"), 0.35)
def target_network_stays(fixed: bool, watch: Watch) -> float:
    """The target network is copied once before training, so that values look one step ahead."""
    model, target, state = mlp(6, 32, 1), mlp(6, 32, 1), torch.eye(6)
    target.load_state_dict(model.state_dict())
    place = torch.randint(6, (800,), generator=torch.Generator().manual_seed(0))
    optimizer = adam(model, 0.01)

    def loss(here: Tensor) -> Tensor:
        with torch.no_grad():
            later = target(state[(here + 1).clamp(max=5)])[:, 0]
        goal = 1 + 0.95 * later * (1 - (here == 5).float())
        return functional.smooth_l1_loss(model(state[here])[:, 0], goal)

    def update(step: int) -> None:
        optimizer.step()
        if fixed and step % 10 == 9:
            target.load_state_dict(model.state_dict())

    fit(watch, model, optimizer, loss, batches(place, steps=400), update)
    truth = torch.tensor([sum(0.95**k for k in range(6 - i)) for i in range(6)])
    return (model(state)[:, 0] - truth).abs().mean().item()
