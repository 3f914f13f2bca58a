"""Per-sample losses of loss modules, against each sample's part of the loss by its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradlens
from gradlens import Cockpit, quantities
from gradlens.torch_private import LossModule
from tests.cases.steps import tracked_backward

N, CLASSES = 5, 3
Parts = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets to each sample's part ``[N]`` of the loss."""


@dataclass(frozen=True)
class Case:
    """A loss module, its targets, and the parts of its output ``[N, 3]``."""

    module: nn.Module
    targets: Tensor
    parts: Parts
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = lambda module, x, y: module(x, y)


class Focal(LossModule):
    """A loss module of somebody's own, whose mean is over all elements."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = functional.binary_cross_entropy_with_logits(x, y, reduction="none")
        losses = losses * (1 - torch.exp(-losses)) ** 2
        return {"mean": losses.mean(), "sum": losses.sum(), "none": losses}[self.reduction]


class Weighted(Focal):
    """Its mean has weights that it doesn't have without a reduction."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = (x - y).square().sum(1)
        return losses if self.reduction == "none" else losses[0] / 2 + losses[1:].sum() / N


class Failing(Focal):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.reduction == "mean", "this module can only average"
        return (x - y).square().mean()


class Random(Focal):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = (x - y + torch.randn_like(x)).square()
        return losses if self.reduction == "none" else losses.mean()


def labels() -> Tensor:
    return torch.tensor([0, 1, 2, 0, 1])


def binary() -> Tensor:
    return torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0]]).double()


def real() -> Tensor:
    return torch.linspace(-1, 1, N * CLASSES).double().reshape(N, CLASSES)


def cross_entropy(weights: Tensor, smoothing: float = 0.0) -> Parts:
    """By its formula: the mean is over the weights of the labels."""

    def parts(x: Tensor, y: Tensor) -> Tensor:
        logs = x.log_softmax(1)
        right = -(logs * weights)[range(N), y]
        smooth = -(logs * weights).mean(1)
        return ((1 - smoothing) * right + smoothing * smooth) / weights[y].sum()

    return parts


WEIGHTS = torch.tensor([0.3, 1.0, 2.0]).double()
ONES = torch.ones(CLASSES).double()
MASK = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5]).double()


CASES: dict[str, Case] = {
    "cross-entropy": Case(nn.CrossEntropyLoss(), labels(), cross_entropy(ONES)),
    "class weights, smoothed": Case(
        nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), labels(), cross_entropy(WEIGHTS, 0.1)
    ),
    "ignored class": Case(
        nn.CrossEntropyLoss(ignore_index=1),
        labels(),
        cross_entropy(torch.tensor([1.0, 0.0, 1.0]).double()),
    ),
    "named arguments": Case(
        nn.CrossEntropyLoss(),
        labels(),
        cross_entropy(ONES),
        lambda module, x, y: module(target=y, input=x),
    ),
    "not reduced": Case(
        nn.CrossEntropyLoss(reduction="none"),
        labels(),
        cross_entropy(ONES),
        lambda module, x, y: module(x, y).mean(),
    ),
    "not reduced, masked": Case(
        nn.MSELoss(reduction="none"),
        real(),
        lambda x, y: ((x - y).square() * MASK[:, None]).sum(1) / (MASK.sum() * CLASSES),
        lambda module, x, y: (module(x, y).mean(1) * MASK).sum() / MASK.sum(),
    ),
    "positive weights": Case(
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        binary(),
        lambda x, y: (
            -(WEIGHTS * y * functional.logsigmoid(x) + (1 - y) * functional.logsigmoid(-x)).mean(1)
            / N
        ),
    ),
    "perfect fit": Case(
        nn.MSELoss(), real(), lambda x, y: 0 * x.sum(1), lambda module, x, y: module(x, x.detach())
    ),
}


class Losses(quantities.SingleStepQuantity):
    """ℓₙ of the step."""

    needs = ("individual_losses",)

    def compute(self, step: Any) -> Any:
        return step.individual_losses


