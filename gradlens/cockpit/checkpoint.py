"""The state of a cockpit in a checkpoint: what later values depend on, besides the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlens.cockpit.tracking import Tracking
from gradlens.history.undefined import Undefined
from gradlens.numerics.saveable import restored, saveable
from gradlens.numerics.unavailable import first_line
from gradlens.stateful import State, load_state, state_of

FORMAT = 1


def state_of_tracking(tracking: Tracking) -> State:
    """The state of all parts of a cockpit, and of its quantities and their schedules by name."""
    quantities: dict[str, State] = {}
    schedules: dict[str, State] = {}
    for quantity in tracking.quantities:
        with tracking.boundary.contain(f"saving {quantity.name}"):
            quantities[quantity.name] = {}
            if quantity.has_started:
                quantities[quantity.name] = saveable(quantity.state_dict())
            schedules[quantity.name] = saveable(state_of(quantity.schedule))
    return {
        "gradlens_state": FORMAT,
        "parameters": _shapes(tracking),
        "loss_reduction": tracking.setting.loss_reduction,
        "quantities": quantities,
        "schedules": schedules,
        "unfinished": dict(tracking.updates.unfinished),
        "observers": {type(each).__name__: each.state_dict() for each in tracking.observers},
        "run": tracking.run.state_dict(),
        "past": tracking.past,
        "budget": state_of(tracking.budget),
    }


def load_tracking(tracking: Tracking, state: Mapping[str, Any], strict: bool) -> None:
    """Let all parts of a cockpit continue from a state; see ``Cockpit.load_state_dict``."""
    _check(tracking, state)
    saved, run = state["quantities"], tracking.run
    own = [quantity.name for quantity in tracking.quantities]
    unknown = [name for name in saved if name not in own]
    if unknown and strict:
        raise ValueError(UNKNOWN.format(names=", ".join(unknown)))
    for quantity in tracking.quantities:
        name = quantity.name
        if name not in saved:
            continue
        try:
            quantity.resume(restored(saved[name]))
            load_state(quantity.schedule, restored(state["schedules"].get(name, {})))
        except Exception as error:
            raise ValueError(
                f"{name} can't continue from its state ({first_line(error)}): give it the class "
                "and the options that it had, or another name, with which it starts anew"
            ) from error
    tracking.updates.drop()
    run.load_state_dict(state["run"])
    for name, step in state["unfinished"].items():
        if name in own:
            run.record(step, {name: Undefined(CONTINUED)})
    load_state(tracking.budget, state["budget"])
    for observer in tracking.observers:
        load_state(observer, state["observers"].get(type(observer).__name__, {}))
    tracking.continue_from(state["past"])
    new = [name for name in own if name not in saved]
    for names, text in ((new, NEW), (unknown, LEFT_OUT)):
        if names:
            run.note(state["run"]["step"], text.format(names=", ".join(names)))


def _shapes(tracking: Tracking) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in tracking.setting.parameters.items()}


def _check(tracking: Tracking, state: Any) -> None:
    """``ValueError`` unless it is the state of a cockpit of the same network."""
    if not isinstance(state, Mapping) or "gradlens_state" not in state:
        raise ValueError(NO_STATE)
    if state["gradlens_state"] != FORMAT:
        found = str(state["gradlens_state"])[:20]
        raise ValueError(OTHER_FORMAT.format(found=found, expected=FORMAT))
    saved, own = state["parameters"], _shapes(tracking)
    for name in {**own, **saved}:
        pair = [each.get(name) for each in (saved, own)]
        shapes = ["absent" if each is None else f"of shape {[*each]}" for each in pair]
        if len({*shapes}) > 1:
            raise ValueError(OTHER_NETWORK.format(name, *shapes))
    reductions = (state["loss_reduction"], tracking.setting.loss_reduction)
    if len({*reductions}) > 1:
        raise ValueError(OTHER_REDUCTION.format(*reductions))


NO_STATE = (
    "this is not the state of a cockpit: pass what cockpit.state_dict() has returned, such as "
    'torch.load("checkpoint.pt")["cockpit"]'
)
OTHER_FORMAT = (
    "the state has format {found}, and this version reads format {expected}: load it with the "
    "version of gradlens that saved it"
)
OTHER_NETWORK = (
    "the state is that of a cockpit of other parameters: {0} is {1} in it, and {2} in the cockpit. "
    "Load it into a cockpit of the same model with the same parameters frozen, or leave "
    "load_state_dict out: quantities start anew then"
)
OTHER_REDUCTION = (
    'the state is that of a cockpit with loss_reduction="{0}", and this one has "{1}", so that '
    'values before and after could not be compared: pass loss_reduction="{0}" to the cockpit'
)
UNKNOWN = (
    "the state has quantities that the cockpit doesn't track: {names}. Track them under these "
    "names, or pass strict=False, which leaves them out"
)
CONTINUED = (
    "the run was continued from a checkpoint that was saved while the value was still waiting for "
    "the update after the step, or for the next step"
)
NEW = "quantities that are not in the state that was loaded start anew: {names}"
LEFT_OUT = "quantities of the state that was loaded are not tracked any more: {names}"
