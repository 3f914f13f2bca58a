"""Facts of whole runs: against the loop's own numbers, in the file, and after a checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import gradlens
from gradlens import Cockpit, History
from gradlens.facts.parameters import parameter_numbers
from gradlens.history.json_lines import encoded, to_line
from gradlens.history.records import LeftOutWarning
from gradlens.history.series import value_of
from gradlens.quantities import NormTest
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward

N, STEPS = 6, 45


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(N, 5, generator=generator).to(dtype)
    return x, torch.randint(3, (N,), generator=generator)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def numbers(history: History, facts: str = "steps") -> dict[str, Any]:
    """Facts by name, as ``kind/name`` those of layers."""
    series = history.facts[facts]
    found = {name: series.column(name) for name in series.entries}
    if facts == "layers":
        found = {f"{kind}/{n}": of.column(n) for kind, of in found.items() for n in of.entries}
    return {name: one.numbers() for name, one in found.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_numbers_are_those_of_the_loop(optimizer: str, clip: float | None) -> None:
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())
    cockpit = Cockpit(model, [], strict=True)
    expected: dict[str, list[float]] = {}
    layers: dict[str, list[float]] = {}
    for step in range(STEPS):
        x, y = batch(step)
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        tracked_backward(cockpit, step, loss, optimizer=opt)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        before = [p.detach().clone() for p in model.parameters()]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        at_step = norm([p.grad for p in model.parameters() if p.grad is not None])
        opt.step()
        row = {
            "loss": float(loss.detach()),
            "samples": N,
            "grad_norm": norm(gradients),
            "grad_norm_at_step": at_step,
            "lr": opt.param_groups[0]["lr"],
            "updates": 1.0,
            "input_rms": rms(x),
        }
        for name, value in row.items():
            expected.setdefault(name, []).append(value)
        for (name, p), old, gradient in zip(
            model.named_parameters(), before, gradients, strict=True
        ):
            found = {"weight": rms(old), "gradient": rms(gradient), "update": rms(p - old)}
            for kind, value in found.items():
                layers.setdefault(f"{kind}_rms/{name}", []).append(value)
    cockpit.close()
    steps, of_layers = (numbers(cockpit.history, name) for name in ("steps", "layers"))
    assert [*cockpit.history.facts["steps"]] == [*range(STEPS)]
    for name, values in expected.items():
        known = ~np.isnan(steps[name])
        assert known.sum() >= (STEPS if "grad" not in name else STEPS // 4)
        assert steps[name][known] == pytest.approx(np.array(values)[known], rel=1e-5)
    at = [*cockpit.history.facts["layers"]]
    assert at == [0, 1, 2, 4, 8, 16, 20, 40]
    for name, values in layers.items():
        assert of_layers[name] == pytest.approx(np.array(values)[at], rel=1e-3, abs=1e-9)
    setup = cockpit.history.setups[0]
    assert setup.optimizer == type(opt).__name__
    assert setup.activations == {"0": "relu", "2": "tanh"}
    assert {name for group in setup.groups for name in group.parameters} == {
        name for name, _ in model.named_parameters()
    }
    has_moments = "root_second_moment" in cockpit.history.facts["layers"].entries
    assert has_moments == optimizer.startswith("Adam")


LOOPS: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    "zero_grad": lambda model, opt: opt.zero_grad(),
    "zero_grad to zeros": lambda model, opt: opt.zero_grad(set_to_none=False),
    "halved": lambda model, opt: scale_gradients(model, 0.5),
    "nothing": lambda model, opt: None,
}
BEFORE_STEPS: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "clipped norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clipped values": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "unscaled": lambda model: scale_gradients(model, 1 / 128),
}


def scale_gradients(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


@pytest.mark.filterwarnings("ignore:gradlens.*sum over steps")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stepping", [1, 0, 2])
@pytest.mark.parametrize(("change", "fused"), [*zip(BEFORE_STEPS, (True, False) * 2, strict=True)])
def test_loops_without_zero_grad_or_step(
    loop: str, stepping: int, change: str, fused: bool
) -> None:
    model = network()
    opt = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    cockpit = Cockpit(model, [], strict=True)
    for step in range(6):
        x, y = batch(step)
        LOOPS[loop](model, opt)
        tracked_backward(cockpit, step, functional.cross_entropy(model(x), y), optimizer=opt)
        BEFORE_STEPS[change](model)
        for _ in range(stepping):
            opt.step()
    cockpit.close()
    assert not opt._optimizer_step_pre_hooks
    facts = numbers(cockpit.history)
    assert facts["updates"].tolist() == [stepping] * 6
    stale = loop == "nothing" and stepping > 0
    assert facts["stale"].tolist() == [0, *[float(stale)] * 5]


@pytest.mark.parametrize("parts", [(6,), (3, 3), (1, 2, 3)])
@pytest.mark.parametrize("how", ["divided", "loss_scale"])
def test_micro_batches_are_one_step(parts: tuple[int, ...], how: str) -> None:
    model = network()
    opt = torch.optim.SGD(model.parameters(), 0.01)
    cockpit = Cockpit(model, [], strict=True)
    expected = []
    for step in range(4):
        x, y = batch(step)
        opt.zero_grad()
        expected.append(float(functional.cross_entropy(model(x), y).detach()))
        start = 0
        for number, count in enumerate(parts):
            rows = slice(start, start + count)
            start += count
            share = count / N
            loss = functional.cross_entropy(model(x[rows]), y[rows]) * share
            scale = {"loss_scale": share} if how == "loss_scale" else {}
            with cockpit(
                step, loss=loss, optimizer=opt, accumulating=number < len(parts) - 1, **scale
            ):
                loss.backward()
        opt.step()
    cockpit.close()
    facts = numbers(cockpit.history)
    assert [*cockpit.history.facts["steps"]] == [0, 1, 2, 3]
    assert facts["samples"].tolist() == [N] * 4
    assert facts["labels"].tolist() == [N] * 4
    assert facts["loss"] == pytest.approx(expected, rel=1e-5)
    assert not np.isnan(facts["loss_max"]).any()


@pytest.mark.parametrize("known", ["batch_size", "individual_losses"])
def test_the_number_of_samples_is_what_was_passed(known: str) -> None:
    """Texts have their words along the first axis, and a sum divided by N is a mean."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    losses = model(torch.randn(8 * N, N, 5)).square().mean((0, 2))
    passed = {"batch_size": N, "individual_losses": losses.detach()}
    cockpit = Cockpit(model, [], strict=True)
    tracked_backward(cockpit, 0, losses.sum() / N, info={known: passed[known]})
    cockpit.close()
    assert cockpit.history.setups[0].loss_reduction == "mean"


