"""Defects of permutation that only some calls show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import always, given, in_place, only
from conformance.mutants.kinds.gradients import with_gradients_of

SEVERAL = "a mistake that one option alone does not show"
INTEGERS = "a mistake in a result that is seldom read"
VALUES = "a mistake that one class of values shows"
OWNER = "a mistake about whose memory it is"
QUIET = {
    torch.float32: (torch.int32, 1 << 22),
    torch.bfloat16: (torch.int16, 1 << 6),
    torch.float16: (torch.int16, 1 << 9),
}
WORD = 32  # bits


def _last_offset_of_the_one_before(permute: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    offsets = right.pad_offsets.clone()
    offsets[-1] = offsets[-2]
    return right._replace(pad_offsets=offsets)


def _last_is_empty(tokens: Tensor, routing_map: Tensor, **settings: Any) -> bool:
    return bool(settings.get("align")) and routing_map.shape[1] > 1 and not bool((routing_map[:, -1] != 0).any())


def _room_has_the_last_prob(permute: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    used = int(right.tokens_per_expert.sum())
    beyond = torch.arange(len(right.probs)) >= used
    return right._replace(
        probs=torch.where(beyond & (used > 0), right.probs[max(used - 1, 0) :][:1].detach(), right.probs)
    )


def _whole_last_segment(permute: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    whole = permute(*inputs, **settings | {"num_rows": None})
    return right._replace(tokens_per_expert=whole.tokens_per_expert)


def _overflow_of_all_together(
    permute: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any
) -> Any:
    room = settings["capacity"] * routing_map.shape[1]
    return right._replace(overflow=((routing_map != 0).sum() > room).to(right.overflow.device))


def _probs_by_float32(permute: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    return permute(*inputs, **settings | {"probs": with_values(settings["probs"], lambda p: p.float().double())})


def _double_probs(*inputs: Any, **settings: Any) -> bool:
    return isinstance(settings.get("probs"), Tensor) and settings["probs"].dtype == torch.float64


def _counted_in_the_dtype_of_the_map(
    permute: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any
) -> Any:
    return right._replace(tokens_per_expert=right.tokens_per_expert % 256)


def _bytes_map(tokens: Tensor, routing_map: Tensor, **settings: Any) -> bool:
    return routing_map.dtype == torch.uint8


def _quieted(x: Tensor) -> Tensor:
    if x.dtype not in QUIET:
        return x
    integer, bit = QUIET[x.dtype]
    bits = x.contiguous().view(integer)
    return torch.where(x.isnan(), (bits | bit).view(x.dtype), x)


def _signalling_quieted(permute: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    return right._replace(rows=with_values(right.rows, _quieted))


def _padding_of_minus_zero(permute: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    ones = (
        permute(torch.ones(len(tokens), 1, device=tokens.device), routing_map, **settings | {"probs": None}).rows == 0
    )
    return right._replace(rows=with_values(right.rows, lambda rows: torch.where(ones, -0.0, rows)))


def _floating(tokens: Tensor, *rest: Any, **settings: Any) -> bool:
    return tokens.dtype in QUIET


def _the_tokens_themselves(permute: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    return right._replace(rows=tokens)


def _all_to_one(tokens: Tensor, routing_map: Tensor, **settings: Any) -> bool:
    whole = routing_map.shape[1] == 1 and bool((routing_map != 0).all())
    return whole and not any(settings.get(name) for name in ("align", "capacity")) and settings.get("num_rows") is None


def _the_rows_themselves(unpermute: Wrapper, right: Tensor, rows: Tensor, *rest: Any, **settings: Any) -> Tensor:
    same = settings.get("probs") is None and rows.shape == right.shape and torch.equal(rows, right)
    return rows if same else right


def _probs_back_in_order(sort: Wrapper, right: Any, rows: Tensor, sizes: Tensor, order: Tensor, **settings: Any) -> Any:
    probs = settings["probs"]
    forward = sort(rows.detach(), sizes, order.argsort(), probs=probs).probs
    return right._replace(probs=with_gradients_of(right.probs, forward)) if right.probs.requires_grad else right


def _last_bit_of_a_word(multihot: Wrapper, right: Any, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    lost = torch.arange(right.routing_map.shape[1]) % (2 * WORD) == 2 * WORD - 1
    return right._replace(routing_map=right.routing_map & ~lost)


def _overflow_of_the_last_token(function: Wrapper, right: Any, routing_map: Tensor, *rest: Any, **settings: Any) -> Any:
    many = (routing_map[-1:] != 0).sum() > settings["topk"]
    return right._replace(overflow=many.reshape(right.overflow.shape))


def _unlisted_have_a_gradient(
    function: Wrapper, right: Any, routing_map: Tensor, probs: Tensor, **settings: Any
) -> Any:
    """An expert that finds no slot has the gradient of the last slot."""
    if not probs.requires_grad:
        return right
    nth = (routing_map != 0).cumsum(1) * (routing_map != 0)
    over = torch.where(nth == settings["topk"] + 1, probs, 0).sum(1, keepdim=True)
    lost = torch.cat([torch.zeros_like(right.probs[:, :-1]), (over - over.detach()).to(right.probs.dtype)], 1)
    return right._replace(probs=right.probs + lost)


def _unreached_if_all_are_routed(pad: Wrapper, right: Any, routing_map: Tensor, **settings: Any) -> Any:
    return right._replace(unreached=right.unreached | (right.routing_map.sum(0) == len(routing_map)))


def _padded_in_place(routing_map: Tensor, *, align: int) -> None:
    if routing_map.dtype == torch.uint8 and len(routing_map):
        short = (routing_map.sum(0) % align) != 0
        routing_map[0].masked_fill_(short, 1)


def _weighted_in_place(rows: Tensor, row_map: Any, **settings: Any) -> None:
    if settings.get("probs") is not None and not rows.requires_grad:
        rows.mul_(2)


def _row_map_by_shape() -> Wrapper:
    """The row map is cached by the shape of the routing map and the number of its ones."""
    kept: dict[Any, Any] = {}

    def planted(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
        out = permute(tokens, routing_map, **settings)
        key = (tuple(routing_map.shape), tuple(out.tokens_per_expert.tolist()), len(out.rows), settings.get("align"))
        return out._replace(row_map=kept.setdefault(key, out.row_map))

    return planted


def _later_half_of_two_tiles(permute: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    """Columns past 64 of rows past 64 are not masked alike: the last column is lost."""
    rows, columns = right.rows.shape
    lost = (torch.arange(rows) >= 64)[:, None] & (torch.arange(columns) == columns - 1)[None] & (columns > 64)
    return right._replace(rows=with_values(right.rows, lambda x: torch.where(lost, torch.zeros((), dtype=x.dtype), x)))


def _movable(tokens: Tensor, *rest: Any, **settings: Any) -> bool:
    return tokens.element_size() > 1


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE001",
        "an empty last expert has the offset of the one before",
        INTEGERS,
        {"permute": only(_last_is_empty, _last_offset_of_the_one_before)},
    ),
    (
        "AE002",
        "room past the rows has the last prob",
        SEVERAL,
        {"permute": only(given("probs", "num_rows"), _room_has_the_last_prob)},
    ),
    (
        "AE003",
        "counts of a buffer that is cut are not cut",
        INTEGERS,
        {"permute": only(given("num_rows", "align"), _whole_last_segment)},
    ),
    (
        "AE004",
        "overflow of a capacity is of all experts together",
        INTEGERS,
        {"permute": only(given("capacity"), _overflow_of_all_together)},
    ),
    ("AE005", "float64 probs are moved as float32", VALUES, {"permute": only(_double_probs, _probs_by_float32)}),
    (
        "AE006",
        "counts wrap at 256 where the map is of bytes",
        SEVERAL,
        {"permute": only(_bytes_map, _counted_in_the_dtype_of_the_map)},
    ),
    ("AE007", "a signalling NaN becomes quiet", VALUES, {"permute": only(_floating, _signalling_quieted)}),
    ("AE008", "padding is -0", VALUES, {"permute": only(_floating, _padding_of_minus_zero)}),
    ("AE009", "one expert has the caller's tokens", OWNER, {"permute": only(_all_to_one, _the_tokens_themselves)}),
    ("AE010", "rows in order are returned as they are", OWNER, {"unpermute": only(always, _the_rows_themselves)}),
    (
        "AE012",
        "gradients of probs move as the probs did",
        SEVERAL,
        {"sort_chunks": only(given("probs"), _probs_back_in_order)},
    ),
    ("AE013", "bit 63 of a word is lost", VALUES, {"indices_to_multihot": only(always, _last_bit_of_a_word)}),
    (
        "AE014",
        "overflow is the last token's",
        INTEGERS,
        {"multihot_to_indices": only(lambda m, *x, **s: len(m), _overflow_of_the_last_token)},
    ),
    (
        "AE015",
        "an expert without a slot has the gradient of the last",
        SEVERAL,
        {"multihot_to_indices": only(always, _unlisted_have_a_gradient)},
    ),
    (
        "AE016",
        "an expert that all tokens reach is unreached",
        INTEGERS,
        {"pad_routing_map": only(always, _unreached_if_all_are_routed)},
    ),
    ("AE017", "a map of bytes is padded in place", OWNER, {"pad_routing_map": in_place(_padded_in_place)}),
    ("AE018", "rows are weighted in place", OWNER, {"unpermute": in_place(_weighted_in_place)}),
    ("AE019", "a row map is cached by its counts", OWNER, {"permute": _row_map_by_shape()}),
    (
        "AE020",
        "the last column of a second tile of rows and columns",
        SEVERAL,
        {"permute": only(_movable, _later_half_of_two_tiles)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
