"""What quantities compute from curvature when a context is entered, while the graph is whole."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from gradlens.cockpit.tracking import Tracking
from gradlens.cockpit.values import NOT_PASSED, StepValues
from gradlens.curvature.curvature import Curvature, LossCurvature
from gradlens.curvature.probe import Probe, ProbedModel
from gradlens.gradients.gradients import Setting
from gradlens.gradients.loss_factor import unscaled_loss
from gradlens.graph.fully_shard import kept_whole
from gradlens.graph.passes import why_not_to_pass
from gradlens.graph.undisturbed import training_kept, undisturbed
from gradlens.numerics.shards import any_distributed
from gradlens.numerics.unavailable import UnavailableError
from gradlens.observers.observer import StepContext


def compute_curvature(tracking: Tracking, context: StepContext, values: StepValues) -> None:
    """Call quantities with the curvature that they need.

    Of several micro-batches, quantities get that of the last one. Passes of gradlens's own leave no
    trace in the training.
    """
    setting, run = tracking.setting, tracking.run
    active = [] if context.accumulating else values.before_backward
    why = _why_no_curvature(setting)
    if why:
        values.refusing(*active)(why)
        return
    for probe in dict.fromkeys(quantity.on for quantity in active):
        of_probe = [each for each in active if each.on is probe]
        if probe is None and "loss" not in context.info:
            for each in of_probe:
                values.refusing(each)(NOT_PASSED.format(quantity=each.name, needed="loss"))
            continue
        work = "the curvature of the loss" if probe is None else "a probe"
        with (
            tracking.boundary.contain(work, values.refusing(*of_probe)),
            undisturbed(setting.model),
            kept_whole(setting.model),
            training_kept(() if probe is None else setting.parameters.values()),
            torch.enable_grad(),
            _curvature(tracking, context, probe) as curvature,
        ):
            values.compute_before(curvature, of_probe)
            of_part = [CURVATURE_OF_A_PART] if curvature.is_part else []
            for note in [*curvature.notes, *of_part]:
                run.note(context.global_step, note)


def _curvature(
    tracking: Tracking, context: StepContext, probe: Probe | None
) -> AbstractContextManager[Curvature]:
    """A context with the curvature of a probe's loss, or of the step's."""
    setting, info = tracking.setting, context.info
    if probe is not None:
        assert setting.model is not None  # the cockpit has checked it
        probed = tracking.probed.setdefault(probe, ProbedModel(probe, setting.model))
        optimizer, held = info.get("optimizer"), setting.parameters
        return probed.curvature(context.global_step, setting.leaves, optimizer, held)
    loss = unscaled_loss(info)
    assert loss is not None  # as was seen before
    why = why_not_to_pass(loss) if loss.grad_fn is not None else ""
    if why:
        raise UnavailableError(why)
    return nullcontext(
        LossCurvature(
            global_step=context.global_step,
            loss=loss,
            parameters=setting.leaves,
            model=setting.model,
            outputs=info.get("outputs"),
            returned=tracking.take_outputs(),
            optimizer=info.get("optimizer"),
            held=setting.parameters,
            loss_reduction=setting.loss_reduction,
            batch_size=info.get("batch_size"),
            plans=tracking.output_plans,
            is_part=tracking.assembly.has_parts(context.accumulating),
        )
    )


def _why_no_curvature(setting: Setting) -> str:
    """Why parameters have no second derivatives; empty if they have."""
    parameters = setting.parameters.values()
    if not any(parameter.requires_grad for parameter in parameters):
        return ALL_FROZEN
    is_divided = setting.sharding is None and any_distributed(parameters)
    return NO_SECOND_DERIVATIVES if is_divided else ""


ALL_FROZEN = (
    "all parameters that are tracked are frozen: if others are trained, close the cockpit and make "
    "a new one, which continues the run's file with resume=True"
)
NO_SECOND_DERIVATIVES = (
    "the parameters are divided among processes by tensor parallelism, where torch has no second "
    "derivatives, since gradients are exchanged by functions that can't be differentiated"
)
CURVATURE_OF_A_PART = (
    "the batch comes in parts, from micro-batches or processes; its curvature is that of the last "
    "part of the first process alone"
)
