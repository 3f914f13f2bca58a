"""The state of a cockpit in a checkpoint: what later values depend on, besides the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradlens.cockpit.tracking import Tracking
from gradlens.history.undefined import Undefined
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
        "costs": tracking.costs.state_dict(),
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
    tracking.costs.load_state_dict(state["costs"])
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


# Values of plain classes, which ``torch.load(weights_only=True)`` reads -------------------------

UNDEFINED = "$undefined"
"""The key of the reason of an ``Undefined``, as in a run's file."""


def saveable(value: Any) -> Any:
    """A value of plain classes; tensors are detached and not copied, all else is copied.

    ``TypeError`` for what ``torch.load(weights_only=True)`` can't read.
    """
    if isinstance(value, Undefined):
        return {UNDEFINED: value.reason}
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {saveable(key): saveable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _kind(value)(map(saveable, value))
    raise TypeError(
        f"a {type(value).__name__} can't be saved: use numbers, strings and tensors (such as "
        "torch.from_numpy(array)), and lists, tuples and dicts of these"
    )


def restored(value: Any) -> Any:
    """What ``saveable`` was given."""
    if isinstance(value, Mapping):
        if value.keys() == {UNDEFINED}:
            return Undefined(value[UNDEFINED])
        return {key: restored(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _kind(value)(map(restored, value))
    return value


def _kind(value: list[Any] | tuple[Any, ...]) -> type[list[Any]] | type[tuple[Any, ...]]:
    """``list`` or ``tuple``, of which a named tuple, say, is a subclass."""
    return list if isinstance(value, list) else tuple


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
