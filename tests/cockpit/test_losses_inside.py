"""Losses that the model or a function computes: per-sample losses and outputs are found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradlens
from benchmarks.zoo.network import Network
from benchmarks.zoo.transformers_families import Family
from gradlens.curvature.curvature import LossCurvature
from gradlens.history.undefined import Undefined
from gradlens.quantities import CurvatureQuantity, HessTrace, SingleStepQuantity
from gradlens.quantities.step import Step
from tests.cases.processes import in_process_group
from tests.cases.steps import tracked_backward
from tests.cases.whole_networks import FAMILIES

N = 4


class Losses(SingleStepQuantity):
    """The losses of single samples as they are, or why there are none."""

    needs = ("individual_losses",)

    def compute(self, step: Step) -> Any:
        found = step.individual_losses
        return Undefined(step.without_losses) if found is None else found


class Outputs(CurvatureQuantity):
    """The network's outputs."""

    def compute(self, curvature: LossCurvature) -> Any:
        return curvature.ggn.outputs.detach().clone()


def found(model: nn.Module, loss_of: Callable[[], Tensor], **arguments: Any) -> dict[str, Any]:
    """What a step of these two quantities records."""
    cockpit = gradlens.Cockpit(model, [Losses(), Outputs()])
    tracked_backward(cockpit, 0, loss_of(), **arguments)
    cockpit.close()
    return cockpit.get_output()[0]


