"""Networks and loops that once gave wrong values, or might."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from backpack.context import CTX
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.testing import assert_close

import gradlens
from gradlens import Cockpit, quantities
from tests.cases.references import assert_covered, per_sample_gradients_of_losses


def test_regulariser_that_is_switched_on_later() -> None:
    model = nn.Linear(4, 2).double()
    cockpit = Cockpit(model, [quantities.NormTest()])
    inputs = torch.randn(5, 4, dtype=torch.float64)
    for step in range(3):
        model.zero_grad()
        loss = model(inputs).square().mean()
        if step:
            loss = loss + model.weight.square().sum()
        said = pytest.warns(match="the samples' gradients don't add up to p.grad of weight: ")
        with said if step == 1 else nullcontext(), cockpit(step):
            loss.backward()
    first, *others = cockpit.history["NormTest"].values()
    assert others == pytest.approx([first, first])
    assert [note.step for note in cockpit.history.notes] == [1]


TERMS_OF_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "indexed": lambda weights, labels: weights[labels],
    "gathered": lambda weights, labels: weights.gather(0, labels),
    "a prior": lambda weights, labels: weights.log_softmax(0)[labels],
    "one-hot": lambda weights, labels: (F.one_hot(labels, 3) * weights).sum(1),
    "repeated": lambda weights, labels: weights.logsumexp(0),
}


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("name", TERMS_OF_WEIGHTS)
def test_terms_of_weights_for_each_sample_are_no_regularisers(name: str, samples: int) -> None:
    """As the start of a sequence in a conditional random field."""
    model = nn.Linear(4, 3).double()
    weights = model.weights = nn.Parameter(torch.randn(3).double())
    inputs, labels = torch.randn(samples, 4).double(), torch.randint(3, (samples,))
    with gradlens.per_sample_gradients(model) as gradients:
        normaliser = (model(inputs) + weights).logsumexp(1)
        (normaliser - TERMS_OF_WEIGHTS[name](weights, labels)).mean().backward()
    for each, parameter in model.named_parameters():
        assert_close(gradients[each].mean(), parameter.grad)


OF_MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "learned weights": lambda means, w: ((-w).exp() * means + w).sum(),
    "with constants": lambda means, w: (0.5 * torch.exp(-w) * means + 0.5 * w).sum(),
    "variances": lambda means, w: (means / (2 * w**2) + w.abs().log()).mean(),
    "softmax": lambda means, w: w.softmax(0) @ means,
    "constant weights": lambda means, w: (torch.tensor([0.3, 0.7]).double() * means).sum(),
    "geometric mean": lambda means, w: means.log().mean().exp(),
    "the worst": lambda means, w: means.max() + means.norm(),
    "a number repeated": lambda means, w: means[0].expand(4).square().mean() + means[1],
}


@pytest.mark.parametrize("samples", [2, 4])
@pytest.mark.parametrize("name", OF_MEANS)
def test_losses_of_several_means(name: str, samples: int) -> None:
    """gₙ is that of sample n's losses, weighted as the loss weights their means."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    weights = model.weights = nn.Parameter(torch.randn(2).double())
    inputs, labels = torch.randn(samples, 5).double(), torch.randint(3, (samples,))

    def losses() -> list[Tensor]:
        outputs = model(inputs)
        return [F.cross_entropy(outputs, labels, reduction="none"), outputs.square().mean(1)]

    means = torch.stack([each.mean() for each in losses()]).detach().requires_grad_()
    (shares,) = torch.autograd.grad(OF_MEANS[name](means, weights.detach()), means)
    alone = sum(share * own for share, own in zip(shares, losses(), strict=True))
    expected = per_sample_gradients_of_losses(alone, model)
    with gradlens.per_sample_gradients(model) as gradients:
        means = torch.stack([each.mean() for each in losses()])
        OF_MEANS[name](means, weights).backward()
    assert gradients.batch_size == samples
    for each in ("weight", "bias"):
        assert_close(gradients[each].dense(), expected[each])


