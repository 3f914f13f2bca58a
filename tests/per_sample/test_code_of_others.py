"""Code of others in the backward pass: training stays the same, and what is given is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from itertools import cycle
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gradlens
from tests.cases.references import per_sample_gradients_of_losses
from tests.cases.steps import tracked_backward

N, D, H, C = 5, 4, 6, 3


def slope(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of SiLU."""
    s = x.sigmoid()
    return gradient * s * (1 + x * (1 - s))


def silu(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x * x.sigmoid()


def relu(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x.relu()


Function = Callable[..., Any]


def function(backward: Function, forward: Function = silu) -> Any:
    """A function of autograd's."""
    own = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(backward.__name__, (torch.autograd.Function,), own)


def overwriting(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    x.data.copy_(slope(x, gradient))
    return x


def overwriting_rows(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    for row, part in zip(x.detach().numpy(), gradient, strict=True):
        row[:] = slope(torch.from_numpy(row), part).numpy()
    return x


def stashing(ctx: Any, x: Tensor) -> Tensor:
    ctx.stash = [x.detach().clone()]
    return x * x.sigmoid()


def popping(ctx: Any, gradient: Tensor) -> Tensor:
    return slope(ctx.stash.pop(), gradient)


class Counting:
    """What functions change: a number, factors of which each call takes one, and norms."""

    calls = 0
    factors: ClassVar[list[float]] = []
    norms: ClassVar[list[float]] = []


def counting_calls(ctx: Any, gradient: Tensor) -> Tensor:
    Counting.calls += 1
    return slope(ctx.saved_tensors[0], gradient) * (1 + Counting.calls / 100)


def taking_a_factor(ctx: Any, gradient: Tensor) -> Tensor:
    factor = Counting.factors.pop()
    return slope(ctx.saved_tensors[0], gradient) * factor


def scale(gradient: Tensor) -> Tensor:
    Counting.calls += 1
    return gradient * (1 + Counting.calls / 100)


def by_another_function(ctx: Any, gradient: Tensor) -> Tensor:
    return scale(slope(ctx.saved_tensors[0], gradient))


class sorted:  # noqa: N801
    """It has the name of a function of Python's."""

    def __new__(cls, gradient: Tensor) -> Tensor:  # type: ignore[misc]
        return scale(gradient)


def by_a_namesake(ctx: Any, gradient: Tensor) -> Tensor:
    return sorted(slope(ctx.saved_tensors[0], gradient))  # type: ignore[return-value]


def drawing_in_python(ctx: Any, gradient: Tensor) -> Tensor:
    return slope(ctx.saved_tensors[0], gradient) * (1 + random.random() / 10)


def pure(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    found = gradient.clone()
    found[x < 0] = 0
    return found


def rescaling(ctx: Any, gradient: Tensor) -> Tensor:
    """It writes into the gradient that it gets."""
    (x,) = ctx.saved_tensors
    return gradient.mul_(x > 0)


def halved(gradient: Tensor, times: int) -> Tensor:
    return gradient if times == 0 else doubled(gradient / 2, times - 1)


def doubled(gradient: Tensor, times: int) -> Tensor:
    return gradient if times == 0 else halved(gradient * 2, times - 1)


def of_each_other(ctx: Any, gradient: Tensor) -> Tensor:
    """Its functions call each other, and change nothing."""
    return halved(gradient, 4) * (ctx.saved_tensors[0] > 0)


def of_transforms(ctx: Any, gradient: Tensor) -> Tensor:
    """It uses modules of torch, what they return, and the limits of numbers."""
    (x,) = ctx.saved_tensors
    basis = torch.linalg.qr(torch.eye(x.shape[-1]).to(x)).Q.abs()
    found = torch.fft.irfft(torch.fft.rfft(gradient), n=x.shape[-1]) @ basis
    limit = torch.finfo(x.dtype).eps * x.detach().max(-1, keepdim=True).values.abs()
    return found * torch.special.expit(1e3 * (x - limit)).round()


def normalising(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A wrapper, which says that it is what it wraps, and has a state."""

    @wraps(function)
    def inner(ctx: Any, gradient: Tensor) -> Tensor:
        Counting.norms.append(float(gradient.norm()))
        return function(ctx, gradient) / len(Counting.norms)

    return inner


def with_a_list_on_a_tensor(ctx: Any, x: Tensor) -> Tensor:
    ctx.weight = torch.ones(())
    ctx.weight.history = []
    return relu(ctx, x)


def of_a_tensor(ctx: Any, gradient: Tensor) -> Tensor:
    ctx.weight.history.append(1.0)
    return gradient * (ctx.saved_tensors[0] > 0) / len(ctx.weight.history)


def of_the_engine(ctx: Any, gradient: Tensor) -> Any:
    """A backward pass inside, which would run hooks."""
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        return torch.autograd.grad(x.relu(), x, gradient)[0]


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


LIBRARY = torch.library.Library("gradlens_tests", "FRAGMENT")


def operator(schema: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """An operator of ``torch.library``; ``torch.library.custom_op`` would import the compiler."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))

    name, _, _ = schema.partition("(")
    LIBRARY.define(schema)
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"gradlens_tests::{name}", backward, setup_context=setup, lib=LIBRARY
    )
    return getattr(torch.ops.gradlens_tests, name)


def square(name: str, backward: Callable[..., Any]) -> Any:
    return operator(f"{name}(Tensor x) -> Tensor", Tensor.square, backward)


doubled_of_list = operator(
    "doubled(Tensor[] xs) -> Tensor[]",
    lambda xs: [2 * x for x in xs],
    lambda ctx, gradients: [2 * each for each in gradients],
)


def counting(ctx: Any, gradient: Tensor) -> Tensor:
    Counting.norms.append(1.0)
    return 2 * gradient * ctx.saved_tensors[0] / len(Counting.norms)


def keeping(ctx: Any, gradient: Tensor, seen: list[float] = []) -> Tensor:  # noqa: B006
    return gradient * ctx.saved_tensors[0] * (2 + len(seen))


OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "an operator": (square("pure", lambda ctx, g: 2 * g * ctx.saved_tensors[0]), ""),
    "an operator of lists": (lambda x: torch.cat(doubled_of_list([x[:2], x[2:]])), ""),
    "an operator that counts": (square("counting", counting), "uses 'Counting'"),
    "an operator with a list of its own": (
        square("keeping", keeping),
        r"uses 'seen \(a default argument\)'",
    ),
    "an operator that draws": (
        square("drawing", lambda ctx, g: g * ctx.saved_tensors[0] * torch.rand_like(g)),
        "draws random numbers",
    ),
}


class State:
    """What hooks and functions of a program change."""

    def __init__(self) -> None:
        self.numbers: list[float] = []


def with_hook(hook: Callable[[State, Tensor], Any]) -> Callable[[Any, Tensor, State], Tensor]:
    def compute(net: Any, x: Tensor, state: State) -> Tensor:
        features = net.inner(x).tanh()
        features.register_hook(partial(hook, state))
        return net.head(features)

    return compute


def normalised(state: State, gradient: Tensor) -> Tensor:
    state.numbers.append(0.9 * (state.numbers or [1.0])[-1] + float(gradient.norm()))
    return gradient / state.numbers[-1]


def retained(net: Any, x: Tensor, state: State) -> Tensor:
    features = net.inner(x).tanh()
    features.retain_grad()
    features.register_hook(lambda _: None)
    state.numbers.append(0.0)
    net.kept = features
    return net.head(features)


def in_checkpoint(net: Any, x: Tensor, state: State, **options: Any) -> Tensor:
    def region(x: Tensor) -> Tensor:
        state.numbers.append(1.0)
        return net.middle(net.inner(x).tanh()).tanh()

    return net.head(checkpoint(region, x, use_reentrant=False, **options))


def drawing_in_checkpoint(net: Any, x: Tensor, state: State) -> Tensor:
    """By so little that it doesn't matter for what is computed."""

    def region(x: Tensor) -> Tensor:
        return F.dropout(net.middle(net.inner(x).tanh()), 1e-9)

    return net.head(checkpoint(region, x, use_reentrant=False, preserve_rng_state=False))


def packed_once(net: Any, x: Tensor, state: State) -> Tensor:
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        held[len(state.numbers)] = tensor
        state.numbers.append(1.0)
        return len(state.numbers) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, held.pop):
        features = net.inner(x).tanh()
    return net.head(features)


class Program:
    """A network's computation, and whether its first layer must be covered."""

    def __init__(
        self, compute: Callable[[Any, Tensor, State], Tensor], covered: bool | None = False
    ) -> None:
        self.compute = compute
        self.covered = covered


def by_function(function: Any, *arguments: Any) -> Callable[[Any, Tensor, State], Tensor]:
    return lambda net, x, _: net.head(function.apply(net.inner(x), *arguments))


def by_operator(compute: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor, State], Tensor]:
    return lambda net, x, _: net.head(compute(net.inner(x)))


CHANGING = [
    *map(function, (
        overwriting, overwriting_rows, counting_calls, taking_a_factor, by_another_function,
        by_a_namesake, drawing_in_python,
    )),
    function(popping, stashing), function(normalising(pure), relu),
    function(of_a_tensor, with_a_list_on_a_tensor), function(of_the_engine, relu),
]  # fmt: skip

PROGRAMS: dict[str, Program] = {
    **{f"changing {n}": Program(by_function(each)) for n, each in enumerate(CHANGING)},
    "a pure function": Program(by_function(function(pure, relu)), True),
    "a gradient that is overwritten": Program(by_function(function(rescaling, relu)), True),
    "functions that call each other": Program(by_function(function(of_each_other, relu)), True),
    "a function of transforms": Program(by_function(function(of_transforms, relu)), True),
    "gradient reversal": Program(by_function(Reversal, 0.5), True),
    **{name: Program(by_operator(each), not why) for name, (each, why) in OPERATORS.items()},
    "a hook with a running norm": Program(with_hook(normalised)),
    "a hook that draws": Program(with_hook(lambda _, g: g * random.random())),
    "a hook that counts": Program(with_hook(lambda state, g: state.numbers.append(1.0)), True),
    "a retained gradient": Program(retained, True),
    "a checkpoint that counts": Program(in_checkpoint, True),
    "a checkpoint that draws anew": Program(drawing_in_checkpoint, True),
    "a selective checkpoint": Program(
        lambda net, x, state: in_checkpoint(
            net,
            x,
            state,
            context_fn=partial(
                create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
            ),
        ),
        True,
    ),
    "tensors that are stored by hooks": Program(packed_once),
    "tensors on the processor": Program(lambda net, x, _: net.head(on_cpu(net.inner, x).tanh())),
}


def on_cpu(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


class Network(nn.Module):
    def __init__(self, program: Program, state: State) -> None:
        super().__init__()
        self.inner, self.middle, self.head = nn.Linear(D, H), nn.Linear(H, H), nn.Linear(H, C)
        self.program, self.state = program, state

    def forward(self, x: Tensor) -> Tensor:
        return self.program.compute(self, x, self.state)


def train(name: str, preset: str | None) -> tuple[list[Any], gradlens.Cockpit | None]:
    torch.manual_seed(0)
    random.seed(0)
    Counting.calls = 0
    Counting.norms.clear()
    Counting.factors = [1.0 + k / 100 for k in range(100)]
    state = State()
    model = Network(PROGRAMS[name], state).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quantities = [] if preset is None else gradlens.configuration(preset)
    cockpit = None if preset is None else gradlens.Cockpit(model, quantities)
    losses: list[Tensor] = []
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(N, D).double()), torch.arange(N) % C)
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        optimizer.step()
        losses.append(loss.detach())
    kept = getattr(model, "kept", torch.zeros(()))
    end = [*model.parameters(), *losses, kept if kept.grad is None else kept.grad]
    states = [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.tensor(state.numbers),
    ]
    return [*end, *states, torch.tensor(Counting.calls)], cockpit


@pytest.mark.filterwarnings("ignore:gradlens")
@pytest.mark.parametrize(("name", "preset"), [*zip(PROGRAMS, cycle(["economy", "full"]))])
def test_training_is_the_same(name: str, preset: str) -> None:
    plain, _ = train(name, None)
    found, cockpit = train(name, preset)
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)
    assert cockpit is not None
    missing = cockpit.history.coverages[0].missing
    assert ("inner.weight" not in missing) == PROGRAMS[name].covered
    assert all(len(reason) > 20 for reason in missing.values())


