"""Rates of what gradlens says about runs."""
