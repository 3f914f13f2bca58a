"""Curvature quantities against dense Hessians from torch.func."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import gradlens
from gradlens import Cockpit, quantities
from gradlens.curvature.diagonals import DiagonalKind
from gradlens.curvature.operator import parameter_slices
from gradlens.history.undefined import Undefined
from gradlens.quantities import Quantity
from tests.cases.references import dense_hessian, without_hooks
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward

SAMPLES = 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (mlp, 2),
    "convolutional": (convolutional, 4),
}


def track(
    quantity: Quantity,
    network: str = "mlp",
    reduction: str = "mean",
    steps: int = 2,
) -> tuple[dict[int, Any], list[np.ndarray], nn.Module]:
    """Values, and the dense Hessian of the mean loss at each step."""
    torch.manual_seed(0)
    build, width = NETWORKS[network]
    model = build().double()
    opt = SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model, [quantity], loss_reduction=reduction)
    hessians = []
    for step in range(steps):
        inputs = torch.randn(SAMPLES, 3, dtype=torch.float64)
        target = torch.randn(SAMPLES, width, dtype=torch.float64)

        def loss_of(output: Tensor, target: Tensor = target) -> Tensor:
            losses = (output - target).square().sum(1) + output.exp().sum(1)
            return losses.sum() / (SAMPLES if reduction == "mean" else 1)

        divisor = 1 if reduction == "mean" else SAMPLES
        hessians.append(dense_hessian(without_hooks(model), loss_of, inputs).numpy() / divisor)
        opt.zero_grad()
        outputs = model(inputs)
        tracked_backward(cockpit, step, loss_of(outputs), optimizer=opt, info={"outputs": outputs})
        opt.step()
    return dict(cockpit.history[quantity.name]), hessians, model


OUTERMOST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "largest": lambda values: -values,
    "smallest": lambda values: values,
    "magnitude": lambda values: -abs(values),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("by", "which"), [("layer", "magnitude"), ("parameter", "largest"), ("parameter", "smallest")]
)
@pytest.mark.parametrize("network", NETWORKS)
def test_eigenvalues_of_the_matrix_and_of_its_diagonal_blocks(
    network: str, by: Literal["layer", "parameter"], which: Any, reduction: str
) -> None:
    quantity = quantities.HessEigenvalues(k=2, which=which, tolerance=1e-7, by=by)
    found, hessians, model = track(quantity, network, reduction)
    places = parameter_slices(dict(model.named_parameters()))
    groups: dict[str, list[int]] = {}
    for name, place in places.items():
        one = name.rpartition(".")[0] if by == "layer" else name
        groups.setdefault(one, []).extend(range(place.start, place.stop))
    for step, hessian in enumerate(hessians):
        records = found[step][f"{by}s"]
        assert records.keys() == groups.keys()
        for name, chosen in {"": [*range(len(hessian))], **groups}.items():
            spectrum = np.linalg.eigvalsh(hessian[np.ix_(chosen, chosen)])
            expected = spectrum[np.argsort(OUTERMOST[which](spectrum))][:2]
            record = records[name] if name else found[step]
            assert record["converged"] is True
            np.testing.assert_allclose(record["eigenvalues"], expected, rtol=1e-5)
            assert (record["residuals"] <= 1e-6 * abs(expected)).all()
            assert not name or record["value"] == record["eigenvalues"][0]
    with pytest.raises(ValueError, match="pass the model"):
        gradlens.Cockpit(model.parameters(), [quantities.HessEigenvalues(by="layer")])
    with pytest.raises(ValueError, match="by='layers' is none of"):
        quantities.HessEigenvalues(by="layers")  # type: ignore[arg-type]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.slow
def test_the_largest_eigenvalue_is_followed(network: str) -> None:
    """From one random batch to the next, with a search at every fifth step."""
    quantity = quantities.HessMaxEV(tolerance=0.03, search_interval=5)
    found, hessians, *_ = track(quantity, network, steps=15)
    for step, hessian in enumerate(hessians):
        assert found[step] == pytest.approx(np.linalg.eigvalsh(hessian)[-1], rel=0.03)
    with pytest.raises(ValueError, match="search_interval=0 is too few: use 1"):
        quantities.HessMaxEV(search_interval=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_eigenvalues_of_the_ggn_are_not_negative(reduction: str) -> None:
    """For a loss whose output Hessian is known: 2 + diag(exp(output))."""
    quantity = quantities.HessEigenvalues(k=30, which="smallest", matrix="ggn")
    found, *_ = track(quantity, "mlp", reduction)
    assert (found[0]["eigenvalues"] > -1e-10).all()
    assert found[0]["eigenvalues"].max() > 0.1


@pytest.mark.slow
def test_density_is_that_of_the_spectrum() -> None:
    quantity = quantities.SpectralDensity(probes=60, steps=26)
    found, hessians, *_ = track(quantity, steps=1)
    record, spectrum = found[0], np.linalg.eigvalsh(hessians[0])
    gaussians = np.exp(-0.5 * ((record["grid"][:, None] - spectrum) / record["width"]) ** 2)
    expected = gaussians.mean(1) / (record["width"] * math.sqrt(2 * math.pi))
    inside = (record["low"] <= expected + 1e-9) & (expected <= record["high"] + 1e-9)
    assert inside.mean() > 0.8
    assert trapezoid(record["density"], record["grid"]) == pytest.approx(1, abs=1e-3)


MULTIPLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "3 * loss": lambda loss: 3 * loss,
    "loss / 2": lambda loss: loss / 2,
    "loss + loss": lambda loss: loss + loss,
    "a mean of losses": lambda loss: torch.stack([loss, 2 * loss]).mean(),
    "with a constant": lambda loss: (0.25 * loss.double() + 1).squeeze(),
}


def stability_of(
    what: Callable[[torch.Tensor], torch.Tensor],
    optimizer: str,
    reduction: Literal["mean", "sum"] = "mean",
    passes_multiple: bool = False,
) -> Any:
    """The record at a second step, whose backward pass is called on a function of the loss."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    steps = {"SGD": SGD, "Adam": Adam}[optimizer](model.parameters(), lr=0.1)
    tracked = [quantities.Stability(tolerance=1e-8)]
    cockpit = Cockpit(model, tracked, loss_reduction=reduction)
    for step in range(2):
        steps.zero_grad()
        losses = model(torch.randn(4, 3, dtype=torch.float64)).square().sum(1)
        loss = losses.mean() if reduction == "mean" else losses.sum()
        minimised = what(loss)
        passed = minimised if passes_multiple else loss
        with cockpit(step, loss=passed, optimizer=steps):
            minimised.backward()
        steps.step()
    return cockpit.history["Stability"][1]


