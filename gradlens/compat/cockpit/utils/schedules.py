"""cockpit's schedules."""

from gradlens.schedules import linear, logarithmic

__all__ = ["linear", "logarithmic"]
