"""Per-sample gradients where normalisation over the batch couples the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlens
from benchmarks.zoo.network import Batch, Network
from benchmarks.zoo.reference import reference
from gradlens.history.coverage import Coverage
from gradlens.quantities import GradNorm, NormTest
from tests.cases.references import without_hooks
from tests.cases.steps import tracked_backward


class Net(nn.Module):
    """A layer in front of, and one behind, a normalisation."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.front, self.norm = nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, **options)
        self.behind = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.norm(self.front(x)).tanh().flatten(1))


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, 2, 5, dtype=torch.float64), torch.randint(3, (n,))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def frozen_reference(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """In eval mode with this batch's statistics, sample by sample."""

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return losses_of(net, batch["x"], batch["y"]).mean()

    network = Network("", "", lambda: model, dict, loss, len(x))
    return {**reference(network, without_hooks(model), {"x": x, "y": y}).rows}


NETS = {
    "in front": Net,
    "without weight": lambda: Net(affine=False),
    "without running statistics": lambda: Net(track_running_stats=False),
}


@pytest.mark.parametrize("is_passed", [True, False])
@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
def test_frozen(build: Any, is_passed: bool) -> None:
    """The loss is what backward is called on, where it isn't passed."""
    x, y = batch()
    model = gradlens.extend(build().double())
    expected = frozen_reference(model, x, y)
    loss = losses_of(model, x, y).mean()
    passed = loss if is_passed else None
    with gradlens.per_sample_gradients(model, loss=passed, batchnorm="frozen") as g:
        loss.backward()
    assert set(g) == set(expected)
    for name in expected:
        torch.testing.assert_close(g[name].dense(), expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
def test_coupled_contributions_add_up(build: Any) -> None:
    x, y = batch()
    model = gradlens.extend(build().double())
    loss = losses_of(model, x, y).mean()
    with gradlens.per_sample_gradients(model, loss=loss) as g:
        loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        # The bias in front of a normalisation has no effect, so its gradient is rounding alone.
        torch.testing.assert_close(g[name].mean(), parameter.grad, rtol=1e-9, atol=1e-15)
    assert g.coupling == {"norm"} or not any(n.startswith("norm") for n in g)


@pytest.mark.parametrize("is_passed", [True, False])
@pytest.mark.parametrize("policy", ["coupled", "frozen", "skip"])
def test_what_lies_behind_is_the_same(policy: Any, is_passed: bool) -> None:
    x, y = batch()
    model = gradlens.extend(Net().double())
    clone = without_hooks(model)
    losses = losses_of(clone, x, y)
    wanted = dict(clone.named_parameters())
    behind = ["norm.weight", "norm.bias", "behind.weight", "behind.bias"]
    loss = losses_of(model, x, y).mean()
    passed = loss if is_passed else None
    with gradlens.per_sample_gradients(model, loss=passed, batchnorm=policy) as g:
        loss.backward()
    for name in behind:
        rows = [torch.autograd.grad(one, wanted[name], retain_graph=True)[0] for one in losses]
        torch.testing.assert_close(g[name].dense(), torch.stack(rows), rtol=1e-9, atol=1e-12)
    assert set(g) - {*behind} == (set() if policy == "skip" else {"front.weight", "front.bias"})
    if policy == "skip":
        with pytest.raises(KeyError, match="in front of a normalisation over the batch"):
            g["front.weight"]


@pytest.mark.parametrize("policy", ["coupled", "frozen", "skip"])
def test_the_record_says_what_it_is(policy: Any, tmp_path: Any) -> None:
    x, y = batch()
    model = Net().double()
    run = tmp_path / "run.jsonl"
    cockpit = gradlens.Cockpit(model, [NormTest(), GradNorm()], batchnorm=policy, run=run)
    loss = losses_of(model, x, y).mean()
    with pytest.warns(UserWarning, match=f'batchnorm="{policy}"'), cockpit(0, loss=loss):
        loss.backward()
    history = gradlens.History.load(run)
    coverage = history.coverage("NormTest", 0)
    assert (coverage.coupled, coverage.batchnorm) == (("norm",), policy)
    assert coverage.share(history.parameters) == (45 / 60 if policy == "skip" else 1)
    assert history.coverage("GradNorm", 0) == Coverage()
    table = str(cockpit.coverage())
    assert ("75 % of the" if policy == "skip" else "100 % of the") in table
    assert "front.weight" in table


def test_instance_normalisation_couples_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3), nn.Flatten(), nn.Linear(12, 3))
    x, y = batch()
    cockpit = gradlens.Cockpit(model.double(), [NormTest()], batchnorm="skip")
    tracked_backward(cockpit, 0, losses_of(model, x, y).mean())
    assert cockpit.coverage().share == 1