def found_by(case: Case, model: nn.Module, inputs: Tensor, scale: float = 1.0) -> Any:
    cockpit = Cockpit(model, [Losses()], loss_function=case.module)
    with cockpit(0):
        (scale * case.loss(case.module, model(inputs), case.targets)).backward()
    return cockpit.history["Losses"][0]


def setting() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES).double(), torch.randn(N, 4).double()


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**40, 2.0**-40])
@pytest.mark.parametrize("name", CASES)
def test_losses_are_n_times_each_samples_part(name: str, scale: float) -> None:
    case, (model, inputs) = CASES[name], setting()
    parts = case.parts(model(inputs).detach(), case.targets)
    assert parts.sum() == pytest.approx(case.loss(case.module, model(inputs), case.targets).item())
    found = torch.as_tensor(found_by(case, model, inputs, scale))
    torch.testing.assert_close(found, N * parts * scale, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_is_divided_by_the_lengths_of_its_targets(reduction: str) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, CLASSES).double(), torch.randn(N + 2, N, 4).double()
    targets, lengths = torch.randint(1, CLASSES, (N, 3)), torch.tensor([3, 1, 2, 2, 1])
    module = nn.CTCLoss(reduction=reduction)

    def loss_of(module: nn.Module) -> Tensor:
        logs = model(inputs).log_softmax(-1)
        found: Tensor = module(logs, targets, torch.full((N,), N + 2), lengths)
        return found

    cockpit = Cockpit(model, [Losses()], loss_reduction=reduction, loss_function=module)
    loss = loss_of(module)
    with cockpit(0, batch_size=N):
        loss.backward()
    found = torch.as_tensor(cockpit.history["Losses"][0])
    each = loss_of(nn.CTCLoss(reduction="none")).detach()
    expected = each / lengths if reduction == "mean" else each
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    total = found.mean() if reduction == "mean" else found.sum()
    assert total == pytest.approx(loss.item())


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (Weighted(), torch.tensor([N / 2, 1, 1, 1, 1]).double()),
        (Failing(), torch.full((N,), 1 / CLASSES, dtype=torch.float64)),
    ],
)
def test_losses_that_a_module_does_not_have_are_read_off_the_graph(
    module: nn.Module, parts: Tensor
) -> None:
    model, inputs = setting()
    found = torch.as_tensor(found_by(Case(module, real(), lambda x, y: x), model, inputs))
    squares = (model(inputs).detach() - real()).square().sum(1)
    torch.testing.assert_close(found, parts * squares, rtol=1e-9, atol=1e-12)


