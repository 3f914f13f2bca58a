"""Layers that the model computes with, and that no optimizer trains since they aren't its own."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRAPH
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above

RECORDS = 4
"""Records, so many steps apart that whatever is trained has changed in between."""


def find(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.by_name("strangers")
    count, new, same = found.matrix(("all", "new", "same"))
    known = count > 0
    if known.sum() < RECORDS:
        return
    steps, new, same = found.steps[known], new[known][1:], same[known][1:]
    if (new > 0).all():
        numbers = (above("weights that are new at each record", new.min(), 0),)
        yield Sign(int(steps[1]), numbers, title=ANEW, advice=MAKE_ONCE)
    elif (same > 0).all():
        numbers = (above("weights that never change", same.min(), 0),)
        holders = evidence.setup.unregistered
        if holders:
            yield Sign(int(steps[1]), numbers, where=holders)
        else:
            yield Sign(int(steps[1]), numbers, is_alarm=False, title=OTHERS, advice=FREEZE)


ANEW = "Layers are made anew in each forward pass, so that they never learn"
MAKE_ONCE = "Make the layers once, in __init__, as attributes of the module."
OTHERS = "The loss depends on weights that neither the model nor its optimizer has"
FREEZE = (
    "If they are layers of the model, make them attributes of a module. If they are those of a "
    "teacher or another network that stays as it is, call requires_grad_(False) on it, which "
    "saves time."
)

RULE = Rule(
    fault="unregistered_layers",
    title="Layers in a list, tuple or dict aren't parts of the model, and nothing trains them",
    needs=(GRAPH,),
    find=find,
    advice="Use nn.ModuleList or nn.ModuleDict in place of the list or dict.",
    explains=NO_PROGRESS,
)
