"""Random networks, against one backward pass for each sample."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases.random_networks import Part, Recipe, draw_recipe, each_once, examine

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("GRADLENS_RANDOM_NETWORKS", "60"))
"""How many networks hypothesis draws, others each time if it is set; 2,000 take a few minutes."""

EACH = each_once()
REFUSED = {"loss: trimmed losses", "orthogonal"}
"""Samples without a loss aren't known, and a matrix has as many rows as there are samples."""

recipes = st.randoms(use_true_random=False).map(draw_recipe)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="GRADLENS_RANDOM_NETWORKS" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(recipes)
def test_random_network(recipe: Recipe) -> None:
    """What is covered is right, the rest has a reason, and training is untouched."""
    findings = examine(recipe)
    assert not findings.problems, (findings.problems, recipe)


REORDERED = (
    Recipe(
        *(229113, 2, 2, 2, "features"),
        (Part("linear", ("masked",), 750), Part("softmax over the batch", (), 0)),
        *("ranked losses", "mean", 4, False, False, False),
    ),
    Recipe(
        *(357141, 2, 2, 4, "vectors"),
        (Part("linear", ("permuted", "checkpointed"), 584),),
        *("two heads", "mean", 3, False, False, False),
    ),
    Recipe(
        *(291909, 2, 3, 6, "features"),
        (Part("codebook", ("sorted by key",), 564),),
        *("cross_entropy", "mean", 2, True, False, False),
    ),
)
"""Networks whose rows are put in order where what they are computed from tells little of it."""
AS_MANY_BY_CHANCE = Recipe(
    *(965983, 4, 3, 6, "padded words"),
    (
        Part("multihead attention, positions first", ("single vectors",), 41),
        Part("batch norm by hand", (), 0),
    ),
    *("two heads", "mean", 2, False, False, False),
)
"""Samples meet, and as many of them as there are positions are selected."""

ONE_POSITION = Recipe(
    *(503606, 4, 3, 3, "linear features"),
    (Part("linear", ("masked tokens",), 51),),
    *("trimmed losses", "mean", 4, False, True, False),
)
"""Positions come first, and all rows of the loss depend on one of them."""

AS_MANY_POSITIONS = Recipe(
    *(97242, 3, 4, 4, "linear features"),
    (
        Part("packed rnn, sorted", ("row by row or not",), 944),
        Part("softmax over the batch", (), 0),
    ),
    *("chosen tokens", "mean", 4, False, False, False),
)
"""The last batch has as many positions as samples, of which some are left out."""


SEVERAL_CALLS = (
    Recipe(
        *(387226, 2, 3, 2, "features", (), "cross_entropy"),
        *("mean", 2, False, True, True, "on other data"),
    ),
    Recipe(
        *(461582, 4, 4, 5, "scaled integers"),
        (Part("lstm, positions first", ("stacked positions first",), 706),),
        *("tokens", "mean", 4, False, False, False, "in halves"),
    ),
    Recipe(
        *(691910, 2, 2, 5, "one-hot words"),
        (
            Part("packed lstm, sorted", ("two views",), 360),
            Part("complex filter", ("once", "single vectors"), 598),
        ),
        *("chosen tokens", "sum", 2, False, False, True, "on other data"),
    ),
    Recipe(
        *(300326, 3, 3, 2, "words"),
        (Part("nearest", (), 786), Part("packed rnn, sorted", ("masked scatter",), 380)),
        *("chosen tokens", "sum", 2, False, False, True, "on other data"),
    ),
    Recipe(
        *(309892, 2, 4, 2, "scaled integers"),
        (
            Part("pooled: last", ("masked scatter",), 892),
            Part("rnn", ("sorted by key",), 391),
            Part("positions [1, T, D]", ("single vectors",), 42),
        ),
        *("one number", "mean", 2, False, False, False, "losses of halves"),
    ),
    Recipe(
        *(14887, 2, 1, 2, "normalised features"),
        (Part("lstm, positions first", ("routed", "two views"), 695),),
        *("cross_entropy", "mean", 2, False, False, True, "on other data"),
    ),
)
"""As many calls as samples, as many positions as all calls have samples, and calls of one row."""

AS_MANY_HEADS = (
    Recipe(
        *(939244, 3, 4, 3, "padded words"),
        (
            Part("convolution", ("positions first", "added to some"), 119),
            Part("linear", ("added to some", "stacked positions first", "every other sample"), 857),
            Part("windows", ("chunks",), 734),
        ),
        *("stacked heads", "mean", 3),
    ),
    Recipe(
        *(615507, 2, 1, 4, "features"),
        (Part("linear", ("both orders", "added to some"), 288),),
        *("added heads", "mean", 3),
    ),
)
"""As many heads in front of the samples as there are of these, whose order isn't known."""


SINGLE = (AS_MANY_BY_CHANCE, ONE_POSITION, AS_MANY_POSITIONS)


@pytest.mark.parametrize("recipe", [*SEVERAL_CALLS, *AS_MANY_HEADS, *REORDERED, *SINGLE])
def test_rows_that_are_put_in_order_or_selected(recipe: Recipe) -> None:
    findings = examine(recipe)
    assert not findings.problems


@pytest.mark.parametrize("name", EACH)
def test_each_layer_way_entry_and_loss(name: str) -> None:
    """All parameters are covered, but for those behind which samples meet.

    At a step whose plan is new, and at one that has it from before.
    """
    findings = examine(EACH[name], steps=2)
    assert not findings.problems
    assert (findings.covered < findings.elements) == (name in REFUSED), findings.reasons