def test_several_inputs_are_no_list_of_samples() -> None:
    """Positions and their numbers, of three documents in one row; the third input is a mask."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(5, 4), nn.Embedding(12, 4), nn.Linear(4, 3)]).double()

    def forward(words: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        return model[2]((model[0](words) + model[1](places)) * mask[..., None])

    model.forward = forward  # type: ignore[method-assign]
    gradlens.extend(model)
    words, places = torch.randint(5, (1, 12)), torch.arange(12)[None]
    outputs = model(words, places, torch.ones(1, 12, dtype=torch.long))
    loss = F.cross_entropy(outputs[0], torch.randint(3, (12,)))
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=3) as gradients:
        loss.backward()
    with pytest.raises(KeyError, match="can't be followed which sample each of their rows"):
        gradients["2.weight"]


@pytest.mark.parametrize("samples", [1, 4])
def test_regulariser_of_a_batch_of_any_size(samples: int) -> None:
    model = nn.Linear(4, 3).double()
    start, inputs = model.weight.detach() + 1, torch.randn(samples, 4).double()
    regularisers = (model.weight.square().sum(), 0.1 * (model.weight - start).square().sum())
    for regulariser in regularisers:
        with gradlens.per_sample_gradients(model) as gradients:
            loss = model(inputs).logsumexp(1).mean()
            (loss + regulariser).backward(retain_graph=True)
        (expected,) = torch.autograd.grad(loss, model.weight)
        assert_close(gradients["weight"].mean(), expected)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one + self.other


class OldFunction(torch.autograd.Function):
    """Without `setup_context`, which torch.func insists on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


def test_mode_and_frozen_parameters_are_those_of_the_forward_pass() -> None:
    model = gradlens.extend(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).eval()
    model[1].running_mean.fill_(0.3)
    model[0].weight.requires_grad_(False)
    loss = model(torch.randn(5, 4)).square().mean()
    model.train()
    model[0].weight.requires_grad_(True)
    with gradlens.per_sample_gradients(model) as gradients:
        loss.backward()
    assert set(gradients) == {"0.bias", "1.weight", "1.bias"}
    torch.testing.assert_close(gradients["1.weight"].mean(), model[1].weight.grad)


class Twice(nn.Module):
    """The same output two times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.linear
        return y, y


class Entangled(Twice):
    """One output computed from another."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.linear
        return torch.tanh(y), y


class First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.rest = layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        output = output[0] + output[1] if isinstance(output, tuple) else output + x
        return self.rest(output)


def patched() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = types.MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), layer)
    return layer


def with_replaced_outputs() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "two names of a parameter": TwoNames,
    "a function without a context of its own": lambda: Taking(OldFunction.apply, 4),
    "a hook that replaces outputs": with_replaced_outputs,
    "returns its parameter": lambda: Taking(lambda x, w: w, 4),
    "the same output twice": Twice,
    "entangled outputs": Entangled,
    "patched forward": patched,
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "weight norm, as a parametrization": lambda: weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: spectral_norm(nn.Linear(4, 4)),
    "pruned, with a rule": lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "pruned, without": lambda: prune.random_unstructured(nn.PReLU(4), "weight", 0.5),
    "Python's random": lambda: Taking(lambda x, gain: gain * x * random.random(), 4),
    "NumPy's random": lambda: Taking(lambda x, gain: gain * x * np.random.random(), 4),
}


@pytest.mark.parametrize("case", UNUSUAL)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_unusual_layers_are_covered_and_right(case: str) -> None:
    """And nothing changes by that."""
    torch.manual_seed(0)
    model = First(UNUSUAL[case]()).double()
    cockpit = Cockpit(model, [quantities.NormTest()])
    for step in range(2):
        model.zero_grad()
        losses = model(torch.randn(5, 4, dtype=torch.float64)).square().mean(1)
        expected = per_sample_gradients_of_losses(losses, model)
        before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        with gradlens.per_sample_gradients(model) as gradients, cockpit(step):
            losses.mean().backward()
        after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        assert before == after
        assert gradients.keys() == expected.keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name].dense(), expected[name], rtol=1e-9, atol=0)
            torch.testing.assert_close(gradients[name].mean(), parameter.grad)
        assert cockpit.coverage().share == 1
    assert not cockpit.history.notes


def test_complex_parameters_are_not_covered() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))
    cockpit = Cockpit(model, [quantities.NormTest()])
    loss = model(torch.randn(5, 4, dtype=torch.complex64)).abs().square().mean()
    with pytest.warns(UserWarning, match="cover 0 %.*it is complex"), cockpit(0):
        loss.backward()
    assert "it is complex" in cockpit.history["NormTest"][0].reason


