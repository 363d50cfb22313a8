"""Wrong experts are noticed by the tests of `moe_ref`, and illegal calls are refused by name."""

import pytest
import torch
from torch import Tensor

from moe_ref.config import LinearState, Recipe
from moe_ref.experts.mlp import grouped_mlp, latent_projection, sequential_mlp
from moe_ref.experts.shared import shared_experts
from tests.experts.test_mlp import HIDDEN, WIDTH, agrees

# Twins: what `agrees` must not accept

CALL = {"clamp": 0.5, "offset": 1.0}


def without_empty(counts: Tensor) -> Tensor:
    return torch.cat([counts[counts > 0], counts[counts == 0]])


def bias_without_prob(rows, counts, w1, w2, *, probs, fc1_bias, fc2_bias, **call):
    y = grouped_mlp(rows, counts, w1, w2, probs=probs, fc1_bias=fc1_bias, **call)
    owned = torch.cat([fc2_bias[e].expand(count, -1) for e, count in enumerate(counts.tolist())])
    return y + torch.cat([owned, torch.zeros(len(rows) - len(owned), HIDDEN)])


TWINS = {
    "clamp ignored": lambda *given, clamp, **call: grouped_mlp(*given, **call),
    "offset ignored": lambda *given, offset, **call: grouped_mlp(*given, **call),
    "halves taken for blocks": lambda *given, **call: grouped_mlp(*given, interleave=2, **call),
    "value before gate": lambda x, n, w1, w2, *, fc1_bias, **call: grouped_mlp(
        x, n, w1.roll(WIDTH, 1), w2, fc1_bias=fc1_bias.roll(WIDTH, 1), **call
    ),
    "prob twice": lambda *given, probs, **call: grouped_mlp(*given, probs=probs**2, **call),
    "prob on the input as well": lambda x, *given, probs, **call: grouped_mlp(
        x * probs[:, None], *given, probs=probs, **call
    ),
    "prob on the input instead": lambda *given, **call: grouped_mlp(*given, probs_on_input=True, **call),
    "prob of the next row": lambda *given, probs, **call: grouped_mlp(*given, probs=probs.roll(1), **call),
    "second bias not scaled": bias_without_prob,
    "second bias dropped": lambda *given, fc2_bias, **call: grouped_mlp(*given, **call) + 0 * fc2_bias.sum(),
    "first bias dropped": lambda *given, fc1_bias, **call: grouped_mlp(*given, **call) + 0 * fc1_bias.sum(),
    "empty expert shifts the others": lambda x, counts, *given, **call: grouped_mlp(
        x, without_empty(counts), *given, **call
    ),
    "fc2 of another expert": lambda x, counts, w1, w2, **call: grouped_mlp(x, counts, w1, w2.roll(1, 0), **call),
    "last expert takes the tail": lambda x, counts, *given, **call: grouped_mlp(
        x, torch.tensor([2, 0, 5]), *given, **call
    ),
    "no gradient of the probs": lambda *given, probs, **call: (
        grouped_mlp(*given, probs=probs.detach(), **call) + 0 * probs.sum()
    ),
    "no gradient of fc1": lambda x, counts, w1, w2, **call: (
        grouped_mlp(x, counts, w1.detach(), w2, **call) + 0 * w1.sum()
    ),
}


@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_wrong_experts_are_noticed(twin):
    assert agrees(grouped_mlp, [2, 0, 3], CALL) and not agrees(twin, [2, 0, 3], CALL)


def test_probs_left_on_the_activation_are_noticed():
    def flag_ignored(*given, probs_on_input, **call):
        return grouped_mlp(*given, **call)

    assert not agrees(flag_ignored, [2, 0, 3], {"probs_on_input": True})


# Errors

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
