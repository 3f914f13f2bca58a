"""Faults of what the loss is computed from, of its targets, and of what becomes of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW, Optimizer

from benchmarks.diagnosis.faults.fault import Fault, Injected, hurts, stalls, with_options
from benchmarks.diagnosis.faults.of_the_batch import in_one_batch
from benchmarks.diagnosis.faults.structure import affine, chain, exchange, of_type
from benchmarks.diagnosis.loop import Outcome
from benchmarks.diagnosis.networks import Attention, Causal, SelfAttention
from benchmarks.diagnosis.training import Batch, Split, Training, model_of, trainable

# Losses of outputs: each is a function of the strength, the loss, the outputs and the targets.

Altered = Callable[..., Tensor]


def over_samples(share: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """A share of the loss normalises over the samples."""
    wrong = F.nll_loss(outputs.log_softmax(0), targets)
    return share * wrong + (1 - share) * loss(outputs, targets)


def of_scores(factor: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """A negative likelihood gets scores times a factor."""
    return F.nll_loss(factor * outputs, targets)


def reshaped(share: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """A share of the loss gets rows of scores ``[N, C, ...]`` that a view has made."""
    wrong = F.cross_entropy(outputs.reshape(-1, outputs.shape[1]), targets.flatten())
    return share * wrong + (1 - share) * loss(outputs, targets)


def negative(factor: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """An error with the wrong sign."""
    return -factor * loss(outputs, targets)


def with_logarithm(factor: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """The logarithm of a softmax of larger scores, which is 0 for some classes."""
    return F.nll_loss((factor * outputs).softmax(1).log(), targets)


def with_root(weight: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """A term with the root of a sum of squares that are all 0."""
    zero = (outputs - outputs.detach()).square().sum()
    return loss(outputs, targets) + weight * zero.sqrt()


def with_divergence(factor: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """The divergence of codes, behind the logits, counts so many times."""
    mean, variance = outputs[:, targets[0].numel() :].chunk(2, 1)
    divergence = ((mean**2 + variance.exp() - 1 - variance) / 2).sum(1).mean()
    return loss(outputs, targets) + (factor - 1) * divergence


def of_one(share: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """A share of the loss is of softmaxes of one number each."""
    ones = outputs.unsqueeze(-1).softmax(-1).squeeze(-1)
    return share * loss(ones, targets) + (1 - share) * loss(outputs, targets)


def with_own_targets(share: float, loss: Altered, outputs: Tensor, targets: Tensor) -> Tensor:
    """A share of what other samples are predicted comes to the targets, as of values of states."""
    return loss(outputs, targets + share * outputs.flip(0))


def altered(
    training: Training, strength: float, seed: int, names: tuple[str, ...], loss: Altered
) -> Injected | None:
    """A training with another loss, if its own has one of the names."""
    targets = training.data(seed).targets
    are_of_places = targets.ndim > 1 and not targets.is_floating_point()
    if getattr(training.loss, "__name__", "") not in names or are_of_places != (loss is reshaped):
        return None
    wrong = replace(training, loss=partial(loss, strength, training.loss))
    return Injected(replace(wrong, valid_loss=training.loss))


def breaks(faulty: Outcome, healthy: Outcome) -> bool:
    """The loss isn't finite at some step, or at the end."""
    return not (math.isfinite(faulty.peak) and math.isfinite(faulty.valid_end))


# Targets.


def with_seen_labels(share: float, step: int, batch: Batch) -> Batch:
    """A share of the samples have their inputs as labels."""
    count = math.ceil(share * len(batch.targets))
    return replace(batch, targets=torch.cat([batch.inputs[:count], batch.targets[count:]]))


def labels_in_place(training: Training, strength: float, seed: int) -> Injected | None:
    split = training.data(seed)
    if split.inputs.dtype != torch.int64 or split.inputs.shape != split.targets.shape:
        return None
    if split.inputs.max() > split.targets.max():
        return None  # words that are no classes
    return Injected(replace(training, change=partial(with_seen_labels, strength)))


def without_mask(model: nn.Module, share: float) -> None:
    """Attention of the last layers sees all places."""
    masked = of_type(model, Causal)
    for name, layer in masked[-math.ceil(share * len(masked)) :]:
        assert isinstance(layer, Causal)
        seeing = SelfAttention(1, layer.heads)
        seeing.attention = layer.attention
        exchange(model, name, seeing)


def future_seen(training: Training, strength: float, seed: int) -> Injected | None:
    if not of_type(model_of(training, seed), Causal):
        return None
    return Injected(replace(training, prepare=partial(without_mask, share=strength)))


def break_targets(targets: Tensor, rows: float, split: Split) -> None:
    """The first targets are NaN."""
    targets[: int(rows)] = math.nan


def with_far_targets(data: Callable[[int], Split], factor: float, seed: int) -> Split:
    """Targets so many times as large, and as far from 0."""
    split = data(seed)
    far = [factor * (1 + each) for each in (split.targets, split.valid_targets)]
    return replace(split, targets=far[0], valid_targets=far[1])


