"""Kernels with a planted fault for each tool of --sanitize, and the same kernels without."""