def contributions(network: Network, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """N times what each sample contributes to the loss, by a forward pass of its own."""
    with torch.no_grad():
        parts = [network.part(model, dict(batch), n) for n in range(network.samples)]
    return torch.stack([torch.zeros(()) if p is None else p.double() for p in parts]) * N


# Models of transformers -------------------------------------------------------------------------


def built(family: Family) -> tuple[Network, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    network = family.network()
    return network, network.build().to(network.dtype).eval(), network.batch()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_outputs_of_a_library_of_models(name: str) -> None:
    network, model, batch = built(FAMILIES[name])
    record = found(model, lambda: network.loss(model, batch))
    torch.testing.assert_close(
        torch.as_tensor(record["Losses"]).double(),
        contributions(network, model, batch),
        rtol=1e-5,
        atol=1e-6,
    )
    with torch.no_grad():
        logits = model(**batch).logits
    np.testing.assert_allclose(record["Outputs"], logits, rtol=1e-9, atol=1e-9)


# Losses that functions compute ------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 5, dtype=torch.float64), torch.tensor([0, 2, 1, 2])


WEIGHTS = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
SOFT = torch.rand(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(1)

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "cross entropy": functional.cross_entropy,
    "with weights": lambda o, y: functional.cross_entropy(o, y, weight=WEIGHTS),
    "with smooth labels": lambda o, y: functional.cross_entropy(o, y, label_smoothing=0.1),
    "of probabilities": lambda o, y: functional.cross_entropy(o, SOFT),
    "some ignored": lambda o, y: functional.cross_entropy(o, y, ignore_index=2),
    "times a mask": lambda o, y: (
        (functional.cross_entropy(o, y, reduction="none") * (y > 0)).sum() / (y > 0).sum()
    ),
    "log probabilities": lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(),
    "squares": lambda o, y: (o - SOFT).pow(2).mean(),
    "squared errors": lambda o, y: functional.mse_loss(o, SOFT),
    "squared errors of a column": lambda o, y: functional.mse_loss(
        o[:, :1].squeeze(), SOFT[:, :1].squeeze()
    ),
    "absolute errors": lambda o, y: functional.l1_loss(o, SOFT),
    "smooth absolute errors": lambda o, y: functional.smooth_l1_loss(o, SOFT, beta=0.3),
    "Huber": lambda o, y: functional.huber_loss(o, SOFT, delta=0.3),
    "several labels, unweighted": lambda o, y: functional.binary_cross_entropy_with_logits(o, SOFT),
    "several labels": lambda o, y: functional.binary_cross_entropy_with_logits(
        o, SOFT, weight=WEIGHTS, pos_weight=WEIGHTS
    ),
    "preferences": lambda o, y: -functional.logsigmoid(o[:, 0] - o[:, 1]).mean(),
    "two terms": lambda o, y: 0.3 * functional.cross_entropy(o, y) + (o - SOFT).pow(2).mean(),
    "each alone": lambda o, y: torch.stack(
        [functional.cross_entropy(row, label) for row, label in zip(o, y, strict=True)]
    ).mean(),
    "each alone, added to zero": lambda o, y: (
        sum(functional.cross_entropy(row, label) for row, label in zip(o, y, strict=True)) / N
    ),
    "two terms, added to zero": lambda o, y: sum(
        [functional.cross_entropy(o, y), (o - SOFT).pow(2).mean()]
    ),
    "focal": lambda o, y: (
        (1 - (-functional.cross_entropy(o, y, reduction="none")).exp()).pow(2)
        * functional.cross_entropy(o, y, reduction="none")
    ).mean(),
    "clipped ratios": lambda o, y: (
        -torch.minimum(
            o.log_softmax(1)[:, 0].exp() * WEIGHTS[y], o.log_softmax(1)[:, 0].exp().clamp(0.3, 0.4)
        ).mean()
        + torch.maximum(o[:, 1].square(), o[:, 2].exp()).mean()
    ),
    "hinges": lambda o, y: (
        functional.relu(1 - o[:, 0] * SOFT[:, 0]).mean() + (o[:, 1] - o[:, 2]).clamp_min(0).mean()
    ),
    "odds": lambda o, y: (o[:, 0] - o[:, 1]).sigmoid().mean(),
    "a variance of its own": lambda o, y: functional.gaussian_nll_loss(
        o[:, 0], SOFT[:, 0], o[:, 1].exp()
    ),
    "divergence between outputs": lambda o, y: functional.kl_div(
        o.log_softmax(1), o.flip(1).softmax(1), reduction="batchmean"
    ),
    "to the power": lambda o, y: (
        (1 + functional.cross_entropy(o, y, reduction="none")).pow(2).mean()
    ),
}
"""Losses of outputs and labels, whose contributions of single samples are those of smaller sums."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_losses_of_functions(name: str) -> None:
    """They differ from each other as the loss does where only one sample's outputs change."""
    loss_of, model = FUNCTIONS[name], network()
    x, y = batch()
    record = found(model, lambda: loss_of(model(x), y))
    losses = torch.as_tensor(record["Losses"])
    with torch.no_grad():
        outputs = model(x)
        assert losses.mean() == pytest.approx(float(loss_of(outputs, y)), rel=1e-12)
        for n in range(N):
            changed = outputs.index_fill(0, torch.tensor(n), 0.0)
            other = found_at(loss_of, changed, y)
            kept = [m for m in range(N) if m != n]
            torch.testing.assert_close(other[kept], losses[kept], rtol=1e-10, atol=1e-12)


def found_at(loss_of: Callable[..., Tensor], outputs: Tensor, labels: Tensor) -> Tensor:
    """The per-sample losses where a network returns the outputs."""

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zero = nn.Linear(5, 3, bias=False).double()
            nn.init.zeros_(self.zero.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.zero(x) + outputs

    model, (x, _) = Returning(), batch()
    with torch.enable_grad():
        return torch.as_tensor(found(model, lambda: loss_of(model(x), labels))["Losses"])


def test_losses_behind_a_wrapper_for_several_processes() -> None:
    """It puts a node of its own in front of all that the model returns."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = network()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.inside(x)
            return {"logits": logits, "loss": functional.cross_entropy(logits, y)}

    x, y = batch()
    expected = functional.cross_entropy(network()(x), y, reduction="none").detach()

    def record() -> dict[str, Any]:
        model = nn.parallel.DistributedDataParallel(WithLoss(), find_unused_parameters=True)
        return found(model, lambda: model(x, y)["loss"])

    losses = in_process_group(record)["Losses"]
    np.testing.assert_allclose(losses, expected, rtol=1e-10)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "root of the mean": (lambda o, y: functional.mse_loss(o, SOFT).sqrt(), "SqrtBackward"),
    "product of losses": (
        lambda o, y: functional.mse_loss(o, SOFT) * functional.cross_entropy(o, y),
        "MulBackward",
    ),
    "of all samples": (
        lambda o, y: o.logsumexp(0).sum(),
        "tensors of shape [3], whose rows can't be followed",
    ),
    "centred": (
        lambda o, y: (functional.cross_entropy(o, y, reduction="none") - WEIGHTS.mean()).mean(),
        "SubBackward",
    ),
    "shifted": (lambda o, y: functional.cross_entropy(o, y) - 0.5, "don't add up to the loss"),
    "shifted twice": (lambda o, y: 1 - (functional.cross_entropy(o, y) + 1), "AddBackward"),
    "advantages from one": (
        lambda o, y: ((1 - o.log_softmax(1)[:, 0]) * torch.tensor([1.0, -1.0, 2.0, -2.0])).mean(),
        "RsubBackward",
    ),
    "advantages": (
        lambda o, y: (o.log_softmax(1)[:, 0] - torch.tensor([1.0, -1.0, 2.0, -2.0])).mean(),
        "SubBackward",
    ),
    "divergence": (lambda o, y: nn.KLDivLoss(reduction="batchmean")(o, SOFT), ""),
    "of variances": (lambda o, y: nn.GaussianNLLLoss()(o, torch.zeros_like(o), SOFT / 100), ""),
    "a root beside a loss": (
        lambda o, y: 0.3 * functional.mse_loss(o, SOFT) + o.square().mean().sqrt(),
        "",
    ),
    "an exponential": (lambda o, y: functional.mse_loss(o, SOFT).exp(), ""),
    "flooding": (lambda o, y: (functional.mse_loss(o, SOFT) - 9).abs() + 9, ""),
    "a term of weights": (
        lambda o, y: functional.cross_entropy(o, y) + o.sum() * 0 + o.mean(0).tanh().sum(),
        "Backward",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_of_losses_is_refused(name: str) -> None:
    loss_of, reason = REFUSED[name]
    model, (x, y) = network(), batch()
    value = found(model, lambda: loss_of(model(x), y))["Losses"]
    assert isinstance(value, Undefined)
    assert reason in value.reason


# Where outputs come from ------------------------------------------------------------------------


class Returning(nn.Module):
    """Returns what a function makes of the hidden values and the logits."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inside, self.head, self.make = nn.Linear(5, 4), nn.Linear(4, 3), make
        self.double()

    def forward(self, x: Tensor) -> Any:
        hidden = self.inside(x).tanh()
        return self.make(hidden, self.head(hidden))


RETURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "alone": (lambda h, o: o, lambda r: r),
    "with hidden values": (lambda h, o: (h, o), lambda r: r[1]),
    "by name": (lambda h, o: {"hidden": h, "logits": o}, lambda r: r["logits"]),
    "with probabilities": (lambda h, o: (o, o.softmax(1)), lambda r: r[0]),
    "as a view, too": (lambda h, o: (o, o.mT), lambda r: r[0]),
}


@pytest.mark.parametrize("case", RETURNED)
def test_outputs_are_what_the_loss_is_computed_from(case: str) -> None:
    make, logits_of = RETURNED[case]
    torch.manual_seed(0)
    model, (x, y) = Returning(make), batch()
    record = found(model, lambda: functional.cross_entropy(logits_of(model(x)), y))
    np.testing.assert_array_equal(record["Outputs"], logits_of(model(x)).detach())


UNCLEAR: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[..., Tensor], str]] = {
    "log-probabilities": (
        lambda h, o: o.log_softmax(1),
        functional.nll_loss,
        "the loss is linear in what the model has returned",
    ),
    "two outputs": (
        lambda h, o: (h, o),
        lambda r, y: functional.cross_entropy(r[1], y) + r[0].square().mean(),
        "several tensors that the model has returned",
    ),
    "the loss alone": (
        lambda h, o: o.square().mean(),
        lambda r, y: r,
        "wasn't computed from a tensor that the model has returned",
    ),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_outputs_that_may_be_wrong_are_refused(case: str) -> None:
    make, loss_of, reason = UNCLEAR[case]
    model, (x, y) = Returning(make), batch()
    cockpit = gradlens.Cockpit(model, [HessTrace(curvature="diag_ggn_exact")])
    tracked_backward(cockpit, 0, loss_of(model(x), y))
    assert reason in cockpit.history["HessTrace"][0].reason


@pytest.mark.slow
def test_outputs_are_kept_no_longer_than_until_the_backward_pass() -> None:
    model, (x, y) = network(), batch()
    cockpit = gradlens.Cockpit(model, [HessTrace(lambda step: step < 1, curvature="diag_ggn_mc")])
    alive: list[bool] = []
    for step in range(3):
        outputs = model(x)
        reference = weakref.ref(outputs)
        loss = functional.cross_entropy(outputs, y)
        del outputs
        tracked_backward(cockpit, step, loss)
        del loss
        gc.collect()
        alive.append(reference() is not None)
    assert alive == [False, False, False]
    assert cockpit.history["HessTrace"][0]["trace"] > 0
    cockpit.close()
