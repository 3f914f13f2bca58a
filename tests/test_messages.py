"""Warnings, and what is logged on demand."""

from __future__ import annotations

import logging

import pytest
import torch

import gradlens
from gradlens.history.records import LeftOutWarning
from gradlens.messages import LOGGER


def verbose_step() -> None:
    model = torch.nn.Linear(2, 1)
    cockpit = gradlens.Cockpit(model, [gradlens.quantities.Loss(verbose=True)])
    loss = model(torch.zeros(3, 2)).square().mean() * 0
    with cockpit(5, loss=loss, debug=True):
        loss.backward()


MESSAGES = ["[Step 5] active: Loss", "[Step 5] Loss: 0.0"]


def test_messages_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    verbose_step()
    assert [(one.name, one.levelno, one.message) for one in caplog.records] == [
        ("gradlens", logging.INFO, text) for text in MESSAGES
    ]


def test_messages_are_on_stderr_without_handlers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", False)
    verbose_step()
    printed = capsys.readouterr()
    assert printed.err.splitlines() == MESSAGES
    assert not printed.out


def test_messages_can_be_silenced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradlens"):
        verbose_step()
    assert not caplog.records


def test_notes_have_a_category_of_their_own() -> None:
    model = torch.nn.Linear(2, 1)
    cockpit = gradlens.Cockpit(model, [gradlens.quantities.NormTest()])
    with pytest.warns(gradlens.GradlensWarning, match="gradlens, step 0"), cockpit(0):
        model(torch.zeros(3, 2)).sum()
    assert issubclass(LeftOutWarning, gradlens.GradlensWarning)
    assert issubclass(gradlens.GradlensWarning, UserWarning)