@pytest.mark.parametrize("name", [name for name, (_, why) in OPERATORS.items() if why])
def test_reasons_name_what_a_backward_function_may_change(name: str) -> None:
    model = Network(PROGRAMS[name], State())
    with gradlens.per_sample_gradients(model) as gradients:
        F.cross_entropy(model(torch.randn(N, D)), torch.arange(N) % C).backward()
    with pytest.raises(KeyError, match=OPERATORS[name][1]):
        gradients["inner.weight"]


@pytest.mark.parametrize("name", [n for n, each in PROGRAMS.items() if each.covered])
def test_what_is_covered_is_right(name: str) -> None:
    torch.manual_seed(0)
    model = Network(PROGRAMS[name], State()).double()
    x, y = torch.randn(N, D).double(), torch.arange(N) % C
    rows = [
        F.cross_entropy(model(row[None]), target[None]) for row, target in zip(x, y, strict=True)
    ]
    expected = per_sample_gradients_of_losses(rows, model)
    with gradlens.per_sample_gradients(gradlens.extend(model)) as gradients:
        F.cross_entropy(model(x), y).backward()
    assert gradients.keys() == {n for n in expected if "middle" not in n or "checkpoint" in name}
    for parameter in gradients:
        assert_close(gradients[parameter].dense(), expected[parameter])


