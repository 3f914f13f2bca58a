"""Faults that are read off what a run consists of: its layers, its optimizer, its loss's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gradlens.diagnosis.course import is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRAPH, OPTIMIZER, SETUP
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above
from gradlens.diagnosis.rules.unchanged import changes
from gradlens.history.setup import Setup

ATTENTION = "MultiheadAttention"
HALF = 0.5
"""Share of the parameters' elements that are frozen, above which a run that learns nothing is
explained by that."""


def since(
    entry: Callable[[Setup], object],
    sign: Callable[[Evidence, int], Sign | None] = lambda evidence, step: Sign(step),
) -> Callable[[Evidence], Iterator[Sign]]:
    """Finds that an entry of the setup isn't empty, from the first step on at which it wasn't."""

    def find(evidence: Evidence) -> Iterator[Sign]:
        step = evidence.since(lambda setup: bool(entry(setup)))
        found = None if step is None else sign(evidence, step)
        if found is not None:
            yield found

    return find


def _counted(name: str, where: Sequence[str], step: int, is_alarm: bool = True) -> Sign:
    return Sign(step, (above(name, len(where), 0),), is_alarm=is_alarm, where=tuple(where))


def missed(evidence: Evidence, step: int) -> Sign | None:
    """Parameters that the optimizer doesn't have, and that no other one changes."""
    where = [name for name in evidence.setup.missed if not changes(evidence, name)]
    return _counted("trainable parameters in no group", where, step) if where else None


def frozen(evidence: Evidence, step: int) -> Sign:
    """Parameters that need no gradient: intended or not, by what becomes of the run."""
    names, trained = evidence.setup.frozen, {*evidence.history.parameters}
    kept = len({*names} - trained) > HALF * len({*names} | trained)
    is_alarm = kept and is_stuck(evidence)
    return _counted("parameters with requires_grad=False", names, step, is_alarm)


def softmax_twice(evidence: Evidence, step: int) -> Sign:
    kind = evidence.setup.before_loss
    if kind != "log_softmax":
        return Sign(step, title=f"The loss gets the output of a {kind}, and applies another one")
    advice = "This changes nothing but the time it takes: pass the scores before log_softmax."
    title = "The loss gets the output of a log_softmax and computes it once more"
    return Sign(step, is_alarm=False, title=title, advice=advice)


def broadcast(evidence: Evidence, step: int) -> Sign:
    title = f"The loss compares each prediction with all targets: {evidence.setup.broadcast}"
    return Sign(step, certainty="very likely", title=title)


def linear(evidence: Evidence, step: int) -> Sign | None:
    """Linear layers in a row; a projection in front of attention is one on purpose."""
    layers = evidence.setup.layers
    # The graph of a loss doesn't show what is in front of the first trained layer.
    is_linear = evidence.setup.is_linear and not evidence.setup.frozen
    pairs = [
        pair
        for pair in evidence.setup.linear_pairs
        if is_linear or not (pair[1] in layers and ATTENTION in layers[pair[1]].classes)
    ]
    if not pairs:
        return None
    return Sign(
        step,
        (above("pairs of layers with nothing nonlinear between", len(pairs), 0),),
        is_alarm=is_linear,
        where=tuple(dict.fromkeys(name for pair in pairs for name in pair)),
        title="The whole network is linear" if is_linear else "",
    )


OVER_QUERIES = "A softmax of attention is over the queries, and its values are summed over the keys"
OVER_KEYS = (
    "Use softmax(dim=-1), so that the weights of a query add up to 1: over queries, each position "
    "depends on all others, also on those that a mask hides."
)


RECORDS = 4
"""Records, so many steps apart that whatever is trained has changed in between."""


def strangers(evidence: Evidence) -> Iterator[Sign]:
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


