"""Names that are used elsewhere for what a cockpit has, with its own names, for error messages."""

from __future__ import annotations

_SCHEDULE = (
    'those of the quantities, as in Cockpit(model, gradlens.configuration("economy", '
    "gradlens.schedules.linear(10)))"
)
_STEP = "its context, as in `with cockpit(step, loss=loss): loss.backward()`"
_LOSS_FUNCTION = "loss_function"
_PRESET = "quantities, as in quantities='economy'"
_RUN = "run, as in run='run.jsonl'"
_INFO = "info, as in info={'individual_losses': ..., 'ids': ...}"
_LOG = "cockpit.log(step, name=value)"

ATTRIBUTES = {
    **dict.fromkeys(("step", "track", "update"), _STEP),
    **dict.fromkeys(("add_scalar", "log_metric", "log_metrics"), _LOG),
    **dict.fromkeys(("results", "values", "metrics", "data"), "cockpit.history"),
    "add": "the list of quantities, as in Cockpit(params, [*quantities, quantity])",
    "diagnose": "gradlens.diagnose(cockpit)",
    "output": "cockpit.get_output(), or cockpit.history",
    "params": "cockpit.parameters, which are by name",
    "plot": "gradlens.CockpitPlotter().plot(cockpit)",
    "report": "Cockpit(..., run='run.jsonl'), and `gradlens report run.jsonl`",
    "save": "cockpit.write(path) for values, and cockpit.state_dict() for checkpoints",
    "summary": "Cockpit(..., run='run.jsonl'), and `gradlens summary run.jsonl`",
}
"""Of a cockpit."""

ARGUMENTS = {
    **dict.fromkeys(("loss_fn", "criterion", "loss_func"), _LOSS_FUNCTION),
    **dict.fromkeys(("preset", "config", "configuration"), _PRESET),
    **dict.fromkeys(("every", "interval", "schedule", "track_schedule", "log_freq"), _SCHEDULE),
    **dict.fromkeys(("log_dir", "logdir", "logpath", "path", "file"), _RUN),
    **dict.fromkeys(("loss", "optimizer", "batch_size", "scaler"), _STEP),
    "model": "params, or the first argument, as in Cockpit(model)",
}
"""Of what makes a cockpit."""

CONTEXT_ARGUMENTS = {
    **dict.fromkeys(("individual_losses", "losses", "outputs", "ids"), _INFO),
    **dict.fromkeys(("lr", "learning_rate", "epoch", "accuracy"), _LOG),
    **dict.fromkeys(("loss_fn", "criterion", "loss_function"), "Cockpit(..., loss_function=...)"),
    "step": "global_step, or the first argument, as in cockpit(step, loss=loss)",
}
"""Of a cockpit's context."""
