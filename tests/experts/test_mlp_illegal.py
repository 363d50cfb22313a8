"""Illegal calls of expert MLPs are refused by the name of the argument."""

import pytest
import torch

from moe_ref.config import LinearState, Recipe
from moe_ref.experts.mlp import grouped_mlp, latent_projection, sequential_mlp
from moe_ref.experts.shared import shared_experts

X, N, W1, W2, P = torch.zeros(4, 3), torch.tensor([1, 2]), torch.zeros(2, 8, 3), torch.zeros(2, 3, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("fc1_weight", lambda: grouped_mlp(X, N, W1[0], W2)),
        ("fc1_weight", lambda: grouped_mlp(X, N, W1[:, :7], W2)),
        ("fc1_weight", lambda: grouped_mlp(X, N, W1.bfloat16(), W2)),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, W2.mT)),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, W2[:1])),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, W2, kind="relu")),
        ("fc2_weight", lambda: grouped_mlp(X, N, W1, torch.zeros(2, 5, 4))),
        ("tokens_per_expert", lambda: grouped_mlp(X, N[:1], W1, W2)),
        ("tokens_per_expert", lambda: grouped_mlp(X, N + 1, W1, W2)),
        ("tokens_per_expert", lambda: sequential_mlp(X, N[:1], W1, W2)),
        ("tokens_per_expert", lambda: sequential_mlp(X, N - 2, W1, W2)),
        ("probs", lambda: grouped_mlp(X, N, W1, W2, probs=P[:3])),
        ("probs", lambda: sequential_mlp(X, N, W1, W2, probs=torch.zeros(5))),
        ("probs_on_input", lambda: grouped_mlp(X, N, W1, W2, probs_on_input=True)),
        ("fc1_bias", lambda: grouped_mlp(X, N, W1, W2, fc1_bias=torch.zeros(2, 4))),
        ("fc2_bias", lambda: grouped_mlp(X, N, W1, W2, fc2_bias=torch.zeros(3))),
        ("kind", lambda: grouped_mlp(X, N, W1, W2, kind="swish")),
        ("clamp", lambda: grouped_mlp(X, N, W1, W2, clamp=-1.0)),
        ("clamp", lambda: sequential_mlp(X, N, W1[:, :4], W2, kind="relu", clamp=1.0)),
        ("interleave", lambda: grouped_mlp(X, N, W1, W2, interleave=3)),
        ("align", lambda: grouped_mlp(X, N, W1, W2, align=0)),
        ("recompute", lambda: grouped_mlp(X, N, W1, W2, recompute="mlp")),
        ("state", lambda: grouped_mlp(X, N, W1, W2, recipe=Recipe("delayed"), state=LinearState(None, None, None))),
        ("state", lambda: sequential_mlp(X, N, W1, W2, recipe=Recipe("delayed"), state=(None, None))),
        ("noise", lambda: sequential_mlp(X, N, W1, W2, recipe=Recipe("nvfp4"), noise=(P, P))),
        ("noise", lambda: shared_experts(X, W1[0], W2[0], noise=P)),
        ("fc1_weight", lambda: shared_experts(X, W1, W2[0])),
        ("fc2_weight", lambda: shared_experts(X, W1[0], W2[0].T)),
        ("gate_weight", lambda: shared_experts(X, W1[0], W2[0], gate_weight=torch.zeros(3))),
        ("gate_weight", lambda: shared_experts(X, W1[0], W2[0], gate_weight=torch.zeros(2, 3))),
        ("clamp", lambda: shared_experts(X, W1[0], W2[0], clamp=0.0)),
        ("weight", lambda: latent_projection(X, W2[0])),
    ],
)
def test_illegal_calls_are_refused_by_name(named, call):
    with pytest.raises(ValueError, match=f"^{named} is "):
        call()