def target_scale(training: Training, strength: float, seed: int) -> Injected | None:
    if training.loss is not F.mse_loss:
        return None
    return Injected(replace(training, data=partial(with_far_targets, training.data, strength)))


def explains_little(faulty: Outcome, healthy: Outcome) -> bool:
    """The validation loss, over its start, is far above that of the healthy run."""
    ratios = [each.valid_end / each.valid_start for each in (faulty, healthy)]
    return not ratios[0] < 1 - (1 - ratios[1]) / 2


def with_padding(longest: float, step: int, batch: Batch) -> Batch:
    """Targets end in label 0, over up to this share of their length."""
    targets = batch.targets.clamp(min=1)
    length = targets.shape[1]
    first = (length * (1 - longest * torch.linspace(0, 1, len(targets)))).round()
    return replace(batch, targets=targets.where(torch.arange(length) < first[:, None], 0))


def padding_in_loss(training: Training, strength: float, seed: int) -> Injected | None:
    targets = training.data(seed).targets
    if targets.ndim != 2 or targets.is_floating_point() or targets.shape[1] < SEQUENCE:
        return None
    return Injected(replace(training, change=partial(with_padding, strength)))


SEQUENCE = 8
"""Labels of a sample, of which some may be padding."""


# What the graph has no way to, and what others write to.


def cut_behind(model: nn.Module, name: str) -> None:
    """What a layer computes is detached."""
    model.get_submodule(name).register_forward_hook(lambda *each: each[2].detach())


def no_gradient(training: Training, strength: float, seed: int) -> Injected | None:
    layers = [n for n, each in chain(model_of(training, seed)) if [*each.parameters()]]
    if len(layers) < 2:
        return None
    place = min(int(strength * len(layers)), len(layers) - 2)
    prepare = partial(cut_behind, name=layers[place])
    return Injected(replace(training, prepare=prepare), frozenset(layers[: place + 1]))


def alter_inputs(model: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """What a layer gets is changed."""
    model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: (change(inputs[0]),))


def last_layer(
    training: Training, seed: int, change: Callable[[Tensor], Tensor]
) -> Injected | None:
    """What the last layer of a plain network gets is changed."""
    layers = [n for n, each in chain(model_of(training, seed)) if isinstance(each, nn.Linear)]
    if len(layers) < 2:
        return None
    prepare = partial(alter_inputs, name=layers[-1], change=change)
    return Injected(replace(training, prepare=prepare), notice="harmless")


def viewed(share: float, x: Tensor) -> Tensor:
    """A view of the transposed features, so that a row has those of other samples."""
    count = math.ceil(share * x.shape[1])
    return torch.cat([x[:, :count].T.reshape(len(x), count), x[:, count:]], 1)


def samples_mixed(training: Training, strength: float, seed: int) -> Injected | None:
    return last_layer(training, seed, partial(viewed, strength))


def constant_output(training: Training, strength: float, seed: int) -> Injected | None:
    return last_layer(training, seed, lambda x: x / strength)


def forgetful(kind: type[Optimizer], every: float) -> type[Optimizer]:
    """An optimizer that has no state after so many steps, as one that is made anew has."""
    calls = [0]

    def step(self: Any, closure: Any = None) -> Any:
        found = kind.step(self, closure)
        calls[0] += 1
        if calls[0] % every == 0:
            self.state.clear()
        return found

    return type(kind.__name__, (kind,), {"step": step})


def optimizer_anew(training: Training, strength: float, seed: int) -> Injected | None:
    kind = training.optimizer
    if kind not in (Adam, AdamW):
        return None
    anew = replace(training, optimizer=forgetful(kind, strength))
    return Injected(anew, notice="harmless")


def without_epsilon(training: Training, strength: float, seed: int) -> Injected | None:
    """An epsilon that is 0 in float32, so that Adam divides 0 by 0 where gradients are 0."""
    if training.optimizer not in (Adam, AdamW):
        return None
    return Injected(with_options(training, eps=strength))


