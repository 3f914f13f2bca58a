"""Where a cockpit's records go besides its history: TensorBoard, W&B, MLflow, and others.

``Cockpit(..., sinks=[...])`` passes each record to them when it is made, and ``gradlens export``
those of a run that is over. A sink of your own is a class derived from ``Sink``.
"""

from gradlens.sinks.csv_file import CSV
from gradlens.sinks.mlflow import MLflow
from gradlens.sinks.sink import Sink
from gradlens.sinks.tensorboard import TensorBoard
from gradlens.sinks.trackio import Trackio
from gradlens.sinks.wandb import WandB

__all__ = ["CSV", "MLflow", "Sink", "TensorBoard", "Trackio", "WandB"]


def __dir__() -> list[str]:
    return list(__all__)