@pytest.mark.filterwarnings("ignore:gradlens.*2 ids were passed")
@pytest.mark.parametrize("ids", [[5, 3, 8, 1, 9, 7], list("abcdef"), [2**30] * 6, [1, 2]])
@pytest.mark.parametrize("bad", [1e3, math.nan])
def test_samples_have_the_users_ids(ids: list[Any], bad: float) -> None:
    model = network()
    cockpit = Cockpit(model, [], autopsy=False)
    x, y = batch(0)
    x[4] = bad
    tracked_backward(cockpit, 0, functional.cross_entropy(model(x), y), info={"ids": ids})
    cockpit.close()
    name = "bad_row" if math.isnan(bad) else "row_largest"
    facts = numbers(cockpit.history)
    assert facts[name].tolist() == [4]
    expected = {5: [9], 2**30: [2**30]}.get(ids[0], [math.nan])
    np.testing.assert_array_equal(facts.get(f"{name}_id", [math.nan]), expected)


def test_exceptions_leave_their_step_out() -> None:
    model = network()
    cockpit = Cockpit(model, [], strict=True)
    for step in range(4):
        loss = model(batch(step)[0]).square().mean()
        try:
            with cockpit(step, loss=loss):
                if step == 2:
                    raise KeyError
                loss.backward()
        except KeyError:
            pass
    cockpit.close()
    assert [*cockpit.history.facts["steps"]] == [0, 1, 3]


def assert_same(one: History, other: History) -> None:
    for name, series in other.facts.items():
        np.testing.assert_equal(dict(one.facts[name]), dict(series))
    assert one.setups == other.setups
    assert one.findings == other.findings


