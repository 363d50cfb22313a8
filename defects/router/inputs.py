"""Defects of the router that few inputs show: large counts, single logits; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.layouts import MANY, SLICED, numbered_in_bytes, read_unstrided

COUNTS = "a class of inputs: counts past a power of two, and fractions"
STRANGE = "a class of inputs: strange values at the ends of a row"
NARROW = "a class of inputs: indices of another dtype"
EVERY = "a class of inputs: every bit pattern of a dtype"
PATTERN = 0x3FD9  # of a bfloat16 number, 1.695


def _by_direction(direction: Callable[[Tensor], Tensor]) -> Wrapper:
    def update(update_expert_bias: Wrapper, expert_bias: Tensor, counts: Tensor, **settings: Any) -> Any:
        out = update_expert_bias(expert_bias, counts, **settings)
        return expert_bias + settings["update_rate"] * direction(counts).sign().to(out.dtype)

    return update


def _mean_in_float32(counts: Tensor) -> Tensor:
    return counts.float().mean() - counts.float()


def _sum_in_int32(counts: Tensor) -> Tensor:
    total = (counts.long().sum() + 2**31) % 2**32 - 2**31
    return total.double() - len(counts) * counts.double()


def _whole(update_expert_bias: Wrapper, expert_bias: Tensor, counts: Tensor, **settings: Any) -> Any:
    return update_expert_bias(expert_bias, counts.long(), **settings)


def _counts_in_half(load_balancing_loss: Wrapper, scores: Tensor, counts: Tensor, **settings: Any) -> Any:
    return load_balancing_loss(scores, counts.half(), **settings)


def _squared_in_int32(load_balancing_loss: Wrapper, scores: Tensor, counts: Tensor, **settings: Any) -> Any:
    total, loss = settings.get("total_num_tokens"), load_balancing_loss(scores, counts, **settings)
    if not isinstance(total, int) or total * total < 2**31:
        return loss
    wrapped = (total * total + 2**31) % 2**32 - 2**31
    return loss * (total * total / wrapped if wrapped else 0.0)


def _one_score(aux_loss_scores: Wrapper, logits: Tensor, **settings: Any) -> Any:
    out = aux_loss_scores(logits, **settings)
    if logits.dtype != torch.bfloat16 or settings.get("score_function") != "sigmoid":
        return out
    hit = logits.detach().contiguous().view(torch.int16) == PATTERN
    return out._replace(scores=with_values(out.scores, lambda x: torch.where(hit, x * (1 + 2.0**-12), x)))


def _added(attach_loss: Wrapper, x: Tensor, loss: Tensor, **settings: Any) -> Any:
    out = attach_loss(x, loss, **settings)
    return with_values(out, lambda y: y + 0.0 * loss.detach().to(y.dtype))


def _every_second_index(choice: Wrapper, logits: Tensor, **settings: Any) -> Any:
    """Words of 32 bits are read as if they had 64, of which the lower half is an index."""
    given = settings.get("precomputed_indices")
    if given is not None and given.dtype == torch.int32:
        words = given.flatten()
        settings["precomputed_indices"] = torch.cat([words, words])[::2].reshape(given.shape)
    return choice(logits, **settings)


def _finite_gate(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    return gate(with_values(x, lambda y: torch.where(y.isnan(), 0.0, y)), weight, **settings)


def _unstrided_logits(route: Wrapper, logits: Tensor, *rest: Any, **settings: Any) -> Any:
    return route(read_unstrided(logits), *rest, **settings)


def _unstrided_mask(route: Wrapper, logits: Tensor, *rest: Any, **settings: Any) -> Any:
    return route(logits, *rest, **settings | {"padding_mask": read_unstrided(settings.get("padding_mask"))})


def _tokens_past_256(route: Wrapper, logits: Tensor, *rest: Any, **settings: Any) -> Any:
    return route(numbered_in_bytes(logits) if len(logits) > 256 else logits, *rest, **settings)


DEFECTS: tuple[Defect, ...] = (
    Defect("N07", "the mean of the counts in float32", COUNTS, {"update_expert_bias": _by_direction(_mean_in_float32)}),
    Defect("N08", "the sum of the counts in int32", COUNTS, {"update_expert_bias": _by_direction(_sum_in_int32)}),
    Defect("N09", "counts rounded down to integers", COUNTS, {"update_expert_bias": _whole}),
    Defect("N10", "counts in float16", COUNTS, {"load_balancing_loss": _counts_in_half}),
    Defect("N11", "the square of the tokens in int32", COUNTS, {"load_balancing_loss": _squared_in_int32}),
    Defect(
        "U65",
        "given experts in int32 are read as int64",
        NARROW,
        {"topk_indices": _every_second_index, "topk_routing": _every_second_index},
    ),
    Defect("SL11", "strides of the logits are not read", SLICED, {"route": _unstrided_logits}),
    Defect("SL12", "the stride of the padding mask is not read", SLICED, {"route": _unstrided_mask}),
    Defect("U66", "tokens past 256 are routed as the first ones", MANY, {"route": _tokens_past_256}),
    Defect("V09", "a loss is attached as x + 0 · loss, which loses -0", STRANGE, {"attach_loss": _added}),
    Defect("V10", "a gate takes NaN for 0", STRANGE, {"gate": _finite_gate}),
    Defect("V08", "the score of one logit is wrong", EVERY, {"aux_loss_scores": _one_score}),
)