class Wrapper(nn.Module):
    """A module of somebody's own, which divides the sum that it calls."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.inner, self.reduction = nn.MSELoss(reduction=reduction), reduction


class WithoutReduction(LossModule):
    def __init__(self) -> None:
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("module", "own"),
    [
        (None, None),
        (nn.MSELoss(), "mean"),
        (nn.MSELoss(reduction="sum"), "sum"),
        (nn.MSELoss(reduction="none"), None),
        (nn.KLDivLoss(reduction="batchmean"), "mean"),
        (Focal(reduction="sum"), "sum"),
        (Focal(reduction="median"), None),
        (Wrapper("sum"), None),
        (WithoutReduction(), None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("said", ["mean", "sum"])
def test_a_loss_modules_own_reduction_must_be_the_one_that_was_said(
    module: nn.Module | None, own: str | None, said: Any
) -> None:
    if own in (None, said):
        Cockpit(nn.Linear(2, 1), [quantities.Time()], loss_reduction=said, loss_function=module)
        return
    with pytest.raises(ValueError, match=rf"pass loss_reduction='{own}'.*reduction='none'"):
        Cockpit(nn.Linear(2, 1), [quantities.Time()], loss_reduction=said, loss_function=module)


def test_a_compiled_loss_module_has_its_reduction() -> None:
    module = torch.compile(nn.MSELoss(reduction="sum"), backend="eager")
    with pytest.raises(ValueError, match="pass loss_reduction='sum'"):
        Cockpit(nn.Linear(2, 1), loss_function=module)


def test_random_losses_leave_the_random_numbers() -> None:
    model, inputs = setting()
    torch.manual_seed(1)
    Random()(model(inputs), real()).backward()
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    # Those of another call with other random numbers don't add up to the loss; its graph's do.
    assert found_by(Case(Random(), real(), lambda x, y: x), model, inputs) is not None
    assert torch.equal(torch.get_rng_state(), expected)


def test_modules_for_different_numbers_of_samples_have_those_of_the_graph() -> None:
    model, inputs = setting()
    module = gradlens.extend(nn.MSELoss())
    cockpit = Cockpit(model, [Losses()])
    with cockpit(0):
        output = model(inputs)
        (module(output, real()) + module(output[:2], real()[:2])).backward()
    squares = (output.detach() - real()).square().sum(1)
    shares = torch.tensor([1 / 15 + 1 / 6] * 2 + [1 / 15] * 3, dtype=torch.float64)
    found = torch.as_tensor(cockpit.history["Losses"][0])
    torch.testing.assert_close(found, N * shares * squares, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_under_autocast_and_a_scaler_are_those_of_single_precision(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, CLASSES), torch.randn(N, 4)
    module = nn.CrossEntropyLoss(WEIGHTS.float())
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, [Losses(), quantities.Alpha()], loss_function=module)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            output = model(inputs)
            loss = module(output, labels())
        with cockpit(step, loss=loss, optimizer=optimizer, scaler=scaler):
            scaler.scale(loss).backward()
        expected = N * cross_entropy(WEIGHTS)(output.detach().double(), labels())
        found = torch.as_tensor(cockpit.history["Losses"][step]).double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        scaler.step(optimizer)
        scaler.update()
    assert math.isfinite(cockpit.history["Alpha"][0])


@pytest.mark.parametrize("passes_loss", [True, False])
def test_alpha_is_the_same_whether_the_loss_is_passed(passes_loss: bool) -> None:
    (model, inputs), module = setting(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [*functional.mse_loss(model(inputs), real(), reduction="none").mean(1).tolist()]
    cockpit = Cockpit(model, [quantities.Alpha(), Losses()], loss_function=module)
    gradients = []
    for step in range(2):
        optimizer.zero_grad()
        loss = module(model(inputs), real())
        with cockpit(step, optimizer=optimizer, info={"loss": loss} if passes_loss else {}):
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    assert cockpit.history["Losses"][0] == pytest.approx(losses)
    # The loss is a parabola along the update, which is in proportion to the first gradient.
    expected = -(gradients[1] @ gradients[0]) / (gradients[0] @ gradients[0])
    assert cockpit.history["Alpha"][0] == pytest.approx(expected.item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_in_half_precision_whose_mean_is_in_single(dtype: torch.dtype) -> None:
    (model, inputs), module = setting(), nn.CrossEntropyLoss(reduction="none")
    model, inputs = model.to(dtype), inputs.to(dtype)
    cockpit = Cockpit(model, [Losses(), quantities.NormTest()], loss_function=module)
    losses = module(model(inputs), labels())
    tracked_backward(cockpit, 0, losses.float().mean())
    found = torch.as_tensor(cockpit.history["Losses"][0])
    torch.testing.assert_close(found, losses.detach().float(), rtol=0.02, atol=0)


def test_a_gradient_of_the_users_own_inside_the_context_does_not_count() -> None:
    (model, inputs), module = setting(), nn.CrossEntropyLoss()
    cockpit = Cockpit(model, [Losses(), quantities.NormTest()], loss_function=module)
    loss = module(model(inputs), labels())
    with cockpit(0, loss=loss):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
    found = torch.as_tensor(cockpit.history["Losses"][0])
    expected = functional.cross_entropy(model(inputs), labels(), reduction="none").detach()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
