"""Hooks that belong to an object, and hooks on tensors."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.hooks import RemovableHandle

import gradlens
from gradlens.graph.hooks import HookOwner, OwnedHook, hook_owners, on_gradient
from gradlens.graph.undisturbed import undisturbed
from gradlens.quantities import Alpha, HessMaxEV, NormTest, OutputGradientGeometry, OutputNorm
from gradlens.recorders import (
    BackwardInput,
    BackwardOutput,
    ForwardInput,
    ForwardOutput,
    ForwardPre,
)


class Counter(HookOwner):
    """Counts what its hooks are called with."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, *arguments: Any) -> None:
        self.calls += 1


ON_MODULES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "before": lambda m, hook: m.register_forward_pre_hook(hook),
    "before, with keywords": lambda m, hook: m.register_forward_pre_hook(hook, with_kwargs=True),
    "after": lambda m, hook: m.register_forward_hook(hook),
    "after, with keywords": lambda m, hook: m.register_forward_hook(hook, with_kwargs=True),
}


@pytest.fixture(params=ON_MODULES)
def hooked(request: pytest.FixtureRequest) -> tuple[nn.Module, Counter]:
    model, counter = nn.Sequential(nn.Linear(2, 2)), Counter()
    ON_MODULES[request.param](model[0], OwnedHook(counter, Counter.count))
    return model, counter


def test_a_hook_calls_its_owner_unless_it_is_paused(hooked: tuple[nn.Module, Counter]) -> None:
    model, counter = hooked
    model(torch.ones(1, 2))
    with undisturbed(model):
        model(torch.ones(1, 2))
        with undisturbed(model):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert counter.calls == 1
    model(torch.ones(1, 2))
    assert counter.calls == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_hooks_of_copies_have_no_owner(
    hooked: tuple[nn.Module, Counter], copied: Callable[[nn.Module], nn.Module]
) -> None:
    model, counter = hooked
    other = copied(model)
    other(torch.ones(1, 2))
    assert counter.calls == 0
    assert hook_owners(model.modules()) == {counter}
    assert hook_owners(other.modules()) == set()


def test_hooks_that_are_registered_on_what_a_process_has_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They get numbers of their own, and so aren't called as gradlens's hooks are."""
    model = model_of_two()
    cockpit = gradlens.Cockpit(model)
    pickled = pickle.dumps(model)
    cockpit.close()
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in a new process
    other = pickle.loads(pickled)
    calls: list[int] = []
    for module in [other, *other] * 9:
        module.register_forward_hook(lambda *arguments: calls.append(len(arguments)))
        module.register_forward_pre_hook(lambda *arguments: calls.append(len(arguments)))
    other(torch.ones(1, 2))
    assert sorted(calls) == [2] * 36 + [3] * 36


def test_a_model_keeps_no_owner_alive() -> None:
    model, deleted = nn.Linear(2, 2), list[int]()

    class Owner(Counter):
        def __del__(self) -> None:
            deleted.append(1)

    owner = Owner()
    model.register_forward_hook(OwnedHook(owner, Owner.count))
    output = model(torch.ones(1, 2))
    on_gradient(output, OwnedHook(owner, Owner.count))
    del owner
    assert deleted == [1]
    model(torch.ones(1, 2))
    output.sum().backward()


def test_gradients_are_received_in_each_backward_pass() -> None:
    found: list[Tensor] = []
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf * 1):
        handle = on_gradient(tensor, found.append)
        for factor in (2, 3):
            (factor * tensor).sum().backward(retain_graph=True)
        handle.remove()
        tensor.sum().backward()
    assert [gradient.tolist() for gradient in found] == [[2.0] * 3, [3.0] * 3] * 2


class Changed(nn.Module):
    """Returns a tensor that was changed in place, then through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.weight, torch.zeros(4, requires_grad=True))
        h.mul_(0.5)
        h[..., 0] = 0
        return h


def test_tensors_that_were_changed_through_a_view() -> None:
    """The register_hook of torch itself crashes the process there."""
    x, found = torch.randn(2, 3, 4), list[Tensor]()
    h = Changed()(x)
    on_gradient(h, found.append)
    (h * 2).sum().backward()
    assert torch.equal(found[0], torch.full((2, 3, 4), 2.0))
    model = nn.Sequential(Changed(), nn.Identity())
    after, before = BackwardOutput().children(model), BackwardInput().children(model)
    cockpit = gradlens.Cockpit(model, [OutputGradientGeometry()])
    loss = model(x).sum()
    with cockpit(0, loss=loss):
        loss.backward()
    assert [len(data) for data in (*after, *before)] == [1, 1, 0, 1]
    assert cockpit.history["OutputGradientGeometry"][0]["layers"]["0"]["norm"] > 0


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


# Code that is made of a module with hooks -------------------------------------------------------


class Scaled(nn.Module):
    """A layer with a rule of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def rule_of_scaled(module: nn.Module, given: Any, gradient: Tensor) -> dict[str, Tensor]:
    return {"scale": given[0] * gradient}


Making = Callable[[nn.Module, Tensor], Any]


def doubled(self: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
    """A hook of the user's, of the kind that scripts contain."""
    return 2 * output


def halved(self: Any, given: tuple[Tensor]) -> tuple[Tensor]:
    """Another one."""
    return (given[0] / 2,)