@pytest.mark.filterwarnings("ignore:gradlens")
@pytest.mark.parametrize("preset", ["economy", "full"])
def test_a_loss_in_a_checkpoint_is_computed_as_often_as_without(preset: str) -> None:
    def calls(tracked: bool) -> int:
        torch.manual_seed(0)
        model, count = nn.Linear(D, C), State()
        quantities = gradlens.configuration(preset)
        cockpit = gradlens.Cockpit(model, quantities) if tracked else None

        def region(x: Tensor) -> Tensor:
            count.numbers.append(1.0)
            return F.cross_entropy(model(x), torch.arange(N) % C)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = checkpoint(region, torch.randn(N, D), use_reentrant=False)
            tracked_backward(cockpit, step, loss, optimizer=optimizer)
        return len(count.numbers)

    assert calls(True) == calls(False)


class Instrument:
    """Counts what it sees, and may add noise to products, as models of analog hardware do."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def see(self, name: object, output: Any, is_product: bool = False) -> Any:
        self.seen.append(str(name))
        return output + 1e-3 * torch.randn(output.shape) if is_product else output


class NoisyOperations(TorchDispatchMode, Instrument):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Instrument.__init__(self)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        is_product = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return self.see(function, output, is_product)


class NoisyFunctions(TorchFunctionMode, Instrument):
    def __init__(self) -> None:
        TorchFunctionMode.__init__(self)
        Instrument.__init__(self)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", function)
        return self.see(name, function(*args, **(kwargs or {})), function is F.linear)


class Packing(saved_tensors_hooks, Instrument):
    """Halves the precision of what is saved."""

    def __init__(self) -> None:
        saved_tensors_hooks.__init__(
            self, self.pack, lambda packed: self.see("unpack", packed[0].to(packed[1]))
        )
        Instrument.__init__(self)

    def pack(self, tensor: Tensor) -> Any:
        return self.see("pack", (tensor.to(torch.bfloat16), tensor.dtype))


class Seen(Tensor):
    """A class of tensors that lists the functions that are called with them."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class OfTensors(nullcontext[None], Instrument):
    def __init__(self) -> None:
        super().__init__()
        Seen.names = self.seen = []


