"""Strategies reach what they promise, draw only legal cases, and depend on nothing but their seed."""

import functools
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core import covering
from conformance.core.case import Case, case_from
from conformance.core.ranks import ranks_of
from conformance.core.space import DTYPES, LAYOUTS, LOGIT_DTYPES, MAP_DTYPES, MOVED_DTYPES, POISONS, Space
from conformance.engine.choose import unconverted
from conformance.engine.choose.draw import covering_cases, drawn, far_cases, run_seed, scope_of, shape_cases, strategy
from conformance.engine.choose.plan import Section, cases_of, fixed_cases
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.choose.unconverted import AXES
from conformance.engine.run.corpus import checked
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.cases import SPREADS as SPREADS_OF_SLOTS
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.experts import axes_mlp
from conformance.families.experts.cases import VALUES as VALUES_ACTIVATED
from conformance.families.experts.cases import ActivationCase, GroupedCase, counts_of, hidden_of
from conformance.families.experts.mlp import MlpCase
from conformance.families.experts.shared import SharedCase
from conformance.families.experts.space_recipes import recipe_cases
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.fused.space import kinds as permuted_and_quantized_kinds
from conformance.families.permutation.cases import SPREADS, ChunksCase, IndicesCase, RoutingCase, indices, routed
from conformance.families.quantization.cases import (
    DIRECTIONS,
    RECIPES,
    ROLES,
    VARIANTS,
    QuantizeCase,
    is_random,
    is_transformed,
    splits_of,
    unit_of,
    x_of,
)
from conformance.families.quantization.cases import VALUES as VALUES_QUANTIZED
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase, logits_of, map_of, padding_of
from conformance.families.router.cases_route import LOSSES, STEPS
from conformance.families.router.space import REAL_ROUTERS, SINKHORN_SPREADS
from moe_ref.config import GATED as GATED_KINDS
from moe_ref.config import PLAIN as PLAIN_KINDS

FUNCTIONS = tuple(CONTRACTS)
WIDE = ("wide_rows", "wide_columns")
FAR = (*WIDE, "wide_depth")
DRAWS = {
    "permute": 700,
    "unpermute": 500,
    "sort_chunks": 500,
    "topk_indices": 500,
    "topk_routing": 500,
    "quantize": 700,
    "permute_and_quantize": 700,
}
CHOOSE = ("topk_indices", "topk_routing")
ELEMENTWISE = ("glu", "activation")
QUANTIZED = ("quantize",)
BACK_AND_QUANTIZED = ("glu_backward_and_quantize", "activation_backward_and_quantize")
ACTIVATED_AND_QUANTIZED = ("glu_and_quantize", "activation_and_quantize", *BACK_AND_QUANTIZED)
GROUPED = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
MLPS = ("grouped_mlp", "sequential_mlp")
STEPPED = ("route",)  # made of the other functions: its inputs lie as they come


@functools.cache
def draws(function: str, seed: int = 1, count: int = 0) -> list[Case]:
    return drawn(strategy(function, Space()), seed, count or DRAWS.get(function, 300))


@functools.cache
def covered(function: str) -> covering.Covered:
    return covering_cases(function, Space())


# ---- what the draws reach


def _counts(case):
    return routed(case).sum(0)


def _expected(case, output):
    contract = CONTRACTS[case.function]
    return contract.expected(case, contract.problem(case), {})[output].value


