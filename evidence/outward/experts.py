"""Names of Liger Kernel and ScatterMoE for experts and their activations, over `moe_fast`."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from evidence.outward.modules import moe_fast, not_offered, replace


def experts(x: Tensor, indices: Tensor, weights: Tensor, fc1: Tensor, fc2: Tensor, **settings: Any) -> Tensor:
    """Each token's experts by index, added with its weights."""
    if not (indices.sort(-1).values.diff(dim=-1) > 0).all():
        not_offered("an expert twice for one token")
    multihot = moe_fast.indices_to_multihot(indices, weights, num_experts=len(fc1))
    rows = moe_fast.permute(x, multihot.routing_map, num_rows=indices.numel())
    out = moe_fast.grouped_mlp(rows.rows, rows.tokens_per_expert, fc1, fc2, **settings)
    return moe_fast.unpermute(out, rows.row_map, restore_shape=tuple(x.shape), probs=multihot.probs)


class FusedMoE:
    """`LigerFusedMoEFunction`."""

    @staticmethod
    def apply(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return experts(x, indices, weights, gate_up, down)


def gated(kind: str) -> Any:
    """A function of gate and value, as Liger's autograd functions are called."""

    def apply(gate: Tensor, value: Tensor, *multipliers: float) -> Tensor:
        if any(x != 1 for x in multipliers):
            not_offered("multipliers of a gate")
        both = torch.cat([gate, value], -1).flatten(0, -2)
        return moe_fast.glu(both, kind=kind).view(value.shape)

    return SimpleNamespace(apply=apply)


def squared_relu(x: Tensor) -> Tensor:
    """`LigerReLUSquaredFunction.apply`."""
    return moe_fast.activation(x.flatten(0, -2), kind="squared_relu").view(x.shape)


class MLP(nn.Module):
    """`scattermoe.mlp.MLP`: experts without a gate, with the parameters of the package's class."""

    def __init__(self, input_size: int, hidden_size: int, num_experts: int, top_k: int, bias: bool, activation: Any):
        super().__init__()
        sizes = {"experts": (hidden_size, input_size), "output_experts": (input_size, hidden_size)}
        for name, (rows, columns) in sizes.items():
            layer: Any = nn.Module()
            layer.weight = nn.Parameter(torch.empty(num_experts, rows, columns).uniform_(-1, 1) / columns**0.5)
            layer.bias = nn.Parameter(torch.zeros(num_experts, rows)) if bias else None
            setattr(self, name, layer)
        self.activation = activation

    def forward(self, x: Tensor, probs: Tensor, indices: Tensor) -> Tensor:
        layers: Any = self
        fc1, fc2 = layers.experts, layers.output_experts
        # the bias of the second product is multiplied by the probs too, which are applied last
        return experts(x, indices, probs, fc1.weight, fc2.weight, kind="gelu", fc1_bias=fc1.bias, fc2_bias=fc2.bias)


def install() -> None:
    """Replace the functions of the package that is there."""
    if importlib.util.find_spec("scattermoe"):
        replace("scattermoe.mlp", MLP=MLP)
        return
    functions = {
        "fused_moe": {"LigerFusedMoEFunction": FusedMoE},
        "swiglu": {"LigerSiLUMulFunction": gated("swiglu")},
        "geglu": {"LigerGELUMulFunction": gated("geglu")},
        "relu_squared": {"LigerReLUSquaredFunction": SimpleNamespace(apply=squared_relu)},
    }
    for module, members in functions.items():
        replace(f"liger_kernel.ops.{module}", **members)
        replace("liger_kernel.ops", **members)
