"""Upcycling: a Mixture-of-Experts layer that computes what a dense layer does."""

import torch
from torch import Tensor

from moe_ref.config.experts import GATED
from moe_ref.config.parameters import Upcycled, check_upcycle
from moe_ref.rounding import accumulator_dtype


def upcycle(
    router_weight_EH: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, *, topk: int, granularity: int = 1,
    kind: str = "swiglu", pre_softmax: bool = False, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
) -> Upcycled:  # fmt: skip
    """Experts that are slices of a dense MLP, scaled such that K of E chosen ones sum to it.

        granularity G, X = E/G copies;  expert e has slice e mod G of the dense width, of each half
        router row e = given row ⌊e/G⌋:  a copy's G slices are chosen together
        α = X·G²/K with pre_softmax, else G
        fc1 and fc2 times α^⅓ (gated kinds, squared_relu) or α^½

    The sum is the dense layer's where the activation is homogeneous, and near it elsewhere.

    Args:
        router_weight_EH: of the new router; its first E/G rows are used.
        fc1_weight: [2·F·G,H] for a gated kind, halves one after the other, else [F·G,H].
        fc2_weight: [H,F·G].
        topk: K. granularity: G.
        pre_softmax: whether the router's softmax comes before the choice.
        fc1_bias: cut and scaled like fc1_weight. fc2_bias: [H], each expert's, not scaled.

    Products are in float32 (float64 for float64), rounded once.

    Raises:
        ValueError: G does not divide E and the dense width, or shapes that do not fit.

    Source: `upcycling_utils.py`.
    """
    halves = 2 if kind in GATED else 1
    check_upcycle(router_weight_EH, fc1_weight, fc2_weight, topk, granularity, kind, fc1_bias, fc2_bias, halves)
    experts, copies = len(router_weight_EH), len(router_weight_EH) // granularity
    alpha = copies * granularity**2 / topk if pre_softmax else granularity
    scale = alpha ** (1 / 3 if halves == 2 or kind == "squared_relu" else 1 / 2)
    width = fc2_weight.shape[1] // granularity

    router, fc1, fc2, bias1 = [], [], [], []
    for e in range(experts):
        copy, granule = divmod(e, granularity)
        columns = torch.arange(granule * width, (granule + 1) * width, device=fc2_weight.device)
        rows = torch.cat([columns + half * fc2_weight.shape[1] for half in range(halves)])
        router.append(router_weight_EH[copy])
        fc1.append(_scaled(fc1_weight[rows], scale))
        fc2.append(_scaled(fc2_weight[:, columns], scale))
        if fc1_bias is not None:
            bias1.append(_scaled(fc1_bias[rows], scale))
    return Upcycled(
        torch.stack(router),
        torch.stack(fc1),
        torch.stack(fc2),
        None if fc1_bias is None else torch.stack(bias1),
        None if fc2_bias is None else torch.stack([fc2_bias] * experts),
    )


def _scaled(x: Tensor, scale: float) -> Tensor:
    return (x.to(accumulator_dtype(x.dtype)) * scale).to(x.dtype)
