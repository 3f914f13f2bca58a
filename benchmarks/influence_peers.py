"""Influence of samples on others, beside other libraries: ``python -m benchmarks.influence_peers``.

Prints the rows of ``docs/influence_peers.csv``. Each library that is installed scores all pairs of
training and test samples, in float64 and in a process of its own: ``pip install captum
curvlinops-for-pytorch dattri``. Errors are relative to ``torch.func``'s dense gradients and
Jacobians.
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.curvature_peers import BATCH, LOSS, costs, is_installed, problem
from benchmarks.memory import in_a_process

THIS = "benchmarks.influence_peers"

DAMPING = 0.01
TOLERANCE = 1e-6
"""Residual, relative to the right side, at which conjugate gradients end."""

TRACIN, LAST_LAYER, INFLUENCE = TASKS = ("TracIn", "influence, last layer", "influence")
"""gₙᵀgₘ, and gₙᵀ(G + damping·I)⁻¹gₘ/N; that of the last layer has G equal to the Hessian."""

SAMPLES = {TRACIN: (150, 50), LAST_LAYER: (50, 4), INFLUENCE: (50, 4)}
"""Training samples, in batches of 64, and test samples."""

Data = DataLoader[Any]
Parameters = dict[str, Tensor]


def test_data(count: int) -> Data:
    """Images like those of the training data."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, 32, 32, dtype=torch.float64, generator=generator)
    targets = torch.randint(10, (count,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), BATCH)


def parameters_of(task: str, model: nn.Module) -> Parameters:
    """Those that scores are about."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return dict([*parameters.items()][-2:]) if task == LAST_LAYER else parameters


def gradlens(task: str, model: nn.Module, train: Data, test: Data) -> Tensor:
    import gradlens

    if task != TRACIN:
        return torch.from_numpy(
            gradlens.influence(
                model, LOSS, train, test, damping=DAMPING, by_sample=True,
                parameters=[*parameters_of(task, model)],
                tolerance=TOLERANCE,
            ).scores
        )  # fmt: skip

    def gradients(inputs: Tensor, targets: Tensor) -> gradlens.PerSampleGradients:
        with gradlens.per_sample_gradients(model) as found:
            LOSS(model(inputs), targets).backward()
        return found

    of_test = [gradients(*batch) for batch in test]
    rows = (torch.cat([g.gram(h) for h in of_test], 1) for g in (gradients(*b) for b in train))
    return torch.cat([*rows])


def dattri(task: str, model: nn.Module, train: Data, test: Data) -> Tensor:
    from dattri.algorithm import IFAttributorCG, TracInAttributor
    from dattri.task import AttributionTask

    if task == INFLUENCE:  # with its Hessian, these are other scores
        raise NotImplementedError

    def loss(parameters: Parameters, data: tuple[Tensor, Tensor]) -> Tensor:
        inputs = data[0] if data[0].dim() == 4 else data[0][None]
        return LOSS(functional_call(model, parameters, inputs), data[1].reshape(len(inputs)))

    given = AttributionTask(loss, model, model.state_dict())
    if task == TRACIN:
        weights: Any = torch.ones(1)
        tracin = TracInAttributor(given, weights, normalized_grad=False)
        tracin.projector_kwargs = None
        return tracin.attribute(train, test)
    layers = [*parameters_of(task, model)]
    found = IFAttributorCG(given, layers, max_iter=ITERATIONS, regularization=DAMPING)
    samples = train.dataset
    whole = DataLoader(samples, len(samples))  # it adds up the inverses of batches
    found.cache(whole)
    return found.attribute(whole, test) / len(samples)


ITERATIONS = 20
"""Those of dattri, which has no tolerance, and of curvlinops, which doesn't come to this one."""


def captum(task: str, model: nn.Module, train: Data, test: Data) -> Tensor:
    from captum.influence import NaiveInfluenceFunction, TracInCP

    if task == INFLUENCE:
        raise NotImplementedError
    samples = tuple(torch.cat(each) for each in zip(*test, strict=True))
    options: Any = {"checkpoints_load_func": lambda *_: 1.0, "sample_wise_grads_per_batch": True}
    loss = nn.CrossEntropyLoss(reduction="sum")
    if task == TRACIN:
        tracin = TracInCP(model, train, ["now"], loss_fn=loss, **options)
        return tracin.influence(samples, k=None).T
    count = sum(p.numel() for p in parameters_of(task, model).values())
    found = NaiveInfluenceFunction(
        model, train, "now", loss_fn=loss, layers=["12"], projection_dim=count,
        hessian_reg=DAMPING * len(train.dataset), hessian_inverse_tol=0.0, **options,
    )  # fmt: skip
    return found.influence(samples, k=None).T


