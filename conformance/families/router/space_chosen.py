"""Chosen cases of the router, with values that draws rarely have."""

from conformance.core.axes import Changes
from conformance.core.scope import Scope
from conformance.families.router.cases import GateCase, LogitsCase

MANY_REPLAYS = 11  # queued names with numbers of one and of two digits
SMALL: Changes = {"tokens": 6, "experts": 5, "topk": 2}
# a scaling factor that bfloat16 rounds by half a unit in its last place
FINE_FACTOR: Changes = {"tokens": 5, "experts": 8, "topk": 3, "score": "sigmoid", "scaling": 257, "dtype": "bfloat16"}
FINE_FACTORS = tuple(
    FINE_FACTOR | {"score": score} | groups
    for score in ("sigmoid", "softmax_pre")
    for groups in ({}, {"groups": 2, "group_topk": 1})
)
# logits that float32 cannot tell apart
FINE_LOGITS: Changes = {"tokens": 9, "experts": 8, "topk": 3, "spread": "near", "dtype": "float64"}
# a bias too fine for bfloat16, also in groups; groups of three, with keys below 0
FINE_BIAS: Changes = {"tokens": 3, "experts": 64, "topk": 8, "spread": "equal", "score": "sigmoid", "bias": "fine"}
FINE_BIAS |= {"dtype": "bfloat16"}
BELOW_ZERO: Changes = {"tokens": 5, "experts": 12, "topk": 6, "score": "sigmoid", "bias": "large"}
FINER_BIAS = FINE_BIAS | {"dtype": "float64", "seed": 1}
BIASED_GROUPS = (FINE_BIAS | {"groups": 4, "group_topk": 2}, BELOW_ZERO | {"groups": 4, "group_topk": 2})
# equal logits in several tiles of experts, and zeros of both signs
TIES: tuple[Changes, ...] = (
    {"tokens": 3, "experts": 1030, "topk": 3, "spread": "equal"},
    {"tokens": 9, "experts": 8, "topk": 3, "spread": "zeros"},
)
# scores whose sum is far below 1e-20's root
FAR_DOUBLES: Changes = {"tokens": 9, "experts": 4, "topk": 2, "spread": "far", "score": "sigmoid", "dtype": "float64"}
# keys that float32 cannot tell apart
FINE_KEYS: Changes = {"tokens": 30, "experts": 3, "topk": 2, "capacity": 3, "dtype": "float64", "values": "fine"}
# NaN and infinities in padding
UNREAD: Changes = {"tokens": 9, "experts": 5, "spread": "nan", "padding": 4}
# scores whose float32 sum is wrong; a mean length above 1, and no whole number
FINE_SCORES: Changes = SMALL | {"dtype": "float64", "values": "fine"}
# probs above 1, and many equal ones, for tokens that are routed to every expert
ABOVE_ONE: Changes = {"tokens": 30, "experts": 3, "topk": 2, "seed": 1, "capacity": 3, "values": "above_one"}
MANY_EQUAL: Changes = {"tokens": 600, "experts": 2, "topk": 2, "seed": 1, "capacity": 3, "values": "ties"}
MEAN_LENGTH: Changes = SMALL | {"total": "mean"}
ONE_LENGTH: Changes = SMALL | {"total": "one"}  # a tensor of shape [1]
# a scale of the loss with more bits than 16-bit numbers have
FINE_SCALE: Changes = {"tokens": 3, "hidden": 5, "scale": 2049, "dtype": "bfloat16"}
FINER_SCALE: Changes = {"tokens": 3, "hidden": 5, "dtype": "float64"}

