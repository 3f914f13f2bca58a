"""Runs and configurations of other tools."""
