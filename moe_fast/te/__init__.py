"""Transformer Engine's names, signatures and results through our kernels: `shim`."""
