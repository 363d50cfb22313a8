"""Promises of the draws of permutation and the router: property name, and whether a case has it."""

import torch

from conformance.catalogue import CONTRACTS
from conformance.core.space import MAP_DTYPES
from conformance.families.permutation.cases import SPREADS, indices, routed
from conformance.families.router.cases import logits_of, map_of, padding_of
from conformance.families.router.cases_route import LOSSES, STEPS
from conformance.families.router.space import REAL_ROUTERS
from tests.engine.drawn_cases import BACK_AND_QUANTIZED, PARAMETERS


def counts(case):
    return routed(case).sum(0)


def expected(case, output):
    contract = CONTRACTS[case.function]
    return contract.expected(case, contract.problem(case), {})[output].value


ROUTED = {
    "no tokens": lambda c: c.tokens == 0,
    "nothing routed": lambda c: c.tokens > 0 and not counts(c).any(),
    "an empty expert beside others": lambda c: c.tokens > 0 and 0 < (counts(c) == 0).sum() < c.experts,
    "one expert": lambda c: c.experts == 1,
    "all experts for every token": lambda c: c.tokens > 0 and c.experts > 1 and routed(c).all(),
    "a number of experts that is no power of two": lambda c: c.experts & (c.experts - 1) != 0,
    "more than 250 tokens": lambda c: c.tokens > 250,
    "more than 500 experts": lambda c: c.experts > 500,
    "tokens with different numbers of experts": lambda c: c.tokens > 1 and len(set(routed(c).sum(1).tolist())) > 1,
    "an explicit map": lambda c: c.routing is not None and c.tokens > 1,
} | {f"a map of {dtype}": lambda c, dtype=dtype: c.map_dtype == dtype for dtype in MAP_DTYPES}
SPREAD = {f"spread {spread}": lambda c, spread=spread: c.routing is None and c.spread == spread for spread in SPREADS}
WITH_ROOM = {
    "a hidden size above 4000": lambda c: c.hidden > 4000,
    "a hidden size of one": lambda c: c.hidden == 1,
    "a hidden size of zero": lambda c: c.hidden == 0,
    "an alignment": lambda c: c.align > 1,
    "a capacity above the number of tokens": lambda c: c.capacity > c.tokens,
    "a capacity that drops rows": lambda c: c.capacity and (counts(c) > c.capacity).any(),
    "too few rows": lambda c: c.slack is not None and c.slack < 0 and counts(c).any(),
    "more rows than needed": lambda c: c.slack is not None and c.slack > 0,
    "exactly the rows that are needed": lambda c: c.slack == 0,
    "an alignment and a number of rows": lambda c: c.align > 1 and c.slack is not None,
}
VALUES = {f"{values} values": lambda c, values=values: c.values == values for values in ("dyadic", "wide", "special")}
PROBS = {
    "probs of another dtype than the rows": lambda c: c.probs == "bfloat16" and c.dtype == "float32",
    "no probs": lambda c: not c.probs,
}
INDEXED = {
    "no tokens": lambda c: c.tokens == 0,
    "one expert": lambda c: c.experts == 1,
    "more slots than experts": lambda c: c.topk > c.experts,
    "empty slots": lambda c: c.tokens > 0 and (indices(c) == -1).any(),
    "nothing but empty slots": lambda c: c.tokens > 0 and (indices(c) == -1).all(),
    "an expert in several slots": lambda c: any(
        len({e for e in row if e >= 0}) < sum(e >= 0 for e in row) for row in indices(c).tolist()
    ),
    "more than 250 tokens": lambda c: c.tokens > 250,
    "more than 500 experts": lambda c: c.experts > 500,
    "a number of experts that is no power of two": lambda c: c.experts & (c.experts - 1) != 0,
    "probabilities of zero": lambda c: c.zero_probs,
} | {f"indices of {dtype}": lambda c, dtype=dtype: c.index_dtype == dtype for dtype in ("int64", "int32", "int16")}
CHUNKED = {
    "no chunks": lambda c: not c.sizes,
    "no rows": lambda c: c.sizes and not sum(c.sizes),
    "an empty chunk beside others": lambda c: 0 in c.sizes and any(c.sizes),
    "an empty chunk in front": lambda c: c.sizes and c.sizes[0] == 0 and any(c.sizes),
    "more than 100 chunks": lambda c: len(c.sizes) > 100,
    "chunks that stay where they are": lambda c: len(c.sizes) > 1 and c.order == tuple(range(len(c.sizes))),
    "an order that is not its own inverse": lambda c: any(c.order[c.order[i]] != i for i in range(len(c.order))),
    "rows behind the last chunk": lambda c: c.tail > 0,
    "a hidden size above 1000": lambda c: c.hidden > 1000,
    "more than 100 rows": lambda c: sum(c.sizes) > 100,
} | {f"indices of {dtype}": lambda c, dtype=dtype: c.index_dtype == dtype for dtype in ("int64", "int32")}


NO_GRADIENTS = (
    "pad_routing_map",
    "deepep_layout",
    "jitter",
    "update_expert_bias",
    "grouped_dgrad",
    "grouped_wgrad",
    *BACK_AND_QUANTIZED,
    *PARAMETERS,
)


def in_order(case):
    return logits_of(case).sort(dim=1, descending=True).values.double()