def curvlinops(task: str, model: nn.Module, train: Data, test: Data) -> Tensor:
    import curvlinops
    from curvlinops.examples import IdentityLinearOperator

    if task == TRACIN:
        raise NotImplementedError
    parameters = parameters_of(task, model)
    own = [p for name, p in model.named_parameters() if name in parameters]
    matrix = curvlinops.GGNLinearOperator(model, LOSS, own, train)
    shapes, device, dtype = [p.shape for p in own], own[0].device, own[0].dtype
    damping = DAMPING * IdentityLinearOperator(shapes, device, dtype)
    inverse = curvlinops.CGInverseLinearOperator(
        matrix + damping, tolerance=TOLERANCE, max_iter=ITERATIONS
    )
    rows = partial(rows_of_gradients, model, parameters)
    solved = inverse @ torch.cat([rows(*batch) for batch in test]).T
    scores = torch.cat([rows(*batch) @ solved for batch in train])
    return scores / len(scores)


def rows_of_gradients(
    model: nn.Module, parameters: Parameters, inputs: Tensor, targets: Tensor
) -> Tensor:
    """``[N, D]``, by torch.func."""
    frozen = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: Parameters, one: Tensor, target: Tensor) -> Tensor:
        return LOSS(functional_call(model, frozen | given, one[None]), target[None])

    found = vmap(grad(loss), (None, 0, 0))(parameters, inputs, targets)
    return torch.cat([each.flatten(1) for each in found.values()], 1)


def dense(task: str, model: nn.Module, train: Data, test: Data) -> Tensor:
    """The reference: gradients and Jacobians of all samples, and no iteration."""
    parameters = parameters_of(task, model)
    rows = partial(rows_of_gradients, model, parameters)
    of_train, of_test = (torch.cat([rows(*batch) for batch in data]) for data in (train, test))
    if task == TRACIN:
        return of_train @ of_test.T
    frozen = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(given: Parameters, one: Tensor) -> Tensor:
        return functional_call(model, frozen | given, one[None])[0]

    def roots(inputs: Tensor) -> Tensor:
        """R ``[N·K, D]`` with RᵀR = Σₙ JₙᵀHₙJₙ, for H = diag(p) − ppᵀ."""
        found = vmap(jacrev(outputs), (None, 0))(parameters, inputs)
        jacobians = torch.cat([each.flatten(2) for each in found.values()], 2)
        p = model(inputs).detach().softmax(1)
        means = torch.einsum("nk,nkd->nd", p, jacobians)
        return ((jacobians - means[:, None]) * p.sqrt()[..., None]).flatten(0, 1)

    root = torch.cat([roots(inputs) for inputs, _ in train])
    samples = len(of_train)
    inner = root @ root.T + samples * DAMPING * torch.eye(len(root), dtype=root.dtype)
    along = root.T @ torch.linalg.solve(inner, root @ of_test.T)  # Woodbury's identity
    return of_train @ (of_test.T - along) / (DAMPING * samples)


CONTENDERS: dict[str, Callable[[str, nn.Module, Data, Data], Tensor]] = {
    "gradlens": gradlens,
    "captum": captum,
    "curvlinops": curvlinops,
    "dattri": dattri,
}


def measured(name: str, task: str, path: str) -> None:
    """Save the scores, and print their seconds and bytes."""
    work: list[Callable[[], Tensor]] = []
    for samples, others in ((2, 1), SAMPLES[task]):  # the first imports what is needed
        model, train = problem(torch.float64, samples)
        work.append(
            partial({**CONTENDERS, "dense": dense}[name], task, model, train, test_data(others))
        )
    work[0]()
    scores: list[Tensor] = []
    found = costs(lambda: lambda: scores.append(work[1]()), repetitions=1)
    torch.save(scores[0].detach(), path)
    print(*found)


def rows() -> Iterator[list[str]]:
    """The table."""
    with TemporaryDirectory() as folder:
        for task in TASKS:
            expected = torch.empty(0)
            for name in ("dense", *CONTENDERS):
                path = str(Path(folder) / name)
                if name != "dense" and not is_installed(name):
                    continue
                found = in_a_process(THIS, name, task, path)
                if found is None:
                    continue
                if name == "dense":
                    expected = torch.load(path)
                error = float((torch.load(path) - expected).norm() / expected.norm())
                seconds, size = found[-2:]
                shown = f"{float(seconds):.2f}", f"{int(size) / 2**20:.0f}"
                yield [task, name, f"{error:.1e}", *shown]


def main() -> None:
    """Print the table, or what one process of it finds."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case [name, task, path]:
            measured(name, task, path)
        case _:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(["scores", "library", "error", "CPU time, s", "memory, MB"])
            for row in rows():
                writer.writerow(row)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
