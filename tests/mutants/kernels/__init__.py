"""Plants the defects of fused kernels and their launchers, each a substitution in `moe_fast`."""