INSTRUMENTS: dict[str, Callable[[], Any]] = {
    "operations": NoisyOperations,
    "functions": NoisyFunctions,
    "saved tensors": Packing,
    "tensors": OfTensors,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "device": lambda: torch.device("cpu"),
}
PRESETS: dict[str, Callable[[], list[Any]]] = {
    "full": partial(gradlens.configuration, "full"),
    "now and then": lambda: [gradlens.quantities.OutputNorm(gradlens.schedules.linear(3))],
}


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, H), nn.Tanh(), nn.Linear(H, C))


def loss_of(model: Any, inputs: Tensor, checkpointed: bool = False) -> Tensor:
    front, middle, behind = model[0], model[1:3], model[3:]
    x = front(inputs)
    x = checkpoint(middle, x, use_reentrant=False) if checkpointed else middle(x)
    return F.cross_entropy(behind(x), torch.arange(N) % C)


def watched(
    name: str, preset: str, checkpointed: bool, whole: bool, tracked: bool, **options: Any
) -> list[Any]:
    """What an instrument has seen of a training, and what that has left."""
    model, instrument = small_network(), INSTRUMENTS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = gradlens.Cockpit(model, PRESETS[preset]() if tracked else [], **options)
    around = (instrument, nullcontext()) if whole else (nullcontext(), instrument)
    with around[0]:
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(N, D)
            x = x.as_subclass(Seen) if name == "tensors" else x
            loss = loss_of(model, x, checkpointed)
            info: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
            with around[1], cockpit(step, **info) if tracked else nullcontext():
                loss.backward()
            optimizer.step()
    seen = instrument.seen if isinstance(instrument, Instrument) else []
    return [seen, torch.get_rng_state().tolist(), [p.tolist() for p in model.parameters()]]


