"""Products over a data set, beside other libraries: ``python -m benchmarks.curvature_peers``.

Prints the rows of ``docs/curvature.csv``. Each library that is installed multiplies the matrices
of one network and its data: ``pip install curvlinops-for-pytorch pyhessian hessian-eigenthings``.
Errors are those in float64, relative to the loss of all samples at once; times and memory are those
in float32, in a process for each.

``python -m benchmarks.curvature_peers beside`` prints the times of gradlens over those of
curvlinops, which take turns in one process, for a perceptron, this network and a small GPT.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.diagnosis.networks import Causal, Placed, stack, transformer
from benchmarks.memory import in_a_process, peak_of

SAMPLES, BATCH, COLUMNS, REPETITIONS = 300, 64, 8, 3
"""The last batch has 44 samples, so that an average over batches isn't that over samples."""

THIS = "benchmarks.curvature_peers"

Multiply = Callable[[Tensor], Tensor]
"""Matrix times the columns of ``[D, k]``."""

MATRICES = ("Hessian", "Gauss-Newton", "empirical Fisher")
LOSS = nn.CrossEntropyLoss()


def problem(dtype: torch.dtype, samples: int = SAMPLES) -> tuple[nn.Module, DataLoader[Any]]:
    """A convolutional network of 62,000 parameters, and images of 3 x 32 x 32 pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 90), nn.ReLU(), nn.Linear(90, 10),
    ).to(dtype)  # fmt: skip
    inputs, targets = torch.randn(samples, 3, 32, 32, dtype=dtype), torch.randint(10, (samples,))
    return model, DataLoader(TensorDataset(inputs, targets), BATCH)


def gradlens(matrix: str, model: nn.Module, data: DataLoader[Any]) -> Multiply:
    from gradlens.curvature import EmpiricalFisherOperator, GGNOperator, HessianOperator

    kinds = (HessianOperator, GGNOperator, EmpiricalFisherOperator)
    kind: Any = dict(zip(MATRICES, kinds, strict=True))[matrix]
    operator = kind.over_data(model, LOSS, data)
    return lambda columns: torch.from_numpy(operator @ columns.numpy())


def curvlinops(matrix: str, model: nn.Module, data: DataLoader[Any]) -> Multiply:
    import curvlinops

    names = ("HessianLinearOperator", "GGNLinearOperator", "EFLinearOperator")
    kind = getattr(curvlinops, dict(zip(MATRICES, names, strict=True))[matrix])
    operator = kind(model, LOSS, list(model.parameters()), data)
    return lambda columns: operator @ columns


def hessian_eigenthings(matrix: str, model: nn.Module, data: DataLoader[Any]) -> Multiply:
    from hessian_eigenthings.operators.ggn import GGNOperator
    from hessian_eigenthings.operators.hessian import HessianOperator

    if matrix == "Hessian":
        operator = HessianOperator(model, data, lambda model, each: LOSS(model(each[0]), each[1]))
    elif matrix == "Gauss-Newton":
        operator = GGNOperator(
            model, data, lambda model, each: model(each[0]), lambda out, each: LOSS(out, each[1])
        )
    else:
        raise NotImplementedError
    return lambda columns: torch.stack([operator.matvec(one) for one in columns.T], dim=1)


def pyhessian(matrix: str, model: nn.Module, data: DataLoader[Any]) -> Multiply:
    import pyhessian

    if matrix != "Hessian":
        raise NotImplementedError
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hessian = pyhessian.hessian(model, LOSS, dataloader=data, cuda=False)
    shapes = [p.shape for p in model.parameters()]

    def product(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        shaped = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return torch.cat([part.flatten() for part in hessian.dataloader_hv_product(shaped)[1]])

    return lambda columns: torch.stack([product(one) for one in columns.T], dim=1)


def all_at_once(matrix: str, model: nn.Module, data: DataLoader[Any]) -> Multiply:
    """The reference: torch.func, of the loss of all samples at once."""
    parameters = dict(model.named_parameters())
    inputs, targets = data.dataset.tensors  # type: ignore[attr-defined]

    def outputs(values: dict[str, Tensor], inputs: Tensor = inputs) -> Tensor:
        return functional_call(model, values, inputs)

    def product(vector: Tensor) -> Tensor:
        parts = vector.split([p.numel() for p in parameters.values()])
        pairs = zip(parameters.items(), parts, strict=True)
        direction = {name: part.reshape(p.shape) for (name, p), part in pairs}
        values = {name: p.detach() for name, p in parameters.items()}
        if matrix == "Hessian":
            _, found = jvp(grad(lambda v: LOSS(outputs(v), targets)), (values,), (direction,))
        elif matrix == "Gauss-Newton":
            logits, moved = jvp(outputs, (values,), (direction,))
            _, curved = jvp(grad(lambda each: LOSS(each, targets)), (logits,), (moved,))
            (found,) = vjp(outputs, values)[1](curved)
        else:
            of_sample = grad(lambda v, x, y: LOSS(outputs(v, x[None]), y[None]))
            gradients = vmap(of_sample, (None, 0, 0))(values, inputs, targets)
            rows = torch.cat([each.flatten(1) for each in gradients.values()], dim=1)
            return rows.T @ (rows @ vector) / len(rows)
        return torch.cat([part.flatten() for part in found.values()])

    return lambda columns: torch.stack([product(one) for one in columns.T], dim=1)


CONTENDERS: dict[str, Callable[[str, nn.Module, DataLoader[Any]], Multiply]] = {
    "gradlens": gradlens,
    "curvlinops": curvlinops,
    "hessian-eigenthings": hessian_eigenthings,
    "PyHessian": pyhessian,
    "all at once": all_at_once,
}


def gpt(words: int = 1000, width: int = 64, length: int = 32) -> nn.Module:
    """Two blocks of causal attention, and logits ``[N * T, words]`` of texts ``[N, T]``."""
    blocks = transformer(width, partial(Causal, heads=4))
    return stack(nn.Embedding(words, width), Placed(length, width, size=0.02), blocks,
                 nn.Linear(width, words), nn.Flatten(0, 1))  # fmt: skip


def beside() -> Iterator[list[str]]:
    """The medians of the ratios of CPU times, of networks with two batches."""
    import curvlinops

    from gradlens import curvature

    torch.manual_seed(0)
    texts = [torch.randint(1000, (8, 33)) for _ in range(2)]
    images, labels = torch.randn(2, 128, 784), torch.randint(10, (2, 128))
    perceptron = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    network, data = problem(torch.float32, 2 * BATCH)
    networks: dict[str, tuple[nn.Module, list[Any]]] = {
        "MLP": (perceptron, [*zip(images, labels, strict=True)]),
        "ConvNet": (network, [*data]),
        "GPT": (gpt(), [(text[:, :-1], text[:, 1:].flatten()) for text in texts]),
    }
    kinds: Any = {
        "Hessian": (curvature.HessianOperator, curvlinops.HessianLinearOperator),
        "Gauss-Newton": (curvature.GGNOperator, curvlinops.GGNLinearOperator),
        "Monte-Carlo Fisher": (curvature.FisherOperator, curvlinops.FisherMCLinearOperator),
        "empirical Fisher": (curvature.EmpiricalFisherOperator, curvlinops.EFLinearOperator),
    }
    # Of the fused kernel of attention, curvlinops has no forward derivative.
    turns = itertools.product(networks.items(), kinds.items())
    with sdpa_kernel(SDPBackend.MATH):
        for (name, (model, batches)), (matrix, (own, other)) in turns:
            ours = own.over_data(model, LOSS, batches)
            parameters = list(model.parameters())
            theirs = other(model, LOSS, parameters, batches, check_deterministic=False)
            found = []
            for count in (1, COLUMNS):
                columns = columns_of(model, count, torch.float32)
                works = partial(ours.multiply_many, columns.T), partial(theirs.__matmul__, columns)
                times = [[seconds(work) for work in works] for _ in range(2 * REPETITIONS)][1:]
                found.append(f"{statistics.median(one / two for one, two in times):.2f}")
            yield [name, matrix, *found]


def seconds(work: Callable[[], object]) -> float:
    """The CPU time that it takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def columns_of(model: nn.Module, count: int, dtype: torch.dtype) -> Tensor:
    size = sum(p.numel() for p in model.parameters())
    return torch.from_numpy(np.random.default_rng(0).standard_normal((size, count))).to(dtype)


