"""What can't be had of models that are divided among processes, and processes that differ."""

from __future__ import annotations

import itertools
import math
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradlens
from gradlens.gradients import gradients as gradients_module
from gradlens.graph.fully_shard import IS_KNOWN
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities import (
    ActivationOutliers,
    Alpha,
    ConditionNumber,
    CriticalSharpness,
    DeadNeurons,
    GradNorm,
    HessTrace,
    InputMean,
    InputNorm,
    InputStd,
    Loss,
    NormTest,
    OutputActivation,
    OutputEntropy,
    OutputNorm,
    ParameterNorm,
    Quantity,
    StepLedger,
    UpdateSize,
    UpdateSpectrum,
    WeightSpectrum,
)
from gradlens.schedules import linear
from tests.cases.processes import join_group, outcomes_of
from tests.cases.records import assert_same_records, unnamed
from tests.cases.steps import tracked_backward

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_KNOWN, reason="this torch is too old")]

STEPS = 3
PLAIN = ("Loss", "GradNorm", "ParameterNorm", "UpdateSize")
"""Quantities without per-sample gradients."""

Batch = Callable[[int], tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def sharded() -> nn.Module:
    model = network()
    fully_shard(model[0])
    fully_shard(model)
    return model


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(5, (8,), generator=generator)


def half(rank: int) -> Batch:
    return lambda step: (data(step)[0][4 * rank :][:4], data(step)[1][4 * rank :][:4])


def quantities() -> list[Quantity]:
    return [Loss(), GradNorm(), ParameterNorm(), UpdateSize(), NormTest(), Alpha()]


def trained(
    model: nn.Module,
    chosen: list[Quantity],
    batch: Batch,
    reduction: Any = "mean",
    seen: Callable[[int, Tensor], None] = lambda step, outputs: None,
    again: Callable[[], Tensor] | None = None,
) -> gradlens.History:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_function = nn.CrossEntropyLoss(reduction=reduction)
    cockpit = gradlens.Cockpit(
        model, chosen, loss_function=loss_function, loss_reduction=reduction, strict=True
    )
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        outputs = model(x)
        seen(step, outputs)
        loss = loss_function(outputs, y)
        closure = again or (lambda x=x, y=y: loss_function(model(x), y))
        tracked_backward(cockpit, step, loss, optimizer=optimizer, closure=closure)
        optimizer.step()
    cockpit.close()
    return cockpit.history


def assert_same_plain(found: gradlens.History, expected: gradlens.History) -> None:
    for name in PLAIN:
        assert_same_records(found[name], expected[name])


# Scenarios, in each of two processes ------------------------------------------------------------


def curvature(rank: int) -> None:
    history = trained(sharded(), [Loss(), HessTrace(), NormTest()], half(rank))
    alone = trained(network(), [HessTrace()], half(rank))
    assert_same_records(history["HessTrace"][0], alone["HessTrace"][0])
    assert history["NormTest"][0] > 0


def singular_values(rank: int) -> None:
    spectra = [WeightSpectrum, UpdateSpectrum]
    history = trained(sharded(), [ConditionNumber(), *(kind() for kind in spectra)], half(rank))
    values = history["ConditionNumber"][0]
    assert "each process has a part" in str(values["parameters"]["0.weight"])
    alone = trained(network(), [kind() for kind in spectra], data)
    for kind in spectra:
        assert_same_records(history[kind.__name__], alone[kind.__name__])


LAYERS: tuple[type[Quantity], ...] = (
    OutputNorm, InputNorm, InputMean, InputStd, OutputActivation, DeadNeurons,
    ActivationOutliers, OutputEntropy,
)  # fmt: skip


def layers_of_all(rank: int) -> None:
    """Values of layers are those of the samples of both processes, also if one has none."""

    def one_sided(step: int) -> tuple[Tensor, Tensor]:
        x, y = data(step)
        return (x, y) if rank == 0 else (x[:0], y[:0])

    for model in (replicated, sharded):
        for batch in (half(rank), one_sided):
            reduction = "mean" if batch is not one_sided else "sum"
            history = trained(model(), [kind() for kind in LAYERS], batch, reduction)
            alone = trained(network(), [kind() for kind in LAYERS], data, reduction)
            for kind in LAYERS:
                found, expected = (each[kind.__name__][0] for each in (history, alone))
                # Wrapped modules have longer names.
                assert_same_records(unnamed(found), unnamed(expected))


def layers_of_one(rank: int) -> None:
    """One process tracks layers, and doesn't wait for the other, which doesn't."""
    chosen = [NormTest()] if rank else [NormTest(), OutputNorm()]
    history = trained(replicated(), chosen, half(rank))
    assert rank or [*history["OutputNorm"]] == [*range(STEPS)]


def failing_layers(rank: int) -> None:
    """What can't be reduced in one process is refused in both."""
    reduction = OutputNorm().reduction
    model = replicated()
    cockpit = gradlens.Cockpit(model, [OutputNorm(), GradNorm()])
    capture = cockpit._tracking.signals._capture  # type: ignore[attr-defined]
    finish = capture.finish

    def failing(step: int, wanted: Any) -> Any:
        if rank and step == 1:
            raise RuntimeError("out of luck")
        return finish(step, wanted)

    capture.finish = failing
    for step in range(STEPS):
        x, y = half(rank)(step)
        tracked_backward(cockpit, step, nn.functional.cross_entropy(model(x), y))
    assert reduction.classes
    for step, value in cockpit.history["OutputNorm"].items():
        assert ("out of luck" in str(value)) == (step == 1)


def tensor_parallel(rank: int) -> None:
    model = network()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    others = [HessTrace(), WeightSpectrum(), CriticalSharpness(), StepLedger()]
    history = trained(model, [*quantities(), *others], data)
    assert_refused(history)
    for name in ("CriticalSharpness", "StepLedger"):
        assert "tensor parallelism" in history[name][0].reason
    spectra, alone = (
        each["WeightSpectrum"][0]["parameters"]
        for each in (history, trained(network(), [WeightSpectrum()], data))
    )
    # The first layer is divided by rows, and the second by columns.
    assert_same_records(spectra["0.weight"], alone["0.weight"])
    assert "each process has a part" in str(spectra["2.weight"])


def tensor_parallel_and_sharded(rank: int) -> None:
    model, mesh = network(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    assert_refused(trained(model, quantities(), data))


def assert_refused(history: gradlens.History) -> None:
    assert "tensor parallelism" in str(history["NormTest"][0])
    assert_same_plain(history, trained(network(), quantities(), data))


def right_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def losses_along_the_update(rank: int) -> None:
    """One process has no closure, or its closure fails: none waits."""

    def fails() -> Tensor:
        raise UnavailableError("out of luck")

    model = replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = gradlens.Cockpit(model, [Loss(), CriticalSharpness()])
    for step in range(STEPS):
        x, y = half(rank)(step)
        loss = nn.functional.cross_entropy(model(x), y)
        closure = None if rank and step else partial(right_loss, model, x, y)
        tracked_backward(cockpit, step, loss, optimizer=optimizer, closure=closure)
        optimizer.step()
        value = cockpit.history["CriticalSharpness"][step]
        assert isinstance(value, dict) == (step == 0)

    tracked: list[Quantity] = [CriticalSharpness(), StepLedger()]
    history = trained(replicated(), tracked, half(rank), again=fails if rank else None)
    for name in history.names:
        assert "out of luck" in history[name][0].reason


def flat_parameters(rank: int) -> None:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="use fully_shard"):
        gradlens.Cockpit(model)


def no_samples(rank: int) -> None:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = data(step)
        return (x, y) if rank == 0 else (x[:0], y[:0])

    history = trained(sharded(), quantities(), batch, "sum")
    alone = trained(network(), quantities(), data, "sum")
    for name in ("Loss", "NormTest"):
        assert history[name][0] == pytest.approx(alone[name][0], rel=1e-9)
    assert history["Loss"][2] > 0


def failing_plan(rank: int) -> None:
    """Finding the samples fails in the second process at step 1."""
    steps: list[int] = []
    plan_of = gradients_module.plan_of

    def failing(*arguments: Any) -> Any:
        if rank == 1 and steps[-1] == 1:
            raise RuntimeError("no plan")
        return plan_of(*arguments)

    gradients_module.plan_of = failing  # type: ignore[assignment]
    try:
        # The plan of a batch of another size is not known.
        history = trained(
            sharded(),
            quantities(),
            lambda step: tuple(each[: step + 2] for each in half(rank)(step)),  # type: ignore[return-value]
            seen=lambda step, outputs: steps.append(step),
        )
    finally:
        gradients_module.plan_of = plan_of
    assert "no plan" in str(history["NormTest"][1])
    assert history["NormTest"][0] > 0
    assert history["NormTest"][2] > 0
    assert history["GradNorm"][1]["0.weight"] > 0


def other_schedules(rank: int) -> None:
    history = trained(sharded(), [Loss(), NormTest(linear(1 + rank))], half(rank))
    assert history["Loss"][0] > 0
    assert "the same quantities and schedules" in str(history["Loss"][1])


def replicated() -> nn.Module:
    return nn.parallel.DistributedDataParallel(network())


def tracked_by_one(rank: int) -> None:
    """The other process has no quantities, or none at most steps: none waits for the other."""
    kinds: tuple[type[Quantity], ...] = (NormTest, CriticalSharpness)
    for make, kind in itertools.product((replicated, sharded), kinds):
        for schedule, shared in ((linear(2), (0, 2)), (lambda step: False, ()), (None, ())):
            chosen = [] if schedule is None else [kind(schedule)]
            history = trained(make(), chosen if rank else [kind()], half(rank))
            for step, value in history[kind.__name__].items() if history.names else ():
                has_value = isinstance(value, dict) or math.isfinite(value)
                assert has_value == (step in shared), (step, value)
                words = "the same quantities and schedules"
                assert has_value or kind is CriticalSharpness or words in value.reason


def different_numbers_of_batches(rank: int) -> None:
    """Inside of ``join``, a process that has no further batch doesn't take part."""
    model = replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = gradlens.Cockpit(model, quantities(), loss_function=nn.CrossEntropyLoss())
    with model.join():
        for step in range(1 + 2 * rank):
            x, y = half(rank)(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            tracked_backward(cockpit, step, loss, optimizer=optimizer)
            optimizer.step()
    cockpit.close()
    history = cockpit.history
    assert list(history["Loss"]) == [*range(1 + 2 * rank)]
    assert all("DistributedDataParallel.join" in str(history[name][0]) for name in history.names)


def without_the_wrapper(rank: int) -> None:
    """Values are those of the process's own samples, and a note says so."""
    model = replicated()
    history = trained(model.module, [Loss(), NormTest()], half(rank))
    (note,) = history.notes
    assert "has 2 processes" in note.text
    alone = trained(network(), [Loss(), NormTest()], half(rank))
    assert history["NormTest"][0] == pytest.approx(alone["NormTest"][0])


def made_after_forward(rank: int) -> None:
    """A forward pass leaves the parameters of the whole model unsharded."""
    model = sharded()
    shards = dict(model.named_parameters())
    model(data(0)[0])
    assert {*map(id, model.parameters())} != {*map(id, shards.values())}
    found = gradlens.Cockpit(model, [Loss()]).parameters
    assert {name: id(p) for name, p in found.items()} == {n: id(p) for n, p in shards.items()}


def budget(rank: int) -> None:
    with pytest.raises(ValueError, match="must track the same steps"):
        gradlens.Cockpit(sharded(), budget=0.05)


def without_a_cockpit(rank: int) -> None:
    model, plain = sharded(), network()
    (x, y), loss_function = half(rank)(0), nn.CrossEntropyLoss()
    found, expected = [], []
    for one, gradients in ((model, found), (plain, expected)):
        with gradlens.per_sample_gradients(one, batch_size=len(x)) as operators:
            loss_function(one(x), y).backward()
        gradients += [operators[name].dense() for name in operators]
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def all_quantities(rank: int) -> None:
    """No quantity of the presets fails by an exception; those of curvature have their reason."""
    history = trained(sharded(), gradlens.configuration("full"), half(rank))
    assert not [note for note in history.notes if " failed" in note.text]


SCENARIOS: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (
        curvature,
        singular_values,
        layers_of_all,
        layers_of_one,
        failing_layers,
        tensor_parallel,
        tensor_parallel_and_sharded,
        losses_along_the_update,
        flat_parameters,
        no_samples,
        failing_plan,
        other_schedules,
        tracked_by_one,
        different_numbers_of_batches,
        without_the_wrapper,
        made_after_forward,
        budget,
        without_a_cockpit,
        all_quantities,
    )
}


def worker(rank: int, processes: int, port: int, folder: Path) -> None:
    join_group(rank, processes, port)
    warnings.simplefilter("ignore")
    for name, scenario in SCENARIOS.items():
        text = "as expected"
        try:
            scenario(rank)
        except Exception:
            text = traceback.format_exc()
        (folder / f"{name}{rank}").write_text(text)
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outcomes_of(tmp_path_factory, worker)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes(name: str, outcomes: Path) -> None:
    for rank in range(2):
        assert (outcomes / f"{name}{rank}").read_text() == "as expected"
