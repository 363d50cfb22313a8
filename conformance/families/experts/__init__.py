"""The experts: activations, grouped GEMMs, expert MLPs, shared experts."""
