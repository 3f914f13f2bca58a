"""The callback of transformers' Trainer: its values, its place in the Trainer, its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradlens
from gradlens.integrations.transformers import CockpitCallback
from gradlens.messages import GradlensWarning
from gradlens.quantities import (
    Alpha,
    Distance,
    GradCovariance,
    GradNorm,
    Loss,
    MeanGSNR,
    NormTest,
    OutputNorm,
    Quantity,
    UpdateSize,
)
from gradlens.quantities.presets import configuration
from gradlens.torch_private import forward_hooks
from tests.cases.records import assert_same_records
from tests.cases.steps import tracked_backward
from tests.cases.whole_networks import gpt2

pytestmark = [
    pytest.mark.slow,
    # Of transformers and peft, about their own names.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]

T = 6
QUANTITIES: tuple[type[Quantity], ...] = (
    Loss,
    GradNorm,
    NormTest,
    MeanGSNR,
    GradCovariance,
    UpdateSize,
    Distance,
    Alpha,
)


def texts(count: int) -> list[dict[str, Tensor]]:
    """Texts with different numbers of labelled tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        words = torch.randint(11, (T,), generator=generator)
        labels = words.clone()
        labels[: 1 + number % 4] = -100
        found.append({"input_ids": words, "labels": labels})
    return found


