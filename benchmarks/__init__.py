"""Measurements, one module per family: `python -m benchmarks.permutation` in the root folder."""