def each(field: str, *values) -> dict:
    """Values that are in no covering array; those that are must be drawn as well."""
    return {f"{field} {value!r}": lambda c, value=value: getattr(c, field) == value for value in values}


BLOCKS = each("align", 64, 128, 256)  # of the products that take the rows
WITH_ROOM |= BLOCKS


def steps(case):
    return case.steps.split("+")


def waiting(case):
    """The most choices of different records that wait for their replay at once."""
    queue, most, number = [], 0, 0
    for step in steps(case):
        number += step == "record"
        queue = [*queue, number] if step == "forward" else queue[1:] if step == "backward" else queue
        most = max(most, len(set(queue)))
    return most


SHAPED = {
    "no tokens": lambda c: c.tokens == 0,
    "one expert": lambda c: c.experts == 1,
    "one slot of several experts": lambda c: c.topk == 1 < c.experts,
    "a number of experts that is no power of two": lambda c: c.experts & (c.experts - 1) != 0,
}
LARGE = {
    "more than 250 tokens": lambda c: c.tokens > 250,
    "more than 2000 experts": lambda c: c.experts > 2000,
    "more than 30 slots": lambda c: c.topk > 30,
} | {
    f"the router of a real model, {experts} {topk}": lambda c, s=(experts, topk): (c.experts, c.topk) == s
    for experts, topk in REAL_ROUTERS
}
SPREAD_OF_LOGITS = each("spread", "extreme", "equal", "saturated") | {
    "NaN beside rows without": lambda c: 0 < int(logits_of(c).isnan().any(1).sum()) < c.tokens,
    "+∞": lambda c: bool((logits_of(c) == torch.inf).any()),
    "a row of nothing but -∞": lambda c: bool((logits_of(c) == -torch.inf).all(1).any()),
    "fewer logits above -∞ than slots, but some": lambda c: bool(
        ((n := (logits_of(c) > -torch.inf).sum(1)) < c.topk).logical_and(n > 0).any()
    ),
}
CHOICES = {
    "all experts for every token": lambda c: c.tokens > 0 and c.topk == c.experts > 1,
    "a tie between the last chosen and the next": lambda c: (
        c.topk < c.experts and bool((in_order(c)[:, c.topk - 1] == in_order(c)[:, c.topk]).any())
    ),
    "no tie anywhere": lambda c: c.tokens > 1 and c.experts > 1 and bool((in_order(c).diff(dim=1) < 0).all()),
}
SETTINGS_OF_TOPK = {
    "one group kept": lambda c: c.groups > 1 and c.group_topk == 1,
    "several of the groups kept": lambda c: 1 < c.group_topk < c.groups,
    "all groups kept": lambda c: c.groups > 1 and c.group_topk == c.groups,
    "groups judged by several experts": lambda c: c.groups and c.topk // c.group_topk > 1,
    "slots that are no multiple of the kept groups": lambda c: c.groups and c.topk % c.group_topk != 0,
    "kept groups that are chosen whole": lambda c: c.groups and c.topk == c.group_topk * c.experts // c.groups,
    "a bias with groups": lambda c: c.groups and c.bias,
    "a scaling factor below one": lambda c: 0 < c.scaling < 8,
    "a scaling factor above one": lambda c: c.scaling > 8,
    "indices given": lambda c: c.precomputed,
    "indices given beside groups": lambda c: c.precomputed and c.groups,
}
PADDED = {
    "no padding": lambda c: not c.padding,
    "some padding": lambda c: c.padding and 0 < int(padding_of(c).sum()) < c.tokens,
    "nothing but padding": lambda c: c.tokens > 0 and bool(padding_of(c).all()),
}
TOPK = SHAPED | LARGE | SPREAD_OF_LOGITS | CHOICES | SETTINGS_OF_TOPK
DROPS = {
    "tokens of which some are dropped": lambda c: c.capacity and bool((map_of(c).sum(0) > c.capacity).any()),
    "no room at all": lambda c: c.capacity == 0 < c.tokens,
    "more room than tokens": lambda c: c.capacity > c.tokens > 0,
    "experts filled up": lambda c: c.pad and c.tokens and bool((map_of(c).sum(0) < min(c.capacity, c.tokens)).any()),
    "tokens with different numbers of experts": lambda c: c.tokens > 1 and len(set(map_of(c).sum(1).tolist())) > 1,
}
STATES = {
    "no tokens": lambda c: c.tokens == 0,
    "one column": lambda c: c.hidden == 1,
    "more than 100 columns": lambda c: c.hidden > 100,
}
ROUTES = {f"the step {step}": lambda c, step=step: step in steps(c) for step in STEPS} | {
    "all losses at once": lambda c: len(c.losses.split("+")) == len(LOSSES),
    "a step after a global batch": lambda c: "finish" in steps(c)[1:-1],
    "two replays in a queue": lambda c: "forward+forward" in c.steps,
    "three different replays in a queue": lambda c: waiting(c) > 2,
    "several sequences": lambda c: c.sequences > 1,
    "padding": lambda c: c.padding > 0,
    "a capacity": lambda c: c.capacity > 0,
    "groups": lambda c: c.groups > 0,
    "an expert bias that is updated and used again": lambda c: c.bias and "finish+train" in c.steps,
    "losses a token": lambda c: c.per_token and c.losses,
}