class Loop:
    """A network and its loss, of which something may be made between any two lines."""

    def __init__(self, making: Making | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), Scaled(), nn.Tanh(), nn.Linear(3, 1)).double()
        self.model[0].register_forward_hook(doubled)
        self.model[3].register_forward_pre_hook(halved)
        self.x, self.loss_function = torch.randn(5, 2).double(), nn.MSELoss()
        self.making = making

    def loss(self) -> Tensor:
        self.make()
        found: Tensor = self.loss_function(self.model(self.x), self.x[:, :1])
        self.make()
        return found

    def make(self) -> None:
        """Make the same of the model and a layer as of ones without hooks."""
        if self.making is None:
            return
        plain = Loop()
        plain.model.load_state_dict(self.model.state_dict())
        for part in ("", "0"):
            modules = (loop.model.get_submodule(part) for loop in (self, plain))
            found, truth = (self.making(module, self.x) for module in modules)
            torch.testing.assert_close(found, truth, rtol=0, atol=0)


def of_a_cockpit(loop: Loop) -> Any:
    """What it records by hooks of all kinds, on the model, its layers and the loss module."""
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    tracked = [kind() for kind in (NormTest, HessMaxEV, Alpha, OutputNorm, OutputGradientGeometry)]
    cockpit = gradlens.Cockpit(loop.model, tracked, loss_function=loop.loss_function)
    for step in range(3):
        optimizer.zero_grad()
        loss = loop.loss()
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        loop.make()
        optimizer.step()
    cockpit.close()
    loop.make()
    # The last digits of a sum depend on where its terms are in memory.
    lines = cockpit.history.json_lines()
    return [json.loads(line, parse_float=lambda text: f"{float(text):.9g}") for line in lines]


def of_per_sample_gradients(loop: Loop) -> Any:
    """Those of an extended model."""
    gradlens.extend(loop.model)
    loss = loop.loss()
    with gradlens.per_sample_gradients(loop.model, loss=loss) as gradients:
        loss.backward()
    return {name: gradient.dense().tolist() for name, gradient in gradients.items()}


def of_recorders(loop: Loop) -> Any:
    """What those of tensors and of gradients record."""
    kinds = (ForwardPre, ForwardInput, ForwardOutput, BackwardInput, BackwardOutput)
    recorders = [kind().modules(loop.model) for kind in kinds]
    loop.loss().backward()
    loop.make()
    return [[[tensor.tolist() for tensor in slot] for slot in each] for each in recorders]


def of_single_samples(module: nn.Module, x: Tensor) -> Any:
    """Gradients of parameters, with others in their place."""

    def loss(state: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(module, state, (sample[None],)).square().sum()

    state = {name: 2 * p.detach() for name, p in module.named_parameters()}
    return vmap(grad(loss), (None, 0))(state, x)


MADE: dict[str, Making] = {
    "script": lambda module, x: torch.jit.script(module)(x),
    "script of a model around it": lambda module, x: torch.jit.script(nn.Sequential(module))(x),
    "script of a copy": lambda module, x: torch.jit.script(copy.deepcopy(module))(x),
    # The check calls the module itself.
    "trace": lambda module, x: torch.jit.trace(module, x, check_trace=False)(x),
    "copy": lambda module, x: copy.deepcopy(module)(x),
    "pickle": lambda module, x: pickle.loads(pickle.dumps(module))(x),
    "gradients of single samples": of_single_samples,
    "vmap": lambda module, x: vmap(module)(x),
    "grad": lambda module, x: grad(lambda each: module(each).sum())(x),
    "vjp": lambda module, x: vjp(lambda each: module(each).sum(), x)[1](x[0, 0]),
    "jvp": lambda module, x: jvp(module, (x,), (x,)),
    "jacrev": lambda module, x: jacrev(module)(x),
    "jacfwd": lambda module, x: jacfwd(module)(x),
    "functionalize": lambda module, x: functionalize(module)(x),
    "vmap of a second derivative": lambda module, x: vmap(jacrev(jacrev(module)))(x),
}


@pytest.fixture
def with_a_rule() -> Iterator[None]:
    with gradlens.register_layer_rule(Scaled, rule_of_scaled):
        yield


@pytest.mark.usefixtures("with_a_rule")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("tracked", [of_a_cockpit, of_per_sample_gradients, of_recorders])
def test_what_is_made_of_a_tracked_module_is_the_same(
    tracked: Callable[[Loop], Any], made: str
) -> None:
    """And what is tracked is the same as if nothing were made."""
    assert tracked(Loop(MADE[made])) == alone(tracked)


@cache
def alone(tracked: Callable[[Loop], Any]) -> Any:
    return tracked(Loop())


# gradlens's own backward passes -----------------------------------------------------------------


@pytest.mark.parametrize("passed", [False, True], ids=["loss found", "loss passed"])
def test_gradients_of_layers_are_those_of_the_users_backward_pass(passed: bool) -> None:
    """Not of those in which the loss's graph is traced, also where these run inside the context."""
    torch.manual_seed(0)
    model, x = model_of_two(), torch.randn(5, 2)
    output = model[0](x)
    (gradient,) = torch.autograd.grad(model[1:](output).square().mean(), output)
    cockpit = gradlens.Cockpit(model, [OutputGradientGeometry(), NormTest()])
    loss = model(x).square().mean()
    with cockpit(0, **({"loss": loss} if passed else {})):
        loss.backward()
    found = cockpit.history["OutputGradientGeometry"][0]["layers"]["0"]["norm"]
    assert found == pytest.approx(float(gradient.norm()), rel=1e-6)
