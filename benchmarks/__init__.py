"""Measurements, one module per family; run from the repository root: `python -m benchmarks.permutation`."""
