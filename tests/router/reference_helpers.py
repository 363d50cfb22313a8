"""What several test modules of this folder use: reference."""

import math

import torch
from torch import Tensor

from moe_ref.config import RouterConfig

NONE = -math.inf
SCORES = {
    "softmax": lambda x: [math.exp(v - max(x)) / sum(math.exp(w - max(x)) for w in x) for v in x],
    "sigmoid": lambda x: [1 / (1 + math.exp(-v)) if v > NONE else 0.0 for v in x],
    "sqrtsoftplus": lambda x: [math.sqrt(math.log1p(math.exp(v))) for v in x],
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def best(keys: list[float], count: int) -> list[int]:
    """The largest, of equal ones the first."""
    return sorted(range(len(keys)), key=lambda e: (-keys[e], e))[:count]


def scores_by_loop(x: Tensor, function: str) -> list[list[float]]:
    score = [SCORES[function](row) for row in x.tolist()]
    return score if function == "softmax" else [[s / (sum(row) + 1e-20) for s in row] for row in score]


def map_by_loop(x: Tensor, topk: int, function: str) -> list[list[int]]:
    chosen = [best(SCORES[function](row), topk) for row in x.tolist()]
    return [[int(e in row) for e in range(x.shape[1])] for row in chosen]


def balance_by_loop(score, counts, tokens, topk, coeff) -> float:
    """coeff · E / (K N²) · Σ_e counts_e Σ_t score_te, over plain lists."""
    experts = len(counts)
    total = sum(counts[e] * sum(row[e] for row in score) for e in range(experts))
    return coeff * experts / (topk * tokens**2) * total if tokens else 0.0


def z_by_loop(x: Tensor, coeff: float) -> float:
    return coeff * sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in x.tolist()) / max(len(x), 1)


EXPERTS, TOPK = 6, 2


def config(*losses: str, coeff: float = 0.5, **settings) -> RouterConfig:
    coeffs = {f"{name}_coeff": coeff for name in losses}
    return RouterConfig(num_experts=EXPERTS, topk=TOPK, score_function="sigmoid", **coeffs, **settings)


ALL = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def losses_by_loop(
    x: Tensor, batch: int = 1, counted: list[Tensor] | None = None, coeff: float = 0.5
) -> dict[str, float]:
    """Each loss of one rank; `counted` are the logits of the micro-batches before."""
    tokens = len(x)
    score, chosen = scores_by_loop(x, "sigmoid"), map_by_loop(x, TOPK, "sigmoid")

    def counts(maps):
        return [sum(row[e] for row in maps) for e in range(EXPERTS)]

    def of_sequence(table, b):
        return [table[t] for t in range(b, tokens, batch)]

    sequences = [
        balance_by_loop(of_sequence(score, b), counts(of_sequence(chosen, b)), tokens // batch, TOPK, coeff)
        for b in range(batch)
    ]
    batches = [counts(map_by_loop(y, TOPK, "sigmoid")) for y in [*(counted or []), x]]
    mean = [sum(batch[e] for batch in batches) / len(batches) for e in range(EXPERTS)]
    return {
        "z_loss": z_by_loop(x, coeff),
        "aux_loss": balance_by_loop(score, counts(chosen), tokens, TOPK, coeff),
        "seq_aux_loss": sum(sequences) / batch,
        "global_aux_loss": balance_by_loop(score, mean, tokens, TOPK, coeff),
    }


def told(out) -> dict[str, float]:
    return {name: float(loss) for name, loss in out.losses._asdict().items() if loss is not None}


BIASED = config(expert_bias=True, bias_update_rate=0.25)