@pytest.mark.parametrize("name", MULTIPLES)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_stability_is_that_of_what_backward_is_called_on(
    name: str, optimizer: str, reduction: Literal["mean", "sum"]
) -> None:
    found = stability_of(MULTIPLES[name], optimizer, reduction)
    expected = stability_of(MULTIPLES[name], optimizer, reduction, passes_multiple=True)
    plain = stability_of(lambda loss: loss, optimizer, reduction)
    assert found["ratio"] == pytest.approx(expected["ratio"], rel=1e-6)
    if optimizer == "SGD":
        assert found["threshold"] != pytest.approx(plain["threshold"], rel=0.2)
    else:  # whose steps don't depend on the loss's unit
        assert found["ratio"] == pytest.approx(plain["ratio"], rel=1e-3)


OTHERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "with a term": (lambda loss: loss + nn.Parameter(torch.ones(())), "isn't a multiple"),
    "a square": (lambda loss: loss * loss, "isn't a multiple"),
    "a logarithm": (lambda loss: loss.log(), "isn't a multiple"),
    "an inverse": (lambda loss: 2 / loss, "isn't a multiple"),
    "a quotient of its own": (lambda loss: loss / (1 + loss), "isn't a multiple"),
    "negative": (lambda loss: -loss, "negative multiple of the loss"),
    "nothing": (lambda loss: 0 * loss, "zero times the loss"),
    "another one": (lambda loss: nn.Parameter(torch.ones(())) * 2, "isn't a multiple"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_stability_of_what_is_no_multiple_of_the_loss(name: str) -> None:
    what, reason = OTHERS[name]
    found = stability_of(what, "SGD")
    assert reason in found.reason


@pytest.mark.parametrize("calls", ["backward", "autograd"])
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_stability_of_several_backward_passes(calls: str, passes: int) -> None:
    model = nn.Linear(3, 2)
    cockpit = Cockpit(model, [quantities.Stability()])
    optimizer = SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(4, 3)).square().mean()
    with cockpit(0, loss=loss, optimizer=optimizer):
        for _ in range(passes):
            if calls == "backward":
                (loss / 2).backward(retain_graph=True)
            else:
                torch.autograd.backward(loss / 2, retain_graph=True)
    found = cockpit.history["Stability"][0]
    if passes == 1:
        assert found["threshold"] == pytest.approx(40)
    else:
        assert {0: "no backward", 2: "several backward"}[passes] in found.reason


def test_a_gradient_of_the_users_own_is_no_part_of_the_weight() -> None:
    model = nn.Linear(3, 2)
    cockpit = Cockpit(model, [quantities.Stability(), quantities.CABS()])
    optimizer = SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(4, 3)).square().mean()
    with cockpit(0, loss=loss, optimizer=optimizer):
        torch.autograd.grad(5 * loss, list(model.parameters()), retain_graph=True)
        (loss / 2).backward()
    assert cockpit.history["Stability"][0]["threshold"] == pytest.approx(40)
    assert cockpit.history["CABS"][0] > 0


