"""Imports Lightning where torchvision is installed, but was not built for the installed torch.

torchmetrics, which Lightning imports, takes torchvision for importable if it is installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from unittest.mock import patch


def _version(distribution: str) -> str:
    if distribution == "torchvision":
        raise PackageNotFoundError(distribution)
    return version(distribution)


with patch("lightning_utilities.core.imports._version", _version):
    import lightning.pytorch as lightning

__all__ = ["lightning"]
