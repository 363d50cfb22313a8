"""Defects that were reported of public experts, planted by their mechanism; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import called_with, given, only
from conformance.mutants.kinds.gradients import rounded_to, with_gradient
from moe_ref.config.experts import GATED

MLPS = ("grouped_mlp", "sequential_mlp")
LEAST = 1e-12  # what a weight is divided by at least
TILE, ALIGN = 128, 64
OAI_ALPHA = 1.702


# ---- products


def _turned_weight(function: Wrapper, right: Any, first: Tensor, weight: Tensor, *rest: Any, **settings: Any) -> Any:
    """Of a square weight the shape does not tell in which order its axes are."""
    return function(first, weight.mT, *rest, **settings)


def _square(first: Tensor, weight: Tensor, *rest: Any, **settings: Any) -> bool:
    return weight.shape[-1] == weight.shape[-2] > 1


def _rows_past_the_only_expert(
    wgrad: Wrapper, right: Tensor, d_out: Tensor, rows: Tensor, counts: Tensor, **settings: Any
) -> Tensor:
    return wgrad(d_out, rows, torch.full_like(counts, len(rows)), **settings)


def _one_expert_and_a_tail(d_out: Tensor, rows: Tensor, counts: Tensor, **settings: Any) -> bool:
    return len(counts) == 1 and int(counts[0]) < len(rows) and settings.get("recipe") is None


def _one_expert_and_a_tail_by_codes(d_out: Tensor, rows: Tensor, counts: Tensor, **settings: Any) -> bool:
    recipe = settings.get("recipe")
    scaling = None if recipe is None else recipe.scaling
    whole = scaling == "current" or (scaling == "mxfp8" and len(rows) % 32 == 0)
    return len(counts) == 1 and int(counts[0]) < len(rows) and whole


def _gradient_of_the_one_before(wgrad: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    empty = (inputs[2] == 0).to(right.device).view(-1, 1, 1)
    return torch.where(empty, right.roll(1, 0), right)


def _fresh(*inputs: Any, **settings: Any) -> bool:
    return settings.get("accumulate_into") is None


def _segments_from_whole_blocks(
    wgrad: Wrapper, right: Tensor, d_out: Tensor, rows: Tensor, counts: Tensor, **settings: Any
) -> Tensor:
    """A segment past 64 rows is read from the multiple of 64 before it on."""
    parts, start, into = [], 0, settings.get("accumulate_into")
    for e, count in enumerate(counts.tolist()):
        first = start // ALIGN * ALIGN
        own = slice(first, first + count)
        one = settings | {"accumulate_into": None if into is None else into[e : e + 1]}
        moved = count and first not in (0, start)
        parts.append(wgrad(d_out[own], rows[own], counts[e : e + 1], **one) if moved else right[e : e + 1])
        start += count
    return torch.cat(parts)


def _plain_product(*inputs: Any, **settings: Any) -> bool:
    return settings.get("recipe") is None


def _past_half_a_tile(function: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    """Of a tile of 256 columns that the result does not fill, the second half is lost."""
    lost = torch.arange(right.shape[-1], device=right.device) >= TILE
    return with_values(right, lambda out: torch.where(lost, 0, out)) if TILE < right.shape[-1] < 2 * TILE else right


# ---- activations


def _by_division(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    """The gradient of a prob is that of the weighted row, divided by the prob or 1e-12."""
    p = settings["probs"].detach()
    probs = with_gradient(settings["probs"], lambda g: torch.where(p < LEAST, g * p / LEAST, g))
    return function(*inputs, **settings | {"probs": probs})


def _clamped_afterwards(glu: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    """min(silu(u), c) in place of silu(min(u, c))."""
    bound, probs = settings["clamp"], settings.get("probs")

    def wrong(out: Tensor) -> Tensor:
        u, v = (x if h.dtype == torch.float64 else x.float() for x in h.detach().chunk(2, 1))
        value = torch.nn.functional.silu(u).clamp(max=bound) * (v.clamp(-bound, bound) + settings.get("offset", 0.0))
        return (value if probs is None else value * probs.detach()[:, None].to(value.dtype)).to(out.dtype)

    return with_values(right, wrong)


def _simple_clamp(h: Tensor, **settings: Any) -> bool:
    others = any(settings.get(name) for name in ("alpha", "interleave", "round_before_probs"))
    return settings.get("clamp") is not None and settings.get("kind", "swiglu") == "swiglu" and not others


def _clamped_without_alpha(*inputs: Any, **settings: Any) -> bool:
    swiglu = settings.get("kind", "swiglu") == "swiglu"
    return swiglu and settings.get("clamp") is not None and settings.get("alpha") is None


def _halves_exchanged(glu: Wrapper, h: Tensor, **settings: Any) -> Any:
    """The gradients of both halves are stored in each other's place."""
    return glu(with_gradient(h, lambda g: g.roll(g.shape[1] // 2, 1)), **settings)


def _gradients_in_the_first_row(glu: Wrapper, h: Tensor, **settings: Any) -> Any:
    def back(g: Tensor) -> Tensor:
        rows = torch.arange(len(g), device=g.device)[:, None]
        return torch.where(rows == 0, g[-1:], 0) if len(g) else g

    return glu(with_gradient(h, back), **settings)


# ---- MLPs


def _turned_first(mlp: Wrapper, right: Any, x: Tensor, counts: Tensor, fc1: Tensor, *rest: Any, **settings: Any) -> Any:
    return mlp(x, counts, fc1.mT, *rest, **settings)


def _square_first(x: Tensor, counts: Tensor, fc1: Tensor, *rest: Any, **settings: Any) -> bool:
    return fc1.shape[-1] == fc1.shape[-2] > 1


def _turned_second(mlp: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    return mlp(*inputs[:-1], inputs[-1].mT, **settings)


def _square_second(*inputs: Any, **settings: Any) -> bool:
    return inputs[-1].shape[-1] == inputs[-1].shape[-2] > 1


def _hybrid_mxfp8(*inputs: Any, **settings: Any) -> bool:
    recipe = settings.get("recipe")
    return recipe is not None and recipe.scaling == "mxfp8" and recipe.fp8_format == "hybrid"


def _read_as_e4m3(mlp: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    """The bits of a gradient in E5M2 are taken for E4M3, which divides most of it by 128."""
    return with_gradient(right, lambda g: g / 128)


def _unweighted_second_bias(mlp: Wrapper, right: Tensor, x: Tensor, counts: Tensor, *rest: Any, **settings: Any) -> Any:
    bias, probs, total = settings["fc2_bias"], settings["probs"], int(counts.sum())
    each = bias.repeat_interleave(counts.to(bias.device).long(), 0).float()
    shift = each * (1 - probs[:total, None].float())
    return torch.cat([(right[:total].float() + shift).to(right.dtype), right[total:]])


def _codes_and_second_bias(*inputs: Any, **settings: Any) -> bool:
    three = all(settings.get(name) is not None for name in ("recipe", "fc2_bias", "probs"))
    return three and not settings.get("probs_on_input")


def _weighted_again(mlp: Wrapper, right: Tensor, x: Tensor, *rest: Any, **settings: Any) -> Tensor:
    return (right.float() * settings["probs"][:, None].float()).to(right.dtype)


def _narrow_probs_on_input(mlp: Wrapper, right: Tensor, x: Tensor, *rest: Any, **settings: Any) -> Any:
    probs = with_values(settings["probs"], rounded_to(x.dtype))
    return mlp(x, *rest, **settings | {"probs": probs})


def _wider_probs_on_input(x: Tensor, *rest: Any, **settings: Any) -> bool:
    probs = settings.get("probs")
    wider = isinstance(probs, Tensor) and probs.dtype.itemsize > x.dtype.itemsize
    return wider and bool(settings.get("probs_on_input"))


def _one_expert_squared(x: Tensor, counts: Tensor, *weights: Any, **settings: Any) -> bool:
    recipe = settings.get("recipe")
    codes = recipe is not None and recipe.scaling == "mxfp8"
    return codes and len(counts) == 1 and int(counts[0]) < len(x) and settings.get("kind") == "squared_relu"


def _second_weight_doubled(mlp: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    return mlp(*inputs[:-1], with_gradient(inputs[-1], lambda g: 2 * g), **settings)


def _no_gate(shared: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    free = shared(*inputs, **settings | {"gate_weight": None})
    return free + 0 * (settings["gate_weight"].sum().to(free.dtype))


def _gated(*inputs: Any, **settings: Any) -> bool:
    return settings.get("kind", "swiglu") in GATED and given("recipe")(**settings)


def _clamped_by_codes(*inputs: Any, **settings: Any) -> bool:
    return _gated(**settings) and settings.get("clamp") is not None


def _shifted_by_codes(*inputs: Any, **settings: Any) -> bool:
    return _gated(**settings) and (settings.get("offset", 0) != 0 or settings.get("alpha") is not None)


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB33",
        "a square weight is turned",
        "unsloth-zoo #849",
        dict.fromkeys(("grouped_linear", "grouped_dgrad", "latent_projection"), only(_square, _turned_weight)),
    ),
    (
        "RB34",
        "a square first weight is turned",
        "unsloth-zoo #849",
        dict.fromkeys(MLPS, only(_square_first, _turned_first)),
    ),
    (
        "RB35",
        "a square second weight is turned",
        "transformers #47031",
        dict.fromkeys((*MLPS, "shared_experts"), only(_square_second, _turned_second)),
    ),
    (
        "RB36",
        "the only expert has the rows past it",
        "TransformerEngine #3484",
        {"grouped_wgrad": only(_one_expert_and_a_tail, _rows_past_the_only_expert)},
    ),
    (
        "RB37",
        "the only expert has the rows past it, by codes",
        "TransformerEngine #3484",
        {"grouped_wgrad": only(_one_expert_and_a_tail_by_codes, _rows_past_the_only_expert)},
    ),
    (
        "RB38",
        "with squared relu the only expert's second weight has another gradient",
        "TransformerEngine #3484",
        {"grouped_mlp": only(_one_expert_squared, _second_weight_doubled)},
    ),
    (
        "RB39",
        "an empty expert has the gradient before",
        "pytorch #172439",
        {"grouped_wgrad": only(_fresh, _gradient_of_the_one_before)},
    ),
    (
        "RB40",
        "segments begin at whole blocks of rows",
        "marin #8339",
        {"grouped_wgrad": only(_plain_product, _segments_from_whole_blocks)},
    ),
    (
        "RB41",
        "columns past half a tile are lost",
        "marin #7484",
        dict.fromkeys(
            ("grouped_linear", "grouped_dgrad", "grouped_wgrad"), only(lambda *x, **s: True, _past_half_a_tile)
        ),
    ),
    (
        "RB42",
        "the gradient of a prob is divided by the prob",
        "unsloth-zoo #858",
        dict.fromkeys(("glu", "activation", *MLPS), only(given("probs"), _by_division)),
    ),
    (
        "RB43",
        "gates are clamped after their sigmoid",
        "a mistake that two clamped gates invite",
        {"glu": only(_simple_clamp, _clamped_afterwards)},
    ),
    (
        "RB44",
        "a clamp has an alpha of its own",
        "onnxruntime #28738",
        {"glu": only(_clamped_without_alpha, called_with(alpha=OAI_ALPHA))},
    ),
    ("RB45", "gradients of both halves are exchanged", "unsloth #3314", {"glu": _halves_exchanged}),
    ("RB46", "gradients of all rows are in the first", "Triton-distributed #180", {"glu": _gradients_in_the_first_row}),
    (
        "RB47",
        "gradients in E5M2 are taken for E4M3",
        "TransformerEngine #3342",
        dict.fromkeys(MLPS, only(_hybrid_mxfp8, _read_as_e4m3)),
    ),
    (
        "RB48",
        "with a recipe the second bias is not weighted",
        "Megatron-LM #5850",
        dict.fromkeys(MLPS, only(_codes_and_second_bias, _unweighted_second_bias)),
    ),
    (
        "RB49",
        "with a recipe gates are not clamped",
        "vLLM #42855",
        dict.fromkeys(MLPS, only(_clamped_by_codes, called_with(clamp=None))),
    ),
    (
        "RB50",
        "with a recipe gates of shared experts are not clamped",
        "vllm-ascend #14363",
        {"shared_experts": only(_clamped_by_codes, called_with(clamp=None))},
    ),
    (
        "RB51",
        "with a recipe gates have no offset and no alpha",
        "sgl-project/DeepGEMM #87",
        dict.fromkeys((*MLPS, "shared_experts"), only(_shifted_by_codes, called_with(offset=0.0, alpha=None))),
    ),
    (
        "RB52",
        "with a recipe shared experts have no gate",
        "vllm-ascend #15953",
        {"shared_experts": only(given("recipe", "gate_weight"), _no_gate)},
    ),
    (
        "RB53",
        "with a recipe probs are on input and output",
        "vLLM #43694",
        dict.fromkeys(MLPS, only(given("recipe", "probs", "probs_on_input"), _weighted_again)),
    ),
    (
        "RB54",
        "probs on the input are rounded to its dtype",
        "TensorRT-LLM #3492",
        dict.fromkeys(MLPS, only(_wider_probs_on_input, _narrow_probs_on_input)),
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