ROUTED = {
    "no tokens": lambda c: c.tokens == 0,
    "nothing routed": lambda c: c.tokens > 0 and not _counts(c).any(),
    "an empty expert beside others": lambda c: c.tokens > 0 and 0 < (_counts(c) == 0).sum() < c.experts,
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
    "a capacity that drops rows": lambda c: c.capacity and (_counts(c) > c.capacity).any(),
    "too few rows": lambda c: c.slack is not None and c.slack < 0 and _counts(c).any(),
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


DTYPES_OF = {
    **dict.fromkeys(("permute", "sort_chunks"), MOVED_DTYPES),
    **dict.fromkeys((*CHOOSE, "aux_loss_scores", "load_balancing_loss", "z_loss", *ELEMENTWISE), LOGIT_DTYPES),
    **dict.fromkeys((*GROUPED, *MLPS, "shared_experts", "latent_projection"), LOGIT_DTYPES),
    **dict.fromkeys(("pad_routing_map", "update_expert_bias", "deepep_layout"), ()),
    "route": ("float32", "bfloat16"),
    **{name: MOVED_DTYPES if name.endswith("dispatch") else DTYPES for name in COLLECTIVES},
}
ONE_GRADIENT = (
    "allgather_combine",
    "alltoall_combine",
    "deepep_low_latency_dispatch",
    "deepep_cached_dispatch",
    "hybridep_cached_dispatch",
)
NO_GRADIENTS = (
    "pad_routing_map",
    "deepep_layout",
    "jitter",
    "update_expert_bias",
    "grouped_dgrad",
    "grouped_wgrad",
    *BACK_AND_QUANTIZED,
)
GRADS_OF = {
    "permute": ("tokens", "probs", "tokens+probs"),
    **dict.fromkeys(("unpermute", "sort_chunks"), ("rows", "probs", "rows+probs")),
    **dict.fromkeys(("indices_to_multihot", "multihot_to_indices", "drop_tokens"), ("probs",)),
    **dict.fromkeys((*CHOOSE, "aux_loss_scores", "z_loss", "sinkhorn_routing", "route"), ("logits",)),
    "load_balancing_loss": ("scores",),
    "gate": ("x", "weight", "x+weight", "x+weight+bias"),
    "attach_loss": ("x", "loss", "x+loss"),
    **dict.fromkeys(ELEMENTWISE, ("h", "probs", "h+probs")),
    "quantize": ("x",),
    **dict.fromkeys(ACTIVATED_AND_QUANTIZED, ("h", "probs", "h+probs")),
    "permute_and_quantize": ("tokens", "probs", "tokens+probs"),
    **{
        name: (main,) if name in ONE_GRADIENT else ("probs", f"{main}+probs")
        for name in COLLECTIVES
        for main in ("tokens" if name.endswith("dispatch") else "rows",)
    },
    "grouped_linear": ("rows", "weight", "bias", "rows+weight", "rows+weight+bias"),
    **dict.fromkeys(
        MLPS,
        (
            "rows",
            "rows+probs+fc1_weight+fc2_weight",
            "rows+fc1_weight+fc2_weight",
            "rows+probs+fc1_weight+fc2_weight+fc1_bias+fc2_bias",
        ),
    ),
    "latent_projection": ("x", "weight", "bias", "x+weight", "x+weight+bias"),
    "shared_experts": ("x", "x+fc1_weight+fc2_weight", "x+fc1_weight+fc2_weight+gate_weight"),
}
EXPANDED = (
    "permute",
    "unpermute",
    "sort_chunks",
    *CHOOSE,
    "gate",
    "sinkhorn_routing",
    "drop_tokens",
    "aux_loss_scores",
    "attach_loss",
)
EXPANDED += ("shared_experts", "latent_projection")
EXPANDED += (
    *ELEMENTWISE,
    *GROUPED,
    "permute_and_quantize",
    *(name for name in ACTIVATED_AND_QUANTIZED if name not in BACK_AND_QUANTIZED),
)
LAYOUTS_OF = {"update_expert_bias": ("strided", "wide_rows")} | dict.fromkeys(STEPPED, ())  # two vectors; none
LAYOUTS_OF["deepep_low_latency_combine"] = (*LAYOUTS, *FAR)
LAYOUTS_OF |= dict.fromkeys((*GROUPED, *QUANTIZED, *MLPS), (*LAYOUTS, *FAR, "expanded"))


def _everywhere(function: str) -> dict:
    """What every function's draws must reach: laws, poisons, layouts, dtypes, gradients."""
    laws = [law.name for law in CONTRACTS[function].laws.values() if not law.device]
    layouts = LAYOUTS_OF.get(function, (*LAYOUTS, *WIDE, *(("expanded",) if function in EXPANDED else ())))
    found = {f"law {law}": lambda c, law=law: c.law == law for law in laws}
    found |= {f"poison {poison}": lambda c, poison=poison: c.poison == poison for poison in POISONS}
    found |= {f"layout {layout}": lambda c, layout=layout: c.layout == layout for layout in layouts}
    found |= {f"dtype {dtype}": lambda c, dtype=dtype: c.dtype == dtype for dtype in DTYPES_OF.get(function, DTYPES)}
    if function not in NO_GRADIENTS:
        found |= {
            f"gradients of {grads or 'nothing'}": lambda c, grads=grads: c.grads == grads
            for grads in ("", *GRADS_OF[function])
        }
    if function in ("permute", "sort_chunks"):
        found |= {f"unused {unused}": lambda c, unused=unused: c.unused == unused for unused in ("rows", "probs")}
    return found


def _sorted(case):
    return logits_of(case).sort(dim=1, descending=True).values.double()


def _each(field: str, *values) -> dict:
    return {f"{field} {value!r}": lambda c, value=value: getattr(c, field) == value for value in values}


def _steps(case):
    return case.steps.split("+")


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
SPREAD_OF_LOGITS = _each(
    "spread", "distinct", "ties", "near", "negative", "extreme", "minus_inf", "nan", "equal", "saturated"
) | {
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
        c.topk < c.experts and bool((_sorted(c)[:, c.topk - 1] == _sorted(c)[:, c.topk]).any())
    ),
    "no tie anywhere": lambda c: c.tokens > 1 and c.experts > 1 and bool((_sorted(c).diff(dim=1) < 0).all()),
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
TOPK |= _each("score", "softmax", "softmax_pre", "sigmoid", "sqrtsoftplus") | _each("bias", "", "small", "large")
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
ROUTES = {f"the step {step}": lambda c, step=step: step in _steps(c) for step in STEPS} | {
    "all losses at once": lambda c: len(c.losses.split("+")) == len(LOSSES),
    "a step after a global batch": lambda c: "finish" in _steps(c)[1:-1],
    "two replays in a queue": lambda c: "forward+forward" in c.steps,
    "several sequences": lambda c: c.sequences > 1,
    "padding": lambda c: c.padding > 0,
    "a capacity": lambda c: c.capacity > 0,
    "groups": lambda c: c.groups > 0,
    "an expert bias that is updated and used again": lambda c: c.bias and "finish+train" in c.steps,
    "losses a token": lambda c: c.per_token and c.losses,
}
ACTIVATED = {
    "no rows": lambda c: c.tokens == 0,
    "no columns": lambda c: c.width == 0,
    "one column": lambda c: c.width == 1,
    "more than 100 columns": lambda c: c.width > 100,
    "no probs": lambda c: not c.probs,
    "probs of another dtype than the rows": lambda c: c.probs and c.probs != c.dtype,
    "a number on the bound": lambda c: (
        c.values == "bounds" and bool((hidden_of(c, c.width).abs() == (c.clamp / 8 or 1)).any())
    ),
    "a row with a NaN beside one without": lambda c: 0 < int(hidden_of(c, c.width).isnan().any(1).sum()) < c.tokens,
    "an infinity": lambda c: bool(hidden_of(c, c.width).isinf().any()),
}
ACTIVATED |= (
    _each("weights", "plain", "zeros", "signed")
    | _each("values", "dyadic", "rows", "bounds", "saturated", "special")
    | _each("early", False, True)
)
GATED = {
    "a negative offset": lambda c: c.offset < 0,
    "columns that alternate": lambda c: c.interleave == 1 < c.width,
    "blocks as long as a half": lambda c: c.interleave == c.width > 1,
    "blocks between": lambda c: 1 < c.interleave < c.width,
    "a clamp, an offset and a slope": lambda c: c.clamp and c.offset and c.alpha,  # gpt-oss has all three
    "an input that is stored in E4M3, and beyond its range": lambda c: (
        c.stored and bool((hidden_of(c, 2 * c.width).abs() > 464).any()) and c.grads
    ),
}
SEGMENTS = {
    "no rows": lambda c: not any(counts_of(c)),
    "one expert": lambda c: c.experts == 1,
    "an empty expert first": lambda c: counts_of(c)[0] == 0 < c.tokens,
    "an empty expert in the middle": lambda c: 0 in counts_of(c)[1:-1] and counts_of(c)[0] and counts_of(c)[-1],
    "an empty expert last": lambda c: counts_of(c)[-1] == 0 < c.tokens,
    "all rows to one of several": lambda c: max(counts_of(c)) == c.tokens > 1 < c.experts,
    "more experts than rows": lambda c: c.experts > c.tokens > 0,
    "counts that differ": lambda c: len(set(counts_of(c)) - {0}) > 1,
    "rows behind the last segment": lambda c: c.tail > 0 < c.tokens,
    "nothing but rows behind": lambda c: c.tail > 0 == c.tokens,
    "another width out than in": lambda c: c.hidden != c.width,
    "nothing in": lambda c: c.hidden == 0,
    "nothing out": lambda c: c.width == 0,
}
SEGMENTS |= (
    _each("values", "dyadic", "rows", "special")
    | _each("accumulator", "", "float64")
    | _each("index_dtype", "int64", "int32")
)

_SETTINGS = {name: GATED[name] for name in ("a clamp, an offset and a slope",)} | _each(
    "kind", "", *GATED_KINDS[1:], *PLAIN_KINDS
)
LAYERED = {name: promise for name, promise in SEGMENTS.items() if not name.startswith("accumulator")} | _SETTINGS
LAYERED |= (
    _each("bias1", "", "float32", "bfloat16", "float64")
    | _each("bias2", "", "float32", "bfloat16", "float64")
    | _each("on_input", False, True)
)
LAYERED |= (
    _each("stored", False, True)
    | _each("early", False, True)
    | _each("recompute", "", "moe_act", "moe")
    | _each("weights", "plain", "zeros", "signed")
)
LAYERED |= {
    "one bias": lambda c: bool(c.bias1) != bool(c.bias2),
    "padding": lambda c: c.align > 1 and c.tokens % c.align,
    "no probs": lambda c: not c.probs,
}
OF_ALL = (
    _SETTINGS
    | _each("stored", False, True)
    | _each("gate", False, True)
    | _each("again", False, True)
    | _each("values", "dyadic", "rows", "special")
)
LAYERED |= _each("scaling", "", "current", "block", "mxfp8", "nvfp4")
OF_ALL |= _each("scaling", "", "delayed", "current", "block", "mxfp8", "nvfp4")
PROJECTED = _each("values", "dyadic", "rows", "special") | _each(
    "scaling", "", "delayed", "current", "block", "mxfp8", "nvfp4"
)
PROJECTED |= {
    "no tokens": lambda c: not c.tokens,
    "nothing in": lambda c: not c.hidden,
    "nothing out": lambda c: not c.width,
}
OF_ALL |= {
    "no tokens": lambda c: not c.tokens,
    "nothing in": lambda c: not c.hidden,
    "nothing between": lambda c: not c.width,
}

QUANTIZATIONS = {
    f"variant {variant} of {scaling}, {role}, {direction}": lambda c, kind=(scaling, variant, role, direction): (
        (c.scaling, c.variant, c.role, c.direction) == kind
    )
    for scaling in RECIPES
    for variant in range(VARIANTS)
    for role in ROLES
    for direction in DIRECTIONS
} | {
    "no splits": lambda c: not c.experts and c.tokens,
    "no rows": lambda c: not c.tokens,
    "no columns": lambda c: not c.hidden,
    "an empty group first": lambda c: c.experts and splits_of(c)[0] == 0 < c.tokens,
    "an empty group in the middle": lambda c: 0 in splits_of(c)[1:-1] and splits_of(c)[0] and splits_of(c)[-1],
    "an empty group last": lambda c: c.experts and splits_of(c)[-1] == 0 < c.tokens,
    "groups with nobody": lambda c: c.experts > 1 and not c.tokens,
    "rows behind the last group": lambda c: c.tail > 0 < c.tokens,
    "a second block of 128 rows": lambda c: c.scaling == "block" and c.tokens > 128,
    "a third block of 128 columns": lambda c: c.scaling == "block" and c.hidden > 256,
    "a partial block": lambda c: c.scaling == "block" and c.hidden % 128,
    "an infinity that rows of a group hold": lambda c: bool(x_of(c)[: c.tokens * unit_of(c)].isinf().any()),
    "a NaN that rows of a group hold": lambda c: bool(x_of(c)[: c.tokens * unit_of(c)].isnan().any()),
    "a subnormal number": lambda c: bool(
        ((x := x_of(c)) != 0).logical_and(x.abs() < torch.finfo(x.dtype).smallest_normal).any()
    ),
    "a block of zeros beside others": lambda c: (
        c.scaling == "mxfp8"
        and c.direction == "rowwise"
        and bool((_expected(c, "amax") == 0).any() and _expected(c, "amax").any())
    ),
    "a transform": is_transformed,
    "noise": is_random,
    "a state that is saved": lambda c: "reload" in c.steps,
    "amax of other ranks": lambda c: "reduced" in c.steps,
    "two quantisations before an update": lambda c: "quantize+quantize+update" in c.steps,
    "more updates than are remembered": lambda c: c.steps.count("update") > 3,
}
QUANTIZATIONS |= _each(
    "values", "dyadic", "rows", "wide", "bounds", "midpoints", "tiny", "huge", "zeros", "special"
) | _each("gemm", False, True)
QUANTIZATIONS |= _each("index_dtype", "int64", "int32")

PERMUTED_AND_QUANTIZED = (
    {name: promise for name, promise in ROUTED.items() if not name.startswith("more than")} | SPREAD | PROBS
)
PERMUTED_AND_QUANTIZED |= {
    str(kind): lambda c, kind=kind: kind.items() <= vars(c).items()
    for kind in permuted_and_quantized_kinds(scope_of("permute_and_quantize", Space()))
}
PERMUTED_AND_QUANTIZED |= _each("values", *VALUES_QUANTIZED) | _each("gemm", False, True)
PERMUTED_AND_QUANTIZED |= {
    name: promise for name, promise in WITH_ROOM.items() if not name.startswith("a hidden size above")
}
PERMUTED_AND_QUANTIZED |= {
    f"unused {unused}": lambda c, unused=unused: c.unused == unused for unused in ("rows", "probs")
}
IN_ONE_STEP = (
    _each("scaling", *RECIPES)
    | _each("variant", 0, 1, 2)
    | _each("direction", "rowwise", "columnwise", "both")
    | _each("rounded", False, True)
)
IN_ONE_STEP |= (
    _each("probs", "", "float32", "bfloat16", "float64")
    | _each("weights", "plain", "zeros", "signed")
    | _each("values", *VALUES_ACTIVATED)
)
IN_ONE_STEP |= {
    "no rows": lambda c: not c.tokens,
    "no splits": lambda c: not c.experts,
    "an empty group beside others": lambda c: 0 in c.counts and any(c.counts),
    "rows behind the last group": lambda c: c.tail > 0,
    "more than a block of rows": lambda c: c.scaling == "block" and c.tokens > 128,
    "more than a block of columns": lambda c: c.scaling == "block" and c.width > 128,
}
PERMUTED_AND_QUANTIZED |= {
    "an overflow": lambda c: _expected(c, "overflow").any(),
    "more than 100 tokens": lambda c: c.tokens > 100,
}


IN_WORLDS = (
    {f"a world of {ranks}": lambda c, ranks=ranks: len(c.counts) == ranks for ranks in (1, 2, 3, 4)}
    | _each("spread", *SPREADS_OF_SLOTS)
    | {
        "a rank without tokens beside others": lambda c: 0 in c.counts and any(c.counts),
        "ranks with other numbers of tokens": lambda c: len(set(c.counts)) > 1,
        "no tokens anywhere": lambda c: not any(c.counts),
        "more than 20 tokens on a rank": lambda c: max(c.counts) > 20,
        "more than 30 experts on a rank": lambda c: c.local_experts > 30,
        "one expert": lambda c: c.experts == 1,
        "several slots": lambda c: c.topk > 1,
    }
)
IN_WORLDS |= _each("values", "dyadic", "integers", "wide", "special")
OF_DISPATCHERS = {
    "allgather": _each("shards", 1, 2, 3, 4) | _each("map_dtype", *MAP_DTYPES),
    "alltoall": _each("shards", 1, 2, 3, 4) | _each("capacity", 0, 1, 5) | _each("map_dtype", *MAP_DTYPES),
    "hybridep": _each("align", 0, 16, 128) | _each("slack", None, -3, 0, 3) | _each("map_dtype", *MAP_DTYPES),
    "deepep": _each("align", 0, 8)
    | _each("slack", None, 0, 3)
    | _each("repeats", "", "count each", "last slot")
    | _each("scales", 0, 3),
    "deepep_low_latency": _each("repeats", "", "count each", "last slot")
    | _each("slack", None, 0, 3)
    | _each("index_dtype", "int64", "int32"),
}

AS_CODES = _each("fp8", "", "fp8", "powers", "least") | {
    "codes of rows that are no whole blocks": lambda c: c.fp8 and c.hidden % 128,
    "codes of several blocks": lambda c: c.fp8 and c.hidden > 128 and any(c.counts),
    "codes with padding": lambda c: c.fp8 and c.align > 1 and any(c.counts),
    "codes with too few rows": lambda c: c.fp8 and c.slack is not None and c.slack < 0,
    "gradients of what codes stand for": lambda c: c.fp8 and c.grads == "tokens+probs" and c.unused != "rows",
}

PROMISES = {
    **{
        name: IN_WORLDS
        | OF_DISPATCHERS[DispatchCase(function=name).dispatcher]
        | (AS_CODES if name == "hybridep_dispatch" else {})
        for name in COLLECTIVES
    },
    "permute": ROUTED | SPREAD | WITH_ROOM | VALUES | PROBS | {"an overflow": lambda c: _expected(c, "overflow").any()},
    "unpermute": ROUTED | SPREAD | WITH_ROOM | VALUES | PROBS,
    "sort_chunks": CHUNKED | VALUES | PROBS,
    "pad_routing_map": ROUTED
    | SPREAD
    | {
        "a multiple out of reach": lambda c: _expected(c, "unreached").any(),
        "an alignment of one": lambda c: c.align == 1,
    },
    "indices_to_multihot": INDEXED,
    "deepep_layout": {name: promise for name, promise in INDEXED.items() if "probabilities" not in name}
    | {
        "one rank": lambda c: c.ranks == 1,
        "a rank for each expert": lambda c: c.ranks == c.experts > 1,
        "several experts of a rank for one token": lambda c: (
            1 < c.ranks < c.experts
            and any(
                len({e for e in row if e >= 0}) > len({e // (c.experts // c.ranks) for e in row if e >= 0})
                for row in indices(c).tolist()
            )
        ),
    },
    "multihot_to_indices": ROUTED
    | SPREAD
    | {
        "more experts than slots": lambda c: routed(c).sum(1).max(initial=0) > c.topk,
        "more slots than experts": lambda c: c.topk > c.experts,
        "probabilities of zero": lambda c: c.zero_probs,
    },
    **dict.fromkeys(CHOOSE, TOPK),
    "aux_loss_scores": SHAPED
    | LARGE
    | SPREAD_OF_LOGITS
    | CHOICES
    | PADDED
    | _each("score", "softmax", "sigmoid", "sqrtsoftplus"),
    "z_loss": {name: SHAPED[name] for name in ("no tokens", "one expert")}
    | {"more than 250 tokens": LARGE["more than 250 tokens"], "a coefficient of zero": lambda c: c.coeff == 0}
    | _each("spread", "distinct", "negative", "minus_inf", "nan", "extreme")
    | PADDED,
    "sinkhorn_routing": SHAPED
    | _each("spread", *SINKHORN_SPREADS)
    | _each("evaluation", False, True)
    | {"several slots": lambda c: c.topk > 1},
    "drop_tokens": SHAPED
    | {name: LARGE[name] for name in ("more than 250 tokens", "more than 2000 experts")}
    | DROPS
    | _each("values", "distinct", "ties", "zeros", "negative")
    | _each("policy", "probs", "position")
    | _each("pad", False, True)
    | _each("map_dtype", *MAP_DTYPES),
    "load_balancing_loss": SHAPED
    | LARGE
    | _each("values", "distinct", "zeros", "negative")
    | _each("total", "number", "device", "zero")
    | _each("map_dtype", "int64", "int32")
    | {"several sequences": lambda c: c.sequences > 1, "a coefficient of zero": lambda c: c.coeff == 0},
    "update_expert_bias": {name: SHAPED[name] for name in ("one expert", "a number of experts that is no power of two")}
    | {"more than 2000 experts": LARGE["more than 2000 experts"], "a large bias": lambda c: c.bias > 10}
    | _each("even", False, True)
    | _each("map_dtype", "int64", "int32", "uint8"),
    "gate": STATES
    | {"one expert": SHAPED["one expert"], "a bias": lambda c: c.bias, "no bias": lambda c: not c.bias}
    | _each("router_dtype", "", "fp32", "fp64")
    | _each("weight_dtype", "", "float32", "bfloat16"),
    "jitter": STATES | {"no jitter": lambda c: c.eps == 0, "the most jitter": lambda c: c.eps == 15},
    "attach_loss": STATES
    | {
        "a negative scale": lambda c: c.scale < 0,
        "a scale of zero": lambda c: c.scale == 0,
        "no loss's gradient": lambda c: c.grads == "x",
    },
    "glu": ACTIVATED | GATED | _each("kind", "", "geglu", "geglu_erf", "quick_geglu", "reglu"),
    "activation": ACTIVATED | _each("kind", "", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu"),
    "grouped_linear": SEGMENTS | _each("bias", "", "float32", "bfloat16", "float64"),
    "grouped_dgrad": SEGMENTS,
    "grouped_wgrad": SEGMENTS | _each("into", "", "float32", "float64"),
    **dict.fromkeys(MLPS, LAYERED),
    "shared_experts": OF_ALL,
    "latent_projection": PROJECTED | _each("bias", "", "float32", "bfloat16", "float64"),
    "quantize": QUANTIZATIONS,
    "permute_and_quantize": PERMUTED_AND_QUANTIZED,
    **dict.fromkeys(ACTIVATED_AND_QUANTIZED, IN_ONE_STEP),
    "route": ROUTES
    | _each("score", "softmax", "softmax_pre", "sigmoid", "sqrtsoftplus")
    | _each("policy", "probs", "position")
    | _each("pad", False, True),
}


def unreached(function: str, cases) -> list[str]:
    return [
        name
        for name, promise in (PROMISES[function] | _everywhere(function)).items()
        if not any(promise(case) for case in cases)
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_draws_reach_all_that_is_promised(function):
    assert unreached(function, [*draws(function), *far_cases(function, Space())]) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_draws_that_are_held_back_are_missed(function):
    plain = replace(
        draws(function)[0],
        law="",
        poison="nan",
        **({} if function in STEPPED else {"layout": "contiguous", "layout_of": ""}),
    )
    assert "poison max" in unreached(function, [plain])
    assert {f"law {law.name}" for law in CONTRACTS[function].laws.values() if not law.device} <= set(
        unreached(function, [plain])
    )


# ---- what they depend on


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_seed_draws_the_same_cases_and_another_seed_others(function):
    first, again, other = (drawn(strategy(function, Space()), seed, 40) for seed in (7, 7, 8))
    assert first == again
    assert len({case.id for case in first}) == 40
    assert len({case.id for case in first} & {case.id for case in other}) < 20


DRAW_ELSEWHERE = """
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
for function in CONTRACTS:
    for kind in ("fixed", "drawn"):
        print(*(case.id for case in cases_of(Section(kind, function), PROFILES["gate"], Space(), 0, [])))
"""


def test_the_cases_depend_on_neither_folder_nor_process(tmp_path):
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(
        [sys.executable, "-c", DRAW_ELSEWHERE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = [
        cases_of(Section(kind, function), PROFILES["gate"], Space(), 0, [])
        for function in FUNCTIONS
        for kind in ("fixed", "drawn")
    ]
    assert told.splitlines() == [" ".join(case.id for case in cases) for cases in here]


def test_seeds_of_sections_differ():
    seeds = [run_seed(function, shard, seed) for function in FUNCTIONS for shard in range(3) for seed in range(3)]
    assert len(set(seeds)) == len(seeds)


# ---- that they are legal


def all_cases(function: str, space: Space, count: int = 25) -> list[Case]:
    random = drawn(strategy(function, space), 3, count)
    assert len(random) == count
    pairs = [*(covered(function) if space == Space() else rough(function, space)).cases]
    pairs += recipe_cases(function, space)
    return [*fixed_cases(function, space), *pairs, *far_cases(function, space), *random]


def rough(function: str, space: Space) -> covering.Covered:
    """A covering array that is made quicker, of more cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(covering, "CANDIDATES", 2)
        return covering_cases(function, space)


@functools.cache
def every_case(function: str) -> list[Case]:
    return all_cases(function, Space())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_case_is_legal_and_survives_json(function):
    contract = CONTRACTS[function]
    for case in every_case(function):
        assert checked(case_from(json.loads(case.text))) == case
        problem = contract.problem(case)
        if not case.illegal and not case.golden:
            contract.expected(case, problem, {})
        assert case.law in ("", *Space().laws(case))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_neighbour_is_a_legal_other_case(function):
    contract = CONTRACTS[function]
    for case in draws(function, 3, 25):
        other = contract.neighbour(case)
        assert other.text != case.text
        contract.expected(other, contract.problem(other), {})


def asked_for(case: Case) -> set[tuple[str, str]]:
    """(function, setting) of every call that the case makes."""
    problem = CONTRACTS[case.function].problem(case)
    return {(call.function, name) for call in (problem, problem.producer) if call for name in call.settings}


SETTINGS = [(function, name) for function, contract in CONTRACTS.items() for name in contract.optional]


@pytest.mark.parametrize(("owner", "setting"), SETTINGS)
def test_a_setting_that_is_not_accepted_is_never_asked_for(owner, setting):
    lacking = Space(without={owner: frozenset({setting})})
    functions = ("permute", "unpermute") if owner == "permute" else (owner,)
    for function in functions:
        assert all((owner, setting) not in asked_for(case) for case in all_cases(function, lacking, 10))
    assert any((owner, setting) in asked_for(case) for case in every_case(owner))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_not_asked_of_what_is_not_differentiable(function):
    undifferentiable = Space(not_differentiable=frozenset({function}))
    assert not any(getattr(case, "grads", "") for case in all_cases(function, undifferentiable))
    assert function in NO_GRADIENTS or any(case.grads for case in every_case(function))


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in STEPPED])
def test_layouts_are_not_asked_of_what_needs_contiguous_inputs(function):
    contiguous = Space(contiguous_only=frozenset({function}))
    assert all(case.layout == "contiguous" for case in all_cases(function, contiguous))
    assert any(case.layout != "contiguous" for case in every_case(function))


def test_laws_that_need_a_gpu_are_only_drawn_there():
    case = RoutingCase(function="permute", tokens=2, experts=2, slack=0)
    assert "graph_capture" in Space(device="cuda").laws(case)
    assert "graph_capture" not in Space().laws(case)


# ---- covering arrays


def axes_of(function: str) -> dict:
    """The axes of a converted function's covering array."""
    scope = scope_of(function, Space())
    return scope.covered_axes(scope.contract.shapes.covered, scope.contract.shapes.together(scope))


def legal(function: str, row: dict) -> bool:
    """Whether the case with these values, and the others as the array has them at first, is a call."""
    scope = scope_of(function, Space())
    return scope.fits(scope.row(scope.contract.shapes.covered, row))


def pairs_of(case: Case) -> set:
    """All pairs of values that a case of a converted function's covering array has."""
    plain = scope_of(case.function, Space()).row(scope_of(case.function, Space()).contract.shapes.covered, {})
    found = {}
    for axis, values in axes_of(case.function).items():
        moved = {name for value in values for name, _ in value}
        wanted = [{name: getattr(plain, name) for name in moved} | dict(value) for value in values]
        asked = [{name: x(case) if callable(x) else x for name, x in fields.items()} for fields in wanted]
        has = {name: getattr(case, name) for name in moved}
        found[axis] = [value for value, fields in zip(values, asked, strict=True) if fields == has]
    return {((x, a), (y, b)) for x, y in itertools.combinations(sorted(found), 2) for a in found[x] for b in found[y]}


def legal_by_few(function: str) -> set:
    """Every pair of values that is a call with at most two other axes away from their first value."""
    axes, found = axes_of(function), set()
    single = [{name: value} for name, values in axes.items() for value in values]
    for x, y in itertools.combinations(sorted(axes), 2):
        others = [one for one in single if not {x, y} & set(one)]
        more = [{}, *others, *(a | b for a, b in itertools.combinations(others, 2) if len(a | b) > 1)]
        for a, b in itertools.product(axes[x], axes[y]):
            if any(legal(function, {x: a, y: b} | row) for row in more):
                found.add(((x, a), (y, b)))
    return found


def row_of(case: Case) -> dict:
    """The values of the axes that a case of a covering array stands for."""
    if case.function in axes_mlp.AXES:
        return axes_mlp.row_of(case)
    fields = {axis: getattr(case, axis) for axis in AXES[case.function] if axis not in ("layout", "room", "groups")}
    fields["layout"] = (case.layout, case.layout_of) if case.function not in STEPPED else ("contiguous", "")
    if "groups" in AXES[case.function]:
        fields["groups"] = case.groups, case.group_topk
    if case.function == "route":
        fields["room"] = -case.capacity if case.pad else case.capacity
    return fields


def pairs(rows) -> set:
    return {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)}


def reached_by(cases: list[Case]) -> set:
    """The pairs of values that the cases of a covering array have."""
    converted = CONTRACTS[cases[0].function].signature
    return set().union(*map(pairs_of, cases)) if converted else pairs(map(row_of, cases))


class Undecided(Exception):
    """An axis was read that has no value yet."""


class PartialRow(dict):
    """Some axes of a row; reading another one is noticed."""

    def __init__(self, axes, values) -> None:
        super().__init__(values)
        self.axes = axes

    def __missing__(self, axis):
        if axis in self.axes:
            raise Undecided(axis)
        raise KeyError(axis)

    def __contains__(self, axis) -> bool:
        return axis in self.axes

    def get(self, axis, default=None):
        return self[axis] if axis in self.axes else default


def decisions(axes, legal, held=()):
    """What has to be known of a row to call it legal, in every way in which it can be."""
    try:
        if legal(PartialRow(axes, held)):
            yield dict(held)
    except Undecided as open_:
        (axis,) = open_.args
        for value in axes[axis]:
            yield from decisions(axes, legal, (*held, (axis, value)))


@functools.cache
def legal_pairs(function: str) -> set:
    """Every pair of values that some legal combination of all axes has: an axis that legality does not look at has any value."""
    if CONTRACTS[function].signature:
        return legal_by_few(function)
    axes, found = AXES[function], set()
    for held in decisions(axes, lambda row: unconverted.legal(function, row, Space())):
        open_ = {name: axes[name] if name not in held else (held[name],) for name in sorted(axes)}
        for x, y in itertools.combinations(open_, 2):
            found.update(((x, a), (y, b)) for a in open_[x] for b in open_[y])
    return found


@pytest.mark.parametrize("function", ["latent_projection"])
def test_legal_pairs_are_those_of_all_combinations(function):
    axes = {name: values if name != "poison" else values[:1] for name, values in AXES[function].items()}
    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    known = {pair for pair in legal_pairs(function) if ("poison", "max") not in pair and ("poison", "zero") not in pair}
    assert known == pairs(row for row in every if unconverted.legal(function, row, Space()))


@pytest.mark.parametrize("function", ["indices_to_multihot", "pad_routing_map", "gate", "sinkhorn_routing"])
def test_pairs_that_few_axes_allow_are_those_of_all_combinations(function):
    axes = axes_of(function)
    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    assert legal_by_few(function) == pairs(row for row in every if legal(function, row))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_covering_arrays_have_every_legal_pair(function):
    reached = reached_by(covered(function).cases)
    assert reached == legal_pairs(function)
    assert covered(function).pairs == len(reached)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_covering_array_without_its_last_case_does_not(function):
    assert reached_by(covered(function).cases[:-1]) < legal_pairs(function)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_covering_arrays_are_much_smaller_than_all_combinations(function):
    assert len(covered(function).cases) < len(legal_pairs(function))


# ---- far cases

FULLEST = {
    **{
        name: DispatchCase(
            function=name,
            counts=(3,),
            local_experts=3,
            topk=2,
            hidden=3,
            probs="" if name == "deepep_low_latency_dispatch" else "float32",
            scales=3 if name.startswith("deepep_") and "low" not in name else 0,
            grads=GRADS_OF[name][-1],
            seed=1,
        )
        for name in COLLECTIVES
    },
    "permute": RoutingCase(function="permute", tokens=3, experts=3, hidden=3, probs="float32", grads="tokens+probs"),
    "unpermute": RoutingCase(function="unpermute", tokens=3, experts=3, hidden=3, probs="float32", grads="rows+probs"),
    "sort_chunks": ChunksCase(
        function="sort_chunks", sizes=(1, 2), order=(1, 0), hidden=3, probs="float32", grads="rows+probs"
    ),
    "pad_routing_map": RoutingCase(function="pad_routing_map", tokens=3, experts=3, align=2),
    "indices_to_multihot": IndicesCase(function="indices_to_multihot", tokens=3, topk=2, experts=3, grads="probs"),
    "deepep_layout": IndicesCase(function="deepep_layout", tokens=3, topk=2, experts=4, ranks=2),
    "multihot_to_indices": RoutingCase(function="multihot_to_indices", tokens=3, topk=2, experts=3, grads="probs"),
    "gate": GateCase(function="gate", tokens=3, hidden=3, experts=3, bias=True, grads="x+weight+bias"),
    "jitter": GateCase(function="jitter", tokens=3, hidden=3),
    "attach_loss": GateCase(function="attach_loss", tokens=3, hidden=3, grads="x+loss"),
    **{
        name: LogitsCase(
            function=name, tokens=3, experts=3, score="sigmoid", bias="small", precomputed=True, grads="logits"
        )
        for name in CHOOSE
    },
    **{
        name: LogitsCase(function=name, tokens=3, experts=3, padding=4, grads="logits")
        for name in ("aux_loss_scores", "z_loss")
    },
    "sinkhorn_routing": LogitsCase(function="sinkhorn_routing", tokens=3, experts=3, grads="logits"),
    "drop_tokens": LoadCase(function="drop_tokens", tokens=3, experts=3, grads="probs"),
    "load_balancing_loss": LoadCase(function="load_balancing_loss", tokens=3, experts=3, grads="scores"),
    "update_expert_bias": LoadCase(function="update_expert_bias", tokens=3, experts=3),
    **{
        name: ActivationCase(function=name, tokens=3, width=3, probs="float32", grads="h+probs") for name in ELEMENTWISE
    },
    "quantize": QuantizeCase(
        function="quantize", scaling="nvfp4", role="grad_output", tokens=2, experts=2, hidden=1, grads="x"
    ),
    **{
        name: QuantizedActivationCase(
            function=name,
            tokens=3,
            experts=2,
            width=3,
            probs="float32",
            grads="" if name in BACK_AND_QUANTIZED else "h+probs",
        )
        for name in ACTIVATED_AND_QUANTIZED
    },
    "permute_and_quantize": PermutedQuantizationCase(
        function="permute_and_quantize",
        scaling="delayed",
        tokens=3,
        experts=3,
        hidden=3,
        probs="float32",
        grads="tokens+probs",
    ),
    "grouped_linear": GroupedCase(
        function="grouped_linear", tokens=3, experts=3, hidden=3, width=3, bias="float32", grads="rows+weight+bias"
    ),
    "latent_projection": GroupedCase(
        function="latent_projection", tokens=3, hidden=3, width=3, bias="float32", grads="x+weight+bias"
    ),
    "grouped_dgrad": GroupedCase(function="grouped_dgrad", tokens=3, experts=3, hidden=3, width=3),
    **{
        name: MlpCase(
            function=name,
            **dict.fromkeys(("tokens", "experts", "hidden", "width"), 3),
            **dict.fromkeys(("probs", "bias1", "bias2"), "float32"),
            grads="rows+probs+fc1_weight+fc2_weight+fc1_bias+fc2_bias",
        )
        for name in MLPS
    },
    "shared_experts": SharedCase(
        function="shared_experts", tokens=3, hidden=3, width=3, gate=True, grads="x+fc1_weight+fc2_weight+gate_weight"
    ),
    "grouped_wgrad": GroupedCase(function="grouped_wgrad", tokens=3, experts=3, hidden=3, width=3, into="float32"),
}


@pytest.mark.parametrize("function", FULLEST)
def test_every_input_and_cotangent_lies_far_in_each_of_its_dimensions(function):
    problem = CONTRACTS[function].problem(FULLEST[function])
    tensors = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
    wanted = {
        (name, layout) for name, x in tensors.items() for layout in FAR[name == "gate_weight" : x.dim()]
    }  # which has one row
    assert {(case.layout_of, case.layout) for case in far_cases(function, Space())} == wanted


def test_only_what_is_made_of_others_has_no_far_cases():
    assert set(FUNCTIONS) - set(FULLEST) == set(STEPPED) == {name for name in FUNCTIONS if not far_cases(name, Space())}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_lies_far_is_there(function):
    for case in far_cases(function, Space()):
        problem = CONTRACTS[function].problem(case)
        masters = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
        dim = FAR.index(case.layout) if masters[case.layout_of].dim() > 1 else 0
        assert masters[case.layout_of].shape[dim] > 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("function", [*COLLECTIVES, "route", "shared_experts"])
def test_a_world_with_less_room_has_all_kinds_of_cases_and_none_of_more_ranks(function, ranks, device):
    space = Space(device=device, ranks=ranks)
    cases = [
        *fixed_cases(function, space),
        *shape_cases(function, space),
        *far_cases(function, space),
        *drawn(strategy(function, space), 3, 6),
    ]
    asked = [ranks_of(CONTRACTS[function], case) for case in cases if not case.golden and not case.illegal]
    assert asked
    assert max(asked) <= ranks
