"""What derivatives cost that presets can't do without.

``python -m benchmarks.floors [PROBLEM ...]`` prints, for each problem, the CPU time of a draw of a
sampled trace where samples are coupled, which is a backward pass from the outputs, of the graph of
a gradient, and of products with the Hessian and the generalised Gauss-Newton matrix on such a
graph, over that of a plain training step. Each is the least of some alternating runs.

``python -m benchmarks.floors --gradients [PROBLEM ...]`` prints that of what economy needs of the
linear layers of a network alone, as bare operations of torch: all elements of all samples'
gradients, of which there is a histogram, the projections of samples on an update, which take
another product at the update's start, and a pass over the elements that looks for the largest. Of
convolutions whose windows are views, it prints that of the elements and of a pass over them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.contenders import Setting, peer
from benchmarks.problems import PROBLEMS, problem_of
from gradlens.curvature import GGNOperator, HessianOperator


def floors(name: str, runs: int) -> dict[str, float]:
    """CPU time in plain steps."""
    problem = problem_of(name)
    setting = Setting(problem, problem.batch_size, torch.device("cpu"))
    plain = peer("plain")(setting)
    torch.manual_seed(0)
    model = problem.build()
    parameters = dict(model.named_parameters())
    inputs, labels = problem.batch(problem.batch_size)
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, labels)
    ggn, hessian = GGNOperator(loss, outputs, parameters), HessianOperator(loss, parameters)
    direction = torch.randn(hessian.shape[0])
    start = torch.randn_like(outputs)
    hessian.multiply(direction), ggn.multiply(direction)  # which build their graphs
    work: dict[str, Callable[[], object]] = {
        "plain step": plain,
        "draw of a trace": lambda: ggn.jacobian.transposed_product(start),
        "graph of a gradient": lambda: HessianOperator(loss, parameters),
        "Hessian product": lambda: hessian.multiply(direction),
        "Gauss-Newton product": lambda: ggn.multiply(direction),
    }
    return least(work, runs)


def least(work: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """The least CPU time of some alternating runs, over that of the plain step."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(runs):
        for what, run in work.items():
            begin = time.process_time()
            run()
            best[what] = min(best[what], time.process_time() - begin)
    unit = best.pop("plain step")
    return {what: seconds / unit for what, seconds in best.items()}


Captured = list[tuple[nn.Module, Tensor, Tensor]]
"""Modules, their inputs, and the gradients at their outputs."""
PIECE = 2**22
"""Elements that are computed at once: 16 MiB."""
AT_ONCE = 8
"""Samples whose windows are copied at once: of all, this takes twice to six times as long."""


def gradient_floors(name: str, runs: int) -> dict[str, float]:
    """CPU time in plain steps of what economy needs of linear layers' weights."""
    problem = problem_of(name)
    plain = peer("plain")(Setting(problem, problem.batch_size, torch.device("cpu")))
    dense, windows = captured(name, multiplies), captured(name, has_views)
    work: dict[str, Callable[[], object]] = {
        "plain step": plain,
        "elements": partial(over, of_dense, dense, lambda piece: None),
        "elements and a pass": partial(over, of_dense, dense, torch.aminmax),
        "projection": partial(project, dense),
    }
    if windows:
        of_convolutions = "elements of convolutions"
        work[of_convolutions] = partial(over, of_windows, windows, lambda piece: None)
        work[f"{of_convolutions} and a pass"] = partial(over, of_windows, windows, torch.aminmax)
    return least(work, runs)


def multiplies(module: nn.Module) -> bool:
    """Whether its weight is a matrix that real numbers are multiplied with."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def has_views(module: nn.Module) -> bool:
    """Whether it is a convolution whose windows are views."""
    return isinstance(module, nn.Conv2d) and module.groups == 1 and module.stride == (1, 1)


def captured(name: str, wanted: Callable[[nn.Module], bool]) -> Captured:
    """Of a backward pass of the network, in which the wanted modules are called once."""
    problem, seen = problem_of(name), dict[nn.Module, tuple[Tensor, Tensor]]()
    torch.manual_seed(0)
    model = problem.build()
    inputs, labels = problem.batch(problem.batch_size)

    def keep(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        n, data = problem.batch_size, arguments[0].detach()
        seen[module] = data if data.dim() == 4 else data.reshape(n, -1, data.shape[-1]), output

    for module in filter(wanted, model.modules()):
        module.register_forward_hook(keep)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    if not seen:
        return []
    gradients = torch.autograd.grad(loss, [output for _, output in seen.values()])
    pairs = zip(seen.items(), gradients, strict=True)
    return [
        (each, x, g if x.dim() == 4 else g.reshape(*x.shape[:2], -1)) for (each, (x, _)), g in pairs
    ]


def over(
    elements: Callable[..., Iterator[Tensor]], layers: Captured, use: Callable[[Tensor], object]
) -> None:
    """Compute all elements of all gradients, and pass pieces of them on."""
    for layer in layers:
        for piece in elements(*layer):
            use(piece)


def of_dense(_: nn.Module, x: Tensor, delta: Tensor) -> Iterator[Tensor]:
    """``[N, R, K]`` from inputs ``[N, S, K]`` and gradients ``[N, S, R]``, some rows at once."""
    at_once = max(PIECE // (len(x) * x.shape[2]), 1)
    yield from (part.mT @ x for part in delta.split(at_once, dim=2))


def of_windows(layer: nn.Conv2d, data: Tensor, gradient: Tensor) -> Iterator[Tensor]:
    """``[n, O, K]``, of so many samples at once that all stays in the processor's cache.

    Of a convolution with stride and dilation one, whose windows are views.
    """
    assert not isinstance(layer.padding, str)
    (rows, columns), (high, wide) = layer.kernel_size, layer.padding
    padded = nn.functional.pad(data, (wide, wide, high, high))
    pairs = zip(padded.split(AT_ONCE), gradient.flatten(2).split(AT_ONCE), strict=True)
    for some, of_output in pairs:
        windows = some.unfold(2, rows, 1).unfold(3, columns, 1).permute(0, 1, 4, 5, 2, 3)
        yield torch.bmm(of_output, windows.reshape(len(some), -1, of_output.shape[2]).mT)


def project(layers: Captured) -> None:
    """The projection of each sample's gradient on a direction, which is one value repeated."""
    for _, x, delta in layers:
        direction = torch.ones(delta.shape[2], x.shape[2])
        torch.linalg.vecdot((delta @ direction).flatten(1), x.flatten(1))


def main() -> None:
    """Print a row for each problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", default=[*PROBLEMS])
    parser.add_argument("--gradients", action="store_true", help="of linear layers' gradients")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    measure = gradient_floors if options.gradients else floors
    for name in options.problems:
        found = ", ".join(
            f"{what} {ratio:.2f}" for what, ratio in measure(name, options.runs).items()
        )
        print(f"{name:20} {found}", flush=True)


if __name__ == "__main__":
    main()