@pytest.mark.filterwarnings("ignore:gradlens")
@pytest.mark.parametrize("whole", [True, False], ids=["around the loop", "around the context"])
@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("name", INSTRUMENTS)
def test_instruments_of_others_see_training_alone(
    name: str, checkpointed: bool, whole: bool
) -> None:
    case = (name, "full", checkpointed, whole)
    assert watched(*case, True) == watched(*case, False)


@pytest.mark.filterwarnings("ignore:gradlens")
@pytest.mark.parametrize("options", [{"facts": False, "autopsy": False}, {"budget": 0.03}])
@pytest.mark.parametrize("name", ["operations", "functions"])
def test_instruments_see_nothing_of_other_options(name: str, options: dict[str, Any]) -> None:
    case = (name, "now and then", False, True)
    assert watched(*case, True, **options) == watched(*case, False)


@pytest.mark.filterwarnings("ignore:gradlens")
def test_instruments_see_no_other_context_either() -> None:
    def seen(tracked: bool) -> list[str]:
        model, instrument = small_network(), NoisyFunctions()
        cockpit = gradlens.Cockpit(model, [gradlens.quantities.OutputNorm()])
        with instrument:
            for step in range(3):
                with cockpit.forward(step) if tracked else nullcontext():
                    loss = loss_of(model, torch.randn(N, D))
                gradients = gradlens.per_sample_gradients(model, loss=loss) if tracked else None
                with gradients or nullcontext():
                    loss.backward()
                with cockpit.evaluation(step) if tracked else nullcontext():
                    value = model(torch.randn(N, D)).mean().detach()
                if tracked:
                    cockpit.log(step, valid_loss=value)
                    cockpit.push(value=value)
                    cockpit.tick_epoch()
                    cockpit.state_dict()
            if tracked:
                cockpit.close()
        return instrument.seen

    assert seen(True) == seen(False)