# a plan of more tokens than a block
LONG_PLANS: tuple[Changes, ...] = (
    {"tokens": 130, "experts": 4, "topk": 2},
    {"tokens": 9, "experts": 4, "topk": 2, "dtype": "float64"},
    {"tokens": 257, "experts": 3, "topk": 1, "dtype": "bfloat16"},
)
# chosen experts whose activation is 0 in float32; a row whose numbers are far above those of
# others; costs that float16 rounds
FAR_PLANS: tuple[Changes, ...] = (
    {"tokens": 2, "experts": 2, "topk": 2, "logits": (0, -960) * 2, "evaluation": True},
    {"tokens": 3, "experts": 4, "topk": 1, "logits": (328, 320, 322, 318, 8, -2, 5, 0, 9, 12, -6, 3)},
    {"tokens": 3, "experts": 2, "topk": 1, "logits": (96, 88, 96, 0, 96, 92), "dtype": "float16"},
)
# plans that change the choice after 4, 11 and 33 of 65 rounds, and after 5 and 11 of 54
SLOW_PLANS: tuple[Changes, ...] = (
    {"tokens": 64, "experts": 2, "topk": 1, "spread": "slow"},
    {"tokens": 48, "experts": 4, "topk": 2, "spread": "slow", "dtype": "bfloat16"},
)

# a choice by a plan, and without one in evaluations; with options that then have no effect
PLANNED: tuple[Changes, ...] = (
    {"tokens": 9, "experts": 4, "topk": 1, "sinkhorn": True, "losses": "z", "steps": "train+eval+train"},
    {"tokens": 8, "experts": 8, "topk": 3, "sinkhorn": True, "losses": "z", "dtype": "bfloat16"}
    | {"bias": True, "scaling": 20, "groups": 4, "group_topk": 2, "steps": "train+nograd+finish+train"},
)


def grouped(scope: Scope) -> list[Changes]:
    """Many groups; many and few groups of equal sums; a fine bias; and both."""
    groups = scope.accepts("num_groups") and scope.accepts("group_topk")
    many: Changes = {"tokens": 5, "experts": 66, "topk": 8, "groups": 33, "group_topk": 5}
    even: Changes = {"tokens": 3, "experts": 8, "topk": 2, "groups": 4, "group_topk": 2, "spread": "equal"}
    # groups with an expert that cannot be chosen: by its sum, and as the last of those kept
    barred: Changes = {"tokens": 14, "spread": "minus_inf"}
    group_changes: list[Changes] = [
        *(many, many | {"spread": "ties"}, even, even | {"experts": 18, "groups": 9}),
        barred | {"experts": 8, "topk": 2, "groups": 4, "group_topk": 1},
        barred | {"experts": 6, "topk": 3, "groups": 3, "group_topk": 2},
    ]
    group_changes = group_changes if groups else []
    return group_changes + (
        [FINE_BIAS, FINER_BIAS, *(BIASED_GROUPS if groups else ())] if scope.accepts("expert_bias") else []
    )


def many_factors(scope: Scope) -> list[GateCase]:
    """Enough draws to count the different ones; in float64; of one repeated row; and of more rows
    than a block has.
    """
    few_tokens: Changes = {"tokens": 33, "hidden": 40, "eps": 8, "law": "evenly_spread"}
    all_changes = (few_tokens, few_tokens | {"dtype": "float64"}, few_tokens | {"layout": "expanded", "layout_of": "x"})
    cases = [scope.case(fields) for fields in (*all_changes, few_tokens | {"tokens": 1030, "hidden": 8})]
    return [case for case in cases if scope.fits(case)]


def strange(scope: Scope) -> list[LogitsCase]:
    """Strange first and last logits, which other shapes draw on a GPU; all 16-bit patterns; more
    tokens than 16 bits count; and scores far below 1.
    """
    edges: Changes = {"tokens": 14, "experts": 5, "topk": 2, "spread": "edges"}
    all_patterns: Changes = {"tokens": 512, "experts": 128, "topk": 4, "spread": "every", "dtype": "bfloat16"}
    scores = [score for score in ("softmax", "sigmoid") if scope.function != "z_loss" or score == "softmax"]
    cases = [scope.case(common | {"score": score}) for common in (edges, all_patterns) for score in scores]
    if scope.space.device == "cuda":
        many: Changes = {"tokens": 65537, "experts": 2, "topk": 1}
        cases = [scope.case(changes | {"score": scores[-1]}) for changes in (many, all_patterns)]
    far: Changes = {"tokens": 6, "experts": 5, "topk": 2, "spread": "far", "score": "sqrtsoftplus"}
    cases += [scope.case(far | {"grads": "logits"})] if scope.accepts("score_function") else []
    return [case for case in cases if scope.fits(case)]


