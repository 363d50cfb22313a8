"""Defects of products and MLPs that only some calls show; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import (
    always,
    called_with,
    given,
    in_place,
    only,
)
from conformance.mutants.kinds.gradients import rounded_to, with_gradient, with_gradients_of

SEVERAL = "a mistake that one option alone does not show"
VALUES = "a mistake that one class of values shows"
SIZES = "a mistake that one size shows"
BACK = "a mistake that one gradient shows"
OWNER = "a mistake about whose memory it is"
PRODUCTS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")
MLPS = ("grouped_mlp", "sequential_mlp")


# ---- products


def _bias_of_the_expert_before(
    function: Wrapper, right: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, **settings: Any
) -> Tensor:
    """An empty expert's bias has the gradient of the expert before."""
    bias = settings["bias"]

    def back(g: Tensor) -> Tensor:
        empty = (counts == 0).to(g.device)
        return torch.where(empty[:, None], g.roll(1, 0), g)

    return function(rows, weight, counts, **settings | {"bias": with_gradient(bias, back)})


def _wide_bias(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    bias = settings.get("bias")
    return isinstance(bias, Tensor) and bias.dtype != rows.dtype


def _bias_in_the_dtype_of_rows(function: Wrapper, right: Tensor, rows: Tensor, *rest: Any, **settings: Any) -> Tensor:
    return function(rows, *rest, **settings | {"bias": with_values(settings["bias"], rounded_to(rows.dtype))})


def _lost_without_rows(wgrad: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    counts = inputs[2] if len(inputs) > 2 else settings["tokens_per_expert"]
    return torch.where((counts > 0).view(-1, *[1] * (right.dim() - 1)), right, 0)


def _written_into(d_out: Tensor, rows: Tensor, counts: Tensor, **settings: Any) -> None:
    into = settings.get("accumulate_into")
    if into is not None:
        into.add_(1)


def _accumulated_here(wgrad: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    """A sum with nothing is what was given."""
    into = settings["accumulate_into"]
    return into if torch.equal(into, right) else right


def _other_override(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    recipe = settings["recipe"]
    other = {"high_precision": "dequantized", "dequantized": "high_precision"}[recipe.backward_override]
    return function(*inputs, **settings | {"recipe": replace(recipe, backward_override=other)})


def _overridden(*inputs: Any, **settings: Any) -> bool:
    recipe = settings.get("recipe")
    return recipe is not None and recipe.backward_override is not None


def _low_precision_bias(*inputs: Any, **settings: Any) -> bool:
    return settings.get("recipe") is not None and settings.get("bias") is not None


def _weights_of_the_first_call() -> Wrapper:
    """The quantised weight is kept by its address: a step in place goes unseen."""
    kept: dict[Any, Tensor] = {}

    def planted(function: Wrapper, rows: Tensor, weight: Tensor, *rest: Any, **settings: Any) -> Any:
        out = function(rows, weight, *rest, **settings)
        if settings.get("recipe") is None:
            return out
        key = (weight.data_ptr(), tuple(weight.shape), weight.dtype)
        first = kept.setdefault(key, weight.detach().clone())
        return (
            out
            if torch.equal(first, weight.detach())
            else function(rows, with_values(weight, lambda _: first), *rest, **settings)
        )

    return planted


def _counts_kept_by_shape() -> Wrapper:
    """Offsets are kept by the number of rows and experts and the first count."""
    kept: dict[Any, Tensor] = {}

    def planted(function: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, **settings: Any) -> Any:
        function(rows, weight, counts, **settings)  # refuses illegal calls
        key = (tuple(rows.shape), tuple(weight.shape), rows.dtype, int(counts[0]), int(counts.sum()))
        first = kept.setdefault(key, counts.clone())
        return function(rows, weight, first, **settings)

    return planted


def _power_of_two_rows(rows: Tensor, weight: Tensor, counts: Tensor, **settings: Any) -> bool:
    return bool(((counts >= 64) & (counts & (counts - 1) == 0)).any())


def _last_row_of_a_power(
    function: Wrapper, right: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, **settings: Any
) -> Tensor:
    ends = counts.cumsum(0) - 1
    lost = ends[(counts >= 64) & (counts & (counts - 1) == 0)].to(right.device)
    return right.index_fill(0, lost, 0)


# ---- MLPs


def _weighted_bias(mlp: Wrapper, right: Tensor, *rows: Any, **settings: Any) -> Tensor:
    """p (x W + b): the bias is weighted, too."""
    x, counts, fc1, fc2 = rows
    bias, probs = settings["fc1_bias"], settings["probs"]
    parts, start = [], 0
    for e, count in enumerate(counts.tolist()):
        own = slice(start, start + count)
        one = settings | {"fc1_bias": None, "probs": probs[own]}
        more = settings.get("fc2_bias")
        one |= {"fc2_bias": None if more is None else more[e : e + 1]}
        mean = probs[own].mean() if count else 1.0
        given_bias = settings | one | {"fc1_bias": bias[e : e + 1] * mean}
        parts.append(mlp(x[own], counts[e : e + 1], fc1[e : e + 1], fc2[e : e + 1], **given_bias))
        start += count
    return torch.cat([*parts, right[start:]])


def _input_probs_and_bias(*rows: Any, **settings: Any) -> bool:
    plain = all(settings.get(name) is None for name in ("state", "noise", "wgrads", "rows_again", "amaxes"))
    return (
        plain
        and bool(settings.get("probs_on_input"))
        and settings.get("fc1_bias") is not None
        and settings.get("probs") is not None
    )


def _second_bias_weighted(
    mlp: Wrapper, right: Tensor, x: Tensor, counts: Tensor, *weights: Any, **settings: Any
) -> Tensor:
    bias, probs = settings["fc2_bias"], settings["probs"]
    total = int(counts.sum())
    each = bias.repeat_interleave(counts.to(bias.device).long(), 0)
    shift = each.float() * (probs[:total, None].float() - 1)
    return torch.cat([(right[:total].float() + shift).to(right.dtype), right[total:]])


def _input_probs_and_second_bias(*rows: Any, **settings: Any) -> bool:
    return (
        bool(settings.get("probs_on_input"))
        and settings.get("fc2_bias") is not None
        and settings.get("probs") is not None
    )


def _biases_of_experts_with_rows(
    mlp: Wrapper, right: Tensor, x: Tensor, counts: Tensor, *weights: Any, **settings: Any
) -> Tensor:
    """Empty experts are left out of the list, their second biases are not."""
    bias, order = settings["fc2_bias"], (counts > 0).nonzero().flatten().tolist()
    moved = {e: nth for nth, e in enumerate(order)}
    index = torch.tensor([moved.get(e, e) for e in range(len(counts))])
    return mlp(x, counts, *weights, **settings | {"fc2_bias": bias[index.to(bias.device)]})


def _tail_as_it_came(mlp: Wrapper, right: Tensor, x: Tensor, counts: Tensor, *weights: Any, **settings: Any) -> Tensor:
    total = int(counts.sum())
    return torch.cat([right[:total], x[total:].detach()])


def _gradient_scale_of_the_first(mlp: Wrapper, right: Tensor, *rows: Any, **settings: Any) -> Tensor:
    first, second = settings["state"]
    return mlp(*rows, **settings | {"state": (first, second._replace(grad_output=first.grad_output))})


def _second_input_scale_of_the_first_weight(mlp: Wrapper, right: Tensor, *rows: Any, **settings: Any) -> Tensor:
    first, second = settings["state"]
    return mlp(*rows, **settings | {"state": (first, second._replace(input=second.weight))})


def _frozen_second(
    mlp: Wrapper, right: Tensor, x: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, **settings: Any
) -> Tensor:
    return mlp(x, counts, fc1.detach(), fc2, **settings)


def _fc2_is_frozen(x: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, **settings: Any) -> bool:
    return fc1.requires_grad and not fc2.requires_grad


def _recomputed_probs(mlp: Wrapper, right: Tensor, *rows: Any, **settings: Any) -> Tensor:
    """The activation that is made again has the probs in the dtype of the rows."""
    probs = settings["probs"]
    other = mlp(*rows, **settings | {"probs": with_values(probs, rounded_to(rows[0].dtype))})
    return with_gradients_of(right, other) if right.requires_grad else right


def _recomputed_and_weighted(*rows: Any, **settings: Any) -> bool:
    return settings.get("recompute") == "moe_act" and settings.get("probs") is not None


def _aligned_counts_of_noise(mlp: Wrapper, right: Tensor, *rows: Any, **settings: Any) -> Tensor:
    first, second = settings["noise"]
    return mlp(*rows, **settings | {"noise": (first, second.flip(1))})


def _shared_gate_quantised(shared: Wrapper, right: Tensor, x: Tensor, *weights: Any, **settings: Any) -> Tensor:
    gate = settings["gate_weight"]
    narrow = with_values(gate, lambda w: w.to(torch.float8_e4m3fn).to(w.dtype))
    return shared(x, *weights, **settings | {"gate_weight": narrow})


def _gate_detached_when_recomputed(shared: Wrapper, right: Tensor, x: Tensor, *weights: Any, **settings: Any) -> Tensor:
    plain = shared(x, *weights, **settings | {"gate_weight": None})
    score = torch.sigmoid(x.detach().float() @ settings["gate_weight"].float().T).to(x.dtype)
    return with_gradients_of(right, plain * score) if right.requires_grad else right


def _shared_state_exchanged(shared: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    return shared(*inputs, **settings | {"state": settings["state"][::-1]})


def _accumulator_of_fprop_alone(*inputs: Any, **settings: Any) -> bool:
    return settings.get("accumulator") == "float64"


def _zero_noise(function: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    noise = settings["noise"]
    return function(*inputs, **settings | {"noise": torch.stack([noise[1], noise[0]])})


def _subnormals_flushed(function: Wrapper, right: Tensor, rows: Tensor, *rest: Any, **settings: Any) -> Tensor:
    tiny = torch.finfo(rows.dtype).tiny
    return function(with_values(rows, lambda x: torch.where(x.abs() < tiny, torch.zeros_like(x), x)), *rest, **settings)


def _half_rows(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return rows.dtype == torch.float16


def _rows_weighted_in_place(rows: Tensor, *rest: Any, **settings: Any) -> None:
    if settings.get("probs_on_input") and settings.get("probs") is not None and rows.numel():
        rows.data.add_(1)


_OVERRIDE = only(_overridden, _other_override)
_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE122",
        "an empty expert's bias has another one's gradient",
        BACK,
        {"grouped_linear": only(given("bias"), _bias_of_the_expert_before)},
    ),
    (
        "AE123",
        "a wider bias is rounded to the dtype of the rows",
        SEVERAL,
        {"grouped_linear": only(_wide_bias, _bias_in_the_dtype_of_rows)},
    ),
    (
        "AE124",
        "what was there is lost without rows",
        VALUES,
        {"grouped_wgrad": only(given("accumulate_into"), _lost_without_rows)},
    ),
    ("AE125", "gradients are accumulated in place", OWNER, {"grouped_wgrad": in_place(_written_into)}),
    (
        "AE126",
        "a sum with nothing is the caller's tensor",
        OWNER,
        {"grouped_wgrad": only(given("accumulate_into"), _accumulated_here)},
    ),
    (
        "AE127",
        "one override of the backward is the other",
        SEVERAL,
        dict.fromkeys((*PRODUCTS, "grouped_mlp", "shared_experts"), _OVERRIDE),
    ),
    (
        "AE128",
        "products by codes have no bias",
        SEVERAL,
        {"latent_projection": only(_low_precision_bias, called_with(bias=None))},
    ),
    (
        "AE130",
        "codes of a weight are kept by its address",
        OWNER,
        dict.fromkeys(("grouped_linear", "latent_projection"), _weights_of_the_first_call()),
    ),
    ("AE131", "offsets are kept by shape and first count", OWNER, {"grouped_linear": _counts_kept_by_shape()}),
    (
        "AE132",
        "the last row of a power of two is left out",
        SIZES,
        {"grouped_linear": only(_power_of_two_rows, _last_row_of_a_power)},
    ),
    (
        "AE133",
        "probs on the input weight the first bias",
        SEVERAL,
        dict.fromkeys(MLPS, only(_input_probs_and_bias, _weighted_bias)),
    ),
    (
        "AE134",
        "probs on the input weight the second bias",
        SEVERAL,
        dict.fromkeys(MLPS, only(_input_probs_and_second_bias, _second_bias_weighted)),
    ),
    (
        "AE135",
        "second biases skip empty experts",
        SEVERAL,
        dict.fromkeys(MLPS, only(given("fc2_bias"), _biases_of_experts_with_rows)),
    ),
    ("AE136", "rows past the experts come back", SIZES, {"sequential_mlp": only(always, _tail_as_it_came)}),
    (
        "AE137",
        "both layers scale gradients as the first",
        SEVERAL,
        {"grouped_mlp": only(given("state"), _gradient_scale_of_the_first)},
    ),
    (
        "AE138",
        "the second input is scaled as its weight",
        SEVERAL,
        {"grouped_mlp": only(given("state"), _second_input_scale_of_the_first_weight)},
    ),
    ("AE139", "fc1 learns only if fc2 does", BACK, dict.fromkeys(MLPS, only(_fc2_is_frozen, _frozen_second))),
    (
        "AE140",
        "an activation made again has rounded probs",
        SEVERAL,
        {"grouped_mlp": only(_recomputed_and_weighted, _recomputed_probs)},
    ),
    (
        "AE141",
        "noise of the second layer is of other rows",
        SEVERAL,
        {"grouped_mlp": only(given("noise"), _aligned_counts_of_noise)},
    ),
    (
        "AE142",
        "the gate of shared experts is quantised, too",
        SEVERAL,
        {"shared_experts": only(given("recipe", "gate_weight"), _shared_gate_quantised)},
    ),
    (
        "AE143",
        "a gate that is made again has no gradient of x",
        SEVERAL,
        {"shared_experts": only(given("recompute", "gate_weight"), _gate_detached_when_recomputed)},
    ),
    (
        "AE144",
        "the states of both layers are exchanged",
        SEVERAL,
        {"shared_experts": only(given("state"), _shared_state_exchanged)},
    ),
    (
        "AE145",
        "a float64 accumulator is that of the forward",
        SEVERAL,
        dict.fromkeys(
            ("grouped_dgrad", "grouped_wgrad"), only(_accumulator_of_fprop_alone, called_with(accumulator="float32"))
        ),
    ),
    (
        "AE146",
        "both directions exchange their noise",
        SEVERAL,
        dict.fromkeys(("grouped_dgrad", "grouped_wgrad"), only(given("noise"), _zero_noise)),
    ),
    (
        "AE147",
        "float16 subnormals are flushed",
        VALUES,
        dict.fromkeys(("grouped_linear", "grouped_mlp", "latent_projection"), only(_half_rows, _subnormals_flushed)),
    ),
    ("AE148", "rows are weighted in place", OWNER, {"grouped_mlp": in_place(_rows_weighted_in_place)}),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
