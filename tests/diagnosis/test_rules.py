"""Each rule on runs made by hand: healthy ones, and ones with a fault in several strengths."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gradlens.diagnosis.diagnose import diagnose, unasked
from gradlens.diagnosis.rules import RULES
from gradlens.history.coverage import Coverage
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.json_lines import encoded, from_plain
from gradlens.history.series import value_of
from gradlens.history.setup import Layer, ParameterGroup, Setup
from gradlens.history.spikes import Origin, Spike, Suspect
from tests.diagnosis.runs import (
    SETUP,
    SHAPES,
    STEPS,
    WEIGHTS,
    at,
    changed,
    layer_columns,
    run,
    step_columns,
    with_options,
)

S, L = step_columns(), layer_columns()
ROWS = len(L["dead/0"])
RISE = np.where(np.arange(STEPS) > 3, 40.0, 2.3)
STUCK = np.full(STEPS, 2.3)
AT_LAST = (np.arange(ROWS) == ROWS - 1).astype(float)


def layers(**changes: object) -> dict[str, np.ndarray]:
    """``kind__name`` stands for ``kind/name``."""
    return changed(
        L, **{k.replace("__", "/").replace("_w", ".weight"): v for k, v in changes.items()}
    )


def batchnorm(training: bool, samples: float = 32) -> History:
    norm = Layer(("BatchNorm1d", "_BatchNorm", "_NormBase"), training)
    setup = replace(SETUP, layers={**SETUP.layers, "1": norm})
    return run(changed(S, samples=samples, labels=samples), setup=setup)


def by_weight(kind: str, *values: object) -> dict[str, np.ndarray]:
    return changed(L, **{f"{kind}/{name}": v for name, v in zip(WEIGHTS, values, strict=True)})


def by_weight_update(size: float) -> dict[str, np.ndarray]:
    return {f"update_rms/{name}": np.full(ROWS, size) for name in WEIGHTS}


def adam(**options: float) -> object:
    found = with_options(**{"beta1": 0.9, "beta2": 0.999, "eps": 1e-8} | options)
    return replace(found, optimizer="Adam")


def moments(value: float) -> dict[str, np.ndarray]:
    return {**L, **{f"root_second_moment/{name}": np.full(ROWS, value) for name in WEIGHTS}}


UNLABELLED = {name: each for name, each in L.items() if not name.startswith("labels/")}
"""The layers' table without the counts of labels."""


def labels(*counts: float) -> dict[str, np.ndarray]:
    return {
        **UNLABELLED,
        **{f"labels/{n}": np.linspace(count / 9, count, ROWS) for n, count in enumerate(counts)},
    }


def spikes(share: float, height: float = 8.0) -> dict[str, np.ndarray]:
    loss = np.where(np.arange(STEPS) == 100, height, S["loss"])
    most = np.where(np.arange(STEPS) == 100, share * height * 32, S["loss_max"])
    return changed(S, loss=loss, loss_max=most, loss_largest=at(100, 7))


def experts(*sizes: float | np.ndarray) -> History:
    table = {
        f"gradient_rms/experts.{n}.weight": np.ones(ROWS) * size for n, size in enumerate(sizes)
    }
    return run(layers={**L, **table})


def first_updates(growth: float, size: float = 0.5) -> dict[str, np.ndarray]:
    """The first update is of this ``size``, over the weights', which grow in the first steps."""
    sizes = 0.07 * np.minimum(np.geomspace(1, growth**3, ROWS), growth)
    updates = np.r_[size, np.full(ROWS - 1, 0.003)] * sizes
    of_updates = {f"update_rms/{name}": updates for name in WEIGHTS}
    return by_weight("weight_rms", *[sizes] * 3) | of_updates