def run(steps: range, path: Path | None, state: Mapping[str, Any] | None = None) -> Any:
    model = network()
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    cockpit = Cockpit(model, [NormTest()], run=path, resume=state is not None, strict=True)
    if state is not None:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        cockpit.load_state_dict(state["cockpit"])
    for step in steps:
        take(step, cockpit, model, opt)
    return cockpit, model, opt


def take(step: int, cockpit: Cockpit, model: nn.Module, opt: Optimizer) -> None:
    x, y = batch(step)
    opt.zero_grad()
    tracked_backward(cockpit, step, functional.cross_entropy(model(x), y), optimizer=opt)
    opt.step()


def test_what_has_not_been_written_yet_belongs_to_steps_that_a_state_ends() -> None:
    cockpit, model, opt = run(range(30), None)
    state = cockpit.state_dict()
    for step in (*range(30, 33), 30):
        if step == 30:
            cockpit.load_state_dict(state)
        take(step, cockpit, model, opt)
    cockpit.close()
    assert [*cockpit.history.facts["steps"]] == [*range(31)]


def test_a_file_has_the_same_facts(tmp_path: Path) -> None:
    cockpit, _, _ = run(range(30), tmp_path / "run.jsonl")
    cockpit.close()
    assert_same(History.load(tmp_path / "run.jsonl"), cockpit.history)
    cockpit.write(tmp_path / "again")
    assert_same(History.load(tmp_path / "again.jsonl"), cockpit.history)
    assert [*cockpit.history[10:20].facts["steps"]] == [*range(10, 20)]


@pytest.mark.parametrize("seed", range(6))
def test_numbers_out_of_the_range_of_single_precision(seed: int, tmp_path: Path) -> None:
    """Those of a run in double precision that diverges, without a warning in the loop."""
    model, (x, y) = network(torch.float64), batch(seed, torch.float64)
    cockpit = Cockpit(model, [], run=tmp_path / "run.jsonl", strict=True)
    scales = 10.0 ** np.random.default_rng(seed).uniform(-60, 60, 8)
    losses = []
    for step, scale in enumerate(scales):
        model.zero_grad()
        loss = scale * functional.cross_entropy(model(x), y)
        tracked_backward(cockpit, step, loss)
        losses.append(torch.tensor(loss.item(), dtype=torch.float32).item())
    cockpit.close()
    np.testing.assert_array_equal(numbers(cockpit.history)["loss"], losses)
    assert_same(History.load(tmp_path / "run.jsonl"), cockpit.history)


@pytest.mark.parametrize("at", [1, 7, 20, 21])
@pytest.mark.parametrize("further", [0, 5])
@pytest.mark.slow
def test_a_run_that_is_resumed(tmp_path: Path, at: int, further: int) -> None:
    whole, _, _ = run(range(30), None)
    whole.close()
    cockpit, model, opt = run(range(at), tmp_path / "run.jsonl")
    state = copy.deepcopy(
        {"model": model.state_dict(), "opt": opt.state_dict(), "cockpit": cockpit.state_dict()}
    )
    for step in range(at, at + further):  # lost, as the checkpoint was saved before
        opt.zero_grad()
        x, y = batch(step + 100)
        tracked_backward(cockpit, step, functional.cross_entropy(model(x), y), optimizer=opt)
    cockpit.close()
    resumed, _, _ = run(range(at, 30), tmp_path / "run.jsonl", state)
    resumed.close()
    assert_same(resumed.history, whole.history)
    assert_same(History.load(tmp_path / "run.jsonl"), whole.history)


def test_memory_is_bounded() -> None:
    history = History()
    for step in range(40_000):
        history.add_facts(step, {"steps": {"loss": float(step)}})
    steps = history.facts["steps"].steps
    assert len(steps) <= 8192
    assert (steps[0], steps[-1]) == (0, 39_999)
    assert (np.diff(steps)[-1000:] == 1).all()
    assert numbers(history)["loss"].tolist() == steps.tolist()


