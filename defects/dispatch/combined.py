"""Defects of dispatchers that only some calls show; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import given, in_place, inside, only
from conformance.mutants.kinds.gradients import rounded_to, with_gradient
from defects.dispatch.parts import everybodys

SEVERAL = "a mistake that one option alone does not show"
INTEGERS = "a mistake in a result that is seldom read"
VALUES = "a mistake that one class of values shows"
HANDLES = "a mistake that handles invite"
OWNER = "a mistake about whose memory it is"
SIZES = "a mistake that one size shows"
MAPPED = ("allgather_dispatch", "alltoall_dispatch", "hybridep_dispatch")
WORD = 32  # bits


def _world(settings: dict[str, Any]) -> int:
    return dist.get_world_size(settings["group"])


def _sharded_capacity(*inputs: Any, **settings: Any) -> bool:
    return settings.get("expert_tensor_parallel", 1) > 1 and settings.get("capacity") is not None


def _sources_ascend(layout: Wrapper, *, sources: Any, **rest: Any) -> Any:
    return layout(sources=None, **rest)


def _three_ranks(*inputs: Any, **settings: Any) -> bool:
    probs = settings.get("probs")
    wide = (
        isinstance(probs, Tensor)
        and probs.dtype == torch.float32
        and inputs[0].dtype in (torch.bfloat16, torch.float16)
    )
    return wide and _world(settings) >= 3


def _ranks_added_in_the_dtype_of_rows(base: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    return right._replace(handle=[replace(own, reduce_dtype=tokens.dtype) for own in right.handle])


def _counts_below_zero(base: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """What is left of the budget for an expert is not cut at 0."""
    free = base(tokens, routing_map, **settings | {"num_rows": None})
    whole = free.tokens_per_expert
    start = whole.cumsum(0) - whole
    return right._replace(tokens_per_expert=torch.minimum(whole, settings["num_rows"] - start))


def _cached_in_the_first_dtype(base: Wrapper, tokens: Tensor, handle: Any, **settings: Any) -> Any:
    out = base(tokens, handle, **settings)
    return with_values(out, rounded_to(torch.bfloat16)) if tokens.dtype == torch.float16 else out


def _cached_without_gradient(base: Wrapper, tokens: Tensor, handle: Any, **settings: Any) -> Any:
    return base(tokens.detach(), handle, **settings) + 0 * base(tokens, handle, **settings)


def _cached_gradient_of_one_rank(base: Wrapper, tokens: Tensor, handle: Any, **settings: Any) -> Any:
    """The backward adds the rows of even ranks alone."""
    even = dist.get_rank(settings["group"]) % 2 == 0
    out = base(tokens, handle, **settings)
    return with_gradient(out, lambda g: g if even else torch.zeros_like(g)) if out.requires_grad else out


def _first_slot_counts(base: Wrapper, right: Any, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    """Of an expert named twice the first slot is kept."""
    turned = dict(settings) | ({"probs": settings["probs"].flip(1)} if settings.get("probs") is not None else {})
    out = base(tokens, indices.flip(1), **turned)
    probs = None if out.probs is None else out.probs.flip(1)
    return out._replace(indices=out.indices.flip(1), probs=probs, handle=right.handle)


def _last_slot(*inputs: Any, **settings: Any) -> bool:
    policy = settings.get("policy")
    return policy is not None and policy.duplicates == "last slot"


def _zeros_dropped_without_duplicates(base: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    return base(*inputs, **settings | {"policy": replace(settings["policy"], zero_prob="keep")})


def _both_policies(*inputs: Any, **settings: Any) -> bool:
    policy = settings.get("policy")
    return policy is not None and policy.zero_prob == "drop" and policy.duplicates != "reject"


def _nan_block(base: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    """A NaN is the amax of its block."""
    return base(
        torch.where(tokens.float().unflatten(1, (-1, 128)).isnan().any(2).repeat_interleave(128, 1), torch.nan, tokens),
        *rest,
        **settings,
    )


def _zero_hides_nan(
    base: Wrapper, right: Tensor, rows: Tensor, indices: Tensor, probs: Tensor, handle: Any, **settings: Any
) -> Tensor:
    """A slot of probability 0 is skipped."""
    finite = base(with_values(rows, lambda x: x.nan_to_num(0.0, 0.0, 0.0)), indices, probs, handle, **settings)
    zero = (probs == 0).any(1, keepdim=True)
    return torch.where(zero & right.isnan(), finite, right)


def _probs_of_dropped_rows(base: Wrapper, right: Any, rows: Tensor, handle: Any, **settings: Any) -> Any:
    """An expert's prob of a token that it dropped is the token's other one."""
    one = right.probs.abs().amax(1, keepdim=True)
    return right._replace(probs=torch.where((right.probs == 0) & (rows.shape[0] % 2 == 1), one * 0.5, right.probs))


def _no_biases_with_probs(base: Wrapper, right: Any, rows: Tensor, handle: Any, **settings: Any) -> Any:
    return base(rows, handle, **settings | {"biases": ()})


def _bits_of_a_word(layout: Wrapper, right: Any, indices: Tensor, *, num_experts: int, ranks: int) -> Any:
    """A mask of 32 bits per token: experts past 31 are taken modulo 32."""
    low = torch.where(indices >= WORD, indices % WORD, indices)
    return right._replace(is_token_in_rank=layout(low, num_experts=num_experts, ranks=ranks).is_token_in_rank)


def _probs_by_equal_ranks(base: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Ranks have as many tokens as this one: its probs are read as the others'."""
    lengths = [len(own) for own in everybodys(torch.zeros(len(tokens)), settings["group"])]
    return right._replace(probs=right.probs.flip(0)) if len(set(lengths)) > 1 else right