def save_product(name: str, matrix: str, path: str) -> None:
    """The product with one vector, in float64."""
    model, data = problem(torch.float64)
    product = CONTENDERS[name](matrix, model, data)(columns_of(model, 1, torch.float64))
    torch.save(product.detach(), path)


def print_costs(name: str, matrix: str, count: int) -> None:
    """Seconds and bytes of the product with some vectors, in float32."""
    model, data = problem(torch.float32)
    columns = columns_of(model, count, torch.float32)

    def prepare() -> Callable[[], object]:
        multiply = CONTENDERS[name](matrix, model, data)
        return lambda: multiply(columns)

    print(*costs(prepare))


def costs(
    prepare: Callable[[], Callable[[], object]], repetitions: int = REPETITIONS
) -> tuple[float, int]:
    """The median CPU time of what ``prepare`` returns, in seconds, and the bytes that both take."""

    def measured() -> list[float]:
        work = prepare()
        return [seconds(work) for _ in range(repetitions)]

    times, size = peak_of(measured)
    return statistics.median(times), size


def is_installed(library: str) -> bool:
    """Whether another library can be imported."""
    return find_spec(library.replace("-", "_").lower()) is not None


def rows() -> Iterator[list[str]]:
    """The table."""
    with TemporaryDirectory() as folder:
        for matrix in MATRICES:
            reference = Path(folder) / "reference"
            in_a_process(THIS, "product", "all at once", matrix, reference)
            expected = torch.load(reference)
            for name in [*CONTENDERS][:-1]:
                path = Path(folder) / name
                if not is_installed(name):
                    continue
                if in_a_process(THIS, "product", name, matrix, path) is None:
                    continue
                error = float((torch.load(path) - expected).norm() / expected.norm())
                found = [in_a_process(THIS, "costs", name, matrix, k) for k in (1, COLUMNS)]
                times = [f"{1000 * float(each[0]):.0f}" for each in found if each]
                memory = [f"{int(each[1]) / 2**20:.0f}" for each in found if each]
                yield [matrix, name, f"{error:.1e}", *times, *memory]


def main() -> None:
    """Print the table, or what one process of it finds."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["product", name, matrix, path]:
            save_product(name, matrix, path)
        case ["costs", name, matrix, count]:
            print_costs(name, matrix, int(count))
        case ["beside"]:
            print("network,matrix,1 vector,8 vectors")
            for row in beside():
                print(*row, sep=",", flush=True)
        case _:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            vectors = [
                f"{count} vectors, {unit}" for unit in ("ms", "MB") for count in (1, COLUMNS)
            ]
            heading = [each.replace("1 vectors", "1 vector") for each in vectors]
            writer.writerow(["matrix", "library", "error", *heading])
            for row in rows():
                writer.writerow(row)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
