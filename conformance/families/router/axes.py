"""The finite axes of the router."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import DTYPES, LAYOUTS, LOGIT_DTYPES, POISONS, Space
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase
from conformance.families.router.cases_route import RouteCase

Row = dict[str, Any]


def layouts(
    *matrices: str, vectors: tuple[str, ...] = (), expanded: tuple[str, ...] = ()
) -> tuple[tuple[str, str], ...]:
    """A layout and the tensor that has it: every one for matrices, one for vectors and for tensors that may be expanded."""
    return (
        ("contiguous", ""),
        *((layout, of) for of in matrices for layout in LAYOUTS[1:]),
        *(("strided", of) for of in vectors),
        *(("expanded", of) for of in expanded),
    )


STEPS = (
    "train",
    "train+train+finish+train",
    "train+reload+train+finish+reload+train",
    "train+eval+nograd+train+finish+train",
    "train+frozen+train+finish+train+finish+train",
    "record+forward+forward+backward+backward+train",
)

_CHOICE = {
    "dtype": LOGIT_DTYPES,
    "score": ("softmax", "softmax_pre", "sigmoid", "sqrtsoftplus"),
    "spread": ("distinct", "ties", "near", "negative", "minus_inf", "nan"),
    "groups": ((0, 0), (2, 1), (4, 2)),  # num_groups and group_topk, of eight experts
    "topk": (1, 2, 4),
    "scaling": (0, 20),
    "bias": ("", "small", "large"),
    "precomputed": (False, True),
    "layout": layouts("logits", "d_probs", vectors=("expert_bias", "precomputed_indices"), expanded=("d_probs",)),
    "grads": ("", "logits"),
    "poison": POISONS,
}

AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gate": {
        "dtype": DTYPES,
        "weight_dtype": ("", "float32"),
        "router_dtype": ("", "fp32", "fp64"),
        "bias": (False, True),
        "layout": layouts("x", "weight", "d_logits", vectors=("bias",), expanded=("d_logits",)),
        "grads": ("", "x", "weight", "x+weight", "x+weight+bias"),
        "poison": POISONS,
    },
    "jitter": {"dtype": DTYPES, "eps": (0, 1, 15), "layout": layouts("x"), "poison": POISONS},
    "topk_indices": _CHOICE,
    "topk_routing": _CHOICE,
    "sinkhorn_routing": {
        "dtype": DTYPES,
        "spread": ("distinct", "ties", "negative"),
        "topk": (1, 2),
        "evaluation": (False, True),
        "layout": layouts("logits", "d_probs", expanded=("d_probs",)),
        "grads": ("", "logits"),
        "poison": POISONS,
    },
    "drop_tokens": {
        "dtype": DTYPES,
        "map_dtype": ("bool", "uint8", "int64"),
        "values": ("distinct", "ties", "zeros", "negative"),
        "policy": ("probs", "position"),
        "pad": (False, True),
        "capacity": (1, 3, 9),  # of seven tokens
        "layout": layouts("probs", "routing_map", "d_probs", expanded=("d_probs",)),
        "grads": ("", "probs"),
        "poison": POISONS,
    },
    "aux_loss_scores": {
        "dtype": LOGIT_DTYPES,
        "score": ("softmax", "sigmoid", "sqrtsoftplus"),
        "spread": ("distinct", "ties", "near", "negative", "minus_inf", "nan"),
        "topk": (1, 2, 8),
        "padding": (0, 3),
        "layout": layouts("logits", "d_scores", vectors=("padding_mask",), expanded=("d_scores",)),
        "grads": ("", "logits"),
        "poison": POISONS,
    },
    "load_balancing_loss": {
        "dtype": LOGIT_DTYPES,
        "map_dtype": ("bool", "int32", "int64"),
        "sequences": (1, 3),
        "total": ("number", "device"),
        "coeff": (8, 1),
        "layout": layouts("scores", vectors=("tokens_per_expert",)),
        "grads": ("", "scores"),
        "poison": POISONS,
    },
    "z_loss": {
        "dtype": LOGIT_DTYPES,
        "spread": ("distinct", "negative", "minus_inf"),
        "padding": (0, 3),
        "coeff": (8, 1),
        "layout": layouts("logits", vectors=("padding_mask",)),
        "grads": ("", "logits"),
        "poison": POISONS,
    },
    "attach_loss": {
        "dtype": DTYPES,
        "scale": (8, 3, -8),
        "layout": layouts("x", "d_x", expanded=("d_x",)),
        "grads": ("", "x", "loss", "x+loss"),
        "poison": POISONS,
    },
    "route": {
        "steps": STEPS,
        "dtype": ("float32", "bfloat16"),
        "score": ("softmax", "softmax_pre", "sigmoid", "sqrtsoftplus"),
        "groups": ((0, 0), (4, 2)),
        "bias": (False, True),
        "losses": ("", "aux", "seq", "global", "z", "aux+seq+global+z"),
        "room": (0, 3, -3),  # capacity factor in quarters; negative: padded to it
        "padding": (0, 3),
        "per_token": (False, True),
        "sequences": (1, 2),
        "ranks": (1, 2),
        "layout": (("contiguous", ""),),
        "grads": ("", "logits"),
        "poison": POISONS,
    },
    "update_expert_bias": {
        "map_dtype": ("int32", "int64", "uint8"),
        "rate": (0, 1, 250),
        "bias": (0, 1, 40),
        "even": (False, True),
        "layout": layouts(vectors=("expert_bias", "tokens_per_expert")),
        "poison": POISONS,
    },
}


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    of, needs = row["layout"][1], space.accepts
    wide = {"sigmoid": "score_function", "sqrtsoftplus": "score_function", "softmax_pre": "pre_softmax"}
    return (
        (function == "route" or row.get("score", "softmax") == "softmax" or needs(function, wide[row["score"]]))
        and not (
            row.get("bias") in ("small", "large")
            and (row["score"].startswith("softmax") or not needs(function, "expert_bias"))
        )
        and not (of == "expert_bias" and function != "update_expert_bias" and not row["bias"])
        and not (row.get("precomputed") and not needs(function, "precomputed_indices"))
        and not (of == "precomputed_indices" and not row["precomputed"])
        and _groups_fit(row, needs(function, "num_groups") and needs(function, "group_topk"))
        and not (row.get("scaling") and not needs(function, "scaling_factor"))
        and not (row.get("padding") and not needs(function, "padding_mask"))
        and not (of == "padding_mask" and not row["padding"])
        and not (function == "gate" and not _gate_fits(row, space))
        and not (function == "route" and not _route_fits(row, space))
        and not (row.get("policy") == "position" and not needs(function, "drop_policy"))
        and not (row.get("pad") and not needs(function, "pad_to_capacity"))
    )


def _groups_fit(row: Row, accepted: bool) -> bool:
    groups, kept = row.get("groups", (0, 0))
    return not groups or "topk" not in row or (accepted and kept <= row["topk"] <= kept * 8 // groups)


def _gate_fits(row: Row, space: Space) -> bool:
    with_bias = row["bias"] and space.accepts("gate", "bias")
    return (
        (with_bias or not row["bias"])
        and (not row["router_dtype"] or space.accepts("gate", "router_dtype"))
        and (with_bias or (row["layout"][1] != "bias" and "bias" not in row["grads"]))
    )


def _route_fits(row: Row, space: Space) -> bool:
    asked = {"batch_size": row["sequences"] > 1, "padding_mask": row["padding"], "replay": "record" in row["steps"]}
    asked |= {"ranks": row["ranks"] > 1}
    needed = [name for name, wanted in asked.items() if wanted]
    by_softmax = row["score"].startswith("softmax")
    return (
        all(space.accepts("route", name) for name in needed)
        and not (row["bias"] and by_softmax)
        and not (row["room"] and row["dtype"] != "float32")
    )


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    if function in ("gate", "jitter", "attach_loss"):
        return GateCase(function=function, tokens=9 if function == "jitter" else 5, hidden=11, experts=4, **fields)
    if function in ("drop_tokens", "load_balancing_loss", "update_expert_bias"):
        return LoadCase(function=function, tokens=7, experts=5, topk=2, **fields)
    groups, kept = fields.pop("groups", (0, 0))
    if function == "route":
        room = fields.pop("room")
        sized = {"capacity": abs(room), "pad": room < 0}
        fields = {name: x for name, x in fields.items() if not name.startswith("layout")}
        return RouteCase(
            function=function, tokens=12, experts=8, topk=3, groups=groups, group_topk=kept, **sized, **fields
        )
    return LogitsCase(function=function, tokens=7, experts=8, groups=groups, group_topk=kept, **fields)
