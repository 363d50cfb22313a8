"""The experts: activations, grouped GEMMs, expert MLPs, shared experts."""

from moe_fast.experts.activations import activation, activation_backward, glu, glu_backward
from moe_fast.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad
from moe_fast.experts.mlp import grouped_mlp, latent_projection, sequential_mlp
from moe_fast.experts.shared import shared_experts

__all__ = [
    "activation",
    "activation_backward",
    "glu",
    "glu_backward",
    "grouped_dgrad",
    "grouped_linear",
    "grouped_mlp",
    "grouped_wgrad",
    "latent_projection",
    "sequential_mlp",
    "shared_experts",
]
