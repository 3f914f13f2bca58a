"""What is concluded from a record of a spike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from gradlens.diagnosis.autopsy import autopsy
from gradlens.history.json_lines import encoded, from_plain
from gradlens.history.series import value_of
from gradlens.history.spikes import NEVER, Spike, Suspect

SAMPLE = Suspect(3, "img_3", share=0.99, loss=50.0, loss_share=0.9, input_ratio=1.1)
SPIKE = Spike(10.0, 1.0, 0.1, 2.3, samples=32, suspects=(SAMPLE,), back=1)


def with_share(share: float, **changes: Any) -> Spike:
    return replace(SPIKE, suspects=(replace(SAMPLE, share=share),), **changes)


@pytest.mark.parametrize(
    ("spike", "cause", "certainty"),
    [
        (SPIKE, "sample", "very likely"),
        (with_share(0.81), "sample", "very likely"),
        (with_share(0.79), "sample", "consistent with"),
        (with_share(0.51), "sample", "consistent with"),
        (with_share(0.49), "batch", "very likely"),
        (with_share(0.49, back=5), "batch", "consistent with"),
        (with_share(0.49, back=NEVER), "rate", "consistent with"),
        (replace(with_share(0.49), back=None), "batch", "consistent with"),
        (with_share(0.49, loss=3.4), "batch", "consistent with"),
        (replace(SPIKE, loss=3.4), "sample", "consistent with"),
        (replace(SPIKE, loss=3.5), "sample", "very likely"),
        (
            replace(SPIKE, loss=3.4, suspects=(replace(SAMPLE, input_ratio=11.0),)),
            "sample",
            "very likely",
        ),
        (
            replace(SPIKE, loss=3.4, suspects=(replace(SAMPLE, target_ratio=11.0),)),
            "sample",
            "very likely",
        ),
        (replace(SPIKE, samples=3), "unknown", "consistent with"),
        (with_share(0.2, rate=1.0, rate_before=0.1), "rate", "consistent with"),
        (with_share(0.2, sharpness=30.0, threshold=20.0), "rate", "consistent with"),
        (with_share(0.2, sharpness=21.0, threshold=20.0), "batch", "very likely"),
        (
            with_share(0.2, rate=1.0, rate_before=0.1, sharpness=30.0, threshold=20.0),
            "rate",
            "very likely",
        ),
        (with_share(0.99, rate=1.0, rate_before=0.1), "sample", "very likely"),
        (replace(SPIKE, suspects=()), "unknown", "consistent with"),
        (with_share(math.nan), "sample", "consistent with"),
        (replace(SPIKE, loss=math.nan, origin="input"), "input", "fact"),
        (replace(SPIKE, loss=math.nan, origin="weights", place="fc"), "weights", "fact"),
        (replace(SPIKE, loss=math.nan, origin="forward", place="fc"), "forward", "fact"),
        (replace(SPIKE, origin="backward", place="fc"), "backward", "fact"),
    ],
)
def test_causes(spike: Spike, cause: str, certainty: str) -> None:
    found = autopsy(spike)
    assert (found.cause, found.certainty) == (cause, certainty)
    assert found.text.endswith(".")
    named = cause in ("sample", "input", "forward", "backward")
    assert found.samples == (("img_3",) if named else ())
    if named and cause != "backward":
        assert "'img_3'" in found.text


def test_several_odd_samples_are_named_together() -> None:
    odd = [Suspect(place, place + 100, share=0.3, loss=9.0, input_ratio=50.0) for place in range(3)]
    found = autopsy(replace(SPIKE, suspects=(*odd, Suspect(9, 9, share=0.01, input_ratio=1.0))))
    assert (found.cause, found.samples) == ("sample", (100, 101, 102))


def test_a_record_in_a_file_is_the_same() -> None:
    found = from_plain(Spike, {**value_of(encoded(SPIKE)), "more": 1}, "the spike")
    assert repr(found) == repr(SPIKE)  # the NaN of two spikes aren't equal