def broken(record: Mapping[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(dict(record))
    part: Any = found
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("facts", ("step",), 2**60),
        ("facts", ("facts",), []),
        ("setup", ("setup",), None),
        ("setup", ("setup", "layers"), {"0": 1}),
        ("setup", ("setup", "groups"), [{}]),
        ("setup", ("step",), "first"),
        ("finding", ("finding",), {}),
    ],
)
def test_records_of_another_form_are_refused(
    kind: str, path: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    cockpit, _, _ = run(range(3), None)
    records = {
        kind: value_of(encoded(record))
        for record in cockpit.history.records()
        for kind in ("facts", "setup")
        if kind in record
    }
    records["finding"] = {"step": 0, "finding": {}}
    cockpit.history.write(tmp_path / "run.jsonl")
    with (tmp_path / "run.jsonl").open("a") as file:
        file.write(to_line(broken(records[kind], path, value)) + "\n")
    with pytest.warns(LeftOutWarning, match="is broken"):
        History.load(tmp_path / "run.jsonl")


@pytest.mark.parametrize("kind", ["compiled", "no loss", "no optimizer", "parameters", "no graph"])
def test_what_isnt_there_is_left_out(kind: str) -> None:
    model = network()
    params: Any = list(model.parameters()) if kind == "parameters" else model
    if kind == "parameters":
        gradlens.extend(model)
    cockpit = Cockpit(params, [], strict=True)
    opt = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        x, y = batch(step)
        loss = functional.cross_entropy(model(x), y)
        given: dict[str, Any] = {} if kind == "no loss" else {"loss": loss}
        if kind != "no optimizer":
            given["optimizer"] = opt
        with cockpit(step, **given):
            loss.backward()
        opt.step()
        opt.zero_grad()
    cockpit.close()
    facts = cockpit.history.facts["steps"]
    assert len(facts) == 3
    assert np.isnan(facts.column("loss").numbers()).any() == (kind == "no loss")
    assert np.isnan(facts.column("updates").numbers()).any() == (kind == "no optimizer")
    assert np.isnan(facts.column("samples").numbers()).any() == (kind == "parameters")


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("hidden", [1, 2, 40])
def test_equal_units_of_recurrent_layers(kind: type[nn.RNNBase], hidden: int) -> None:
    """Weights of different gates differ, though the units of each have the same ones."""
    torch.manual_seed(0)
    layer = kind(3, hidden, bidirectional=True)
    gates = len(layer.weight_ih_l0) // hidden
    for equal in (False, True):
        if equal:
            with torch.no_grad():
                for weight in layer.parameters():
                    rows = weight.reshape(gates, hidden, *weight.shape[1:])
                    rows.copy_(rows[:, :1].clone().expand_as(rows))
        found = parameter_numbers(dict(layer.named_parameters()), {}, 1.0)
        spreads = [*map(float, found["row_spread"].values())]
        assert len(spreads) == (4 if hidden > 1 else 0)
        assert all((spread < 1e-6) == equal for spread in spreads)


def test_a_closure_may_run_the_last_micro_batch() -> None:
    """The optimizer has begun its step by then, and hasn't used what is in p.grad."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    cockpit = Cockpit(network, [])

    def backward(step: int, accumulating: bool) -> None:
        loss = network(torch.randn(4, 3)).square().mean()
        tracked_backward(cockpit, step, loss, optimizer=optimizer, accumulating=accumulating)

    for step in range(3):
        optimizer.zero_grad()
        backward(step, accumulating=True)
        optimizer.step(lambda: backward(step, accumulating=False))  # noqa: B023
    cockpit.close()
    assert not cockpit.history.notes


def test_a_state_is_no_batch() -> None:
    """Of tokens and the state of a recurrent layer, which is real, the tokens have the samples."""

    model = Net(
        lambda net, tokens, state: net.layer(net.table(tokens), state)[0],
        table=nn.Embedding(9, 4),
        layer=nn.GRU(4, 3, batch_first=True),
    )
    cockpit = Cockpit(model, [])
    loss = model(torch.randint(9, (5, 7)), torch.zeros(1, 5, 3)).square().mean()
    tracked_backward(cockpit, 0, loss)
    cockpit.close()
    assert cockpit.history.facts["steps"].column("samples").numbers().tolist() == [5]
    assert cockpit.history.setups[0].input_kind == "integers"