class Taking(nn.Module):
    """A network that computes with its inputs and a parameter."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight, self.use = nn.Parameter(torch.randn(shape).double()), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


COMPLEX_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matrix": lambda x, w: x @ w,
    "transposed matrix": lambda x, w: x @ w.T,
    "cast behind a transpose": lambda x, w: F.linear(x, w * (1 + 2j)),
    "factor": lambda x, w: x * w[0] * (1 - 1j),
    "matrices": lambda x, w: torch.bmm(x[:, None], w.expand(len(x), 4, 4))[:, 0],
    "conjugate": lambda x, w: (x @ w.conj()).conj(),
    "solution": lambda x, w: torch.linalg.solve(w + torch.eye(4), x.T).T,
}


@pytest.mark.parametrize("use", COMPLEX_USES)
def test_real_parameters_in_complex_products(use: str) -> None:
    """The engine takes the real part of their gradient."""
    torch.manual_seed(0)
    model = Taking(lambda x, w: COMPLEX_USES[use](x, w.to(torch.complex128)), 4, 4)
    gradlens.extend(model)
    losses = model(torch.randn(5, 4, dtype=torch.complex128)).abs().sum(1)
    expected = per_sample_gradients_of_losses(losses, model)
    loss = losses.mean()
    with gradlens.per_sample_gradients(model, loss=loss) as gradients:
        loss.backward()
    assert_close(gradients["weight"].dense(), expected["weight"])
    squares = expected["weight"].flatten(1).square().sum(1)
    assert_close(gradients["weight"].squared_norms(), squares)


def test_random_schedules_are_asked_once_a_step() -> None:
    answers = iter([True, False] * 10)
    model = nn.Linear(3, 2)
    cockpit = Cockpit(model, [quantities.NormTest(lambda step: next(answers))])
    for step in range(4):
        with cockpit(step):
            model(torch.randn(4, 3)).square().mean().backward()
        model.zero_grad()
    assert list(cockpit.history["NormTest"]) == [0, 2]


def test_failure_on_entering_leaves_no_hook() -> None:
    model = nn.Linear(3, 2)
    cockpit = Cockpit(model, [quantities.NormTest(), quantities.Loss()])
    for _ in range(2):
        with pytest.raises(ValueError, match="Loss needs the loss"), cockpit(0):
            pass
    assert not model.weight._post_accumulate_grad_hooks
    assert not CTX.get_active_exts()


def test_quantities_that_a_resumed_run_has_added_are_in_its_file(tmp_path: Any) -> None:
    path, model = tmp_path / "run.jsonl", nn.Linear(3, 2)
    Cockpit(model, [quantities.Time()], run=path).close()
    Cockpit(model, [quantities.GradNorm()], run=path, resume=True).close()
    loaded = gradlens.History.load(path)
    assert loaded.of_kind("Time") == ("Time",)
    assert loaded.of_kind("GradNorm") == ("GradNorm",)
    path.write_bytes(path.read_bytes().split(b"\n")[0])
    Cockpit(model, [quantities.GradNorm()], run=path, resume=True).close()
    assert gradlens.History.load(path).of_kind("Time") == ("Time",)


class Steps(nn.Module):
    """A recurrent network of many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 6)
        for step in x.unbind(1):
            state = 0.9 * state + 0.1 * self.cell(step, state)
        return self.head(state)


@pytest.mark.slow
def test_a_parameter_used_at_many_steps() -> None:
    torch.manual_seed(0)
    model = gradlens.extend(Steps().double())
    outputs = model(torch.randn(2, 300, 4, dtype=torch.float64))
    assert_covered(model, F.cross_entropy(outputs, torch.arange(2), reduction="none"))


