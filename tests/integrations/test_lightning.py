"""Trainings by Lightning's Trainer have the values of plain loops, and are left as they are."""

from __future__ import annotations

import csv
import importlib
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import gradlens
from gradlens import quantities
from gradlens.messages import GradlensWarning
from gradlens.quantities import Quantity
from tests.cases.processes import free_port, run_processes
from tests.cases.records import assert_same_histories, assert_same_records
from tests.cases.references import flat, per_sample_gradients_of_losses
from tests.integrations.without_torchvision import lightning

from gradlens.integrations.lightning import CockpitCallback  # isort: skip
from tests.cases.steps import tracked_backward

LIGHTNINGS_OWN = (
    ".*does not have many workers",
    ".*smaller than the logging interval",
    ".*isinstance.treespec, LeafSpec",
    "`training_step` returned `None`",
    "Checkpoint directory .* exists and is not empty",
)
"""Warnings of Lightning's, which it gives without gradlens, too."""

pytestmark = [
    pytest.mark.slow,
    *(pytest.mark.filterwarnings(f"ignore:{text}") for text in LIGHTNINGS_OWN),
]

SAMPLES, STEPS = 12, 4


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES * STEPS, 6, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(3, (SAMPLES * STEPS,), generator=generator))


def loader(batch_size: int = SAMPLES, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    return DataLoader(data(dtype), batch_size)


class Module(lightning.LightningModule):
    """Raises an exception at batch 2, in ``fails_in`` if that is given."""

    fails_in = ""
    error: type[BaseException] = ArithmeticError
    momentum = 0.9

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.loss_function = nn.CrossEntropyLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        loss = self.loss_function(self.network(inputs), labels)
        self.fail("forward", batch_idx)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.fail("backward", self.trainer.fit_loop.batch_idx)

    def fail(self, place: str, batch_idx: int) -> None:
        if place == self.fails_in and batch_idx == 2:
            raise self.error

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class WithoutMomentum(Module):
    momentum = 0.0


class Skipping(Module):
    """Skips batch 1, in front of which there is nothing that the optimizer could remember."""

    momentum = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class PartlyCompiled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.network.compile(backend="aot_eager")


def tracked(*without: str) -> list[Quantity]:
    names = (
        "Loss GradNorm NormTest MeanGSNR GradCovariance GradHist1d UpdateSize Distance OutputNorm "
        "Alpha HessMaxEV"
    )
    return [getattr(quantities, name)() for name in names.split() if name not in without]


def trainer(*callbacks: Any, **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    few = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1}
    return lightning.Trainer(callbacks=[*callbacks], **{**few, **quiet, **options})


def same_state(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def hooks_on(module: nn.Module) -> list[Any]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        hook for m in module.modules() for name in tables for _, hook in getattr(m, name).items()
    ]


# Values -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A training by Lightning, and what a plain loop does to be the same."""

    module: type[Module] = Module
    parts: int = 1
    dtype: torch.dtype | None = None
    clip: float | None = None
    rtol: float = 0
    skipped: int | None = None
    without: tuple[str, ...] = ()

    @property
    def quantities(self) -> list[Quantity]:
        return tracked(*self.without)

    def new_module(self) -> Module:
        return self.module() if self.dtype is None else self.module().float()

    def loader(self, parts: int = 1) -> DataLoader[Any]:
        return loader(SAMPLES // parts, torch.float64 if self.dtype is None else torch.float32)

    @property
    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", 1024, enabled=self.dtype == torch.half)

    def fit(self, *callbacks: Any) -> Module:
        """The module, trained by Lightning."""
        options: dict[str, Any] = {"gradient_clip_val": self.clip}
        if self.dtype == torch.half:
            mixed = lightning.plugins.MixedPrecision
            options["plugins"] = mixed("16-mixed", "cpu", self.scaler)
        elif self.dtype == torch.bfloat16:
            options["precision"] = "bf16-mixed"
        module = self.new_module()
        fitting = trainer(*callbacks, accumulate_grad_batches=self.parts, **options)
        fitting.fit(module, self.loader(self.parts))
        return module

    def plain_loop(self) -> gradlens.History:
        """What a cockpit records in a plain loop, which isn't divided into parts."""
        module, scaler = self.new_module(), self.scaler
        optimizer = module.configure_optimizers()
        cockpit = gradlens.Cockpit(module, self.quantities)
        for step, (inputs, labels) in enumerate(self.loader()):
            if step == self.skipped:
                continue
            optimizer.zero_grad()
            enabled = self.dtype is not None
            with torch.autocast("cpu", self.dtype, enabled, cache_enabled=False):
                loss = module.loss_function(module.network(inputs), labels)
            with cockpit(step, loss=loss, optimizer=optimizer, scaler=scaler):
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), self.clip)
            scaler.step(optimizer)
            scaler.update()
        cockpit.close()
        return cockpit.history