def of_complex_weights() -> nn.Module:
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.cdouble))
    return Net(lambda net, x: (x.to(torch.cdouble) @ net.weight).abs(), weight=weight)


@dataclass
class Loop:
    """A model, its optimizer and its loss, of which a case changes one after tracking began."""

    model: nn.Module = field(default_factory=lambda: nn.Sequential(mlp().double()))

    def __post_init__(self) -> None:
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=0.1)

    def loss(self) -> Tensor:
        return self.model(torch.randn(4, 3, dtype=torch.float64)).square().sum(1).mean()


class OfAFreedGraph(Loop):
    def loss(self) -> Tensor:
        found = super().loss()
        found.backward()
        return found


def freeze(loop: Loop) -> None:
    loop.model[0].requires_grad_(False)
    loop.model.append(nn.Linear(2, 2).double())


def replace_parameters(loop: Loop) -> None:
    copied = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(copied, assign=True)


def leave_one_to_another_optimizer(loop: Loop) -> None:
    loop.optimizer = SGD(list(loop.model.parameters())[1:], lr=0.1)


REFUSED: dict[str, tuple[Callable[[], Loop], Callable[[Loop], None], str, str]] = {
    "complex parameters": (
        lambda: Loop(of_complex_weights()),
        lambda loop: None,
        "HessMaxEV HessEigenvalues HessTrace TICDiag TICTrace Stability",
        "real parameters",
    ),
    "all that are tracked are frozen": (
        Loop,
        freeze,
        "HessMaxEV HessTrace TICTrace",
        "all parameters that are tracked are frozen",
    ),
    "all that are tracked were replaced": (
        Loop,
        replace_parameters,
        "HessMaxEV HessTrace HessEigenvalues",
        "none of the tracked parameters",
    ),
    "a graph that is freed": (
        OfAFreedGraph,
        lambda loop: None,
        "HessMaxEV HessTrace TICDiag Stability",
        "backward has run already when the context was entered",
    ),
    "an optimizer of some parameters": (
        Loop,
        leave_one_to_another_optimizer,
        "Stability CABS",
        "doesn't have 0.0.weight",
    ),
}


def reasons_in(value: Any) -> set[str]:
    parts = value.values() if isinstance(value, dict) else []
    own = {value.reason} if isinstance(value, Undefined) else set()
    return own.union(*(reasons_in(part) for part in parts))


@pytest.mark.parametrize(
    ("name", "quantity"), [(name, q) for name, case in REFUSED.items() for q in case[2].split()]
)
@pytest.mark.filterwarnings("ignore:.*(cover|is estimated|any more|not tracked|none of the)")
def test_curvature_that_does_not_exist_is_refused(name: str, quantity: str) -> None:
    torch.manual_seed(0)
    build, change, _, reason = REFUSED[name]
    loop = build()
    cockpit = Cockpit(loop.model, [getattr(quantities, quantity)()])
    change(loop)
    loss = loop.loss()
    with cockpit(0, loss=loss, optimizer=loop.optimizer), contextlib.suppress(RuntimeError):
        loss.backward()
    found = reasons_in(cockpit.history[quantity][0])
    assert any(reason in each for each in found), found
    assert not any("failed" in note.text for note in cockpit.history.notes)


@pytest.mark.filterwarnings("ignore:.*cover 0 %")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "make",
    [
        *(partial(quantities.HessTrace, curvature=kind) for kind in get_args(DiagonalKind)),
        partial(quantities.HessTrace, curvature="diag_ggn_mc", samples=1),
        quantities.TICTrace,
        quantities.TICDiag,
        quantities.HessMaxEV,
        quantities.HessEigenvalues,
        quantities.SpectralDensity,
    ],
)
def test_empty_batches_have_no_curvature(make: Callable[[], Quantity], reduction: Any) -> None:
    """Not a NaN without a reason, and not the zero that a sum over nothing is."""
    model, loss_function, quantity = nn.Linear(3, 2), nn.MSELoss(reduction=reduction), make()
    cockpit = gradlens.Cockpit(
        model, [quantity], loss_function=loss_function, loss_reduction=reduction
    )
    tracked_backward(cockpit, 0, loss_function(model(torch.randn(0, 3)), torch.randn(0, 2)))
    found = cockpit.history[quantity.name][0]
    value = found["trace"] if isinstance(found, dict) and "trace" in found else found
    while isinstance(value, (dict, list)):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    assert "the batch is empty" in value.reason
