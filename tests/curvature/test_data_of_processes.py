"""Matrices over data that several processes share equal those of one process."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradlens
from gradlens.curvature import (
    CurvatureOperator,
    FisherOperator,
    GGNOperator,
    HessianOperator,
    LossOverData,
    Probe,
    SumOverData,
    eigenpairs,
    hutchinson,
)
from gradlens.graph.fully_shard import IS_KNOWN
from gradlens.numerics.shards import own_parts
from gradlens.quantities import HessMaxEV, HessTrace, Stability
from tests.cases.curvature_cases import MODELS, Problem, build
from tests.cases.processes import free_port, join_group, run_processes
from tests.cases.records import assert_same_records
from tests.curvature.test_over_data import CLOSE, DENSE, OPERATORS, matrix_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_KNOWN, reason="this torch is too old")]

PROCESSES = 2


def each_layer(model: nn.Module) -> nn.Module:
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def freed(model: nn.Module) -> nn.Module:
    return fully_shard(model, reshard_after_forward=True)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copies": DistributedDataParallel,
    "sharded by layer": each_layer,
    "sharded and freed": freed,
}


def share(problem: Problem, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Two batches of the three, or the last one."""
    return problem.batches[:2] if rank == 0 else problem.batches[2:]


def test_matrices_are_those_of_all_data() -> None:
    run_processes(worker, PROCESSES, free_port())


def worker(rank: int, port: int) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "gradlens")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    join_group(rank, PROCESSES, port)
    try:
        # Each network in each way, with the kinds of matrices and of losses in turn.
        kinds, reductions = itertools.cycle(DENSE), itertools.cycle(["mean", "mean", "sum", "sum"])
        for name, wrap in itertools.product(MODELS, WAYS.values()):
            check_matrix(rank, wrap, name, next(kinds), next(reductions))
        for wrap in (DistributedDataParallel, freed):
            check_draws(rank, wrap)
            check_numbers(rank, wrap)
            check_influence(wrap)
            check_failures(rank, wrap)
        for wrap in WAYS.values():
            check_training(rank, wrap)
        for wrap in (each_layer, freed):
            check_tracked(rank, wrap)
    finally:
        distributed.destroy_process_group()


def over_share(rank: int, wrap: Any, problem: Problem, kind: Any, **options: Any) -> Any:
    loss = problem.loss_of(options.get("loss_reduction", "mean"))
    return kind.over_data(wrap(problem.model), loss, share(problem, rank), **options)


def check_matrix(rank: int, wrap: Any, name: str, kind: str, reduction: Any) -> None:
    loss = "mse" if name == "tied" else "cross-entropy"
    dense = DENSE[kind](build(name, loss), reduction).numpy()
    found: CurvatureOperator = over_share(
        rank, wrap, build(name, loss), OPERATORS[kind], loss_reduction=reduction
    )
    np.testing.assert_allclose(matrix_of(found), dense, **CLOSE)


def check_draws(rank: int, wrap: Any) -> None:
    """Draws are those of one process that has the batches in the order of the processes."""
    problem = build("perceptron", "cross-entropy")
    alone = FisherOperator.over_data(problem.model, problem.loss_of("mean"), problem.batches)
    found = over_share(rank, wrap, build("perceptron", "cross-entropy"), FisherOperator)
    np.testing.assert_allclose(matrix_of(found), matrix_of(alone), **CLOSE)


def check_numbers(rank: int, wrap: Any) -> None:
    """Of one part of the parameters, by their names in the network itself."""
    problem, names = build("perceptron", "cross-entropy"), ["2"]
    alone = GGNOperator.over_data(
        problem.model, problem.loss_of("mean"), problem.batches, parameters=names
    )
    shared: SumOverData = over_share(
        rank, wrap, build("perceptron", "cross-entropy"), GGNOperator, parameters=names
    )
    assert [*shared.slices] == ["2.weight", "2.bias"]
    assert shared.loss.samples == alone.loss.samples == 8
    np.testing.assert_allclose(shared.loss.mean(), alone.loss.mean(), **CLOSE)
    for one, other in zip(shared.loss.mean_gradient(), alone.loss.mean_gradient(), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)
    np.testing.assert_allclose(eigenpairs(shared, 2).values, eigenpairs(alone, 2).values, **CLOSE)
    np.testing.assert_allclose(hutchinson(shared, 3).value, hutchinson(alone, 3).value, **CLOSE)


def check_influence(wrap: Any) -> None:
    """Each process has all data, and the scores of one process."""
    scores = []
    for form in (wrap, lambda model: model):
        problem = build("perceptron", "cross-entropy")
        found = gradlens.influence(
            form(problem.model), problem.loss_of("mean"), problem.batches, problem.batches[:1],
            damping=0.5, by_sample=True, tolerance=1e-11,
        )  # fmt: skip
        scores.append(found.scores)
    np.testing.assert_allclose(*scores, rtol=1e-8, atol=1e-12)


def trained(rank: int, wrap: Any, is_watched: bool) -> list[Tensor]:
    problem = build("perceptron", "cross-entropy")
    model, loss, data = wrap(problem.model), problem.loss_of("mean"), share(problem, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        if is_watched:
            HessianOperator.over_data(model, loss, data) @ np.ones(35)
        optimizer.zero_grad()
        inputs, targets = data[0]
        loss(model(inputs), targets).backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def check_training(rank: int, wrap: Any) -> None:
    pairs = zip(trained(rank, wrap, True), trained(rank, wrap, False), strict=True)
    assert all(torch.equal(*own_parts(pair)) for pair in pairs)


def check_failures(rank: int, wrap: Any) -> None:
    """What fails in one process fails in all, since they would wait for each other."""
    problem = build("perceptron", "cross-entropy")
    model, loss, data = wrap(problem.model), problem.loss_of("mean"), share(problem, rank)
    broken = [*data, (torch.ones(2, 4).double(), torch.ones(3).long())] if rank else data
    with pytest.raises(ValueError, match="outputs for 2 samples and targets for 3"):
        LossOverData(model, loss, broken)
    with pytest.raises(ValueError, match="two processes have the same first batch"):
        summed = problem.loss_of("sum")
        LossOverData(model, summed, problem.batches, loss_reduction="sum")
    changed = [*data]
    whole = LossOverData(model, loss, changed)
    if rank:
        changed[0] = (data[0][0] + 1, data[0][1])
    with pytest.raises(ValueError, match="isn't the same as in the first pass"):
        whole.mean()


def tracked(rank: int, wrap: Any) -> dict[str, Any]:
    """Quantities of a sharded network's own part of the batch, and of a probe."""
    problem = build("perceptron", "cross-entropy")
    probe = Probe(problem.batches, nn.CrossEntropyLoss())
    quantities = [
        HessMaxEV(),
        HessTrace(curvature="diag_ggn_exact"),
        HessMaxEV(on=probe, name="HessMaxEV of the probe"),
        Stability(on=probe),
    ]
    model = wrap(problem.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # the same network at all steps
    cockpit = gradlens.Cockpit(model, quantities, strict=True)
    for step in range(2):
        inputs, targets = problem.batches[2]  # the same in all processes, as their mean is then
        optimizer.zero_grad()
        loss = problem.loss_of("mean")(model(inputs), targets)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return {name: cockpit.history[name][1] for name in cockpit.history.names}


def check_tracked(rank: int, wrap: Any) -> None:
    found, alone = tracked(rank, wrap), tracked(rank, lambda model: model)
    assert_same_records(found, alone, rtol=1e-7)
