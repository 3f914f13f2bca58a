"""What quantities compute from curvature when a context is entered, while the graph is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gradlens.cockpit.tracking import Tracking
from gradlens.cockpit.values import NOT_PASSED, StepValues
from gradlens.curvature.curvature import Curvature, LossCurvature
from gradlens.curvature.probe import Probe, ProbedModel
from gradlens.gradients.gradients import Setting
from gradlens.gradients.loss_factor import unscaled_loss
from gradlens.graph.passes import why_not_to_pass
from gradlens.graph.undisturbed import training_kept, undisturbed
from gradlens.numerics.shards import any_distributed
from gradlens.observers.observer import StepContext
from gradlens.quantities.quantity import Quantity


def compute_curvature(tracking: Tracking, context: StepContext, values: StepValues) -> None:
    """Call quantities with the curvature that they need.

    Of several micro-batches, quantities get that of the last one.
    """
    active = [] if context.accumulating else values.before_backward
    why = _why_no_curvature(tracking)
    if why:
        values.refusing(*active)(why)
        return
    for probe in dict.fromkeys(quantity.on for quantity in active):
        of_probe = [each for each in active if each.on is probe]
        if probe is None:
            _compute_on_loss(tracking, context, values, of_probe)
        else:
            _compute_on_probe(tracking, context, values, probe, of_probe)


def _compute_on_loss(
    tracking: Tracking,
    context: StepContext,
    values: StepValues,
    active: Sequence[Quantity],
) -> None:
    setting, info = tracking.setting, context.info
    loss = unscaled_loss(info)
    if loss is None:
        for quantity in active:
            values.refusing(quantity)(NOT_PASSED.format(quantity=quantity.name, needed="loss"))
        return
    why = why_not_to_pass(loss) if loss.grad_fn is not None else ""
    if why:
        values.refusing(*active)(why)
        return
    is_part = tracking.assembly.has_parts(context.accumulating)
    curvature = LossCurvature(
        context.global_step,
        loss,
        setting.parameters,
        model=setting.model,
        outputs=info.get("outputs"),
        returned=tracking.forward_passes.take_outputs(),
        optimizer=info.get("optimizer"),
        loss_reduction=setting.loss_reduction,
        batch_size=info.get("batch_size"),
        plans=tracking.output_plans,
        is_part=is_part,
    )
    with _own_passes(setting):
        _compute(tracking, values, curvature, active)
    if is_part:
        tracking.run.note(context.global_step, CURVATURE_OF_A_PART)


def _compute_on_probe(
    tracking: Tracking,
    context: StepContext,
    values: StepValues,
    probe: Probe,
    active: Sequence[Quantity],
) -> None:
    setting = tracking.setting
    assert setting.model is not None  # the cockpit has checked it
    probed = tracking.probed.setdefault(probe, ProbedModel(probe, setting.model))
    optimizer = context.info.get("optimizer")
    with (
        tracking.boundary.contain("a probe", values.refusing(*active)),
        _own_passes(setting, setting.parameters.values()),
        probed.curvature(context.global_step, setting.parameters, optimizer) as curvature,
    ):
        _compute(tracking, values, curvature, active)


@contextmanager
def _own_passes(setting: Setting, parameters: Iterable[Tensor] = ()) -> Iterator[None]:
    """A context for passes of gradlens's own, which leave no trace in the training."""
    with (
        undisturbed(setting.model),
        training_kept(parameters),
        torch.enable_grad(),
    ):
        yield


def _compute(
    tracking: Tracking, values: StepValues, curvature: Curvature, active: Sequence[Quantity]
) -> None:
    values.compute_before(curvature, active)
    for note in curvature.notes:
        tracking.run.note(curvature.global_step, note)


def _why_no_curvature(tracking: Tracking) -> str:
    """Why parameters have no second derivatives; empty if they have."""
    parameters = tracking.setting.parameters.values()
    if not any(parameter.requires_grad for parameter in parameters):
        return ALL_FROZEN
    return NO_SECOND_DERIVATIVES if any_distributed(parameters) else ""


ALL_FROZEN = (
    "all parameters that are tracked are frozen: if others are trained, close the cockpit and make "
    "a new one, which continues the run's file with resume=True"
)
NO_SECOND_DERIVATIVES = (
    "the parameters are divided among processes (fully_shard or tensor parallelism), where torch "
    "has no second derivatives: they are freed behind each layer in the backward pass, or "
    "gradients are exchanged by functions that can't be differentiated"
)
CURVATURE_OF_A_PART = (
    "the batch comes in parts, from micro-batches or processes; its curvature is that of the last "
    "part of the first process alone"
)
