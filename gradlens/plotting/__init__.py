"""Figures, tables and animations of recorded runs; needs neither PyTorch nor BackPACK."""