OF_THE_LAST_PART = ("HessMaxEV",)
"""Curvature of a batch in parts is that of its last part."""
NEAR_EDGES = ("HessMaxEV", "GradHist1d")
"""Where values are rounded, elements near the edge of a histogram's bin may be in the next one."""

CASES = {
    "plain": Case(),
    "manual": Case(Manual),
    "two parts": Case(parts=2, rtol=1e-9, without=OF_THE_LAST_PART),
    "three parts": Case(parts=3, rtol=1e-9, without=OF_THE_LAST_PART),
    "16-mixed": Case(dtype=torch.half),
    "16-mixed, two parts": Case(parts=2, dtype=torch.half, rtol=1e-2, without=NEAR_EDGES),
    "16-mixed, manual": Case(Manual, dtype=torch.half),
    "bf16-mixed": Case(dtype=torch.bfloat16),
    "clipped": Case(clip=0.1),
    "partly compiled": Case(PartlyCompiled),
    "skipped batch": Case(Skipping, skipped=1, without=("Alpha",)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_are_those_of_a_plain_loop(case: Case) -> None:
    callback = CockpitCallback(case.quantities)
    module = case.fit(callback)
    assert_same_histories(callback.cockpit.history, case.plain_loop(), case.rtol)
    assert same_state(module, case.fit())


def test_the_last_group_of_an_epoch_may_be_short() -> None:
    """Loss and tests are those of its samples; the gradient is the smaller one that is trained on.

    Lightning divides the loss by three, though the last group of 8 batches has two.
    """
    callback = CockpitCallback(tracked(*OF_THE_LAST_PART))
    module = Module()
    trainer(callback, accumulate_grad_batches=3).fit(module, loader(SAMPLES // 2))
    history, plain = callback.cockpit.history, Module()
    optimizer = plain.configure_optimizers()
    for step, samples in enumerate([slice(0, 18), slice(18, 36), slice(36, 48)]):
        inputs, labels = data().tensors[0][samples], data().tensors[1][samples]
        pairs = zip(inputs[:, None], labels[:, None], strict=True)
        losses = [plain.loss_function(plain.network(x), y) for x, y in pairs]
        optimizer.zero_grad()
        gradients = flat(per_sample_gradients_of_losses(losses, plain))
        share = min(1.0, len(losses) / 18)
        loss = torch.stack(losses).mean()
        (share * loss).backward()
        mean = gradients.mean(0)
        spread = (gradients - mean).square().sum() / (len(losses) * (len(losses) - 1))
        expected = {
            "Loss": loss.item(),
            "NormTest": (spread / mean.square().sum()).sqrt().item(),
            "GradNorm": share * mean.norm().item(),
        }
        norms = torch.tensor([*history["GradNorm"][step].values()])
        found = {name: history[name][step] for name in expected} | {"GradNorm": norms.norm().item()}
        assert found == pytest.approx(expected, rel=1e-6)
        optimizer.step()


class ManualInPairs(Module):
    """Makes a step of the optimizer after every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Passing(CockpitCallback):
    """Passes to the context what a function makes of its arguments, the trainer and the batch."""

    def __init__(self, change: Callable[..., dict[str, Any]], *tracked: Quantity) -> None:
        super().__init__([*tracked])
        self.change = change

    def context_arguments(
        self, trainer: Any, pl_module: Any, loss: Tensor, batch: Any
    ) -> dict[str, Any]:
        arguments = super().context_arguments(trainer, pl_module, loss, batch)
        return self.change(arguments, trainer, batch)


def in_pairs(arguments: dict[str, Any], trainer: Any, batch: Any) -> dict[str, Any]:
    is_first = trainer.fit_loop.batch_idx % 2 == 0
    return {**arguments, "loss_scale": 0.5, "accumulating": is_first}


def test_batches_are_joined_under_manual_optimisation() -> None:
    """The step has the number of its first batch, and the values of a plain loop."""
    case = Case(without=OF_THE_LAST_PART)
    callback, module = Passing(in_pairs, *case.quantities), ManualInPairs()
    trainer(callback, max_epochs=1).fit(module, loader(SAMPLES // 2))
    plain = case.plain_loop()
    for name in ("Loss", "GradNorm", "NormTest", "MeanGSNR", "UpdateSize", "Distance", "Alpha"):
        expected = {2 * step: value for step, value in plain[name].items()}
        assert_same_records(recorded(callback.cockpit, name), expected, 1e-9)
    alone = ManualInPairs()
    trainer(max_epochs=1).fit(alone, loader(SAMPLES // 2))
    assert same_state(module, alone)


def test_a_step_whose_last_batch_has_no_loss_has_no_values() -> None:
    callback = CockpitCallback(tracked("Alpha", *OF_THE_LAST_PART))
    with pytest.warns(GradlensWarning, match="1 micro-batches of step 0 have no values"):
        trainer(callback, accumulate_grad_batches=2).fit(Skipping(), loader())
    assert [*callback.cockpit.history["NormTest"]] == [1]


def recorded(cockpit: Any, name: str) -> Mapping[int, Any]:
    return cockpit.history[name]


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_irregular_schedules_with_validations_in_between(manual: bool) -> None:
    """Layers are captured, and steps measured, at exactly the steps of the schedule."""

    def at(step: int) -> bool:
        return step in (1, 2, 6)

    class Trained(Manual if manual else Module):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            Module.training_step(self, batch, batch_idx)

    names = ("OutputNorm", "NormTest", "UpdateSize", "Alpha")
    cockpits = []
    for schedule in (at, None):
        given = [] if schedule is None else [schedule]
        callback = CockpitCallback([getattr(quantities, name)(*given) for name in names])
        trainer(callback, max_epochs=2, val_check_interval=1).fit(Trained(), loader(), loader())
        cockpits.append(callback.cockpit)
    irregular, regular = cockpits
    for name in names:
        expected = {step: recorded(regular, name)[step] for step in (1, 2, 6)}
        assert_same_records(recorded(irregular, name), expected, 0)


# Exceptions, and trainings that continue --------------------------------------------------------


@pytest.fixture
def _interrupts_as_before() -> Iterator[None]:
    """Lightning ignores further interrupts after the first one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts_as_before")
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_exceptions(place: str, error: type[BaseException], tmp_path: Path) -> None:
    """They leave as without a callback; nothing is left behind, and the training can go on."""

    def fail(*callbacks: Any) -> tuple[lightning.Trainer, Module, BaseException]:
        module, fitting = Module(), trainer(*callbacks)
        module.fails_in, module.error = place, error
        with pytest.raises(BaseException) as raised:  # noqa: PT011
            fitting.fit(module, loader())
        return fitting, module, raised.value

    callback = CockpitCallback(tracked(), run=tmp_path / "run.jsonl")
    fitting, module, found = fail(callback)
    assert type(found) is type(fail()[2])
    assert not hooks_on(module)
    assert gradlens.History.load(tmp_path / "run.jsonl").steps == (0, 1)
    module.fails_in = ""
    fitting.fit(module, loader())
    assert gradlens.History.load(tmp_path / "run.jsonl").steps[:3] == (0, 1, 2)
    assert not hooks_on(module)


def unbroken(folder: Path, module: Module) -> gradlens.History:
    callback = CockpitCallback(tracked("Alpha"), run=folder / "unbroken.jsonl")
    trainer(callback, max_epochs=2).fit(module, loader())
    return gradlens.History.load(folder / "unbroken.jsonl")


def test_a_checkpoint_continues_the_run(tmp_path: Path) -> None:
    """Of a training that went on for some steps after the checkpoint was saved.

    Alpha waits for the next step then, and has no value.
    """
    run = tmp_path / "run.jsonl"
    saving = lightning.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    options = {"max_epochs": 2, "enable_checkpointing": True}
    trainer(CockpitCallback(tracked("Alpha"), run=run), saving, **options).fit(Module(), loader())
    (path,) = tmp_path.glob(f"step={STEPS}.ckpt")
    callback = CockpitCallback(tracked("Alpha"), run=run)
    trainer(callback, saving, **options).fit(Module(), loader(), ckpt_path=path)
    assert_same_histories(gradlens.History.load(run), unbroken(tmp_path, Module()))
    assert not callback.cockpit.history.notes


def test_a_second_fit_of_the_same_trainer_continues_the_run(tmp_path: Path) -> None:
    """Its optimizer begins anew, as without a callback."""
    callback = CockpitCallback(tracked("Alpha"), run=tmp_path / "run.jsonl")
    module, fitting = WithoutMomentum(), trainer(callback)
    fitting.fit(module, loader())
    fitting.fit_loop.max_epochs = 2
    fitting.fit(module, loader())
    history = gradlens.History.load(tmp_path / "run.jsonl")
    assert_same_histories(history, unbroken(tmp_path, WithoutMomentum()))


class Wider(WithoutMomentum):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def test_another_network_starts_anew() -> None:
    callback = CockpitCallback([quantities.Distance()])
    fitting = trainer(callback)
    fitting.fit(Module(), loader())
    fitting.fit_loop.max_epochs = 2
    with pytest.warns(gradlens.GradlensWarning, match=r"anew, since .*0.weight.* \[8, 6\]"):
        fitting.fit(Wider(), loader())
    assert callback.cockpit.history["Distance"][STEPS]["network.0.weight"] == 0


# Loops of other kinds ---------------------------------------------------------------------------


class ByLBFGS(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("chosen", [0, None])
def test_of_several_closures_the_first_one_is_tracked(chosen: int | None) -> None:
    callback, module = CockpitCallback(tracked(), backward_pass=chosen), ByLBFGS()
    warned = pytest.warns(GradlensWarning, match="several backward passes")
    with warned if chosen is None else nullcontext():
        trainer(callback).fit(module, loader())
    plain = ByLBFGS()
    optimizer, cockpit = plain.configure_optimizers(), gradlens.Cockpit(plain, tracked())
    for step, (inputs, labels) in enumerate(loader()):
        forwards, backwards = [cockpit.forward(step)], [cockpit]

        def closure() -> Tensor:
            optimizer.zero_grad()
            with forwards.pop() if forwards else nullcontext():  # noqa: B023
                loss: Tensor = plain.loss_function(plain.network(inputs), labels)  # noqa: B023
            is_first = bool(backwards)  # noqa: B023
            with backwards.pop()(step, loss=loss) if is_first else nullcontext():  # noqa: B023
                loss.backward()
            return loss

        optimizer.step(closure)
    cockpit.close()
    assert_same_histories(callback.cockpit.history, cockpit.history, 0)
    assert same_state(module, plain)


class Adversarial(lightning.LightningModule):
    """Two networks, each with its own optimizer; the generator's loss goes through both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        self.discriminator = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def losses(self, inputs: Tensor) -> Iterator[Tensor]:
        """That of the generator, and after its step that of the discriminator."""
        loss = nn.functional.binary_cross_entropy_with_logits
        ones = torch.ones(len(inputs), 1).double()
        yield loss(self.discriminator(self.generator(inputs)), ones)
        pairs = torch.cat([inputs, self.generator(inputs.flip(0)).detach()])
        yield loss(self.discriminator(pairs), torch.cat([ones, 0 * ones]))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for loss, optimizer in zip(self.losses(batch[0]), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        networks = (self.generator, self.discriminator)
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in networks], []


WITHOUT_LOSSES = ("Alpha",)
"""The losses of single samples are unknown, since a function computes the loss."""


def test_two_networks_with_an_optimizer_each() -> None:
    names = ("generator", "discriminator")
    callbacks = [
        CockpitCallback(tracked(*WITHOUT_LOSSES), module=name, backward_pass=number)
        for number, name in enumerate(names)
    ]
    module = Adversarial()
    trainer(*callbacks).fit(module, loader())
    plain = Adversarial()
    optimizers, _ = plain.configure_optimizers()
    networks = (plain.generator, plain.discriminator)
    cockpits = [gradlens.Cockpit(network, tracked(*WITHOUT_LOSSES)) for network in networks]
    for step, (inputs, _) in enumerate(loader()):
        losses = plain.losses(inputs)
        for cockpit, optimizer in zip(cockpits, optimizers, strict=True):
            with cockpit.forward(step):
                loss = next(losses)
            optimizer.zero_grad()
            tracked_backward(cockpit, step, loss, optimizer=optimizer)
            optimizer.step()
    for callback, cockpit in zip(callbacks, cockpits, strict=True):
        cockpit.close()
        assert_same_histories(callback.cockpit.history, cockpit.history, 0)
    assert same_state(module, plain)


# Loggers ----------------------------------------------------------------------------------------


def numbers(history: gradlens.History, name: str) -> dict[int, float]:
    """Those that exist."""
    return {step: value for step, value in history[name].items() if value == value}


def test_numbers_reach_loggers_under_their_own_steps(tmp_path: Path) -> None:
    table = lightning.loggers.CSVLogger(tmp_path, "csv", "")
    board = lightning.loggers.TensorBoardLogger(tmp_path, "board", "")
    callback = CockpitCallback(tracked(), prog_bar=("NormTest",))
    stopping = lightning.callbacks.EarlyStopping("gradlens/NormTest", check_on_train_epoch_end=True)
    fitting = trainer(callback, stopping, logger=[table, board], log_every_n_steps=1, max_epochs=2)
    fitting.fit(Module(), loader())
    history = callback.cockpit.history
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("Alpha", "NormTest"):
        key = f"gradlens/{name}"
        found = {int(row["step"]): float(row[key]) for row in rows if row[key]}
        assert found == numbers(history, name)
        shown = {event.step: event.value for event in events.Scalars(key)}
        assert shown == pytest.approx(numbers(history, name), rel=1e-6)
    assert events.Tags()["histograms"] == ["gradlens/GradHist1d"]
    latest = pytest.approx(history["NormTest"][2 * STEPS - 1])
    assert fitting.progress_bar_metrics == {"gradlens/NormTest": latest}
    assert not history.notes


def test_loggers_get_numbers_as_often_as_the_trainer_says(tmp_path: Path) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path, "", "")
    for callback in (CockpitCallback([quantities.Loss()]), CockpitCallback(log=False)):
        fitting = trainer(callback, logger=logger, log_every_n_steps=3, max_epochs=2)
        fitting.fit(Module(), loader())
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "3", "6"]


def test_fast_dev_run_writes_no_file(tmp_path: Path) -> None:
    callback = CockpitCallback(tracked(), run=tmp_path / "run.jsonl")
    trainer(callback, fast_dev_run=True).fit(Module(), loader())
    assert callback.cockpit.history.steps == (0,)
    assert not any(tmp_path.iterdir())


# Errors -----------------------------------------------------------------------------------------


class Wrapping(lightning.strategies.SingleDeviceStrategy):
    """A strategy whose wrapper is unknown, such as that of FSDP or DeepSpeed."""

    def setup(self, trainer: lightning.Trainer) -> None:
        super().setup(trainer)
        self.model = nn.Sequential(self.model)


def test_strategies_that_cannot_be_tracked() -> None:
    with pytest.raises(ValueError, match=r'Wrapping wraps the model in Sequential.*"ddp"'):
        trainer(CockpitCallback(), strategy=Wrapping("cpu")).fit(Module(), loader())


@pytest.mark.parametrize("argument", [{"quantitys": []}, {"quantities": quantities.Loss}])
def test_wrong_arguments_are_errors_at_once(argument: Any) -> None:
    with pytest.raises(TypeError):
        CockpitCallback(**argument)


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "gradlens.integrations.lightning")
    with pytest.raises(ImportError, match=r"pip install 'gradlens\[lightning\]'"):
        importlib.import_module("gradlens.integrations.lightning")


def test_the_batch_says_the_ids_of_samples() -> None:
    def with_ids(arguments: dict[str, Any], trainer: Any, batch: Any) -> dict[str, Any]:
        return {**arguments, "info": {"ids": (1000 * batch[0][:, 0]).long()}}

    callback = Passing(with_ids, quantities.NormTest())
    trainer(callback).fit(Module(), loader())
    samples = callback.cockpit.history.samples
    assert {*samples.ids} == {*(1000 * data()[:][0][:, 0]).long().tolist()}


def test_inputs_are_known_though_the_module_is_not_called_as_a_whole() -> None:
    class Pixels(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, labels = batch
            return super().training_step((255 * inputs, labels), batch_idx)

    for module, is_found in (Module, False), (Pixels, True):
        callback = CockpitCallback([])
        trainer(callback, max_epochs=4).fit(module(), loader())
        found = {each.fault for each in gradlens.diagnose(callback.cockpit)}
        assert ("input_scale" in found) == is_found


def test_there_is_no_cockpit_before_training() -> None:
    with pytest.raises(RuntimeError, match=r"trainer\.fit"):
        _ = CockpitCallback().cockpit


# Several processes ------------------------------------------------------------------------------

PROCESSES = 2
OF_EACH_PROCESS = ("HessMaxEV",)
"""Curvature is that of each process's own samples."""


def worker(rank: int, port: int, folder: Path) -> None:
    """Trains with each process's share of the batches, in one part and in two."""
    warnings.simplefilter("error")
    for text in LIGHTNINGS_OWN:
        warnings.filterwarnings("ignore", text)
    variables = {"LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    places = torch.arange(SAMPLES * STEPS).unflatten(0, (STEPS, PROCESSES, -1))[:, rank].flatten()
    options: dict[str, Any] = {}
    for parts in (1, 2):
        options = {"strategy": "ddp", "devices": PROCESSES, "accumulate_grad_batches": parts}
        modules = []
        run = folder / f"{parts}.jsonl"
        for callbacks in (
            [CockpitCallback(tracked(*OF_EACH_PROCESS), run=run, prog_bar=("Loss",))],
            [],
        ):
            share = DataLoader(Subset(data(), places.tolist()), SAMPLES // PROCESSES // parts)
            modules.append(Module())
            fitting = trainer(*callbacks, use_distributed_sampler=False, **options)
            fitting.fit(modules[-1], share)
        assert same_state(*modules)
    with pytest.raises(ValueError, match='module="network" can\'t be tracked under DDPStrategy'):
        trainer(CockpitCallback(module="network"), **options).fit(Module(), share)


def test_processes_record_the_joined_batch(tmp_path: Path) -> None:
    run_processes(worker, PROCESSES, free_port(), tmp_path)
    expected = Case(without=OF_EACH_PROCESS).plain_loop()
    for parts in (1, 2):
        found = gradlens.History.load(tmp_path / f"{parts}.jsonl")
        assert_same_histories(found, expected, 1e-9)


# The page ---------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "lightning.rst").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed")
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"code-block:: python\n\n(.*?)\n\n(?=\S)", PAGE, flags=re.DOTALL):
        exec(textwrap.dedent(block), names)
    assert (tmp_path / "cockpit.png").read_bytes().startswith(b"\x89PNG")
    assert all(value == value for value in names["callback"].cockpit.history["Alpha"].values())
    for network in ("generator", "discriminator"):
        history = gradlens.History.load(f"{network}.jsonl")
        assert history.steps == tuple(range(6))
        assert history["NormTest"][0] > 0
    assert names["cockpit"].history["NormTest"][2] > 0
