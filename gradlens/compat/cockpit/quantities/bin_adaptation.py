"""cockpit's policies for the ranges of histograms."""

from gradlens.quantities.bin_adaptation import BinAdaptation, GradAbsMax, NoAdaptation, ParamAbsMax

__all__ = ["BinAdaptation", "GradAbsMax", "NoAdaptation", "ParamAbsMax"]
