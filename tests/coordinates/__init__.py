"""Tests of networks of several widths."""
