"""What a training loop has done: all numbers and states, byte by byte."""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.optim import Optimizer

import gradlens
from gradlens.history.undefined import Undefined

Record = dict[str, Any]


@dataclass
class Trace:
    """Records of a loop in their order, the warnings that were given, and what is left at its end.

    ``excused`` is why the loop wasn't run to its end: gradlens has refused the cockpit itself.
    """

    records: list[tuple[str, Record]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left: Record = field(default_factory=dict)
    excused: str = ""

    def add(self, label: str, record: Record) -> None:
        self.records.append((label, record))


DONATED = "non-empty donated buffers"
"""Of torch's error for a second pass through compiled code, which gradlens may run uncompiled."""


def differences(plain: Trace, other: Trace) -> Iterator[str]:
    """In which the second loop differs from the first one, record by record."""
    for (label, one), (other_label, two) in zip(plain.records, other.records, strict=False):
        if label != other_label:
            why = one.get("exception", two.get("exception", ""))
            if DONATED not in one.get("exception", ""):
                yield f"{label}: the loop went on otherwise: {other_label} {why}"
            return
        found = list(of_records(one, two))
        yield from (f"{label}: {difference}" for difference in found)
        if found:
            return
    if len(plain.records) != len(other.records):
        yield f"end: {len(other.records)} records instead of {len(plain.records)}"


def of_records(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*one, *two}):
        if one.get(name) != two.get(name):
            short = [str(each.get(name))[:300] for each in (one, two)]
            yield f"{name} is {short[1]} instead of {short[0]}"


def exact(value: Any) -> Any:
    """A value that equals that of another run if all of its bits do."""
    if isinstance(value, nn.Parameter | Tensor):
        return of_tensor(value.detach())
    if isinstance(value, Mapping):
        return {str(key): exact(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [exact(part) for part in value]
    if isinstance(value, float):
        return value.hex()
    return value if isinstance(value, int | str | bool | None) else type(value).__name__


def of_tensor(tensor: Tensor) -> Any:
    """Type, shape, strides, and a checksum of the bytes beside the first of its numbers.

    The stride of an axis of one entry means nothing.
    """
    what = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.layout is torch.sparse_coo:
        return ["sparse", what, of_tensor(tensor._indices()), of_tensor(tensor._values())]
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    strides = [stride for stride, length in sizes if length != 1]
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    check = zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
    first = flat[:1].tolist()
    return f"{what} {strides} {check:08x} {first}"


def of_model(model: nn.Module) -> Record:
    """Parameters, gradients, buffers, and the random numbers to come, bit by bit."""
    found: Record = {}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = exact(parameter)
        found[f"gradient {name}"] = exact(parameter.grad)
    found |= {f"buffer {name}": exact(buffer) for name, buffer in model.named_buffers()}
    found["random numbers"] = exact([torch.get_rng_state(), *torch.cuda.get_rng_state_all()])
    found["random numbers of Python"] = hash(random.getstate())
    found["random numbers of numpy"] = str(np.random.get_state())
    return found


def comparable(text: str) -> str:
    """The text without addresses, and without the numbers of scripted classes.

    torch counts these in the process: each script of a class gets a number of its own.
    """
    without_numbers = re.sub(r"\.___torch_mangle_\d+\b", "", text)
    return re.sub(r"0x[0-9a-f]+|\bat [0-9]+\b", "…", without_numbers)


def of_exception(error: BaseException) -> str:
    return comparable(f"{type(error).__name__}: {error}")


# What is left behind.

FUNCTIONS = {
    "torch.autograd.backward": lambda: torch.autograd.backward,
    "torch.autograd.grad": lambda: torch.autograd.grad,
    "Tensor.backward": lambda: Tensor.backward,
    "Tensor.register_hook": lambda: Tensor.register_hook,
    "Module.__call__": lambda: nn.Module.__call__,
    "Module.__setattr__": lambda: nn.Module.__setattr__,
}
"""Functions that might be patched."""

GLOBAL_HOOKS = [name for name in vars(module_globals) if name.startswith("_global_")]


def settings() -> Record:
    """Settings of torch, of this thread and of the process."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "autocast": (torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))),
        "threads": torch.get_num_threads(),
        "multithreaded": torch._C._is_multithreading_enabled(),
        "saved tensors' hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        **{name: len(getattr(module_globals, name) or ()) for name in GLOBAL_HOOKS},
        **{name: id(read()) for name, read in FUNCTIONS.items()},
    }


def inventory(model: nn.Module, loss_module: nn.Module, optimizers: list[Optimizer]) -> Record:
    """Attributes and hooks of modules, parameters and optimizers."""
    found: Record = {}
    for prefix, root in (("model", model), ("loss", loss_module)):
        for name, module in root.named_modules():
            found |= of_object(f"module {prefix}.{name}", module)
    for name, parameter in model.named_parameters():
        found |= of_object(f"parameter {name}", parameter)
        for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found[f"parameter {name}: {table}"] = len(getattr(parameter, table) or ())
    for number, optimizer in enumerate(optimizers):
        found |= of_object(f"optimizer {number}", optimizer)
    return found


def of_object(what: str, owner: Any) -> Record:
    """Names of its attributes, and how many hooks it has."""
    found: Record = {f"{what}: type": type(owner).__name__}
    for name, value in vars(owner).items():
        if name.startswith("_dynamo"):  # what torch.compile notes of a graph
            continue
        has_length = name.endswith("_hooks") and value is not None
        found[f"{what}: attribute {name}"] = len(value) if has_length else True
    return found


# Whether a record's NaN have reasons.


INTERNAL = re.compile(
    r"object has no attribute|NoneType|list index|KeyError|AssertionError|not subscriptable|"
    r"unexpected keyword|positional argument"
)
"""Words of reasons that are about gradlens's code, not about the user's network."""


def unexplained(history: gradlens.History) -> Iterator[str]:
    """NaN without a reason, and reasons that explain nothing."""
    for name in history.names:
        for step, value in history[name].items():
            for place, number in leaves(value):
                if not isinstance(number, float) or not math.isnan(number):
                    continue
                reason = number.reason if isinstance(number, Undefined) else ""
                if not reason and name not in OF_TRAINING:
                    yield f"unexplained: NaN without a reason in {name}{place} at step {step}"
                elif INTERNAL.search(reason):
                    yield f"unexplained: reason of {name}: {reason[:200]}"
    for coverage in history.coverages.values():
        for reason in coverage.missing.values():
            if not reason or INTERNAL.search(reason):
                yield f"unexplained: missing per-sample gradients: {reason[:200]!r}"


OF_TRAINING = {"Loss", "GradNorm", "ParameterNorm", "Distance", "UpdateSize", "Parameters"}
"""Quantities that are NaN where training is."""


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"[{key}]")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part, f"{place}[]")
    else:
        yield place, value