def _straight_through_forgotten(base: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    out = base(tokens.detach(), *rest, **settings)
    return out._replace(probs=right.probs)


def _gradient_of_dropped_probs(base: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """With a budget the gradient of probs is all experts'."""
    probs = settings["probs"]
    whole = with_gradient(probs, lambda g: torch.where((routing_map != 0) & (g == 0), torch.ones_like(g), g))
    return right._replace(probs=base(tokens.detach(), routing_map, **settings | {"probs": whole}).probs)


def _overflow_in_place_of_counts(base: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    """Segments that the budget cuts are padded to the alignment of the whole."""
    align = settings["align"]
    counts = right.tokens_per_expert
    return right._replace(tokens_per_expert=(counts + (counts % (2 * align) == align) * 0) // (2 * align) * 2 * align)


def _rows_negated(rows: Tensor, *rest: Any, **settings: Any) -> None:
    if not rows.requires_grad and rows.numel():
        rows.neg_()


def _handle_by_shape() -> Wrapper:
    """The handle is kept by the number of tokens, experts and rows."""
    kept: dict[Any, Any] = {}

    def planted(base: Wrapper, tokens: Tensor, routing: Tensor, **settings: Any) -> Any:
        out = base(tokens, routing, **settings)
        every = tuple(
            tuple(own.shape)
            for own in everybodys(torch.zeros(int(out.tokens_per_expert.sum()), len(tokens)), settings["group"])
        )
        key = (every, tuple(routing.shape), dist.get_rank(settings["group"]), id(settings["group"]))
        return out._replace(handle=kept.setdefault(key, out.handle))

    return planted


def _aligned_once(base: Wrapper, right: Any, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    """An expert without slots has a whole block."""
    plain = base(tokens, indices, **settings | {"expert_alignment": 1}).tokens_per_expert
    few = (plain > 0) & (plain * 2 < settings["expert_alignment"])
    return right._replace(tokens_per_expert=torch.where(few, 0, right.tokens_per_expert))


def _aligned(*inputs: Any, **settings: Any) -> bool:
    return settings.get("expert_alignment", 1) > 1 and settings.get("num_worst_tokens") is None


def _scales_per_row(base: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    """Scales of one number per token are moved in reverse."""
    return (
        right._replace(scales=right.scales.flip(0)) if right.scales.dim() == 1 or right.scales.shape[1] == 1 else right
    )


def _wire_scale_of_a_subnormal(base: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    return base(torch.where(tokens.abs() < 1e-5, torch.zeros_like(tokens), tokens), *rest, **settings)


def _slots_of_narrow_indices(
    base: Wrapper, right: Tensor, rows: Tensor, indices: Tensor, *rest: Any, **settings: Any
) -> Tensor:
    """int32 slots are read as halves of int64."""
    return right.flip(0)


def _narrow(rows: Tensor, indices: Tensor, *rest: Any, **settings: Any) -> bool:
    return indices.dtype != torch.int64


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE149",
        "with shards and a capacity sources ascend",
        SEVERAL,
        {"alltoall_dispatch": only(_sharded_capacity, inside("moe_ref.dispatch.alltoall", Layout=_sources_ascend))},
    ),
    (
        "AE150",
        "three ranks add float32 probs' rows in 16 bits",
        SEVERAL,
        dict.fromkeys(
            ("allgather_dispatch", "alltoall_dispatch"), only(_three_ranks, _ranks_added_in_the_dtype_of_rows)
        ),
    ),
    (
        "AE152",
        "counts past the budget are below 0",
        INTEGERS,
        dict.fromkeys(MAPPED, only(given("num_rows"), _counts_below_zero)),
    ),
    (
        "AE153",
        "a cached dispatch has the dtype of its handle",
        HANDLES,
        dict.fromkeys(("deepep_cached_dispatch", "hybridep_cached_dispatch"), _cached_in_the_first_dtype),
    ),
    (
        "AE154",
        "a cached dispatch has no gradient",
        HANDLES,
        dict.fromkeys(("deepep_cached_dispatch", "hybridep_cached_dispatch"), _cached_without_gradient),
    ),
    (
        "AE155",
        "a cached dispatch has the gradient of even ranks",
        HANDLES,
        dict.fromkeys(("deepep_cached_dispatch", "hybridep_cached_dispatch"), _cached_gradient_of_one_rank),
    ),
    (
        "AE156",
        "of slots with one expert the first counts",
        SEVERAL,
        {"deepep_dispatch": only(_last_slot, _first_slot_counts)},
    ),
    (
        "AE157",
        "zeros are kept where duplicates are",
        SEVERAL,
        {"deepep_dispatch": only(_both_policies, _zeros_dropped_without_duplicates)},
    ),
    (
        "AE158",
        "a NaN is the amax of its block",
        VALUES,
        {"deepep_low_latency_dispatch": only(given("use_fp8"), _nan_block)},
    ),
    (
        "AE159",
        "a probability of 0 hides NaN",
        VALUES,
        {"deepep_low_latency_combine": only(lambda *x, **s: True, _zero_hides_nan)},
    ),
    (
        "AE160",
        "a dropped row's prob is half of another",
        SEVERAL,
        {"hybridep_combine": only(given("probs"), _probs_of_dropped_rows)},
    ),
    (
        "AE161",
        "probs exclude biases",
        SEVERAL,
        {"deepep_combine": only(given("probs", "biases"), _no_biases_with_probs)},
    ),
    (
        "AE162",
        "experts past 31 are those of the first word",
        SIZES,
        {"deepep_layout": only(lambda x, **s: s["num_experts"] > WORD, _bits_of_a_word)},
    ),
    (
        "AE163",
        "probs are read as if ranks were equal",
        SEVERAL,
        {"allgather_dispatch": only(given("probs"), _probs_by_equal_ranks)},
    ),
    (
        "AE164",
        "rows that travel as codes have no gradient",
        SEVERAL,
        {"hybridep_dispatch": only(given("recipe"), _straight_through_forgotten)},
    ),
    (
        "AE165",
        "probs of dropped rows have a gradient",
        SEVERAL,
        dict.fromkeys(MAPPED, only(given("probs", "num_rows"), _gradient_of_dropped_probs)),
    ),
    (
        "AE166",
        "segments that are cut are cut to two blocks",
        SEVERAL,
        {"hybridep_dispatch": only(given("align", "num_rows"), _overflow_in_place_of_counts)},
    ),
    (
        "AE167",
        "a combine works in place",
        OWNER,
        dict.fromkeys(("alltoall_combine", "hybridep_combine", "deepep_low_latency_combine"), in_place(_rows_negated)),
    ),
    ("AE168", "a handle is kept by its sizes", HANDLES, dict.fromkeys(MAPPED, _handle_by_shape())),
    ("AE169", "less than half a block is no block", INTEGERS, {"deepep_dispatch": only(_aligned, _aligned_once)}),
    (
        "AE170",
        "scales of one number per token are turned",
        SEVERAL,
        {"deepep_dispatch": only(given("scales"), _scales_per_row)},
    ),
    (
        "AE171",
        "values far below the least amax travel as 0",
        VALUES,
        {"deepep_low_latency_dispatch": only(given("use_fp8"), _wire_scale_of_a_subnormal)},
    ),
    (
        "AE172",
        "narrow indices of a combine are misread",
        VALUES,
        {"deepep_low_latency_combine": only(_narrow, _slots_of_narrow_indices)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
