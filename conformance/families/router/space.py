"""Cases of the router beyond their axes: shapes of logits and loads, and tokens over ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes, sizes
from conformance.core.model_sizes import EXPERTS, FEW_ROWS, MODEL_WIDTHS
from conformance.core.scope import NARROW, Scope
from conformance.core.shapes import Shapes
from conformance.core.shared_out import worlds
from conformance.families.router.cases import COUNTED, MORE_SPREADS, SCORES, SPREADS, LogitsCase
from conformance.families.router.space_chosen import (
    ABOVE_ONE,
    FAR_DOUBLES,
    FAR_PLANS,
    FINE_FACTORS,
    FINE_KEYS,
    FINE_LOGITS,
    FINE_SCALE,
    FINE_SCORES,
    FINER_SCALE,
    LONG_PLANS,
    MANY_EQUAL,
    MEAN_LENGTH,
    ONE_LENGTH,
    SLOW_PLANS,
    TIES,
    UNREAD,
    grouped,
    many_factors,
    of_a_model,
    strange,
)
from conformance.families.router.space_route import over_ranks

# experts and top-k of real models
REAL_ROUTERS = ((8, 2), (60, 4), (64, 6), (72, 3), (128, 4), (128, 8), (256, 8), (384, 8), (512, 10))
SINKHORN_SPREADS = ("distinct", "ties", "near", "negative", "equal")
# experts and top-k
EDGES = ((1, 1), (31, 4), (32, 32), (33, 3), (65, 16), (1023, 8), (1024, 8), (2048, 4))
# 2ⁿ + 1 tokens: a loop that ends early misses the last block; seed 1: two experts per token
LONG: Changes = {"experts": 5, "topk": 2, "seed": 1}
WIDE: Changes = {"tokens": 33, "experts": 257, "topk": 3, "seed": 1}


def long(scope: Scope) -> Changes:
    """More tokens than one block; fewer on the CPU, where kernels are interpreted."""
    return LONG | {"tokens": 2049 if scope.space.device == "cuda" else 257}


def near(case: Any, scope: Scope) -> Any:
    """The case without a far layout beyond the address space."""
    small = case.tokens <= 4 and case.experts <= 4 and getattr(case, "hidden", 1) <= 4
    cheap = small and case.dtype in NARROW and case.layout_of not in ("precomputed_indices", "tokens_per_expert")
    return case if cheap or not case.layout.startswith("wide") else replace(case, layout="contiguous", layout_of="")


def convergent(case: Any, scope: Scope) -> Any:
    """`near`, but with logits whose plan converges, because the plans of others take millions of
    iterations.
    """
    near_case = near(case, scope)
    return near_case if near_case.spread in SINKHORN_SPREADS else replace(near_case, spread="distinct")


# ---- logits


@st.composite
def shape(draw: st.DrawFn, scope: Scope) -> Changes:
    """Tokens, experts and top-k: small ones, medium ones, those of real routers, or one size beyond
    any block.
    """
    kind = draw(st.sampled_from(("small", "small", "small", "medium", "real", "beyond")))
    if kind == "small":
        experts = draw(st.integers(1, 12))
        return {"tokens": draw(sizes(0, 9)), "experts": experts, "topk": draw(st.integers(1, experts))}
    if kind == "medium":
        experts = draw(sizes(1, 70))
        return {"tokens": draw(sizes(0, 40)), "experts": experts, "topk": draw(st.integers(1, min(experts, 12)))}
    if kind == "real":
        experts, topk = draw(st.sampled_from(REAL_ROUTERS))
        most = 40 if scope.space.device == "cpu" else 4000
        return {"tokens": draw(sizes(1, most)), "experts": experts, "topk": topk}
    many = scope.space.many
    beyond = ((many, 5, 2), (3, 600, 3), (2, 1024, 2), (2, 2048, 4), (9, 40, 32), (many // 3, 17, 1))
    tokens, experts, topk = draw(st.sampled_from(beyond))
    return {"tokens": tokens, "experts": experts, "topk": topk}


@st.composite
def choices(draw: st.DrawFn, scope: Scope) -> Changes:
    """topk_indices and topk_routing."""
    fields = draw(shape(scope)) | {
        "spread": draw(st.sampled_from((*SPREADS, *MORE_SPREADS))),
        "bias": draw(st.sampled_from(("", "small", "large"))),
        "scaling": draw(st.sampled_from((0, 0, 4, 20, 35))),
        "precomputed": draw(st.sampled_from((False,) * 5 + (True,))),
        "index_dtype": draw(st.sampled_from(("int64", "int32"))),
    }
    return fields | draw(group_limits(fields["experts"], fields["topk"]))


@st.composite
def group_limits(draw: st.DrawFn, experts: int, topk: int) -> Changes:
    """Legal group limits, if any, in half of the cases."""
    fits = [
        (groups, group_topk)
        for groups in range(2, min(experts, 16) + 1)
        if experts % groups == 0
        for group_topk in range(1, min(groups, topk) + 1)
        if group_topk * (experts // groups) >= topk
    ]
    groups, group_topk = (0, 0) if not fits or draw(st.booleans()) else draw(st.sampled_from(fits))
    return {"groups": groups, "group_topk": group_topk}


@st.composite
def losses(draw: st.DrawFn, scope: Scope) -> Changes:
    """aux_loss_scores and z_loss."""
    padding = draw(st.sampled_from((0, 0, 1, 4, 8)))
    spread = draw(st.sampled_from((*SPREADS, *MORE_SPREADS)))
    return draw(shape(scope)) | {"spread": spread, "padding": padding}


@st.composite
def plans(draw: st.DrawFn, scope: Scope) -> Changes:
    """sinkhorn_routing: sizes whose plan converges fast."""
    fields = draw(shape(scope))
    experts = min(fields["experts"], 64)
    smaller = {"tokens": min(fields["tokens"], 64), "experts": experts, "topk": min(fields["topk"], 8, experts)}
    return smaller | {"spread": draw(st.sampled_from(SINKHORN_SPREADS))}


def _values(field: str, *values: Any) -> Callable[[Scope], dict[str, list[Changes]]]:
    return lambda scope: {field: [{field: value} for value in values]}


def _limits(scope: Scope) -> dict[str, list[Changes]]:
    limits: list[Changes] = [{}, {"groups": 2, "group_topk": 1}, {"groups": 4, "group_topk": 2}]
    return {"groups": limits, "topk": [{"topk": n} for n in (1, 2, 4)]}


def _chosen(scope: Scope) -> list[Changes | LogitsCase]:
    """Real routers, edges of blocks, and ties; choices (not precomputed) from far addresses; and
    for few kernels one given expert of a token.
    """
    shapes: tuple[tuple[int, int], ...] = REAL_ROUTERS + EDGES
    if scope.space.few_kernels:  # topk_indices and topk_routing share their kernels, and the shapes
        shapes = shapes[scope.function == "topk_indices" :: 2]
    fields: list[Changes] = [
        *({"tokens": 3, "experts": experts, "topk": topk} for experts, topk in shapes),
        long(scope),
        # all experts chosen
        {"tokens": 3, "experts": 8, "topk": 8, "spread": "equal"},
        {"tokens": 65, "experts": 4, "topk": 2, "spread": "ties", "seed": 3},
        {"tokens": 5, "experts": 8, "topk": 6, "spread": "minus_inf"},  # fewer finite logits than slots
        FINE_LOGITS,
        *TIES,
        FAR_DOUBLES,
    ]
    if scope.accepts("scaling_factor"):
        fields += FINE_FACTORS
    if scope.space.few_kernels:  # values that few rows of the covering array have
        fields.append({"tokens": 3, "experts": 8, "topk": 8, "score": "sigmoid", "spread": "ties"})
    fields += grouped(scope)
    base = scope.fullest(FAR_CHOICE | {"tokens": 3, "dtype": "bfloat16", "precomputed": False})
    far = (("logits", "wide_rows"), ("logits", "wide_columns"), ("expert_bias", "wide_rows"))
    placed = (replace(base, layout=layout, layout_of=name) for name, layout in far)
    single_choice: Changes = {"tokens": 7, "experts": 8, "topk": 1, "score": "sigmoid", "precomputed": True}
    past_a_byte: Changes = {"tokens": 3, "experts": 300, "topk": 4, "precomputed": True}
    precomputed = [*([single_choice] if scope.space.few_kernels else []), past_a_byte]
    chosen = [changes | {"precomputed": False} for changes in fields] + precomputed
    return [*chosen, *filter(scope.fits, placed), *strange(scope)]


# A choice's kernel depends on the score, the experts, and whether keys are often equal: in 16 bits.
CHOICES: tuple[Changes, ...] = tuple(
    {"score": score, "experts": experts, "dtype": dtype, "topk": 2}
    for dtype in ("float32", "bfloat16")
    for score in SCORES
    for experts in (8, 64, 128, 256, 512)
)
GROUPED_CHOICES: tuple[Changes, ...] = tuple(
    fields | {"groups": 8, "group_topk": 4, "topk": 8}
    for fields in CHOICES
    if fields["score"] == "sigmoid" and fields["experts"] > 8
)
FAR_CHOICE: Changes = {"experts": 4, "topk": 3, "score": "sigmoid"}
LOGITS: Changes = {"tokens": 7, "experts": 8}
TOPK_ROUTING = Shapes(
    drawn=choices,
    affordable=near,
    covered=LOGITS | {"topk": 2},
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    model_rows=tuple(fields | {"precomputed": False} for fields in (*CHOICES, *GROUPED_CHOICES)),
    together=_limits,
    always=_chosen,
    far=FAR_CHOICE,
    weight=2,
    real=of_a_model,
)
TOPK_INDICES = replace(TOPK_ROUTING, model_rows=())

# ---- loads


@st.composite
def drops(draw: st.DrawFn, scope: Scope) -> Changes:
    """drop_tokens: capacity for no tokens, some tokens, more than all."""
    fields = draw(shape(scope))
    capacity = draw(sizes(0, max(2 * fields["tokens"] * fields["topk"] // fields["experts"], 3)))
    values = draw(st.sampled_from(("distinct", "ties", "zeros", "negative")))
    policy, pad = draw(st.sampled_from(("probs", "position"))), draw(st.booleans())
    return fields | {"capacity": capacity, "values": values, "policy": policy, "pad": pad}


# a search over thousands of tokens, for each kind of key: a position, a prob of 16 or 32 bits
LONG_DROPS: tuple[Changes, ...] = tuple(
    {"tokens": 4096, "experts": 64, "topk": 2, "capacity": 60, "dtype": dtype, "policy": policy, "pad": pad}
    for dtype, policy, pad in (
        ("float32", "probs", False), ("bfloat16", "probs", False), ("float32", "probs", True),
        ("float32", "position", True), ("float32", "position", False),
    )
)  # fmt: skip


def _dropped(scope: Scope) -> list[Changes]:
    variants: list[Changes] = [{}, {"values": "ties"}, {"policy": "position"}, {"pad": True, "values": "ties"}]
    double = {"tokens": 9, "experts": 3, "topk": 2, "capacity": 2, "dtype": "float64"}
    last = long(scope) | {"seed": 2, "capacity": 65}  # some expert keeps the last token
    room = [WIDE | {"capacity": 1}, long(scope) | {"capacity": 257}]  # few kept, all kept
    return [*(last | fields for fields in variants), *room, double, FINE_KEYS, ABOVE_ONE, MANY_EQUAL]


@st.composite
def counted(draw: st.DrawFn, scope: Scope) -> Changes:
    """load_balancing_loss and update_expert_bias."""
    return draw(shape(scope)) | {
        "map_dtype": draw(st.sampled_from(("int64", "int32", "uint8"))),
        "values": draw(st.sampled_from(("distinct", "zeros", "negative"))),
        "sequences": draw(st.sampled_from((1, 1, 2, 3))),
        "even": draw(st.sampled_from((False, False, False, True))),
    }


def _weighed(scope: Scope) -> list[Changes]:
    folded = long(scope) | {"sequences": 3, "total": "device"}
    return [long(scope), folded, WIDE, *_large(scope), FINE_SCORES, MEAN_LENGTH, ONE_LENGTH]


def _large(scope: Scope) -> list[Changes]:
    """Counts that exceed each number of bits, and counts with fractions."""
    small: Changes = {"tokens": 6, "experts": 5, "topk": 2}
    load_changes: list[Changes] = [small | {"counted": counted} for counted in COUNTED]
    load_changes += [small | {"counted": counted, "map_dtype": "uint8"} for counted in (*COUNTED, "fractions")]
    if scope.function == "update_expert_bias":
        load_changes += [small | {"counted": "past_24_bits", "map_dtype": "int32"}]
    return load_changes


LOADS: Changes = {"tokens": 7, "experts": 5, "topk": 2}

# ---- hidden states


@st.composite
def states(draw: st.DrawFn, scope: Scope) -> Changes:
    """gate, jitter and attach_loss; gate partly over ranks."""
    fields: Changes = {"tokens": draw(sizes(0, 40)), "hidden": draw(sizes(1, 140)), "experts": draw(sizes(1, 40))}
    if scope.function != "gate" or not over_ranks(draw, scope):
        return fields
    counts = draw(worlds(scope.space))
    return fields | {"counts": counts, "tokens": sum(counts), "layout": "contiguous", "layout_of": ""}


def _special(scope: Scope) -> list[Changes]:
    """Strange values at the ends of rows. On a GPU other shapes draw them."""
    small: Changes = {"tokens": 6, "hidden": 5, "experts": 3, "values": "special"}
    return [] if scope.space.device == "cuda" else [small, small | {"dtype": "bfloat16", "seed": 1}]


def _jittered(scope: Scope) -> list[Any]:
    return [*_special(scope), *many_factors(scope)]


def _gated(scope: Scope) -> list[Changes]:
    """Sizes one above a power of two; long sums of 16-bit values; few results of long sums, which a
    library splits on a GPU; and four ranks, one of which has no tokens.
    """
    gpu = scope.space.device == "cuda"
    partial_sums: list[Changes] = [
        {"tokens": 520, "hidden": 1072, "experts": 4, "dtype": "bfloat16"},
        {"tokens": 8200, "hidden": 72, "experts": 8, "dtype": "float16"},
    ]
    wide_hidden = {"tokens": 5, "hidden": 7168 if gpu else 513, "experts": 4, "dtype": "bfloat16"}
    long = {"tokens": 4097 if gpu else 513, "hidden": 5, "experts": 4, "dtype": "float16"}
    shared: Changes = {"counts": (2, 0, 3, 1), "tokens": 6, "hidden": 5, "experts": 4, "seed": 1}
    return [
        *_special(scope),
        {"tokens": 257, "hidden": 129, "experts": 65},
        {"tokens": 3, "hidden": 1030, "experts": 4},
        wide_hidden,
        wide_hidden | {"seed": 1, "hidden": 65},  # a bias of another dtype
        {"tokens": 5, "hidden": 65, "experts": 4, "dtype": "float64"},
        long,
        *(partial_sums if gpu else []),
        *([shared] if scope.space.most_ranks >= 4 else []),
    ]


def _gradients(scope: Scope) -> dict[str, list[Changes]]:
    return {"grads": [{"grads": grads} for grads in ("", "x", "weight", "bias", "x+weight", "x+weight+bias")]}


GATE = Shapes(
    drawn=states,
    affordable=near,
    covered={"tokens": 5, "hidden": 11, "experts": 4},
    models={"hidden": MODEL_WIDTHS, "experts": EXPERTS, "tokens": FEW_ROWS},
    together=_gradients,
    always=_gated,
    tall={"hidden": 2, "experts": 2},
    real=of_a_model,
)
JITTER = Shapes(
    drawn=states,
    affordable=near,
    covered={"tokens": 9, "hidden": 11},
    models={"hidden": MODEL_WIDTHS, "tokens": FEW_ROWS},
    always=_jittered,
    tall={"hidden": 2},
)
ATTACH_LOSS = replace(
    JITTER,
    covered={"tokens": 5, "hidden": 11},
    always=lambda scope: [*_special(scope), FINE_SCALE, FINER_SCALE],
)
SINKHORN_ROUTING = Shapes(
    drawn=plans,
    affordable=convergent,
    covered=LOGITS,
    together=lambda scope: _values("spread", "distinct", "ties", "negative")(scope) | _values("topk", 1, 2)(scope),
    always=lambda scope: [*SLOW_PLANS, *LONG_PLANS, *FAR_PLANS],
    far={"experts": 4, "topk": 3},
)
DROP_TOKENS = Shapes(
    drawn=drops,
    affordable=near,
    covered=LOADS | {"capacity": 3},
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    model_rows=LONG_DROPS,
    always=_dropped,
    far={"topk": 2, "capacity": 1, "map_dtype": "bool"},
    tall={"experts": 2, "topk": 2, "capacity": 32000, "seed": 1},
)
AUX_LOSS_SCORES = Shapes(
    drawn=losses,
    affordable=near,
    covered=LOGITS,
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    model_rows=CHOICES,
    together=_values("topk", 1, 2, 8),
    always=lambda scope: [long(scope) | {"dtype": "bfloat16", "score": "sigmoid"}, WIDE, *TIES, *strange(scope)],
    far={"experts": 4, "topk": 3, "padding": 4},
    real=of_a_model,
)
LOAD_BALANCING_LOSS = Shapes(
    drawn=counted,
    affordable=near,
    covered=LOADS,
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    always=_weighed,
    far={"topk": 2, "sequences": 1, "map_dtype": "int32"},
    tall={"experts": 2, "topk": 1},
)
Z_LOSS = Shapes(
    drawn=losses,
    affordable=near,
    covered=LOGITS,
    models={"experts": EXPERTS, "tokens": FEW_ROWS},
    together=_values("spread", "distinct", "negative", "minus_inf"),
    always=lambda scope: [long(scope), WIDE, *strange(scope), *([UNREAD] if scope.accepts("padding_mask") else [])],
    far={"experts": 4, "padding": 4},
    real=of_a_model,
)
UPDATE_EXPERT_BIAS = Shapes(drawn=counted, affordable=near, covered=LOADS, always=_large, far={"map_dtype": "int32"})