def trainer_of(
    folder: Path,
    batch_size: int = 4,
    parts: int = 1,
    texts_: int = 24,
    network: Callable[[], nn.Module] = gpt2,
    callbacks: list[TrainerCallback] | None = None,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "seed": 3,
    }
    options_of_trainer = {
        name: options.pop(name) for name in ("compute_loss_func",) if name in options
    }
    arguments |= options
    return kind(
        network(),
        TrainingArguments(
            str(folder),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=parts,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=texts(texts_),  # type: ignore[arg-type]
        eval_dataset=texts(4),  # type: ignore[arg-type]
        callbacks=callbacks,
        **options_of_trainer,
    )


def tracked(trainer: Any, *quantities: Quantity, **options: Any) -> CockpitCallback:
    chosen = quantities or tuple(kind() for kind in QUANTITIES)
    callback = CockpitCallback(trainer, chosen, **options)
    trainer.add_callback(callback)
    return callback


def trained(
    folder: Path, *quantities: Quantity, log: bool = True, **options: Any
) -> tuple[Any, CockpitCallback]:
    """A trainer, after a training with a callback."""
    trainer = trainer_of(folder, **options)
    callback = tracked(trainer, *quantities, log=log)
    trainer.train()
    return trainer, callback


def values(callback: CockpitCallback) -> dict[int, dict[str, Any]]:
    return callback.cockpit.get_output()


CLOSE = 2e-4, 2e-4
"""Relative and absolute tolerances of values in single precision."""


def parameters(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def assert_left_as_it_was(trainer: Any) -> None:
    """Neither the accelerator nor the model has anything of the callback's."""
    assert "backward" not in vars(trainer.accelerator)
    hooks = [hook for m in trainer.model.modules() for hook in forward_hooks(m)]
    assert not [hook for hook in hooks if type(hook).__module__.startswith("gradlens")]


# Values -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_batches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return values(trained(tmp_path_factory.mktemp("whole"), batch_size=8)[1])


@pytest.mark.parametrize(("batch_size", "parts"), [(4, 2), (2, 4)])
def test_micro_batches_have_the_values_of_the_whole_batch(
    batch_size: int, parts: int, whole_batches: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    _, callback = trained(tmp_path, batch_size=batch_size, parts=parts)
    assert_same_records(values(callback), whole_batches, *CLOSE)


def test_values_are_those_of_a_plain_loop(
    whole_batches: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, 8)
    model, optimizer = trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    cockpit = gradlens.Cockpit(model, [kind() for kind in QUANTITIES])
    for step, batch in enumerate(trainer.get_train_dataloader()):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - step / 3)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        tracked_backward(cockpit, step, loss, optimizer=optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    cockpit.close()
    assert_same_records(whole_batches, cockpit.get_output(), *CLOSE)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    # 14 texts are 3 groups of 2 × 2 and one of 2.
    "the last group is short": {"batch_size": 2, "parts": 2, "texts_": 14, "max_steps": 5},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1, "parts": 2},
    "checkpointed activations": {"gradient_checkpointing": True},
}


def mean_over_tokens(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


CASES["compute_loss_func"] = {"compute_loss_func": mean_over_tokens, "parts": 2}


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_and_values_are_those_of_the_logs(case: str, tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, **CASES[case])
    plain.train()
    trainer, callback = trained(tmp_path, **CASES[case])
    for one, other in zip(parameters(trainer), parameters(plain), strict=True):
        assert torch.equal(one, other)
    found = values(callback)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == trainer.args.max_steps
    tolerance = 1e-2 if case == "bf16" else 1e-5
    for step, log in enumerate(logs):
        assert found[step]["Loss"] == pytest.approx(log["loss"], rel=tolerance)
        assert log["gradlens/Loss"] == found[step]["Loss"]
        norm = math.hypot(*found[step]["GradNorm"].values())
        assert norm == pytest.approx(log["grad_norm"], rel=tolerance)
        assert found[step]["NormTest"] > 0
    assert_left_as_it_was(trainer)


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
    return peft.get_peft_model(gpt2(), config)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
def test_adapters_are_tracked_alone(tmp_path: Path) -> None:
    trainer, callback = trained(tmp_path, parts=2, network=lora)
    assert callback.cockpit.parameters
    assert all("lora" in name for name in callback.cockpit.parameters)
    log = trainer.state.log_history[0]
    assert log["gradlens/GradNorm"] == pytest.approx(log["grad_norm"], rel=1e-5)
    assert log["gradlens/NormTest"] > 0


def test_irregular_schedules_with_evaluations_in_between(tmp_path: Path) -> None:
    chosen = lambda step: step in (0, 1, 4)  # noqa: E731
    quantities = OutputNorm(chosen, layers=("lm_head",)), NormTest(chosen)
    options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1}
    _, callback = trained(tmp_path, *quantities, **options)
    history = callback.cockpit.history
    assert [*history["OutputNorm"]] == [*history["NormTest"]] == [0, 1, 4]
    assert not history.notes


# Logs -------------------------------------------------------------------------------------------


class Reports(TrainerCallback):
    """What a callback gets that reports logs elsewhere."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, *arguments: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_reports_contain_the_latest_values(tmp_path: Path) -> None:
    reports, quantities = Reports(), (NormTest(), GradNorm(lambda step: step == 0), UpdateSize())
    options = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    _, callback = trained(tmp_path, *quantities, callbacks=[reports], **options)
    found = values(callback)
    own = [{k: v for k, v in log.items() if k.startswith("gradlens/")} for log in reports.logs]
    logged = [each for each, log in zip(own, reports.logs, strict=True) if "loss" in log]
    others = [each for each, log in zip(own, reports.logs, strict=True) if "loss" not in log]
    assert [each["gradlens/NormTest"] for each in logged] == [
        found[step]["NormTest"] for step in (1, 3, 5)
    ]
    assert ["gradlens/GradNorm" in each for each in logged] == [True, False, False]
    assert all("gradlens/UpdateSize" in each for each in logged)
    assert others
    assert not any(others)


def test_nothing_is_logged_without_log(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, NormTest(), log=False)
    assert not any("gradlens" in key for log in trainer.state.log_history for key in log)


# Trainings that end early, or come again --------------------------------------------------------


class Failing(nn.Module):
    """Raises an exception in the forward or backward pass number ``at``."""

    def __init__(self, error: type[BaseException], at: int, backward: bool) -> None:
        super().__init__()
        self.error, self.left, self.backward = error, at, backward

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and self.backward:
            x.register_hook(self._fail)
        elif self.left == 0:
            self._fail()
        return x

    def _fail(self, *_: object) -> None:
        raise self.error("for a test")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_leaves_everything_as_it_was(
    error: type[BaseException], backward: bool, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, parts=2)
    trainer.model.transformer.drop = Failing(error, 3, backward)
    callback = tracked(
        trainer, NormTest(), OutputNorm(layers=("lm_head",)), run=tmp_path / "run.jsonl"
    )
    with pytest.raises(error, match="for a test"):
        trainer.train()
    assert_left_as_it_was(trainer)
    assert [*gradlens.load_run(tmp_path / "run.jsonl")["NormTest"]] == [0]
    trainer.train()
    assert [*values(callback)] == [0, 1, 2]
    assert [*gradlens.load_run(tmp_path / "run-2.jsonl")["NormTest"]] == [0, 1, 2]
    assert_left_as_it_was(trainer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_smaller_batch_size_is_found(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, batch_size=8, auto_find_batch_size=True)

    class OutOfMemory(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4 and trainer.state.global_step > 0:
                raise RuntimeError("CUDA out of memory.")
            return x

    trainer.model.transformer.drop = OutOfMemory()
    callback = tracked(trainer, NormTest(), run=tmp_path / "run.jsonl")
    trainer.train()
    assert [*values(callback)] == [0, 1, 2]
    assert callback.cockpit.history.coverages[0].samples in (4, 6, 7)
    assert (tmp_path / "run-2.jsonl").exists()
    assert_left_as_it_was(trainer)


def test_a_resumed_training_equals_an_unbroken_one(tmp_path: Path) -> None:
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    unbroken = trainer_of(tmp_path / "a", **saving)
    expected = tracked(unbroken, run=tmp_path / "unbroken.jsonl")
    unbroken.train()
    resumed = trainer_of(tmp_path / "b", **saving)
    found = tracked(resumed, run=tmp_path / "run.jsonl")
    (tmp_path / "run.jsonl").write_bytes((tmp_path / "unbroken.jsonl").read_bytes())
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    of_resumed, of_unbroken = values(found), values(expected)
    del of_unbroken[1]["Alpha"]
    assert "continued from a checkpoint" in of_resumed[1].pop("Alpha").reason
    assert_same_records(of_resumed, of_unbroken, 0, 0)
    for one, other in zip(parameters(resumed), parameters(unbroken), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_without_state_is_said(tmp_path: Path) -> None:
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_of(tmp_path, **saving).train()
    trainer = trainer_of(tmp_path, **saving | {"max_steps": 4})
    callback = tracked(trainer, NormTest())
    with pytest.warns(gradlens.GradlensWarning, match=r"checkpoint-2.gradlens.pt isn't there"):
        trainer.train(resume_from_checkpoint=True)
    assert [*values(callback)] == [2, 3]


# What is refused --------------------------------------------------------------------------------


REFUSED = {
    "is_deepspeed_enabled": (True, "DeepSpeed divides the model's parameters"),
    "is_fsdp_enabled": (True, "FSDP divides the model's parameters"),
    "model_wrapped": (nn.DataParallel(nn.Linear(1, 1)), "DataParallel copies the model"),
}


@pytest.mark.parametrize("attribute", REFUSED)
def test_divided_and_copied_models_are_refused(
    attribute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path)
    callback = tracked(trainer, NormTest())
    value, reason = REFUSED[attribute]
    monkeypatch.setattr(trainer, attribute, value)
    with pytest.raises(ValueError, match=reason):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)


class Regularised(Trainer):
    """Runs a backward pass for the loss, and another one for a term that has no samples."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        prepared = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, prepared, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        self.accelerator.backward(sum(p.square().sum() for p in model.parameters()))
        return loss.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("chosen", [0, None])
def test_of_several_backward_passes_the_first_one_is_tracked(
    chosen: int | None, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path, parts=2, kind=Regularised)
    callback = tracked(trainer, backward_pass=chosen)
    warned = pytest.warns(GradlensWarning, match="several backward passes")
    with warned if chosen is None else nullcontext():
        trainer.train()
    found = values(callback)
    for step, log in enumerate(trainer.state.log_history[:3]):
        assert found[step]["Loss"] == pytest.approx(log["loss"], rel=1e-4)
        assert math.isfinite(found[step]["NormTest"])


class Answers(nn.Module):
    """Classifies its input, whose first number is that of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Numbered(CockpitCallback):
    """Keeps the batches, beside the numbers that the sampler has given."""

    def context_arguments(self, loss: Tensor, batch: Any) -> dict[str, Any]:
        arguments = super().context_arguments(loss, batch)
        numbers = list(arguments.get("info", {}).get("ids", ()))
        self.seen = [*getattr(self, "seen", ()), (batch["x"][:, 0].tolist(), numbers)]
        return arguments


def of_answers(folder: Path, **options: Any) -> Any:
    trainer = trainer_of(folder, network=options.pop("network", Answers), **options)
    trainer.train_dataset = [
        {"x": torch.tensor([float(n), 1.0, n % 3]), "labels": n % 2} for n in range(10)
    ]
    return trainer


def test_samples_are_known_by_their_numbers_in_the_data_set(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 3}
    options = {"max_steps": 7, "parts": 2, "batch_size": 3, **saved}
    plain = of_answers(tmp_path / "plain", **options)
    plain.train()
    trainer = of_answers(tmp_path / "tracked", **options)
    trainer.add_callback(callback := Numbered(trainer, [NormTest()], ids=True))
    trainer.train()
    assert all(one == other for one, other in callback.seen)
    assert [len(ids) for _, ids in callback.seen[:4]] == [3, 3, 3, 1]
    samples = callback.cockpit.history.samples
    assert sorted(samples.ids) == [*range(10)]
    for one, other in zip(parameters(trainer), parameters(plain), strict=True):
        assert torch.equal(one, other)
    assert_left_as_it_was(trainer)
    assert "training_step" not in vars(trainer)
    resumed = of_answers(tmp_path / "tracked", **options)
    resumed.add_callback(callback := Numbered(resumed, [NormTest()], ids=True))
    resumed.train(resume_from_checkpoint=str(tmp_path / "tracked" / "checkpoint-3"))
    assert all(not other or one == other for one, other in callback.seen)
    assert any(ids for _, ids in callback.seen)


def test_what_is_missing_is_said_for_a_callback(tmp_path: Path) -> None:
    class Root(Answers):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x, labels)["loss"].sqrt()}

    trainer = of_answers(tmp_path, network=Root, max_steps=2)
    trainer.add_callback(callback := CockpitCallback(trainer, [Alpha()]))
    with pytest.warns(GradlensWarning, match=r"\(by context_arguments of a CockpitCallback"):
        trainer.train()
    reason = callback.cockpit.history["Alpha"][0].reason
    assert "to the context (by context_arguments of a CockpitCallback" in reason


def test_a_callback_that_was_not_added_is_said(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    CockpitCallback(trainer)
    with pytest.warns(GradlensWarning, match="add_callback"):
        trainer.train()


def test_mistakes_are_named_when_it_is_made(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    with pytest.raises(TypeError, match="takes the trainer that it is added to"):
        CockpitCallback(trainer.model, [NormTest()])
    with pytest.raises(TypeError, match="loss_func"):
        CockpitCallback(trainer, [NormTest()], loss_func=nn.MSELoss())
    with pytest.raises(TypeError):
        CockpitCallback(trainer, NormTest())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="economy"):
        CockpitCallback(trainer, "economic")


def test_a_preset_is_given_by_its_name(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    callback = CockpitCallback(trainer, "economy")
    trainer.add_callback(callback)
    trainer.train()
    assert len(callback.cockpit.quantities) == len(configuration("economy"))
