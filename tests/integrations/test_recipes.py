"""The code on the page about Hugging Face and other loops does what the page says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import gradlens
from tests.cases.whole_networks import gpt2
from tests.integrations.test_transformers import texts

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.rst").read_text("utf-8")
BLOCK = re.compile(r"\.\. code-block:: python\n   :name: (.+)\n\n((?:   .*\n|\n)+)")
BLOCKS = {name: dedent(code) for name, code in BLOCK.findall(PAGE)}

Names = dict[str, Any]


def batches() -> list[dict[str, torch.Tensor]]:
    items = texts(16)
    return [
        {key: torch.stack([item[key] for item in items[start : start + 4]]) for key in items[0]}
        for start in range(0, len(items), 4)
    ]


def for_language() -> Names:
    torch.manual_seed(0)
    model = gpt2()
    return {
        "model": model,
        "texts": texts(16),
        "batches": batches(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


def for_trainer() -> Names:
    from transformers import TrainingArguments

    class Small(TrainingArguments):
        """Arguments that write nothing, for 16 texts in 2 steps."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(
                *args,
                max_steps=2,
                per_device_train_batch_size=2,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                **kwargs,
            )

    return for_language() | {"Small": Small}


def for_trl() -> Names:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig

    words = {
        word: number
        for number, word in enumerate(["<pad>", "<eos>", "a", "b", "c", "d", "e", "f", "g", "h"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return for_language() | {
        "texts": Dataset.from_dict({"text": ["a b c", "b c d e", "g h", "d e f"] * 2}),
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
        "arguments": SFTConfig(
            "out",
            max_steps=2,
            per_device_train_batch_size=2,
            max_length=8,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
    }


def for_skorch() -> Names:
    torch.manual_seed(0)
    inputs, labels = torch.randn(40, 4), torch.randint(2, (40,))
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return {"module": module, "inputs": inputs.numpy(), "labels": labels.numpy()}


def for_fastai() -> Names:
    pytest.importorskip("fastai", reason="the recipe needs fastai")
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader

    torch.manual_seed(0)
    samples = [*zip(torch.randn(32, 4), torch.randint(2, (32,)), strict=True)]
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    loaders = DataLoaders(*(DataLoader(samples, bs=16, num_workers=0) for _ in range(2)))
    return {"module": module, "loaders": loaders}


def for_gan() -> Names:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    discriminator = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1))
    return {
        "generator": generator,
        "discriminator": discriminator,
        "optimizer_g": torch.optim.Adam(generator.parameters(), 0.01),
        "optimizer_d": torch.optim.Adam(discriminator.parameters(), 0.01),
        "batches": torch.randn(3, 8, 2) + 3,
    }


def run(name: str, names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Names:
    """The names that a block leaves, run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    code = BLOCKS[name].replace("TrainingArguments(", "Small(")
    exec(code, names := {"torch": torch, **names})
    return names


def covered(history: gradlens.History, samples: int, missing: frozenset[str] = frozenset()) -> None:
    """Per-sample gradients of all other parameters, and no messages but those that are expected."""
    (coverage,) = {id(each): each for each in history.coverages.values()}.values()
    assert coverage.samples == samples
    assert coverage.missing.keys() == missing


@pytest.mark.slow
def test_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = run("trainer", for_trainer(), monkeypatch, tmp_path)
    history = gradlens.load_run(tmp_path / "run.jsonl")
    covered(history, 2)
    assert math.isfinite(history["Alpha"][0]) or "no minimum" in history["Alpha"][0].reason
    assert "gradlens/NormTest" in names["trainer"].state.log_history[0]
    names = run("context arguments", names, monkeypatch, tmp_path)
    names["trainer"].train()
    callbacks = names["trainer"].callback_handler.callbacks
    (callback,) = (each for each in callbacks if isinstance(each, names["WithBatchSize"]))
    assert callback.cockpit.history.coverages[0].known_by == "batch_size="


@pytest.mark.slow
def test_plain_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = run("plain loop", for_language(), monkeypatch, tmp_path)["cockpit"].history
    covered(history, 4)
    assert [*history["Alpha"]] == [0, 1, 2]
    assert all(value["trace"] > 0 for value in history["HessTrace"].values())
    assert not history.notes


@pytest.mark.slow
def test_accelerate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = run("accelerate", for_language(), monkeypatch, tmp_path)["cockpit"].history
    covered(history, 8)
    assert [*history["NormTest"]] == [0, 1]
    assert not history.notes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:gradlens, step 0. Alpha can't be found:UserWarning")
@pytest.mark.filterwarnings(  # the embedding shares the weights of the fused kernel
    r"ignore:gradlens, step 0. per-sample gradients cover 95.* Missing are transformer.wte.weight. "
    ":UserWarning"
)
def test_trl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("trl", for_trl(), monkeypatch, tmp_path)
    history = gradlens.load_run(tmp_path / "run.jsonl")
    covered(history, 2, frozenset({"transformer.wte.weight"}))
    assert "ChunkedLogProbFunction" in history["Alpha"][0].reason


def test_skorch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    history = run("skorch", for_skorch(), monkeypatch, tmp_path)["network"].cockpit.history
    covered(history, 32)  # of 40, of which skorch keeps some for validation
    assert [*history["NormTest"]] == [0, 1]
    assert math.isfinite(history["Alpha"][0])
    assert not history.notes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_fastai(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = run("fastai", for_fastai(), monkeypatch, tmp_path)
    history = names["history"]
    covered(history, 16)
    assert [*history["NormTest"]] == [0, 1, 2, 3]
    assert [*history["UpdateSize"]] == [0, 1, 2, 3]
    assert not history.notes
    # The same training without the callback.
    alone = for_fastai()
    Learner, opt_func = names["Learner"], names["learner"].opt_func
    loss_func = nn.CrossEntropyLoss()
    Learner(alone["loaders"], alone["module"], loss_func=loss_func, opt_func=opt_func).fit(2)
    pairs = zip(names["module"].parameters(), alone["module"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_gan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("gan", for_gan(), monkeypatch, tmp_path)
    for name, samples in (("generator", 8), ("discriminator", 16)):
        history = gradlens.load_run(tmp_path / f"{name}.jsonl")
        covered(history, samples)
        assert [*history["NormTest"]] == [0, 1, 2]
        assert not history.notes


def test_each_block_is_run() -> None:
    tests: list[Callable[..., None]] = [
        each for name, each in globals().items() if name.startswith("test_")
    ]
    known = {each.__name__.removeprefix("test_").replace("_", " ") for each in tests}
    assert {*BLOCKS} - {"context arguments"} <= known
