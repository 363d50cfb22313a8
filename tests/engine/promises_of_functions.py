"""Promises of the draws, by function."""

import itertools

import torch

from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.experts.cases import counts_of, hidden_of
from conformance.families.fused.space import kinds as permuted_and_quantized_kinds
from conformance.families.permutation.cases import indices, routed
from conformance.families.quantization.cases import (
    DIRECTIONS,
    RECIPES,
    ROLES,
    VARIANTS,
    is_random,
    is_transformed,
    splits_of,
    x_of,
)
from moe_ref.config import GATED as GATED_KINDS
from moe_ref.config import PLAIN as PLAIN_KINDS
from tests.engine.drawn_cases import ACTIVATED_AND_QUANTIZED, CHOOSE, MLPS
from tests.engine.promises import (
    BLOCKS,
    CHOICES,
    CHUNKED,
    DROPS,
    INDEXED,
    LARGE,
    PADDED,
    PROBS,
    ROUTED,
    ROUTES,
    SHAPED,
    SPREAD,
    SPREAD_OF_LOGITS,
    STATES,
    TOPK,
    VALUES,
    WITH_ROOM,
    each,
    expected,
)
from tests.engine.promises_of_layer import LAYER
from tests.engine.promises_of_parameters import PARAMETERS

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
GATED = {
    "a negative offset": lambda c: c.offset < 0,
    "columns that alternate": lambda c: c.interleave == 1 < c.width,
    "blocks as long as a half": lambda c: c.interleave == c.width > 1,
    "blocks between": lambda c: 1 < c.interleave < c.width,
    "a clamp, an offset and a slope": lambda c: c.clamp and c.offset and c.alpha,  # as in gpt-oss
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

SETTINGS = {name: GATED[name] for name in ("a clamp, an offset and a slope",)}
SETTINGS |= each("kind", *GATED_KINDS[1:], *PLAIN_KINDS)
SCALED = each("scaling", "current", "block", "mxfp8", "nvfp4")
LAYERED = SEGMENTS | SETTINGS | SCALED
LAYERED |= each("bias1", "bfloat16", "float64") | each("bias2", "float32", "float64") | each("early", True)
LAYERED |= each("values", "rows", "special") | each("index_dtype", "int32") | each("recompute", "moe")
LAYERED |= {
    "one bias": lambda c: bool(c.bias1) != bool(c.bias2),
    "padding": lambda c: c.align > 1 and c.tokens % c.align,
    "padding to a block": lambda c: c.align in (64, 256),
    "no probs": lambda c: not c.probs,
}
PROJECTED = SCALED | each("scaling", "delayed")
OF_ALL = SETTINGS | PROJECTED
EMPTY = {
    "no tokens": lambda c: not c.tokens,
    "no input features": lambda c: not c.hidden,
    "no width": lambda c: not c.width,
}
PROJECTED |= EMPTY
OF_ALL |= EMPTY

QUANTIZATIONS = {
    str(kind): lambda c, kind=kind: (c.scaling, c.variant, c.role, c.direction) == kind
    for kind in itertools.product(RECIPES, range(VARIANTS), ROLES, DIRECTIONS)
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
    "an infinity that rows of a group hold": lambda c: bool(x_of(c)[: c.tokens * c.unit].isinf().any()),
    "a NaN that rows of a group hold": lambda c: bool(x_of(c)[: c.tokens * c.unit].isnan().any()),
    "a subnormal number": lambda c: bool(
        ((x := x_of(c)) != 0).logical_and(x.abs() < torch.finfo(x.dtype).smallest_normal).any()
    ),
    "a block of zeros beside others": lambda c: (
        (c.scaling, c.direction) == ("mxfp8", "rowwise")
        and bool((expected(c, "amax") == 0).any() and expected(c, "amax").any())
    ),
    "a transform": is_transformed,
    "noise": is_random,
    "a state that is saved": lambda c: "reload" in c.steps,
    "amax of other ranks": lambda c: "reduced" in c.steps,
    "two quantisations before an update": lambda c: "quantize+quantize+update" in c.steps,
    "more updates than are remembered": lambda c: c.steps.count("update") > 3,
}

TOO_LARGE = ("more than", "a hidden size above")
PERMUTED_AND_QUANTIZED = {name: x for name, x in (ROUTED | WITH_ROOM).items() if not name.startswith(TOO_LARGE)}
PERMUTED_AND_QUANTIZED |= SPREAD | PROBS | each("unused", "rows", "probs")
PERMUTED_AND_QUANTIZED |= {
    str(kind): lambda c, kind=kind: kind.items() <= vars(c).items()
    for kind in permuted_and_quantized_kinds(scope_of("permute_and_quantize", Space()))
}
IN_ONE_STEP = each("variant", 0, 1, 2)
IN_ONE_STEP |= {
    "no rows": lambda c: not c.tokens,
    "no splits": lambda c: not c.experts,
    "an empty group beside others": lambda c: 0 in c.counts and any(c.counts),
    "rows behind the last group": lambda c: c.tail > 0,
    "more than a block of rows": lambda c: c.scaling == "block" and c.tokens > 128,
    "more than a block of columns": lambda c: c.scaling == "block" and c.width > 128,
}
PERMUTED_AND_QUANTIZED |= {
    "an overflow": lambda c: expected(c, "overflow").any(),
    "more than 100 tokens": lambda c: c.tokens > 100,
}


IN_WORLDS = (
    {f"a world of {ranks}": lambda c, ranks=ranks: len(c.counts) == ranks for ranks in (1, 2, 3, 4)}
    | each("spread", "empty", "local", "skewed")
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
IN_WORLDS |= each("values", "wide")
OF_DISPATCHERS = {
    "allgather": each("shards", 1, 2, 3, 4),
    "alltoall": each("shards", 1, 2, 3, 4) | each("capacity", 0, 1, 5),
    "hybridep": each("align", 0, 16) | BLOCKS | each("slack", None, -3, 0, 3),
    "deepep": each("align", 0, 8) | BLOCKS | each("slack", None, 0, 3) | each("scales", 0, 3),
    "deepep_low_latency": each("slack", None, 0, 3),
}

AS_CODES = each("fp8", "fp8", "powers", "least") | {
    "codes of rows that are no whole blocks": lambda c: c.fp8 and c.hidden % 128,
    "codes of several blocks": lambda c: c.fp8 and c.hidden > 128 and any(c.counts),
    "codes with padding": lambda c: c.fp8 and c.align > 1 and any(c.counts),
    "codes with too few rows": lambda c: c.fp8 and c.slack is not None and c.slack < 0,
    "gradients of what codes stand for": lambda c: c.fp8 and c.grads == "tokens+probs" and c.unused != "rows",
}

PROMISES = {
    **{name: IN_WORLDS | OF_DISPATCHERS[DispatchCase(function=name).dispatcher] for name in COLLECTIVES},
    "permute": ROUTED | SPREAD | WITH_ROOM | VALUES | PROBS | {"an overflow": lambda c: expected(c, "overflow").any()},
    "unpermute": ROUTED | SPREAD | WITH_ROOM | VALUES | PROBS,
    "sort_chunks": CHUNKED | VALUES | PROBS,
    "pad_routing_map": ROUTED
    | BLOCKS
    | SPREAD
    | {
        "a multiple out of reach": lambda c: expected(c, "unreached").any(),
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
    "flatten_experts": {
        "no tokens": lambda c: c.tokens == 0,
        "one group": lambda c: c.groups == 1,
        "a group for each expert": lambda c: c.groups == c.experts > 1,
        "one shard": lambda c: c.shards == 1,
        "several shards of several groups": lambda c: c.shards > 1 < c.groups,
    },
    "multihot_to_indices": ROUTED
    | SPREAD
    | {
        "more experts than slots": lambda c: routed(c).sum(1).max(initial=0) > c.topk,
        "more slots than experts": lambda c: c.topk > c.experts,
        "probabilities of zero": lambda c: c.zero_probs,
    },
    **dict.fromkeys(CHOOSE, TOPK),
    "aux_loss_scores": SHAPED | LARGE | SPREAD_OF_LOGITS | CHOICES | PADDED,
    "z_loss": {name: SHAPED[name] for name in ("no tokens", "one expert")}
    | {"more than 250 tokens": LARGE["more than 250 tokens"], "a coefficient of zero": lambda c: c.coeff == 0}
    | each("spread", "nan", "extreme")
    | PADDED,
    "sinkhorn_routing": SHAPED | each("spread", "near", "equal") | {"several slots": lambda c: c.topk > 1},
    "drop_tokens": SHAPED | {name: LARGE[name] for name in ("more than 250 tokens", "more than 2000 experts")} | DROPS,
    "load_balancing_loss": SHAPED
    | LARGE
    | each("total", "zero")
    | {"several sequences": lambda c: c.sequences > 1, "a coefficient of zero": lambda c: c.coeff == 0},
    "update_expert_bias": {name: SHAPED[name] for name in ("one expert", "a number of experts that is no power of two")}
    | {"more than 2000 experts": LARGE["more than 2000 experts"], "a large bias": lambda c: c.bias > 10},
    "gate": STATES
    | {"one expert": SHAPED["one expert"], "a bias": lambda c: c.bias, "no bias": lambda c: not c.bias}
    | each("weight_dtype", "bfloat16"),
    "jitter": STATES | {"no jitter": lambda c: c.eps == 0, "the most jitter": lambda c: c.eps == 15},
    "attach_loss": STATES
    | {
        "a negative scale": lambda c: c.scale < 0,
        "a scale of zero": lambda c: c.scale == 0,
        "no loss's gradient": lambda c: c.grads == "x",
    },
    "glu": ACTIVATED | GATED,
    "activation": ACTIVATED,
    "grouped_linear": SEGMENTS | each("bias", "float64"),
    "grouped_dgrad": SEGMENTS,
    "grouped_wgrad": SEGMENTS,
    **dict.fromkeys(MLPS, LAYERED),
    "shared_experts": OF_ALL,
    "latent_projection": PROJECTED | each("bias", "float64"),
    "quantize": QUANTIZATIONS,
    "permute_and_quantize": PERMUTED_AND_QUANTIZED,
    **dict.fromkeys(ACTIVATED_AND_QUANTIZED, IN_ONE_STEP),
    "route": ROUTES,
    "moe_layer": LAYER,
    **PARAMETERS,
}
PROMISES["hybridep_dispatch"] |= AS_CODES
