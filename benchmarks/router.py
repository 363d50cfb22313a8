"""Time top-k compact and dense, its backward, and losses against torch and Transformer Engine.

    PYTHONPATH=. python3 -m benchmarks.router [--tokens 8192] [--json FILE] [--quick]

Each call is replayed in a CUDA graph over copies of its inputs that exceed the L2 several times:
inputs come from memory, launches are not counted. Results are compared with eager torch before they
are timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import COLD_BYTES, FP32, Call, Operation, Random, measure, parse, rotated
from moe_fast.launch.backend import INTERPRETED
from moe_fast.router.selection import Settings, _choose_backward


@dataclass(frozen=True)
class Router:
    """The router of a model."""

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
    "dsv3: 8 of 256 experts, 4 of 8 groups, sigmoid + bias": Router(256, 8, "sigmoid", 8, 4, bias=True),
    "groups: 8 of 256 experts, 4 of 8 groups, softmax": Router(256, 8, groups=8, group_topk=4),
    "kimi-k2: 8 of 384 experts, sigmoid + bias": Router(384, 8, "sigmoid", bias=True),
    "qwen3: 8 of 128 experts, softmax": Router(128, 8),
    "qwen3-next: 10 of 512 experts, softmax": Router(512, 10),
    "gpt-oss: 4 of 128 experts, softmax": Router(128, 4),
    "mixtral: 2 of 8 experts, softmax": Router(8, 2),
}


# --- eager torch, as in models' Python code


def eager_topk(logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and indices."""
    scores = torch.sigmoid(logits) if router.score == "sigmoid" else logits
    keys = scores if bias is None else scores + bias
    if router.groups:
        by_group = keys.view(len(keys), router.groups, -1)
        group_scores = by_group.topk(router.topk // router.group_topk, dim=2).values.sum(2)
        group = group_scores.topk(router.group_topk, dim=1).indices
        mask = torch.zeros(len(keys), router.groups, dtype=torch.bool, device=keys.device).scatter(1, group, True)
        keys = by_group.masked_fill(~mask[..., None], -torch.inf).view(keys.shape)
    indices = keys.topk(router.topk, dim=1).indices
    chosen = scores.gather(1, indices)
    weights = torch.softmax(chosen, 1) if router.score == "softmax" else chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    return weights, indices


def eager_dense(logits: Tensor, router: Router, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probs and map."""
    weights, indices = eager_topk(logits, router, bias)
    probs = torch.zeros_like(logits).scatter(1, indices, weights)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


def eager_aux(logits: Tensor, router: Router) -> Tensor:
    """The balancing loss of one rank."""
    scores = torch.softmax(logits, 1) if router.score == "softmax" else torch.sigmoid(logits)
    scores = scores if router.score == "softmax" else scores / (scores.sum(1, keepdim=True) + 1e-20)
    counts = torch.zeros_like(scores).scatter(1, scores.topk(router.topk, dim=1).indices, 1.0).sum(0)
    return (scores.sum(0) * counts).sum() * (router.experts / router.topk / len(logits) ** 2)


def eager_z_loss(logits: Tensor) -> Tensor:
    return (torch.logsumexp(logits, 1) ** 2).mean()


# --- operations


def fast_aux(logits: Tensor, router: Router) -> Tensor:
    scores, chosen = moe_fast.aux_loss_scores(logits, topk=router.topk, score_function=router.score)
    sizes = {"total_num_tokens": len(logits), "topk": router.topk, "num_experts": router.experts}
    return moe_fast.load_balancing_loss(scores, chosen.sum(0), coeff=1.0, **sizes)


def make(router: Router, tokens: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Logits and the expert bias."""
    normal = partial(Random(seed).normal, dtype=torch.float32)
    return normal(tokens, router.experts), normal(router.experts, std=1 / 8) if router.bias else None


def check(router: Router, tokens: int) -> None:
    """Compares the fused results with eager torch.

    Raises:
        AssertionError: they differ.
    """
    logits, bias = make(router, tokens, 1)
    fused = moe_fast.topk_indices(logits, expert_bias=bias, **router.settings)
    assert torch.equal(eager_topk(logits, router, bias)[1].sort(1).values, fused.indices.sort(1).values)
    probs, routing_map = eager_dense(logits, router, bias)
    routed = moe_fast.topk_routing(logits, expert_bias=bias, **router.settings)
    assert torch.equal(routing_map, routed.routing_map)
    torch.testing.assert_close(routed.probs, probs)
    torch.testing.assert_close(fast_aux(logits, router), eager_aux(logits, router))
    torch.testing.assert_close(moe_fast.z_loss(logits, coeff=1.0), eager_z_loss(logits))


def operations(router: Router, tokens: int) -> Iterator[Operation]:
    check(router, tokens)
    copies = 1 if INTERPRETED else min(256, max(2, -(-COLD_BYTES // (tokens * router.experts * FP32))))
    logits, bias = [make(router, tokens, seed)[0] for seed in range(copies)], make(router, tokens, 0)[1]

    def of_copies(call: Callable[..., object], *arguments: Any, **settings: Any) -> list[Call]:
        return [partial(call, x, *arguments, **settings) for x in logits]

    def eager_and_compiled(call: Callable[..., object]) -> dict[str, list[Call]]:
        compiled = torch.compile(call, dynamic=False)
        return {"eager": of_copies(call, router, bias), "torch.compile": of_copies(compiled, router, bias)}

    compact = {"moe_fast": of_copies(moe_fast.topk_indices, expert_bias=bias, **router.settings)}
    dense = {"moe_fast": of_copies(moe_fast.topk_routing, expert_bias=bias, **router.settings)}
    yield Operation("compact", compact | eager_and_compiled(eager_topk), clock=rotated)
    yield Operation("dense", dense | eager_and_compiled(eager_dense) | te_dense(of_copies, router, bias), clock=rotated)
    aux = {"moe_fast": of_copies(fast_aux, router), "eager": of_copies(eager_aux, router)}
    yield Operation("scores, map and balancing loss", aux, clock=rotated)
    z = {"moe_fast": of_copies(moe_fast.z_loss, coeff=1.0), "eager": of_copies(eager_z_loss)}
    yield Operation("z-loss", z, clock=rotated)
    for title, routed in (("compact", compact), ("dense", dense)):
        results = [call() for call in routed["moe_fast"]]
        yield Operation(f"{title}, backward", {"moe_fast": backward(router, logits, results)}, clock=rotated)


def te_dense(of_copies: Callable[..., list[Call]], router: Router, bias: Tensor | None) -> dict[str, list[Call]]:
    """Transformer Engine's fused router, if installed."""
    try:
        from transformer_engine.pytorch import router as te
    except ImportError:
        return {}
    settings = router.topk, False, router.groups or None, router.group_topk or None, None, router.score, bias
    return {"Transformer Engine": of_copies(te.fused_topk_with_score_function, *settings)}


def backward(router: Router, logits: list[Tensor], results: list[Any]) -> list[Call]:
    """The backward kernel alone, from the indices or from the map."""
    settings = Settings.of(router.topk, router.score, False, router.groups or None, router.group_topk or None, None)
    return [
        partial(_choose_backward, probs, x, choice, settings, choice.dtype == torch.bool)
        for x, (probs, choice) in zip(logits, results, strict=True)
    ]


def main() -> None:
    options = parse(__doc__, ROUTERS, ROUTERS, tokens=16, blocks=5, reps=5)
    measure(lambda router: operations(router, options.tokens), options)


if __name__ == "__main__":
    main()
