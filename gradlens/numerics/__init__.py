"""Norms, histograms and formulas that don't lose digits."""
