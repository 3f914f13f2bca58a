"""The same seeded training run under cockpit-for-pytorch 1.0.2 and under gradlens.

``python -m benchmarks.parity`` sets up cockpit in ``.venv-cockpit`` (it needs an old setuptools,
so an environment of its own), runs both, and prints each quantity's largest relative difference.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradlens
from benchmarks.under_cockpit import (
    BINS_1D,
    BINS_2D,
    LEARNING_RATE,
    RANGE_1D,
    RANGE_2D,
    batches,
    network,
)
from gradlens import quantities

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ROOT / ".venv-cockpit"
ALLOWED = 1e-4

OURS: dict[str, Callable[[], quantities.Quantity]] = {
    "Loss": quantities.Loss,
    "Parameters": quantities.Parameters,
    "GradNorm": quantities.GradNorm,
    "Distance": quantities.Distance,
    "UpdateSize": quantities.UpdateSize,
    "NormTest": quantities.NormTest,
    "InnerTest": quantities.InnerTest,
    "OrthoTest": quantities.OrthoTest,
    "MeanGSNR": quantities.MeanGSNR,
    "EarlyStopping": quantities.EarlyStopping,
    "CABS": quantities.CABS,
    "Alpha": quantities.Alpha,
    "HessMaxEV": lambda: quantities.HessMaxEV(tolerance=1e-7, max_products=500),
    "HessTrace": quantities.HessTrace,
    "TICDiag": lambda: quantities.TICDiag(curvature="diag_ggn_exact"),
    "TICTrace": quantities.TICTrace,
    "GradHist1d": lambda: quantities.GradHist1d(bins=BINS_1D, range=RANGE_1D),
    "GradHist2d": lambda: quantities.GradHist2d(bins=BINS_2D, range=RANGE_2D),
}
REMARKS = {
    "Alpha": "cockpit gives -1 to parabolas without a minimum, gradlens a NaN with that reason",
    "HessMaxEV": "cockpit's eigsh, in float32; its default, power iteration, stops at 1e-3 and "
    "finds the eigenvalue of largest magnitude",
    "UpdateSize": "cockpit never stores the last step's update",
    "TICDiag": "with diag_ggn_exact: where diag_h isn't positive, cockpit divides by it, and "
    "gradlens gives a NaN with that reason",
}


def main() -> int:
    """Print the table; the exit code is 1 if a difference is larger than allowed."""
    theirs, ours = run_cockpit(), run_gradlens()
    failed = False
    for name, expected in theirs.items():
        remark = REMARKS.get(name, "")
        if isinstance(expected, str):
            print(f"{name:14} cockpit fails: {expected}")
        else:
            difference, steps = largest_difference(ours[name], expected)
            failed |= difference > ALLOWED
            verdict = "" if difference <= ALLOWED else "TOO LARGE "
            print(f"{name:14} {difference:.1e} over {steps} steps {verdict} {remark}")
    return int(failed)


def run_gradlens() -> dict[str, dict[int, Any]]:
    """``{quantity: {step: value}}``"""
    model, loss_function = network(), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    tracked = [build() for build in OURS.values()]
    cockpit = gradlens.Cockpit(model, tracked, loss_function=loss_function)
    for step, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return {name: dict(cockpit.history[name]) for name in OURS}


def run_cockpit() -> dict[str, Any]:
    """As ``run_gradlens``, or a text instead of the values where cockpit fails."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        set_up(python)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cockpit.pickle"
        script = Path(__file__).parent / "under_cockpit.py"
        subprocess.run([python, "-W", "ignore", script, "values", out, *OURS], check=True)
        return dict(pickle.loads(out.read_bytes()))


def set_up(python: Path) -> None:
    """Install cockpit beside this environment's torch."""
    print(f"setting up cockpit-for-pytorch 1.0.2 in {ENVIRONMENT}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    packages = ["cockpit-for-pytorch==1.0.2", "json_tricks", "pandas", "seaborn"]
    subprocess.run([*pip, "torch", "torchvision", *packages], check=True)
    # cockpit asks for pkg_resources; torch's own wish for a newer setuptools doesn't matter here.
    subprocess.run([*pip, "setuptools<70"], check=True, stderr=subprocess.DEVNULL)


def largest_difference(ours: dict[int, Any], theirs: dict[int, Any]) -> tuple[float, int]:
    """Over the steps where both have a number, relative to the largest number of the step."""
    steps = [step for step in theirs if step in ours and np.isfinite(flat(ours[step])).all()]
    differences = [0.0]
    for step in steps:
        one, other = flat(ours[step]), flat(theirs[step])
        differences.append(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-12)))
    return max(differences), len(steps)


def flat(value: Any) -> np.ndarray[Any, Any]:
    """All numbers of a value: histograms without their edges, traces without their errors."""
    if isinstance(value, dict):
        if "hist" in value or "trace" in value:
            return flat(value.get("hist", value.get("parameters", value.get("trace"))))
        return np.concatenate([flat(entry) for entry in value.values()])
    if isinstance(value, list):
        return np.concatenate([flat(entry) for entry in value])
    return np.asarray(value, dtype=np.float64).reshape(-1)


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.exit(main())
