"""How fast routing is: top-k compact and dense, its backward, scores and losses, capacity; beside eager torch, torch.compile, and TE's fused router.

    PYTHONPATH=. python3 -m benchmarks.router [--tokens 8192] [--json FILE] [--quick]

Every call is replayed in a CUDA graph over as many copies of its inputs as exceed the L2 several times, so that it reads from memory and
no launch is counted; versions take turns. Results are compared before they are timed. `--quick` only compares; it runs without a GPU.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import rotated, table
from moe_fast.launch.backend import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
COLD_BYTES = 256 * 2**20  # of all copies of the logits together


@dataclass(frozen=True)
class Router:
    """A model's router."""

    experts: int
    topk: int
    score: str = "softmax"
    groups: int = 0
    group_topk: int = 0
    bias: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        groups = {"num_groups": self.groups, "group_topk": self.group_topk} if self.groups else {}
        return {"topk": self.topk, "score_function": self.score, **groups}


ROUTERS = {
    "dsv3: 256 experts, 8 of them, 4 of 8 groups, sigmoid + bias": Router(256, 8, "sigmoid", 8, 4, bias=True),
    "256 experts, 8 of them, 4 of 8 groups, softmax": Router(256, 8, groups=8, group_topk=4),
    "kimi-k2: 384 experts, 8 of them, sigmoid + bias": Router(384, 8, "sigmoid", bias=True),
    "qwen3: 128 experts, 8 of them, softmax": Router(128, 8),
    "qwen3-next: 512 experts, 10 of them, softmax": Router(512, 10),
    "gpt-oss: 128 experts, 4 of them, softmax": Router(128, 4),
    "mixtral: 8 experts, 2 of them, softmax": Router(8, 2),
}