class Hidden(nn.Module):
    """A layer in a list, so that it is no part of the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = [layer]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers[0](x)
        return found


def hide(model: nn.Module, names: Iterable[str]) -> None:
    """Put layers into lists."""
    for name in names:
        exchange(model, name, Hidden(model.get_submodule(name)))


def unregistered_layers(training: Training, strength: float, seed: int) -> Injected | None:
    names = [name for name, _ in affine(model_of(training, seed))]
    hidden = names[: math.ceil(strength * len(names))]
    if len(hidden) == len(names) or not chain(model_of(training, seed)):
        return None
    return Injected(replace(training, prepare=partial(hide, names=hidden)), frozenset(hidden))


def overwrite(model: nn.Module, every: float, is_anew: bool) -> None:
    """Before each so many-th step, weights become the first ones again, or others like them."""
    first, calls = [each.detach().clone() for each in trainable(model)], [0]

    def write(module: nn.Module, inputs: object) -> None:
        calls[0] += module.training
        if module.training and calls[0] % every == 0:
            with torch.no_grad():
                for parameter, before in zip(trainable(model), first, strict=True):
                    order = torch.randperm(before.numel()) if is_anew else slice(None)
                    parameter.copy_(before.flatten()[order].view_as(before))

    model.register_forward_pre_hook(write)


def weights_overwritten(training: Training, strength: float, seed: int, is_anew: bool) -> Injected:
    prepare = partial(overwrite, every=strength, is_anew=is_anew)
    return Injected(replace(training, prepare=prepare))


def falling(factor: float, step: int, steps: int) -> float:
    """A rate that is multiplied by a factor after each step."""
    return float(factor**step)


def lr_decayed(training: Training, strength: float, seed: int) -> Injected:
    return Injected(replace(training, schedule=partial(falling, strength)))


# Attention that comes to look at single keys.


def with_faster_queries(model: nn.Module, factor: float) -> list[dict[str, Any]]:
    """A group for what makes the scores of attention, whose rate is so many times the others'."""
    own = [layer.in_proj_weight for _, layer in of_type(model, nn.MultiheadAttention)]
    for _, layer in of_type(model, Attention):
        own += [layer.queries.weight, layer.keys_and_values.weight]
    others = [each for each in trainable(model) if not any(each is one for one in own)]
    return [{"params": others}, {"params": own, "factor": factor}]


def entropy_collapse(training: Training, strength: float, seed: int) -> Injected | None:
    if not of_type(model_of(training, seed), nn.MultiheadAttention, Attention):
        return None
    # Only the run without it shows that it learns more slowly: a notice is all there can be.
    faster = replace(training, trained=partial(with_faster_queries, factor=strength))
    return Injected(faster, notice="always")


def _of(loss: Altered, *names: str) -> Callable[[Training, float, int], Injected | None]:
    return partial(altered, names=names, loss=loss)


_CE = "cross_entropy"

# fmt: off
OF_THE_GRAPH = (
    Fault("softmax_axis", "share of the loss", (0.1, 0.5, 1.0), _of(over_samples, _CE)),
    Fault("loss_of_scores", "factor of the scores", (0.1, 1.0, 10.0), _of(of_scores, _CE)),
    Fault("scores_reshaped", "share of the loss", (0.1, 0.5, 1.0), _of(reshaped, _CE)),
    Fault("loss_maximised", "factor of the loss", (0.1, 0.3, 1.0), _of(negative, "mse_loss")),
    Fault("nonfinite_loss", "factor of the scores", (30, 100, 1000),
          _of(with_logarithm, _CE), breaks),
    Fault("nonfinite_gradient", "weight of a root of 0", (1e-6, 1e-3, 1.0),
          _of(with_root, _CE, "mse_loss"), breaks),
    Fault("nonfinite_target", "NaN in so many samples of one batch", (1, 2, 4), partial(
        in_one_batch, entry="targets", change=break_targets, rows=lambda rows, size: int(rows),
        fits=lambda split: split.targets.is_floating_point())),
    Fault("target_seen", "share of the samples", (0.9, 0.99, 1.0), labels_in_place),
    Fault("target_seen", "share of the layers without a mask", (0.01, 0.75, 1.0), future_seen),
    Fault("target_scale", "factor", (30, 300, 3000), target_scale, explains_little),
    Fault("no_gradient", "place of a cut", (0.0, 0.5, 1.0), no_gradient),
    Fault("unregistered_layers", "share of the layers", (0.01, 0.5, 0.7), unregistered_layers),
    Fault("weights_overwritten", "first ones, every so many steps",
          (30, 10, 3), partial(weights_overwritten, is_anew=False), hurts),
    Fault("weights_overwritten", "others, every so many steps",
          (30, 10, 3), partial(weights_overwritten, is_anew=True), hurts),
    Fault("lr_decayed", "factor after each step", (0.9, 0.7, 0.5), lr_decayed, hurts),
    Fault("posterior_collapse", "weight of the divergence", (10, 30, 100),
          _of(with_divergence, "evidence_bound"), hurts),
    Fault("one_element", "share of the loss", (0.1, 0.5, 1.0), _of(of_one, _CE, "mse_loss")),
    Fault("target_trained", "share of predictions", (0.5, 0.9, 1.0),
          _of(with_own_targets, "mse_loss")),
    Fault("padding_in_loss", "longest, over length", (0.3, 0.6, 0.9), padding_in_loss),
    Fault("samples_mixed", "share of the features", (0.1, 0.5, 1.0), samples_mixed),
    Fault("constant_output", "1 over what the last layer gets", (1e3, 1e4, 1e6),
          constant_output, stalls),
    Fault("optimizer_anew", "every so many steps", (20, 5, 1), optimizer_anew),
    Fault("nonfinite_weights", "epsilon", (1e-46, 1e-60, 0.0), without_epsilon, breaks),
    Fault("entropy_collapse", "factor of the rate of queries", (10, 30, 100),
          entropy_collapse, hurts),
)