# tokens and experts past a block of each together
MANY_ROUTED: Changes = {"experts": 65, "topk": 4, "losses": "aux+global+z", "padding": 0, "steps": "train+finish+train"}

# recorded and played choices that a bias has moved, with groups
RECORDED: Changes = {"tokens": 9, "experts": 8, "topk": 2, "groups": 4, "group_topk": 2, "bias": True, "rate": 40}
RECORDED |= {"padding": 0, "losses": "aux", "steps": "train+finish+" * 3 + "record+forward+finish+record+backward"}

# sequences whose mean length float32 cannot represent
AVERAGED: Changes = {"tokens": 12, "sequences": 3, "experts": 4, "topk": 2, "dtype": "float64", "seed": 3}
AVERAGED |= {"losses": "seq", "score": "sigmoid", "padding": 5, "steps": "train+train"}


def routed(scope: Scope) -> list[Changes]:
    """A reload before queued replays, also with a capacity; replays in evaluations; sequences over
    two and four ranks; and empty ranks.
    """
    queued = "record+forward+" * 3 + "reload" + "+backward" * 3
    replayed: Changes = {"steps": queued, "tokens": 5, "experts": 4, "topk": 2, "padding": 0}
    many = "record+forward+" * MANY_REPLAYS + "reload" + "+backward" * MANY_REPLAYS
    played = "eval_record+forward+eval_record+eval_forward+train+reload+backward+eval_backward"
    small: Changes = {"tokens": 2, "experts": 4, "topk": 1, "score": "sigmoid", "padding": 0, "losses": ""}
    further = [small | {"steps": many}, small | {"steps": played, "bias": True}]
    saved = [replayed, *further] if scope.accepts("replay") else []
    saved += [RECORDED] if scope.accepts("replay") else []
    saved += [MANY_ROUTED | {"tokens": scope.space.many}]
    saved += [AVERAGED] if scope.accepts("padding_mask") and scope.accepts("batch_size") else []
    saved += [planned | {"padding": 3 if scope.accepts("padding_mask") else 0} for planned in PLANNED]
    limited = [replayed | {"capacity": 4}] if scope.accepts("replay") else []
    if scope.space.most_ranks < 4 or not all(scope.accepts(name) for name in ("ranks", "padding_mask")):
        return saved + limited
    common = {"experts": 6, "topk": 2, "losses": "aux+seq+global+z", "bias": True, "seed": 3, "padding": 0}
    uneven = {"counts": (3, 0, 2, 4), "tokens": 9, "padding": 2, "per_token": True}
    return [
        *saved,
        common | {"counts": (3, 3), "tokens": 6, "ranks": 2, "steps": "train+finish+train"},
        common | uneven | {"ranks": 4, "losses": "aux+seq+global", "steps": "train"},
        common | uneven | {"ranks": 2, "steps": "train+train+finish"},
        common | {"counts": (4, 2), "tokens": 6, "sequences": 2, "per_token": True, "steps": "train+finish"},
        *limited,
    ]


def of_a_model(scope: Scope) -> Changes:
    """The router of Qwen3-30B-A3B; its states where a function takes those."""
    dtype = "bfloat16" if "hidden" in scope.live else "float32"
    return {"dtype": dtype, "tokens": scope.space.real_tokens, "experts": 128, "topk": 8, "hidden": 2048}
