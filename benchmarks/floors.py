"""What derivatives cost that curvature can't do without.

``python -m benchmarks.floors [PROBLEM ...]`` prints, for each problem, the CPU time of a draw of a
sampled trace where samples are coupled, which is a backward pass from the outputs, of the graph of
a gradient, and of products with the Hessian and the generalised Gauss-Newton matrix on such a
graph, and of the elements of convolutions' per-sample gradients, over that of a plain training
step. Each is the least of some alternating runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.contenders import Setting, peer
from benchmarks.problems import PROBLEMS, problem_of
from gradlens.curvature import GGNOperator, HessianOperator

RUNS = 5
AT_ONCE = 8
"""Samples whose windows are copied at once: of all, this takes twice to six times as long."""


def floors(name: str) -> dict[str, float]:
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
        "draw of a trace": lambda: ggn.pulled_back(start),
        "graph of a gradient": lambda: HessianOperator(loss, parameters),
        "Hessian product": lambda: hessian.multiply(direction),
        "Gauss-Newton product": lambda: ggn.multiply(direction),
    }
    layers = [*convolutions(model, inputs, labels)]
    if layers:
        work["per-sample gradients of convolutions"] = lambda: [
            per_sample_gradients(*each) for each in layers
        ]
    best = dict.fromkeys(work, float("inf"))
    for _ in range(RUNS):
        for what, run in work.items():
            begin = time.process_time()
            run()
            best[what] = min(best[what], time.process_time() - begin)
    unit = best.pop("plain step")
    return {what: seconds / unit for what, seconds in best.items()}


def convolutions(
    model: nn.Module, inputs: Tensor, labels: Tensor
) -> Iterator[tuple[nn.Conv2d, Tensor, Tensor]]:
    """Convolutions of one group with their inputs, and the gradients at their outputs."""
    seen: dict[nn.Conv2d, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Conv2d, arguments: tuple[Tensor], output: Tensor) -> None:
        seen[module] = (arguments[0].detach(), output)

    layers = [each for each in model.modules() if isinstance(each, nn.Conv2d) and each.groups == 1]
    handles = [layer.register_forward_hook(keep) for layer in layers]
    loss = nn.functional.cross_entropy(model(inputs), labels)
    for handle in handles:
        handle.remove()
    if not seen:
        return
    gradients = torch.autograd.grad(loss, [output for _, output in seen.values()])
    for (layer, (data, _)), gradient in zip(seen.items(), gradients, strict=True):
        yield layer, data, gradient


def per_sample_gradients(layer: nn.Conv2d, data: Tensor, gradient: Tensor) -> None:
    """Compute ``[n, O, K]``, of so many samples at once that all stays in the processor's cache.

    Of a convolution with stride and dilation one, whose windows are views.
    """
    assert not isinstance(layer.padding, str)
    (rows, columns), (high, wide) = layer.kernel_size, layer.padding
    padded = nn.functional.pad(data, (wide, wide, high, high))
    pairs = zip(padded.split(AT_ONCE), gradient.flatten(2).split(AT_ONCE), strict=True)
    for some, of_output in pairs:
        windows = some.unfold(2, rows, 1).unfold(3, columns, 1).permute(0, 1, 4, 5, 2, 3)
        torch.bmm(of_output, windows.reshape(len(some), -1, of_output.shape[2]).mT)


def main() -> None:
    """Print a row for each problem."""
    for name in sys.argv[1:] or PROBLEMS:
        found = ", ".join(f"{what} {ratio:.2f}" for what, ratio in floors(name).items())
        print(f"{name:20} {found}", flush=True)


if __name__ == "__main__":
    main()
