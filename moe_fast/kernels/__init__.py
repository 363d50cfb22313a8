"""Triton kernels only; their launchers and gradients live beside the public functions."""