class Positions(nn.Module):
    """Positions from a table, which are added to hidden states in place, or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.table = nn.Embedding(4, 6)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        hidden, positions = self.first(x), self.table(torch.arange(4))[None]
        if self.in_place:
            hidden += positions
        else:
            hidden = hidden + positions
        return self.last(hidden.tanh().mean(1))


def test_positions_that_are_added_in_place_are_refused_with_the_remedy() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for in_place in (True, False):
        model = Positions(in_place).double()
        gradlens.extend(model)
        loss = model(x).square().mean()
        with gradlens.per_sample_gradients(model, loss=loss) as found:
            loss.backward()
        expected = per_sample_gradients_of_losses(model(x).square().mean(1), model)
        for name, gradients in found.items():
            torch.testing.assert_close(gradients.dense(), expected[name])
        # From torch 2.15 on, the graph shows the rows of an addition in place, too.
        if not in_place or "table.weight" in found:
            assert set(found) == set(expected)
            continue
        assert set(found) == set(expected) - {"table.weight"}
        with pytest.raises(KeyError, match=r"write h = h \+ e instead of h \+= e"):
            found["table.weight"]


def test_the_weight_of_a_whole_loss() -> None:
    model, weight = gradlens.extend(nn.Linear(3, 2)), nn.Parameter(torch.ones(()))
    model.register_parameter("weight_of_loss", weight)
    with gradlens.per_sample_gradients(model) as gradients:
        (weight * model(torch.randn(4, 3)).square().mean()).backward()
    assert set(gradients) == {"weight", "bias"}
    with pytest.raises(KeyError, match="it weights a whole loss"):
        gradients["weight_of_loss"]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs(layout: torch.layout) -> None:
    torch.manual_seed(0)
    model = gradlens.extend(nn.Linear(4, 3).double())
    inputs = torch.randn(5, 4, dtype=torch.float64).to_sparse(layout=layout)
    assert_covered(model, (inputs @ model.weight.T + model.bias).square().mean(1), batch_size=5)


def asked_for(loss: Tensor, parameter: Tensor) -> None:
    torch.autograd.grad(loss, parameter)


def accumulated(loss: Tensor, parameter: Tensor) -> None:
    loss.backward(inputs=[parameter])


@pytest.mark.parametrize("backward", [asked_for, accumulated])
def test_backward_passes_that_leave_out_parameters(
    backward: Callable[[Tensor, Tensor], None],
) -> None:
    """Whose per-sample gradients are there all the same, or missing, but never zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), weight_norm(nn.Linear(5, 3))).double()
    losses = model(torch.randn(6, 4, dtype=torch.float64)).square().mean(1)
    expected = per_sample_gradients_of_losses(losses, model)
    loss = losses.mean()
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=6) as gradients:
        backward(loss, model[0].weight)
    assert "0.weight" in gradients
    for name in gradients:
        torch.testing.assert_close(gradients[name].dense(), expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_elements() -> None:
    layer = gradlens.extend(nn.Linear(3, 0)).double()
    with gradlens.per_sample_gradients(layer) as gradients:
        layer(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
    assert gradients["weight"].squared_norms().tolist() == [0, 0]
    assert next(gradients["weight"].pieces()).values.shape == (2, 0, 3)


@pytest.mark.parametrize("samples", [3, 4, 6])
def test_calls_of_the_same_tensor_are_of_the_same_samples(samples: int) -> None:
    """Of experts in a list, whose router has a term that balances their load over the batch."""
    torch.manual_seed(0)
    experts = nn.ModuleList([nn.Linear(5, 3) for _ in range(4)])
    model = nn.ModuleDict({"experts": experts, "router": nn.Linear(5, 4)}).double()
    inputs, labels = torch.randn(samples, 5).double(), torch.randint(3, (samples,))

    def shares_and_losses() -> tuple[Tensor, Tensor]:
        shares = model["router"](inputs).softmax(1)
        outputs = torch.stack([expert(inputs) for expert in experts], 1)
        weighted = (shares[..., None] * outputs).sum(1)
        return shares, F.cross_entropy(weighted, labels, reduction="none")

    expected = per_sample_gradients_of_losses(shares_and_losses()[1], model)
    with gradlens.per_sample_gradients(model) as gradients:
        shares, losses = shares_and_losses()
        (losses.mean() + shares.mean(0).square().sum()).backward()
    for name, _ in experts.named_parameters(prefix="experts"):
        assert_close(gradients[name].dense(), expected[name])
    with pytest.raises(KeyError, match="a term of the loss is computed from"):
        gradients["router.weight"]


@pytest.mark.parametrize("inputs", [(), (torch.randn(4),)], ids=["nothing", "a vector"])
def test_two_calls_without_rows_say_what_to_pass(inputs: tuple[Tensor, ...]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, *given: Tensor) -> Tensor:
            return self.weight * (given[0] if given else 2)

    model = Scaled()
    with gradlens.per_sample_gradients(model) as gradients:
        (model(*inputs).square().sum() + model(*inputs).abs().sum()).backward()
    with pytest.raises(KeyError, match="pass the number of samples as batch_size="):
        gradients["weight"]