RULES = (
    Rule("unregistered_layers",
         "Layers in a list, tuple or dict aren't parts of the model, and nothing trains them",
         needs=(GRAPH,), find=strangers, explains=NO_PROGRESS,
         advice="Use nn.ModuleList or nn.ModuleDict in place of the list or dict."),
    Rule("optimizer_misses", "The optimizer lacks trainable parameters",
         needs=(OPTIMIZER,), find=since(lambda setup: setup.missed, missed),
         explains=("symmetric_init", "dead_units", "lr_too_low", "labels_random"),
         advice="Pass them to the optimizer: they have gradients and are never updated. Often a "
                "layer was added or replaced after the optimizer had been made."),
    Rule("frozen_layer", "Parameters of the model are frozen",
         needs=(SETUP,), find=since(lambda setup: setup.frozen, frozen),
         explains=("lr_too_low", "labels_random"),
         advice="If this isn't on purpose (in fine-tuning it often is), set requires_grad to "
                "True before the optimizer and the cockpit are created. What is frozen must have "
                "been trained."),
    Rule("softmax_twice", "Softmax or sigmoid is applied twice",
         needs=(GRAPH,), find=since(lambda setup: setup.before_loss, softmax_twice),
         explains=NO_PROGRESS,
         advice="Pass logits, the scores before the softmax or sigmoid: CrossEntropyLoss and "
                "BCEWithLogitsLoss apply it themselves. Applied twice, it keeps the loss high "
                "and gradients small."),
    Rule("softmax_axis", "The softmax is over the samples of the batch, not over the classes",
         needs=(GRAPH,),
         find=since(lambda setup: setup.over_samples or setup.over_queries,
                    lambda evidence, step: Sign(step, title=OVER_QUERIES, advice=OVER_KEYS)
                    if not evidence.setup.over_samples else Sign(step)),
         explains=("samples_mixed", *NO_PROGRESS),
         advice="Use dim=1, the axis of the classes: with dim=0, the probabilities of one class "
                "add up to 1 over the samples."),
    Rule("one_element",
         "A softmax or normalisation has a single element, so that its result is constant",
         needs=(GRAPH,),
         find=since(lambda setup: setup.of_one,
                    lambda evidence, step: Sign(step, where=(evidence.setup.of_one,))),
         explains=("exploding_gradients", "no_gradient", "no_step", "dead_units", *NO_PROGRESS),
         advice="With one output, use a sigmoid and BCEWithLogitsLoss, or two outputs for "
                "CrossEntropyLoss; normalise over more than one feature: the softmax of one "
                "number is 1, and its normalisation 0, whatever the network computes."),
    Rule("loss_broadcast", "The loss compares each prediction with all targets",
         needs=(GRAPH,), find=since(lambda setup: setup.broadcast, broadcast),
         explains=("samples_mixed", *NO_PROGRESS),
         advice="Give predictions and targets the same shape, by outputs.squeeze(1) or "
                "targets.unsqueeze(1). As it is, the best that a network can learn is the mean "
                "target."),
    Rule("scores_reshaped", "A view has made each row of the loss's scores out of several places",
         needs=(GRAPH,), find=since(lambda setup: setup.rows_of_several), explains=NO_PROGRESS,
         advice="Scores [N, C, H, W] become rows by permute(0, 2, 3, 1).reshape(-1, C); or pass "
                "them as they are, since CrossEntropyLoss takes [N, C, H, W] and labels [N, H, "
                "W]."),
    Rule("target_trained",
         "The target of the loss needs a gradient, so that it is moved towards the prediction",
         needs=(GRAPH,),
         find=since(lambda setup: setup.target_trained,
                    lambda evidence, step: Sign(step, is_alarm=evidence.setup.bootstrapped)),
         advice="Compute targets under torch.no_grad(), or detach() them, as those of a value "
                "function or a teacher. Where two outputs are meant to approach each other, all "
                "is well."),
    Rule("no_nonlinearity", "Layers follow each other without a nonlinearity between",
         needs=(GRAPH,), find=since(lambda setup: setup.linear_pairs, linear),
         explains=("labels_random",),
         advice="Put an activation between them: together they are one linear layer. In low-rank "
                "factors and depthwise-separable convolutions, this is on purpose."),
)  # fmt: skip