class OverwritingTangent(torch.autograd.Function):
    """The tangent, whose backward function writes into what it has saved, as kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = x.tanh()
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (found,) = ctx.saved_tensors
        inner = gradient * (1 - found**2)
        found.data.zero_()
        return inner


def test_memory_that_a_backward_function_overwrites_unseen() -> None:
    """Layers behind such a function are refused; that in front of it has saved the same memory."""
    found = []
    for tangent in (torch.tanh, OverwritingTangent.apply):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        x = torch.randn(6, 5)
        gradlens.extend(layers[1])
        loss = layers[1](tangent(layers[0](x))).square().mean()
        with gradlens.per_sample_gradients(layers[1], loss=loss) as gradients:
            loss.backward()
        found.append(gradients["weight"].dense())
    torch.testing.assert_close(*found)


class Residual(nn.Module):
    """A gradient that two nodes have handed on is added up in front of a hook, if it has one."""

    def __init__(self, hook: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.hook is not None:
            hidden.register_hook(self.hook)
        return self.head(hidden + self.inner(hidden).tanh())


@pytest.mark.filterwarnings("ignore:gradlens, step 0.*Missing are first")
def test_a_hook_behind_a_sum_takes_nothing_from_the_layers_in_front_of_it() -> None:
    found = []
    for hook in (None, lambda gradient: gradient - gradient.mean(0)):
        torch.manual_seed(0)
        model = Residual(hook).double()
        x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))
        cockpit = gradlens.Cockpit(model, [gradlens.quantities.NormTest(by="parameter")])
        tracked_backward(cockpit, 0, nn.functional.cross_entropy(model(x), y))
        found.append(cockpit.history["NormTest"][0]["parameters"])
    plain, hooked = found
    for name, value in hooked.items():
        if name.startswith("first"):
            assert "isn't what the loss's graph hands on" in value.reason
        else:
            assert value == plain[name]


def reversed_(*gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(each if each is None else each.flip(0) for each in gradients)


def reverse_in_place(gradients: Sequence[Tensor | None]) -> None:
    for each in gradients:
        if each is not None:
            each.copy_(each.flip(0))


class Hooked(nn.Module):
    """Two layers, with a hook that is set in the forward pass or before, unless it is ``None``."""

    def __init__(self, set_hook: Callable[[nn.Module, Tensor], object] | None) -> None:
        super().__init__()
        self.first, self.head, self.set_hook = nn.Linear(D, H), nn.Linear(H, C), set_hook

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.set_hook is not None:
            self.set_hook(self.head, hidden)
        return self.head(hidden)


HOOKS: dict[str, tuple[Callable[[nn.Module, Tensor], object], set[str]]] = {
    "module, behind it": (
        lambda head, _: head.register_full_backward_pre_hook(lambda _, g: reversed_(*g)),
        {"first", "head"},
    ),
    "module, in front of it": (
        lambda head, _: head.register_full_backward_hook(lambda _, g, __: reversed_(*g)),
        {"first"},
    ),
    "module, in place": (
        lambda head, _: head.register_full_backward_hook(lambda _, g, __: reverse_in_place(g)),
        {"first"},
    ),
    "module that looks on": (
        lambda head, _: head.register_full_backward_hook(lambda _, g, __: g),
        set(),
    ),
    "module that copies": (
        lambda head, _: head.register_full_backward_hook(lambda _, g, __: (g[0].clone(),)),
        set(),
    ),
    "node, before it": (
        lambda _, hidden: hidden.grad_fn.register_prehook(lambda g: reversed_(*g)),
        {"first"},
    ),
    "node, behind it": (
        lambda _, hidden: hidden.grad_fn.register_hook(lambda g, _: reversed_(*g)),
        {"first"},
    ),
    "node that looks on": (lambda _, hidden: hidden.grad_fn.register_hook(lambda g, _: g), set()),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_modules_and_nodes_that_change_gradients(name: str) -> None:
    set_hook, refused = HOOKS[name]
    torch.manual_seed(0)
    model, plain = Hooked(set_hook).double(), Hooked(None).double()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(N, D, dtype=torch.float64), torch.randint(C, (N,))
    expected = per_sample_gradients_of_losses(F.cross_entropy(plain(x), y, reduction="none"), plain)
    gradlens.extend(model)
    with gradlens.per_sample_gradients(model) as found:
        F.cross_entropy(model(x), y).backward()
    assert {each.partition(".")[0] for each in expected.keys() - found.keys()} == refused
    for parameter, operator in found.items():
        assert_close(operator.dense(), expected[parameter])