def eager_topk(logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and indices as a model's Python code computes them."""
    scores = torch.sigmoid(logits) if router.score == "sigmoid" else logits
    keys = scores if bias is None else scores + bias
    if router.groups:
        by_group = keys.view(len(keys), router.groups, -1)
        group = (
            by_group.topk(router.topk // router.group_topk, dim=2).values.sum(2).topk(router.group_topk, dim=1).indices
        )
        mask = torch.zeros(len(keys), router.groups, dtype=torch.bool, device=keys.device).scatter(1, group, True)
        keys = by_group.masked_fill(~mask[..., None], -torch.inf).view(keys.shape)
    indices = keys.topk(router.topk, dim=1).indices
    chosen = scores.gather(1, indices)
    weights = torch.softmax(chosen, 1) if router.score == "softmax" else chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    return weights, indices


def eager_dense(logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    weights, indices = eager_topk(logits, router, bias)
    probs = torch.zeros_like(logits).scatter(1, indices, weights)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def eager_aux(logits: Tensor, router: Router) -> Tensor:
    """The balancing loss of one rank, from logits."""
    scores = torch.softmax(logits, 1) if router.score == "softmax" else torch.sigmoid(logits)
    scores = scores if router.score == "softmax" else scores / (scores.sum(1, keepdim=True) + 1e-20)
    counts = torch.zeros_like(scores).scatter(1, scores.topk(router.topk, dim=1).indices, 1.0).sum(0)
    return (scores.sum(0) * counts).sum() * (router.experts / router.topk / len(logits) ** 2)


def fused_aux(logits: Tensor, router: Router) -> Tensor:
    scores, chosen = moe_fast.aux_loss_scores(logits, topk=router.topk, score_function=router.score)
    how: dict[str, Any] = {
        "total_num_tokens": len(logits),
        "topk": router.topk,
        "num_experts": router.experts,
        "coeff": 1.0,
    }
    return moe_fast.load_balancing_loss(scores, chosen.sum(0), **how)


def fused_te() -> Any:
    """TE's fused router, or None where it is not installed."""
    try:
        from transformer_engine.pytorch import router

        return router
    except ImportError:
        return None


def make(router: Router, tokens: int, seed: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits = torch.randn(tokens, router.experts, generator=generator, device=DEVICE)
    return logits, torch.randn(router.experts, generator=generator, device=DEVICE) / 8 if router.bias else None


def compare(router: Router, tokens: int) -> None:
    """The fused results against eager torch's.

    Raises:
        AssertionError: they differ.
    """
    logits, bias = make(router, tokens, 1)
    indices = eager_topk(logits, router, bias)[1]
    fused = moe_fast.topk_indices(logits, expert_bias=bias, **router.settings)
    assert torch.equal(indices.sort(1).values, fused.indices.sort(1).values)
    dense, chosen = eager_dense(logits, router, bias)
    routed = moe_fast.topk_routing(logits, expert_bias=bias, **router.settings)
    assert torch.equal(chosen, routed.routing_map)
    torch.testing.assert_close(routed.probs, dense)
    torch.testing.assert_close(fused_aux(logits, router), eager_aux(logits, router))


def versions_of(router: Router, tokens: int, te: Any) -> dict[str, dict[str, list[Callable[[], object]]]]:
    """By table, by version: one call for each copy of the inputs."""
    copies = 1 if INTERPRETED else max(2, -(-COLD_BYTES // (tokens * router.experts * 4)))
    copies = min(copies, 256)
    made = [make(router, tokens, seed) for seed in range(copies)]
    bias = made[0][1]
    compiled = torch.compile(eager_topk, dynamic=False)
    compiled_dense = torch.compile(eager_dense, dynamic=False)

    def each(call: Callable[[Tensor], object]) -> list[Callable[[], object]]:
        return [lambda x=x: call(x) for x, _ in made]

    settings = router.settings
    compact = {
        "moe_fast": each(lambda x: moe_fast.topk_indices(x, expert_bias=bias, **settings)),
        "eager": each(lambda x: eager_topk(x, router, bias)),
        "torch.compile": each(lambda x: compiled(x, router, bias)),
    }
    dense = {
        "moe_fast": each(lambda x: moe_fast.topk_routing(x, expert_bias=bias, **settings)),
        "eager": each(lambda x: eager_dense(x, router, bias)),
        "torch.compile": each(lambda x: compiled_dense(x, router, bias)),
    }
    losses = {
        "moe_fast scores, map and aux loss": each(lambda x: fused_aux(x, router)),
        "eager": each(lambda x: eager_aux(x, router)),
        "moe_fast z-loss": each(lambda x: moe_fast.z_loss(x, coeff=1.0)),
        "eager z-loss": each(lambda x: (torch.logsumexp(x, 1) ** 2).mean()),
    }
    if te is not None:
        how = (router.topk, False, router.groups or None, router.group_topk or None, None, router.score, bias)
        dense["Transformer Engine"] = each(lambda x: te.fused_topk_with_score_function(x, *how))
    return {"compact": compact, "dense": dense, "losses": losses}


def backward_versions(router: Router, tokens: int) -> dict[str, list[Callable[[], object]]]:
    """The backward of the compact and of the dense form, by the kernels alone."""
    from moe_fast.router.selection import Settings, _choose_backward

    copies = min(256, max(2, -(-COLD_BYTES // (tokens * router.experts * 4)))) if not INTERPRETED else 1
    made = [make(router, tokens, seed)[0] for seed in range(copies)]
    settings = Settings.of(router.topk, router.score, False, router.groups or None, router.group_topk or None, None)
    bias = make(router, tokens, 0)[1]
    compact = [(x, moe_fast.topk_indices(x, expert_bias=bias, **router.settings)) for x in made]
    dense = [(x, moe_fast.topk_routing(x, expert_bias=bias, **router.settings)) for x in made]
    return {
        "compact": [
            lambda x=x, out=out: _choose_backward(out.probs, x, out.indices, settings, False) for x, out in compact
        ],
        "dense": [
            lambda x=x, out=out: _choose_backward(out.probs, x, out.routing_map, settings, True) for x, out in dense
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    tokens = 16 if arguments.quick else arguments.tokens
    te = fused_te()
    results: dict[str, dict[str, dict[str, float]]] = {"compact": {}, "dense": {}, "losses": {}, "backward": {}}
    for name, router in ROUTERS.items():
        compare(router, tokens)
        if arguments.quick:
            continue
        for kind, versions in versions_of(router, tokens, te).items():
            results[kind][name] = rotated(versions, blocks=5, reps=5)
        results["backward"][name] = rotated(backward_versions(router, tokens), blocks=5, reps=5)
    for kind, by_router in results.items() if not arguments.quick else ():
        header = ["router, µs", *next(iter(by_router.values()))]
        lines = [[name, *(f"{time:.1f}" for time in times.values())] for name, times in by_router.items()]
        print(table(kind, header, lines))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    print("\nall results agree with eager torch")


if __name__ == "__main__":
    main()
