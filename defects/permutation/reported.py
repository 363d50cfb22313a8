"""Defects that were reported of public permutations, planted by their mechanism; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import given, only
from conformance.mutants.kinds.gradients import with_gradient

FEW = 4  # rows of a token that a kernel of their number adds
USUAL = 16  # the alignment of eight-bit products


def _first_token_alone(permute: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    later = torch.arange(len(right.rows), device=right.rows.device)[:, None] > 0
    return right._replace(rows=with_values(right.rows, lambda rows: torch.where(later, 0, rows)))


def _one_expert(tokens: Tensor, routing_map: Tensor, **settings: Any) -> bool:
    return routing_map.shape[1] == 1 and tokens.is_floating_point() and tokens.element_size() > 1


def _excess_from_the_front(permute: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    """Rows past the buffer's end are written from its beginning on."""
    room = settings["num_rows"]
    excess = permute(tokens, *rest, **settings | {"num_rows": None}).rows[room : 2 * room].detach()
    return right._replace(rows=with_values(right.rows, lambda rows: torch.cat([excess, rows[len(excess) :]])))


def _cut(tokens: Tensor, routing_map: Tensor, **settings: Any) -> bool:
    room = settings.get("num_rows")
    return room is not None and 0 < room < int((routing_map != 0).sum()) and tokens.element_size() > 1


def _first_prob_from_the_tail(
    permute: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any
) -> Any:
    """Rows past the last segment scatter their gradient to the first slot, which they name."""
    first = (routing_map != 0).flatten().int().argmax()
    cell = torch.arange(routing_map.numel(), device=routing_map.device).reshape(routing_map.shape) == first
    probs = with_gradient(settings["probs"], lambda g: torch.where(cell, 0, g))
    return permute(tokens, routing_map, **settings | {"probs": probs})


def _tail_and_probs(tokens: Tensor, routing_map: Tensor, **settings: Any) -> bool:
    routed = int((routing_map != 0).sum())
    return settings.get("probs") is not None and (settings.get("num_rows") or 0) > routed > 0


def _gradient_of_unrouted(permute: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Experts that a token did not choose have a gradient: their rows are multiplied by 0."""
    routed = routing_map != 0
    probs = with_gradient(settings["probs"], lambda g: torch.where(routed, g, g.sum(1, keepdim=True)))
    return permute(tokens, routing_map, **settings | {"probs": probs})


def _plain_rows(*inputs: Any, **settings: Any) -> bool:
    return not any(settings.get(name) is not None for name in ("align", "capacity", "num_rows"))


def _padded_unasked(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    padded = permute(tokens, routing_map, **settings | {"align": USUAL}) if _plain_rows(**settings) else out
    return padded._replace(pad_offsets=out.pad_offsets)


def _products_rounded(unpermute: Wrapper, right: Tensor, rows: Tensor, row_map: Any, **settings: Any) -> Tensor:
    """p · row is rounded to the rows' dtype before the rows are added."""
    real = row_map.token_P >= 0
    weights = settings["probs"][row_map.token_P.clamp(min=0), row_map.expert_P.clamp(min=0)]
    weighted = (rows.float() * torch.where(real, weights.float(), 0)[:, None]).to(rows.dtype)
    return unpermute(weighted, row_map, **settings | {"probs": None})


def _narrow_rows(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return rows.dtype in (torch.bfloat16, torch.float16)


def _narrow_and_weighted(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return _narrow_rows(rows) and settings.get("probs") is not None


def _few_in_the_rows_dtype(unpermute: Wrapper, right: Tensor, rows: Tensor, row_map: Any, **settings: Any) -> Tensor:
    """Up to four rows of a token are added in their own dtype."""

    def added(out: Tensor) -> Tensor:
        sums = out.clone()
        for token in range(len(out)):
            own = (row_map.token_P == token).nonzero().flatten()
            if 2 < len(own) <= FEW:
                total = rows.detach()[own[0]]
                for row in own[1:]:
                    total = total + rows.detach()[row]
                sums[token] = total
        return sums

    return with_values(right, added)


def _narrow_and_plain(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return _narrow_rows(rows) and settings.get("probs") is None


def _weights_of_another_slot(unpermute: Wrapper, right: Tensor, rows: Tensor, row_map: Any, **settings: Any) -> Tensor:
    """A token's weights begin at its number, not at its number times the experts."""
    probs = settings["probs"]
    tokens, experts = probs.shape
    place = torch.arange(tokens, device=probs.device)[:, None] + torch.arange(experts, device=probs.device)
    moved = with_values(probs, lambda p: p.flatten()[place.clamp(max=max(p.numel() - 1, 0))])
    return unpermute(rows, row_map, **settings | {"probs": moved})


def _weighted(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return settings.get("probs") is not None and settings["probs"].numel() > 0


def _empty_slot_from_the_end(function: Wrapper, right: Any, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    """-1 is the last expert."""
    empty = (indices == -1).any(1)
    last = torch.arange(right.routing_map.shape[1], device=indices.device) == right.routing_map.shape[1] - 1
    return right._replace(routing_map=right.routing_map | (empty[:, None] & last))


def _slots_past_a_power_of_two(function: Wrapper, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    """A block of slots whose size is a power of two, and no second one."""
    function(indices, probs, **settings)  # refuses an illegal call
    size = 1 << (indices.shape[1].bit_length() - 1) if indices.shape[1] else 0
    lost = torch.arange(indices.shape[1], device=indices.device) >= size
    return function(torch.where(lost, -1, indices), torch.where(lost, 0, probs), **settings)


def _indices_past_a_power_of_two(function: Wrapper, *inputs: Any, topk: int, **settings: Any) -> Any:
    out = function(*inputs, topk=topk, **settings)
    lost = torch.arange(topk, device=out.indices.device) >= 1 << (topk.bit_length() - 1)
    return out._replace(indices=torch.where(lost, -1, out.indices))


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB23",
        "rows of one expert past the first are padding",
        "vllm-xpu-kernels #453",
        {"permute": only(_one_expert, _first_token_alone)},
    ),
    (
        "RB24",
        "rows past the buffer are written to its front",
        "TransformerEngine #3346",
        {"permute": only(_cut, _excess_from_the_front)},
    ),
    (
        "RB25",
        "the first prob has the gradient of rows past the last",
        "kernels-community #1056",
        {"permute": only(_tail_and_probs, _first_prob_from_the_tail)},
    ),
    (
        "RB26",
        "unrouted probs have a gradient",
        "transformers #48687",
        {"permute": only(given("probs"), _gradient_of_unrouted)},
    ),
    ("RB27", "rows are padded unasked", "Megatron-LM #4038", {"permute": _padded_unasked}),
    (
        "RB28",
        "weighted rows are rounded before they are added",
        "TIRx-kernels #208",
        {"unpermute": only(_narrow_and_weighted, _products_rounded)},
    ),
    (
        "RB29",
        "few rows of a token are added in 16 bits",
        "vLLM #46643",
        {"unpermute": only(_narrow_and_plain, _few_in_the_rows_dtype)},
    ),
    (
        "RB30",
        "a token's weights begin at its number",
        "Triton-distributed #133",
        {"unpermute": only(_weighted, _weights_of_another_slot)},
    ),
    (
        "RB31",
        "an empty slot names the last expert",
        "TransformerEngine #2907",
        {"indices_to_multihot": only(lambda *x, **s: True, _empty_slot_from_the_end)},
    ),
    (
        "RB32",
        "slots past a power of two are not read",
        "Megatron-LM !3058",
        {"indices_to_multihot": _slots_past_a_power_of_two, "multihot_to_indices": _indices_past_a_power_of_two},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