def valid(*losses: float, layers: dict[str, np.ndarray] = L) -> History:
    steps = np.linspace(STEPS // len(losses), STEPS - 1, len(losses)).astype(int).tolist()
    return run(layers=layers, series={"valid_loss": dict(zip(steps, losses, strict=True))})


def validated(loss: float, columns: dict[str, np.ndarray]) -> History:
    """The last validation has this loss."""
    return run(columns, series={"valid_loss": {0: 2.3, STEPS - 1: loss}})


def one_bad_batch(median: float) -> dict[str, np.ndarray]:
    """Most of its samples have a high loss; that of the batch is below the first one's."""
    loss = np.where(np.arange(STEPS) == 100, 2.8, S["loss"])
    return changed(S, loss=loss, loss_median=at(100, median), loss_max=at(100, 4.0))


def unlabelled(valid: tuple[float, ...] = (), **changes: np.ndarray) -> History:
    """A run with a loss whose labels and loss by chance aren't known."""
    unknown = ("classes", "labels", "label_entropy", "loss_max", "loss_median", "loss_over")
    table = {name: each for name, each in S.items() if name not in unknown}
    validations = np.linspace(0, STEPS - 1, len(valid)).astype(int).tolist()
    series = {"valid_loss": dict(zip(validations, valid, strict=True))} if valid else {}
    return run(changed(table, **changes), UNLABELLED, replace(SETUP, loss=""), series)


def of_pixels() -> History:
    """A binary cross-entropy that is summed over pixels, whose single losses aren't recorded."""
    unknown = ("label_entropy", "loss_max", "loss_median", "loss_over")
    table = {name: each for name, each in S.items() if name not in unknown}
    setup = replace(SETUP, loss="BinaryCrossEntropyWithLogitsBackward")
    return run(changed(table, loss=80 * S["loss"], classes=2.0), UNLABELLED, setup)


FLAT = np.r_[4 * np.ones(10), 3.5 * np.ones(STEPS - 10)]
DRIFT = np.sin(np.arange(STEPS) / 10) + S["input_mean"]
EARLY_PLATEAU = np.where(np.arange(STEPS) < STEPS // 4, 2.3, S["loss"])


def strangers(new: float = 0.0, same: float = 0.0) -> dict[str, np.ndarray]:
    """So many of two weights that aren't the model's are new, or the same, after the start."""
    later = (np.arange(ROWS) > 0).astype(float)
    found = {"all": np.full(ROWS, 2.0), "new": 2 * (1 - later) + new * later, "same": same * later}
    return {**L, **{f"strangers/{name}": each for name, each in found.items()}}


def regression(
    size: float = 1.0, variance: float = 1.0, mean: float = math.nan
) -> dict[str, np.ndarray]:
    """The losses are those of a healthy run times a size."""
    losses = {name: size * S[name] for name in ("loss", "loss_max", "loss_median")}
    of_targets = {"target_variance": variance, "target_mean": mean}
    table = {**S, **losses, **{n: np.full(STEPS, each) for n, each in of_targets.items()}}
    return changed(table, classes=np.nan, label_entropy=np.nan)


def dense_labels(most: float = 0.3, padding: float = 0.0) -> dict[str, np.ndarray]:
    shares = {"most": max(most, padding), "padding": padding}
    return UNLABELLED | {f"dense_labels/{n}": np.full(ROWS, each) for n, each in shares.items()}


SQUARED = replace(SETUP, loss="MseLossBackward")
UNCHANGED = changed(
    L, **{f"update_rms/{n}": 0.0 for n in SHAPES}, **{f"weight_rms/{n}": 0.1 for n in SHAPES}
)
ADVERSARY = {
    f"strangers/{n}": np.r_[first, np.full(ROWS - 1, later)]
    for n, first, later in (("all", 4, 4), ("new", 4, 0), ("same", 0, 0))
}
AMBIGUOUS = (
    "the number of samples isn't certain, since more than one agrees with the network",
    "N = 32 by the rows, and it can't be followed which sample each of their rows belongs to",
    "the loss may have the samples in another order than the batch, and it isn't known of all",
)


def still_ones(name: str) -> dict[str, float]:
    return {f"update_rms/{name}": 0.0, f"weight_rms/{name}": 0.05}


def gradients_of(*names: str) -> dict[str, np.ndarray]:
    return {f"gradient_rms/{name}": np.zeros(ROWS) for name in names}


def covered(reason: str, columns: dict[str, np.ndarray] | None = None) -> History:
    history = run(changed(S, loss=STUCK) if columns is None else columns)
    history.coverages[0] = Coverage({"0.weight": reason})
    return history


def broken(origin: Origin) -> History:
    """The loss isn't finite from step 50 on, which comes from there."""
    history = run(changed(S, loss=np.where(np.arange(STEPS) >= 50, np.nan, S["loss"])))
    history.spikes[50] = Spike(math.nan, origin=origin, suspects=(Suspect(3, "cat.png"),))
    return history


def of_quantity(
    kind: str,
    values: dict[str, dict[str, np.ndarray] | np.ndarray],
    columns: dict[str, np.ndarray] = S,
    setup: Setup = SETUP,
) -> History:
    """A run with a quantity of layers at each step: entries ``[K]``, or numbers of heads [K, H]."""
    group = "parameters" if kind in ("RelativeUpdate", "OptimizerState") else "layers"

    def at_step(step: int, one: dict[str, np.ndarray] | np.ndarray) -> object:
        if isinstance(one, dict):
            return {name: float(each[step]) for name, each in one.items()}
        return one[step] if one.ndim > 1 else float(one[step])

    records = {s: {group: {n: at_step(s, v) for n, v in values.items()}} for s in range(STEPS)}
    return run(columns, setup=setup, series={kind: records})


EVERY = np.arange(STEPS)
FIRST = (EVERY < 9).astype(float)
GROWS = np.geomspace(1, 2000, STEPS)
STEADY = np.full(STEPS, 3.0)


def updates(**sizes: np.ndarray | float) -> History:
    """‖update‖/‖weight‖ of each weight, by the number of its layer."""
    found = {f"{n.removeprefix('_')}.weight": np.broadcast_to(v, STEPS) for n, v in sizes.items()}
    return of_quantity("RelativeUpdate", {name: {"value": each} for name, each in found.items()})


def heads(
    *values: np.ndarray, kind: str = "AttentionLogits", loss: np.ndarray = S["loss"]
) -> History:
    return of_quantity(kind, {"1.attention": np.stack(values, 1)}, changed(S, loss=loss))


def outputs(entropy: np.ndarray, loss: np.ndarray) -> History:
    entries = {"entropy": entropy, "classes": np.full(STEPS, 10.0)}
    return of_quantity("OutputEntropy", {"4": entries}, changed(S, loss=loss))


def groups(*ends: np.ndarray) -> History:
    """Upper ends of the cosines of pairs of groups, each at every fifth step."""
    records = {
        step: {
            "pairs": {f"{n} and web": {"value": -0.5, "high": e[step]} for n, e in enumerate(ends)}
        }
        for step in range(0, STEPS, 5)
    }
    return run(series={"GroupGradients": records})


def spike_after(rms: float, steps: int = 6, **options: float) -> History:
    """The gradient outgrows v at step 100, and the loss rises for some steps from the next on."""
    rises = (EVERY > 100) & (100 + steps >= EVERY)
    values = {name: {"rms": np.where(EVERY == 100, rms, 1.0)} for name in WEIGHTS[:2]}
    loss = S["loss"] * np.where(rises, 4.0, 1.0)
    return of_quantity("OptimizerState", values, changed(S, loss=loss), adam(**options))


def outliers(kurtosis: float, channels: np.ndarray) -> History:
    entries = {"kurtosis": np.full(STEPS, kurtosis), "channel": channels}
    return of_quantity("ActivationOutliers", {"2": entries})


def critical(often: int) -> History:
    """One of so many steps raises the loss of its own batch, which is high for ten steps."""
    loss = np.where(abs(EVERY - 25) < 5, 3.6, S["loss"])
    ratios = np.where(EVERY % often == 0, 2.0, 0.5)
    series = {"CriticalSharpness": {step: {"ratio": ratios[step]} for step in range(STEPS)}}
    return run(changed(S, loss=loss), series=series)


WRITTEN = {"overwritten": (np.arange(STEPS) % 40 == 0) * (np.arange(STEPS) > 0) * 1.0}


def tokens(here: float = 0.1, later: float = 0.1, seen: float = 1.0) -> dict[str, np.ndarray]:
    shares = {"labels_here": here, "labels_next": later, "next_seen": seen}
    return {name: np.full(STEPS, share) for name, share in shares.items()}


ROUNDS = {"stateless": (np.arange(STEPS) % 40 == 0).astype(float)}
SUM = replace(SETUP, loss_reduction="sum", declared_reduction="sum")
TANH_ALONE = {"saturated/0": np.full(ROWS, 0.95)}
TANH = {**L, **TANH_ALONE}
DYING = {**L, "dead/0": np.linspace(0.2, 1, ROWS)}

FAULTY: dict[str, list[History]] = {
    "optimizer_misses": [
        run(layers=layer_columns(still=["4.weight"]), setup=replace(SETUP, missed=("4.weight",)))
    ],
    "zero_grad_missing": [
        run(changed(S, stale=1.0)),
        run(changed(S, stale=(np.arange(STEPS) % 4 > 0).astype(float))),
    ],
    "no_step": [
        run(changed(S, updates=0.0), UNCHANGED),
        run(changed(S, lr=0.0), UNCHANGED),
        run(layers=UNCHANGED),
        run({**S, "stateless": np.ones(STEPS)}, UNCHANGED, adam()),
        run(changed(S, loss=STUCK, updates=np.arange(STEPS) % 20 == 0)),
    ],
    "no_gradient": [
        run(layers=UNCHANGED | gradients_of(*SHAPES)),
        run(layers=changed(L, **still_ones("0.weight")) | gradients_of("0.weight")),
    ],
    "softmax_axis": [run(setup=replace(SETUP, over_samples=True))],
    "one_element": [run(setup=replace(SETUP, of_one="softmax"))],
    "samples_mixed": [
        covered(reason)
        for reason in ("samples meet between it and 4, as far as can be seen", *AMBIGUOUS)
    ],
    "constant_output": [
        run(changed(S, loss=STUCK) | {"output_std": 1e-9 * np.ones(STEPS)}),
        run(S | {"direction_spread": np.full(STEPS, 0.01)}),
        run(
            changed(S, loss=3 * S["loss"] + 2)
            | {"loss_mean": STUCK, "output_std": 1e-9 * np.ones(STEPS)}
        ),
    ],
    "loss_broadcast": [run(setup=replace(SETUP, broadcast="[20, 1] and [20]"))],
    "softmax_twice": [
        run(setup=replace(SETUP, before_loss=kind)) for kind in ("softmax", "sigmoid")
    ],
    "no_nonlinearity": [
        run(setup=replace(SETUP, linear_pairs=(("0", "2"), ("2", "4")), is_linear=True))
    ],
    "batchnorm_eval": [batchnorm(training=False)],
    "batch_of_one": [batchnorm(training=True, samples=1)],
    "batch_too_small": [run(changed(S, samples=1.0, labels=1.0, loss=STUCK))],
    "adam_epsilon": [
        run(setup=replace(adam(eps=1e-9), dtypes=("float16",))),
        *(run(layers=moments(1e-3), setup=adam(eps=epsilon)) for epsilon in (0.1, 1.0, 10.0)),
    ],
    "weight_decay_high": [
        run(
            changed(S, loss=STUCK, lr=0.1),
            by_weight("weight_rms", *[0.07 * np.exp(-np.arange(ROWS) / fall)] * 3),
            setup,
        )
        for fall, setup in (
            (20, with_options(momentum=0.9, weight_decay=0.02)),
            (10, with_options(momentum=0.9, weight_decay=0.1)),
            (10, adam(weight_decay=0.5)),
            (4, with_options(momentum=0.9, weight_decay=0.5)),
        )
    ],
    "momentum_high": [
        run(
            changed(S, loss=np.where(np.arange(STEPS) > 20, 4.0, S["loss"])),
            setup=with_options(momentum=m),
        )
        for m in (0.99, 0.999)
    ]
    + [run(setup=setup) for setup in (with_options(momentum=0.995), adam(beta1=0.985))],
    "clipping_always": [run(changed(S, grad_norm_at_step=kept)) for kept in (0.05, 0.005, 0.0005)],
    "loss_sum": [
        *(run(changed(S, loss=32 * loss), setup=SUM) for loss in (RISE, STUCK)),
        run(changed(S, loss=RISE, updates=(np.arange(STEPS) % 8 == 7).astype(float))),
    ],
    "nonfinite_input": [
        run(changed(S, bad_rows=at(50, 1.0), bad_row_unused=0.0, loss=at(50, math.nan)))
    ],
    **{
        fault: [broken(origin)]
        for fault, origin in (
            ("nonfinite_target", "target"),
            ("nonfinite_gradient", "backward"),
            ("nonfinite_weights", "weights"),
        )
    },
    "nonfinite_loss": [
        broken("forward"),
        *(
            run(changed(S, loss=np.where(np.arange(STEPS) > 60, end, S["loss"])))
            for end in (np.nan, np.inf)
        ),
    ],
    "input_constant": [
        *(run(changed(S, input_rms=0.01, loss=loss)) for loss in (STUCK, EARLY_PLATEAU)),
        *(run(changed(S, input_spread=spread)) for spread in (4e-4, 0.0)),
        run(changed(S, input_rms=128.0, input_spread=4e-4, distinct_rows=1.0)),
    ],
    "input_scale": [
        *(run(changed(S, input_rms=s, loss=S["loss"] + 0.5)) for s in (30.0, 128.0)),
        run(changed(S, input_rms=10.0, loss=S["loss"] + 0.5), TANH),
    ],
    "input_offset": [
        *(run(changed(S, input_mean=m, loss=S["loss"] + 0.5)) for m in (10.0, -30.0)),
        run(changed(S, input_rms=600.0, input_spread=5e-3, loss=S["loss"] + 0.5)),
        run(changed(S, input_rms=5e8, input_spread=0.0, distinct_rows=25.0, loss=S["loss"] + 0.5)),
    ],
    "batch_repeated": [
        validated(1.0, changed(S, checksum=np.arange(STEPS) // 10)),
        validated(1.0, changed(S, checksum=0.25)),
    ],
    "samples_duplicated": [run(changed(S, distinct_rows=d)) for d in (1.0, 4.0, 14.0)],
    "class_imbalance": [
        run(changed(S, loss=STUCK), labels(900.0, *[100.0] * 9)),
        run(changed(S, loss=STUCK), labels(2000.0, *[20.0] * 9)),
        run(layers=dense_labels(most=0.99)),
    ],
    "target_seen": [
        run(S | tokens(here=1.0, seen=0.0)),
        run(S | tokens(later=1.0, seen=1.0)),
    ],
    "scores_reshaped": [run(setup=replace(SETUP, rows_of_several=True))],
    "posterior_collapse": [run(S | {"code_nats": np.full(STEPS, nats)}) for nats in (1e-5, 0.04)],
    "weights_overwritten": [
        run(
            changed(S, loss=STUCK) | {"overwritten": np.ones(STEPS)},
            by_weight("update_rms", 0.1, 0.1, 0.1),
        ),
        run(changed(S, loss=2.3 * 0.98 ** (np.arange(STEPS) % 40)) | WRITTEN),
        run(S | WRITTEN | {"restored": WRITTEN["overwritten"]}),
    ],
    "padding_in_loss": [run(layers=dense_labels(padding=share)) for share in (0.2, 0.9)],
    "data_order": [
        *(run(changed(S, label_entropy=e)) for e in (0.0, 0.5, 0.9)),
        unlabelled(input_mean=np.tile(DRIFT[:80], 2), checksum=np.tile(S["checksum"][:80], 2)),
        unlabelled(checksum=np.tile(32 * DRIFT[:80], 2)),
    ],
    "outlier_sample": [
        *(run(changed(S, row_rms_max=at(70, size))) for size in (40.0, 100.0)),
        run(spikes(share=0.9)),
        run(spikes(share=0.7, height=4.5)),
        run(spikes(share=0.9, height=2.0)),
    ],
    "corrupt_batch": [
        run(changed(S, input_rms=at(70, 30.0), row_rms_max=at(70, 50), row_rms_median=at(70, 30))),
        *(run(spikes(share=0.2), table) for table in (L, first_updates(growth=3.0))),
        run(one_bad_batch(3.0)),
        run(changed(spikes(share=0.9), input_rms=at(100, 30.0))),
    ],
    "symmetric_init": [
        *(run(layers=by_weight("row_spread", 0.95, s, 0.9)) for s in (0.0, 1e-6)),
        run(layers=by_weight("row_spread", 0.95, np.linspace(1e-6, 0.5, ROWS), 0.9)),
    ],
    "exploding_gradients": [
        run(changed(S, loss=S["loss"] * 4), by_weight("weight_rms", *[gain / 8] * 3))
        for gain in (6.5, 30.0)
    ]
    + [
        run(regression(1e4, 1.0, mean=0.5), by_weight("weight_rms", *[2 / 8] * 3), setup=SQUARED),
        run(layers=by_weight("weight_rms", 0.07, 10 / 8, 0.07)),
        run(layers={**by_weight("weight_rms", 3 / 4.5, 0.07, 0.07), **TANH_ALONE}),
    ],
    "vanishing_gradients": [
        run(
            changed(S, loss=STUCK),
            {**by_weight("weight_rms", 0.006, 0.006, 0.07), **by_weight_update(1e-5)},
        ),
        run(
            layers={
                **by_weight("weight_rms", *[0.006] * 3),
                **{f"gradient_rms/{name}": np.full(ROWS, 1e-3) for name in WEIGHTS},
            }
        ),
        *(
            run(layers=by_weight("gradient_rms", shrunk**2, shrunk, 0.01))
            for shrunk in (1e-6, 1e-9)
        ),
    ],
    "precision_underflow": [
        run(
            changed(S, loss=STUCK),
            by_weight("zero_gradients", zeros, zeros, 0.1),
            replace(SETUP, half=True),
        )
        for zeros in (0.3, 1.0)
    ],
    "dead_units": [
        run(changed(S, loss=S["loss"] + 0.5), {**L, "dead/2": np.full(ROWS, 0.75)}),
        run(changed(S, loss=STUCK), {**L, "dead/2": np.full(ROWS, 1.0)}),
        run(changed(S, loss=STUCK), DYING),
    ],
    "saturated_units": [run(changed(S, loss=S["loss"] + 0.5), TANH)],
    "expert_unused": [
        *(experts(0.01, 0.02, size, 0.01) for size in (0.0, 1e-8)),
        experts(0.01, 0.02, AT_LAST * 1e-4, 0.01),
        experts(0.01, 0.0, 0.0),
        experts(0.01, 1e-8, 0.0, 0.0, 0.02),
    ],
    "lr_too_high": [
        run(changed(S, loss=RISE), L | by_weight_update(0.2)),
        run(changed(S, loss=np.where(np.arange(STEPS) > 60, np.nan, np.minimum(RISE, 5.0)))),
        run(
            changed(S, loss=STUCK),
            {
                **by_weight("weight_rms", *[0.07 * np.linspace(1, 50, ROWS)] * 3),
                **by_weight_update(1.0),
            },
        ),
    ],
    "lr_edge": [
        run(
            changed(S, loss=np.where(np.arange(STEPS) % 9 == 8, 6.0, S["loss"])),
            L | by_weight_update(0.005),
        ),
        run(changed(S, loss=STUCK), by_weight("update_rms", *[0.005] * 3)),
        run(changed(S, loss=at(2, 6.0)), first_updates(growth=3.0)),
        run(changed(S, grad_norm=at(1, 1e-4)), first_updates(growth=1.0, size=2.0)),
        run(
            changed(S, loss=np.where(abs(np.arange(STEPS) - 2) < 2, 6.0, S["loss"])),
            L | by_weight_update(0.005),
        ),
        valid(2, 8, 5, 9, 4, layers=L | by_weight_update(0.005)),
        critical(often=4),
    ],
    "lr_too_low": [
        run(changed(S, loss=STUCK), by_weight("update_rms", *[size] * 3)) for size in (1e-5, 1e-8)
    ],
    "labels_random": [
        *(run(changed(S, loss=loss)) for loss in (STUCK, STUCK * 0.99)),
        unlabelled(loss=FLAT, valid=(4, 3.5, 3.6, 3.5)),
    ],
    "label_noise": [*(validated(0.12, changed(S, loss_over=share)) for share in (0.04, 0.06, 0.2))],
    "lr_decayed": [run(changed(S, lr=0.1 * fall ** np.arange(STEPS))) for fall in (0.9, 0.5)],
    "optimizer_anew": [
        *(run({**S, "stateless": np.ones(STEPS)}, setup=setup) for setup in (adam(), SETUP)),
        run(changed(S, loss=2.3 * 0.98 ** (np.arange(STEPS) % 40)) | ROUNDS, setup=adam()),
    ],
    "loss_of_scores": [
        *(
            run(changed(S, loss=S["loss"] - 3, loss_median=S["loss_median"] - fall))
            for fall in (0.8, 3.0)
        ),
        run(S | {"unlogged": np.ones(STEPS)}, setup=replace(SETUP, loss="")),
    ],
    "loss_maximised": [
        run(changed(S, loss=-np.exp(np.arange(STEPS) / 20)), setup=SQUARED),
        run(
            changed(
                S,
                loss=-S["loss"] * np.exp(np.arange(STEPS) / 20),
                loss_median=S["loss_median"] * np.exp(np.arange(STEPS) / 20),
            )
        ),
        run(changed(S, loss=RISE), setup=with_options(maximize=1.0)),
    ],
    "target_scale": [
        run(
            changed(S, loss=S["loss"] - 3, loss_median=S["loss_median"] - 3.0),
            setup=replace(SETUP, loss="BinaryCrossEntropyWithLogitsBackward"),
        ),
        *(
            run(regression(size, variance), setup=SQUARED)
            for size, variance in ((1e4, 100.0), (1e9, 1e6))
        ),
        run(regression(1e4, 100.0, mean=100.0), setup=SQUARED),
        run(S | {"targets_beyond": np.full(STEPS, 0.4)}),
        run(changed(S, loss=1e3 * RISE, grad_norm=1e6), setup=SQUARED),
    ],
    "unregistered_layers": [
        run(layers=strangers(new=2.0)),
        run(layers=strangers(same=2.0), setup=replace(SETUP, unregistered=("blocks",))),
    ],
    "update_large": [
        updates(_0=0.32, _2=0.01, _4=0.01),
        updates(_0=0.01, _2=np.where(EVERY < 4, 0.5, 0.02), _4=0.01),
        updates(_0=0.5, _2=0.5, _4=0.5),
    ],
    "attention_logits": [
        heads(STEADY, GROWS, STEADY),
        heads(np.where(EVERY > 100, math.inf, STEADY)),
        of_quantity("AttentionLogits", {"1": GROWS}),
    ],
    "entropy_collapse": [
        heads(STEADY, 3 / GROWS, kind="AttentionEntropy", loss=S["loss"] + EVERY / STEPS),
        heads(3 / GROWS, kind="AttentionEntropy", loss=STUCK),
        outputs(2 / GROWS, STUCK),
    ],
    "second_moment_old": [spike_after(rms) for rms in (2.5, 30.0)],
    "overfitting": [
        valid(2, 1, 0.8, 1.2, 1.5),
        valid(2, 1.0, 0.5, 0.6, 0.7, 0.8),
        valid(2, 1.0, *[0.5] * 10, *[0.58] * 12),
    ],
}
"""Runs with each fault, from weak to strong."""

NOTICED: dict[str, list[History]] = {
    "groups_oppose": [
        groups(np.full(STEPS, 0.1), np.where(EVERY < 50, 1.0, -0.1)),
        groups(np.where(EVERY < 12, -0.3, math.nan)),
    ],
    "entropy_collapse": [heads(STEADY, 3 / GROWS, kind="AttentionEntropy")],
    "frozen_layer": [run(setup=replace(SETUP, frozen=("0.weight",)))],
    "batch_repeated": [
        run(changed(S, checksum=np.arange(STEPS) // 10)),
        run(changed(S, checksum=0.25)),
    ],
    "data_order": [unlabelled(input_mean=DRIFT)],
    "samples_mixed": [covered("samples meet in the loss", S)],
    "no_gradient": [
        run(layers=changed(L, **still_ones("4.bias")) | gradients_of("4.bias")),
        run(layers=changed(L, **{"zero_gradients/4.bias": 0.5})),
    ],
    "optimizer_anew": [run({**S, **ROUNDS}, setup=adam())],
    "target_seen": [run(S | tokens(here=1.0))],
    "no_step": [run(layers=layer_columns(still=["2.weight"]))],
    "nonfinite_input": [run(changed(S, bad_rows=at(50, 1.0), bad_row_unused=0.0))],
    "precision_underflow": [
        run(layers=by_weight("zero_gradients", zeros, zeros, 0.0), setup=replace(SETUP, half=True))
        for zeros in (0.0, 0.3)
    ],
    "loss_maximised": [run(setup=replace(with_options(maximize=1.0), loss=""))],
    "no_nonlinearity": [run(setup=replace(SETUP, linear_pairs=(("0", "2"),)))],
    "softmax_twice": [run(setup=replace(SETUP, before_loss="log_softmax"))],
    "batchnorm_eval": [
        run(
            setup=replace(
                SETUP,
                layers={"1": Layer(("BatchNorm2d", "_BatchNorm"), False)},
                frozen=("1.weight", "1.bias"),
            )
        )
    ],
    "input_scale": [
        run(changed(S, input_rms=128.0)),
        run(
            changed(S, input_rms=128.0, loss=S["loss"] + 0.5),
            setup=replace(SETUP, input_normalised=True),
        ),
    ],
    "input_offset": [run(changed(S, input_mean=30.0), setup=replace(SETUP, input_normalised=True))],
    "clipping_always": [run(changed(S, grad_norm_at_step=0.005), setup=adam())],
    "class_imbalance": [
        run(layers=labels(900.0, *[100.0] * 9)),
        run(
            changed(S, loss=S["loss"] + 1.5),
            labels(900.0, *[100.0] * 9),
            setup=replace(SETUP, loss_weighted=True),
        ),
        run(layers=labels(900.0)),
        run(layers=labels(900.0), setup=replace(SETUP, loss="BinaryCrossEntropyBackward")),
    ],
    "corrupt_batch": [run(changed(spikes(share=0.2), labels=1.0))],
    "loss_sum": [run(changed(S, loss=32 * S["loss"]), setup=SUM)],
    "momentum_high": [run(setup=with_options(momentum=0.99))],
    "label_noise": [
        *(run(changed(S, loss_over=share)) for share in (0.03, 0.06)),
        validated(0.12, changed(S, loss_over=0.03)),
        run(changed(S, loss=0.8, loss_over=0.06, loss_median=1.0)),
        validated(0.3, changed(S, loss_over=0.06)),
    ],
    "overfitting": [valid(2, 1, 0.9, 1.02, 1.02)],
    "target_trained": [run(setup=replace(SETUP, target_trained=True))],
    "unregistered_layers": [run(layers=strangers(same=2.0))],
    "outlier_sample": [run(spikes(share=0.9, height=1.2))],
    "input_constant": [run(changed(S, input_rms=0.01))],
    "labels_random": [unlabelled(loss=FLAT)],
    "weight_decay_high": [
        run(
            changed(S, lr=0.1),
            by_weight("weight_rms", *[0.07 * np.exp(-np.arange(ROWS) / 5)] * 3),
            with_options(momentum=0.9, weight_decay=0.1),
        )
    ],
    "batch_too_small": [run(changed(S, samples=n, labels=n, distinct_rows=n)) for n in (1.0, 4.0)],
    "activation_outlier": [outliers(k, np.where(EVERY < 5, 3.0, 7.0)) for k in (110.0, 2000.0)],
}
"""Runs with what may be intended or harmless."""


def cosine(loss: np.ndarray) -> dict[str, np.ndarray]:
    return changed(S, loss=loss, lr=0.1 * np.cos(np.linspace(0, math.pi / 2, STEPS)))


def of_first(rms: float, mean: float, std: float, spread: float) -> dict[str, np.ndarray]:
    """Sizes of what the first layers get, which are seen at every 20th step."""
    is_seen = np.arange(STEPS) % 20 == 0
    sizes = {"rms": rms, "mean": mean, "std": std, "spread": spread}
    return {f"first_{name}": np.where(is_seen, size, np.nan) for name, size in sizes.items()}


DRAWN = np.random.default_rng(0).normal(0, 0.9, STEPS)
FROM_ZERO = np.r_[np.nan, 0.8 * np.ones(ROWS - 1)]
FROM_EQUAL = np.r_[0.0, 0.8 * np.ones(ROWS - 1)]
AFTER_100 = (np.arange(STEPS) >= 100) & (np.arange(STEPS) < 103)

HEALTHY: dict[str, History] = {
    "plain": run(),
    **{f"seed {seed}": run(step_columns(seed=seed), layer_columns(seed=seed)) for seed in (1, 2)},
    "cosine": run(cosine(S["loss"])),
    "hard samples that become fewer": run(changed(S, loss_over=np.linspace(0.2, 0.03, STEPS))),
    "a penalty that grows": run(
        changed(S, loss=np.maximum(S["loss"], 2.5)) | {"loss_mean": S["loss"]}
    ),
    "a loss over the number of batches": run(
        changed(S, loss=S["loss"] / 4, loss_max=S["loss_median"] * 4) | {"loss_mean": S["loss"]}
    ),
    "a first rise": run(changed(S, loss=np.where(np.arange(STEPS) < 4, 3.5, S["loss"]))),
    "one late spike": run(changed(S, loss=at(130, 2.5))),
    "few steps that raise their loss": critical(often=12),
    "He": run(layers=by_weight("weight_rms", *[1.41 / 8] * 3)),
    "inputs in 0 to 1": run(changed(S, input_mean=0.3, input_std=0.1, input_rms=0.32)),
    "pixels that the model divides by 255": run(
        changed(S, input_mean=100.0, input_std=20.0, input_rms=102.0) | of_first(0.4, 0.1, 0.4, 0.9)
    ),
    "rollouts from one state": run(changed(S, input_spread=0.0) | of_first(1.0, 0.0, 1.0, 0.8)),
    "numbers near 1 that the model standardises": run(
        changed(S, input_rms=1.0, input_spread=1e-3) | of_first(1.0, 0.0, 1.0, 1.0)
    ),
    "small weights that sines make up for": run(layers=by_weight("weight_rms", *[0.01] * 3)),
    "without labels": unlabelled(),
    "losses that differ from batch to batch": unlabelled(loss=0.5 * np.exp(DRAWN)),
    "a sum over pixels": of_pixels(),
    "a loss far from 0": unlabelled(loss=S["loss"] + 4, valid=(6, 5, 4.5, 4.2)),
    "a few batches again and again": unlabelled(checksum=np.arange(STEPS) % 30),
    "constant last layer": run(layers=by_weight("row_spread", 0.9, 0.9, FROM_EQUAL)),
    "a loss that is a sum over periods": run(changed(S, loss=5 * S["loss"])),
    "small gradients after a usual update": run(changed(S, grad_norm=at(1, 1e-4))),
    "a loss weighted by rewards": run(changed(S, loss=0.1 * STUCK)),
    "rewards over their mean": run(changed(S, loss=RISE) | {"negative_weights": np.ones(STEPS)}),
    "an unstable step": run(changed(S, loss_median=np.where(AFTER_100, 3.0, S["loss_median"]))),
    "a low validation loss": validated(0.1, S),
    "zero last layer": run(layers=by_weight("row_spread", 0.9, 0.9, FROM_ZERO)),
    "weights of queries": run(layers=by_weight("gradient_rms", 1e-5, 0.01, 0.01)),
    "accumulation": run(changed(S, updates=(np.arange(STEPS) % 4 == 3).astype(float))),
    "some clipping": run(changed(S, grad_norm_at_step=np.minimum(S["grad_norm"], 1.0))),
    "a scaler's units": run(changed(S, grad_norm_at_step=S["grad_norm"] / 65536)),
    "hard samples": run(changed(S, loss_over=0.02)),
    "many classes": run(changed(S, classes=100.0, label_entropy=3.3, loss=S["loss"] * 2)),
    "texts": run(
        changed(S, input_rms=3000.0, labels=4096.0), setup=replace(SETUP, input_kind="integers")
    ),
    "a unit of a penalty": run(layers={**L, "dead/2": np.full(ROWS, 1.0)}),
    "targets out of range": run(
        changed(S, loss=20 * S["loss"], loss_median=20 * S["loss_median"], loss_over=0.0)
    ),
    "a loss that others raise": run(changed(S, loss=RISE, grad_norm=1e-4, grad_norm_at_step=1e-4)),
    "a small last batch": run(
        {**spikes(share=0.9), "samples": np.where(np.arange(STEPS) % 20 == 0, 3.0, 32.0)}
    ),
    "rarely used expert": experts(0.01, 0.02, 1e-4, 0.01),
    "an expert that is used once": experts(0.01, 0.02, AT_LAST * 0.01, 0.01),
    "weights that grow": run(layers=first_updates(growth=3.0)),
    "a large first update": run(changed(S, loss=at(2, 6.0)), first_updates(growth=1.5)),
    "a small space of states": run(
        changed(S, distinct_rows=12.0, row_rms_median=np.arange(STEPS) % 12.0 + 1)
    ),
    "batches of one class in turn": run(
        changed(S, label_entropy=0.0) | {"label_mean": np.arange(STEPS) % 2.0}
    ),
    "updates by another method": run(changed(S, updates=0.0)),
    "an adversary": run(changed(S, loss=RISE), {**L, **ADVERSARY}),
    "warm-up": run(
        changed(S, loss=STUCK - 0.15, lr=np.linspace(0, 1e-3, STEPS)),
        by_weight("update_rms", *[1e-6] * 3),
    ),
    "validation": valid(2, 1, 0.8, 0.7, 0.72),
    "a rise that doesn't last": valid(2, 1.0, *[0.5] * 20, 0.58, 0.58),
    "saturates late": run(layers={**L, "saturated/0": np.linspace(0, 0.9, ROWS)}),
    "sum with Adam": run(
        changed(S, loss=32 * S["loss"]), setup=replace(adam(), loss_reduction="sum")
    ),
    "decay": run(setup=with_options(momentum=0.9, weight_decay=5e-4)),
    "warm-up from nothing": run(changed(S, loss=STUCK, lr=1e-5 * 1.03 ** np.arange(STEPS))),
    "weights that a penalty has shrunk": run(
        {name: each[:90] for name, each in changed(S, loss=STUCK).items()},
        by_weight("weight_rms", *[0.07 * np.linspace(1, 0.1, ROWS)] * 3) | by_weight_update(0.05),
    ),
    "adapters behind a frozen network": run(
        setup=replace(SETUP, linear_pairs=(("0", "2"),), is_linear=True, frozen=("1.w",))
    ),
    "adapters": run(
        changed(S, loss=at(2, 6.0)), first_updates(growth=3.0), replace(SETUP, frozen=("1.w",))
    ),
    "a plateau at the start": run(
        {name: each[:60] for name, each in changed(S, loss=STUCK).items()},
        by_weight("update_rms", *[0.005] * 3),
    ),
    "fine-tuning": run(
        changed(S, loss=0.4 + 0 * S["loss"]), by_weight("update_rms", *[1e-6] * 3)
    ),
    "regression": run(regression(), setup=SQUARED),
    "regression of large targets": run(regression(1e4, 1e4), setup=SQUARED),
    "a schedule that ends near zero": run(
        changed(S, lr=0.1 * np.maximum(np.cos(np.linspace(0, 1.57, STEPS)), 1e-5))
    ),
    "an optimizer without a state": run(
        {**S, "stateless": np.ones(STEPS)}, setup=with_options(momentum=0.0)
    ),
    "words": run(layers=dense_labels(0.4, 0.02)),
    "a discriminator that is trained": run(layers=strangers()),
    "updates that become usual": updates(_0=np.where(EVERY < 2, 1.0, 0.02), _2=0.01, _4=0.01),
    "a weight that begins at zero": updates(_0=np.r_[np.nan, 1 / EVERY[1:]], _2=0.01, _4=0.01),
    "all weights move far at first": updates(_0=FIRST * 0.5, _2=FIRST * 0.4, _4=FIRST * 0.4),
    "scores of attention": heads(STEADY, np.linspace(0, 60, STEPS), np.full(STEPS, np.nan)),
    "single large scores": heads(np.where(EVERY % 9, STEADY, 200.0)),
    "sharp heads": heads(3 / GROWS, kind="AttentionEntropy"),
    "certain outputs": outputs(2 / GROWS, S["loss"]),
    "large gradients without a spike": spike_after(4.0, steps=0),
    "a bad batch after large gradients": spike_after(4.0, steps=2),
    "a spike with a usual beta2": spike_after(4.0, beta2=0.95),
    "outliers of all channels": outliers(500.0, EVERY % 7.0),
    "one step": run(step_columns(1)),
    "two steps": run(step_columns(2)),
}  # fmt: skip


def alarms(history: History) -> list[Finding]:
    return [finding for finding in diagnose(history) if finding.is_alarm]


def test_every_rule_has_runs() -> None:
    assert {rule.fault for rule in RULES} == FAULTY.keys() | NOTICED.keys()
    assert len(RULES) == 65


@pytest.mark.parametrize("name", HEALTHY)
def test_silence_on_healthy_runs(name: str) -> None:
    assert not alarms(HEALTHY[name])


def test_hard_samples_and_small_losses_arent_noticed() -> None:
    for name in ("hard samples that become fewer", "a loss over the number of batches"):
        assert not diagnose(HEALTHY[name])


@pytest.mark.parametrize(
    ("fault", "place"), [(fault, n) for fault, runs in FAULTY.items() for n in range(len(runs))]
)
def test_a_fault_is_named_first(fault: str, place: int) -> None:
    found = alarms(FAULTY[fault][place])
    assert found
    assert found[0].fault == fault
    assert all(each.explained_by for each in found if each.fault != fault)


@pytest.mark.parametrize(
    ("fault", "place"), [(fault, n) for fault, runs in NOTICED.items() for n in range(len(runs))]
)
def test_a_notice_is_no_alarm(fault: str, place: int) -> None:
    found = diagnose(NOTICED[fault][place])
    assert fault in [each.fault for each in found]
    assert not any(each.is_alarm for each in found)


def test_large_inputs_outputs_and_targets_are_told_apart() -> None:
    for fault, place, other in (
        ("input_offset", 2, "input_constant"),
        ("exploding_gradients", 2, "target_scale"),
    ):
        assert other not in [each.fault for each in diagnose(FAULTY[fault][place])]


@pytest.mark.slow
def test_what_findings_say() -> None:
    faults = {rule.fault for rule in RULES}
    histories = [each for runs in (FAULTY, NOTICED) for found in runs.values() for each in found]
    for finding in (finding for history in histories for finding in diagnose(history)):
        assert finding.advice.endswith(".")
        assert not finding.title.endswith(".")
        assert {*finding.others} <= faults
        assert 0 <= finding.step < STEPS
        assert finding == from_plain(Finding, value_of(encoded(finding)), "it")
        for one in finding.evidence:
            assert one.value > one.limit if one.is_above else one.value < one.limit, finding


PLACES = {
    "optimizer_misses": ("4.weight",),
    "dead_units": ("2",),
    "saturated_units": ("0",),
    "symmetric_init": ("2.weight",),
    "vanishing_gradients": ("0.weight", "2.weight"),
    "exploding_gradients": WEIGHTS,
    "expert_unused": ("experts.2",),
    "update_large": ("0.weight",),
    "attention_logits": ("1.attention.head 1",),
    "entropy_collapse": ("1.attention.head 1",),
    "second_moment_old": ("0.weight", "2.weight"),
    "batchnorm_eval": ("1",),
    "no_nonlinearity": ("0", "2", "4"),
}


@pytest.mark.parametrize("fault", PLACES)
def test_layers(fault: str) -> None:
    assert alarms(FAULTY[fault][0])[0].where == PLACES[fault]


@pytest.mark.parametrize(
    ("fault", "place", "step"),
    [
        ("nonfinite_input", 0, 50),
        ("outlier_sample", 0, 70),
        ("outlier_sample", 2, 100),
        ("corrupt_batch", 0, 70),
        ("corrupt_batch", 1, 100),
        ("lr_too_high", 0, 4),
        ("lr_too_high", 1, 4),
        ("nonfinite_target", 0, 50),
        ("nonfinite_loss", 1, 61),
        ("zero_grad_missing", 0, 1),
        ("update_large", 1, 0),
        ("attention_logits", 1, 101),
        ("second_moment_old", 0, 100),
    ],
)
def test_first_steps(fault: str, place: int, step: int) -> None:
    assert alarms(FAULTY[fault][place])[0].step == step


def test_samples() -> None:
    bad = run(
        changed(S, bad_rows=at(50, 2.0), loss=at(50, math.nan))
        | {"bad_row": np.where(np.arange(STEPS) == 50, 5.0, np.nan)}
    )
    assert alarms(bad)[0].samples == ("5 of the batch",)
    largest = f"{int(S['row_largest'][70])} of the batch"
    assert alarms(FAULTY["outlier_sample"][0])[0].samples == (largest,)
    assert alarms(FAULTY["outlier_sample"][2])[0].samples == ("7 of the batch",)


def test_samples_by_the_names_of_the_user() -> None:
    history = run(spikes(share=0.3))
    history.spikes[100] = Spike(18.0, suspects=(Suspect(3, "cat.png", 0.99), Suspect(7, "dog.png")))
    found = alarms(history)[0]
    assert (found.fault, found.samples) == ("outlier_sample", ("cat.png",))
    assert found.evidence[1].value == 0.99
    history.spikes[70] = Spike(1.0, suspects=(Suspect(3, "cat.png"), Suspect(7, "dog.png")))
    history.facts |= run(changed(S, row_rms_max=at(70, 50.0), row_largest=at(70, 7.0))).facts
    assert alarms(history)[0].samples == ("dog.png",)


def test_causes_and_consequences() -> None:
    table = {**L, "dead/0": np.full(ROWS, 0.9)}
    found = alarms(run(changed(S, loss=STUCK, input_rms=200.0), table))
    assert [(each.fault, each.explained_by) for each in found] == [
        ("input_scale", ""),
        ("dead_units", "input_scale"),
        ("labels_random", "input_scale"),
    ]


def test_gradients_that_are_zero_follow_from_dead_units() -> None:
    names = [*SHAPES][:-1]
    still = {name: each for at in names for name, each in still_ones(at).items()}
    table = changed(L, **still) | gradients_of(*names) | {"dead/2": np.ones(ROWS)}
    found = alarms(run(changed(S, loss=STUCK), table))
    assert [(each.fault, each.explained_by) for each in found] == [
        ("dead_units", ""),
        ("no_gradient", "dead_units"),
        ("labels_random", "dead_units"),
    ]


def test_what_is_needed() -> None:
    assert not diagnose(History())
    lacking = unasked(History())
    assert lacking.keys() == {rule.fault for rule in RULES}
    assert "optimizer" in lacking["optimizer_misses"][0]
    known = unasked(run())
    expected = {
        *("overfitting", "samples_mixed", "constant_output", "saturated_units", "padding_in_loss"),
        *("update_large", "attention_logits", "second_moment_old", "entropy_collapse"),
        *("activation_outlier", "groups_oppose", "posterior_collapse"),
    }
    assert known.keys() == expected
    assert "valid_loss" in known["overfitting"][0]


def test_groups_of_the_setup() -> None:
    groups = (
        ParameterGroup({"momentum": 0.5}, ()),
        ParameterGroup({"momentum": 0.999}, tuple(SHAPES)),
    )
    found = diagnose(run(setup=replace(SETUP, groups=groups)))
    assert [each.fault for each in found] == ["momentum_high"]


def test_parameters_of_another_optimizer_are_not_missed() -> None:
    assert not alarms(run(setup=replace(SETUP, missed=("4.weight",))))


def test_what_holds_no_longer_is_no_fault() -> None:
    layers = layer_columns(still=["0.weight", "2.weight"])
    history = run(layers=layers, setup=replace(SETUP, missed=("0.weight",)))
    history.setups[40] = SETUP
    assert not alarms(history)
    history.setups[80] = replace(SETUP, missed=("2.weight",))
    assert [(each.step, each.where) for each in alarms(history)] == [(80, ("2.weight",))]
