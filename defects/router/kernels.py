"""Defects of the router that kernels of other libraries have had, or could have; see `planted`."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import read_as_contiguous, with_gradient, with_gradients_of
from defects.router.parts import chosen_by, keys_of, reweighted
from moe_ref.router.scores import SCORES

BACK = "a mistake that a backward of one's own invites"
CHOICE = "a mistake that a choice of one's own invites"
COUNTED = "a mistake that counts of tokens invite"
LAYOUT = "a mistake that contiguous tensors do not show"
ROUNDED = "a mistake that a narrower unit invites"
TF32_BITS = 13  # of float32's significand that TF32 drops
FLAT = -20.0  # logits from which a library's softplus is taken as 0


def _both(wrapper: Wrapper) -> dict[str, Wrapper]:
    return {"topk_indices": wrapper, "topk_routing": wrapper}


def _groups_without_the_bias(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    out, groups, kept = base(logits, **settings), settings.get("num_groups"), settings.get("group_topk")
    chooses = settings.get("precomputed_indices") is None and logits.numel()
    if not groups or not chooses or settings.get("expert_bias") is None:
        return out
    bare = keys_of(logits, {name: x for name, x in settings.items() if name != "expert_bias"})
    by_group = bare.unflatten(1, (groups, -1)).sort(dim=2, descending=True).values[..., : settings["topk"] // kept]
    order = by_group.sum(2).sort(dim=1, descending=True, stable=True).indices[:, :kept]
    mask = torch.zeros(len(logits), groups, dtype=torch.bool, device=logits.device).scatter(1, order, True)
    keys = keys_of(logits, settings).unflatten(1, (groups, -1)).masked_fill(~mask[..., None], -torch.inf).flatten(1)
    index = keys.sort(dim=1, descending=True, stable=True).indices[:, : settings["topk"]]
    return chosen_by(index, base, logits, settings)


def _sum_is_constant(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    """The gradient treats the sum of the chosen scores as a constant."""
    out, function = base(logits, **settings), settings.get("score_function", "softmax")
    if function == "softmax" or settings["topk"] == 1 or not out.probs.requires_grad:
        return out

    def weigh(index: Tensor) -> Tensor:
        score = SCORES[function](logits).gather(1, index)
        return score / (score.detach().sum(1, keepdim=True) + 1e-20)

    wrong = reweighted(base, logits, settings, weigh)
    return out._replace(probs=with_gradients_of(out.probs, wrong.probs))


def _flat_below(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    far = settings.get("score_function") == "sqrtsoftplus"
    change = lambda g: torch.where(logits < FLAT, 0.0, g)  # noqa: E731
    return base(with_gradient(logits, change) if far else logits, **settings)


def _renormalised(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    out = base(logits, **settings)
    if not settings.get("pre_softmax") or settings["topk"] == 1 or not logits.numel():
        return out
    return out._replace(probs=with_values(out.probs, lambda p: (p.double() / p.double().sum(1, True)).to(p.dtype)))


def _no_factor_for_one(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    out = base(logits, **settings)
    return base(logits, **settings | {"scaling_factor": None}) if settings["topk"] == 1 else out


def _bias_taken_for_contiguous(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    out, bias = base(logits, **settings), settings.get("expert_bias")
    if bias is None or bias.is_contiguous():
        return out
    return base(logits, **settings | {"expert_bias": read_as_contiguous(bias)})


def _given_experts_sorted(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    """Weights come in the order of the experts."""
    out, given = base(logits, **settings), settings.get("precomputed_indices")
    if given is None:
        return out
    order = given.long().argsort(1)
    return out._replace(probs=with_values(out.probs, lambda p: p.gather(1, order)))


def _padding_counts(scores: Wrapper, logits: Tensor, **settings: Any) -> Any:
    out, mask = scores(logits, **settings), settings.get("padding_mask")
    if mask is None:
        return out
    every = scores(torch.where(logits.isfinite(), logits, 0.0), **settings | {"padding_mask": None})
    return out._replace(routing_map=every.routing_map)


def _coefficient_twice(loss: Wrapper, scores: Tensor, *counts: Tensor, **settings: Any) -> Any:
    out = loss(scores, *counts, **settings)
    coeff = float(settings["coeff"])
    return loss(with_gradient(scores, lambda g: g * coeff), *counts, **settings) if out.requires_grad else out


def _logarithm_in_the_dtype(z_loss: Wrapper, logits: Tensor, *, coeff: float, padding_mask: Any = None) -> Any:
    out = z_loss(logits, coeff=coeff, padding_mask=padding_mask)
    kept = logits.detach() if padding_mask is None else logits.detach()[padding_mask == 0]
    square = kept.float().logsumexp(1).to(logits.dtype).double() ** 2
    narrow = logits.element_size() == 2
    return with_values(out, lambda x: (coeff * square.sum() / max(len(square), 1)).to(x.dtype)) if narrow else out


def _last_tokens_kept(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = drop(probs, routing_map, **settings)
    if settings.get("drop_policy", "probs") != "position":
        return out
    turned = drop(probs.flip(0), routing_map.flip(0), **settings)
    return turned._replace(probs=turned.probs.flip(0), routing_map=turned.routing_map.flip(0))


def _largest_without_sign(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = drop(probs, routing_map, **settings)
    if settings.get("drop_policy", "probs") != "probs" or settings.get("pad_to_capacity"):
        return out
    kept = drop(probs.detach().abs(), routing_map, **settings).routing_map
    return out._replace(probs=torch.where(kept, probs, 0), routing_map=kept)


def _filled_ones_have_gradients(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["all"] = g
        return g

    filled = drop(probs, routing_map, **settings).routing_map & (routing_map == 0)
    out = drop(with_gradient(probs, lambda g: torch.where(filled, seen["all"], g)), routing_map, **settings)
    return out._replace(probs=with_gradient(out.probs, noted))


def _centred(update: Wrapper, bias: Tensor, counts: Tensor, **settings: Any) -> Any:
    out = update(bias, counts, **settings)
    return out - out.mean()


def _rounded_before_the_bias(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    out, bias = gate(x, weight, **settings), settings.get("bias")
    if bias is None or x.element_size() != 2:
        return out
    product = gate(x.detach(), weight.detach(), **settings | {"bias": None}).to(x.dtype)
    return with_values(out, lambda y: (product.double() + bias.detach().double()).to(y.dtype))


def _tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + (1 << (TF32_BITS - 1))) & -(1 << TF32_BITS)).view(torch.float32)


def _in_tf32(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    out = gate(x, weight, **settings)
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return out
    return gate(with_values(x, _tf32), with_values(weight, _tf32), **settings)


def _capacity_rounded_down(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out, factor = route(logits, config, **settings), config.capacity_factor
    if factor is None or not len(logits):
        return out
    exact = Fraction(str(factor)) * len(logits) * config.topk / config.num_experts
    if exact.denominator == 1 or exact < 1:
        return out
    lower = float(Fraction(int(exact) * config.num_experts, len(logits) * config.topk))
    return route(logits, replace(config, capacity_factor=lower), **settings)


def _padding_is_not_routed(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out, mask = route(logits, config, **settings), settings.get("padding_mask")
    if mask is None or settings.get("training", True):
        return out
    kept = (mask == 0)[:, None]
    return out._replace(probs=torch.where(kept, out.probs, 0), routing_map=out.routing_map & kept)


def _lopsided(jitter: Wrapper, x: Tensor, *, eps: float) -> Any:
    jitter(x, eps=eps)
    return x * (1 - eps + 1.5 * eps * torch.rand_like(x))


def _scale_twice(attach: Wrapper, x: Tensor, loss: Tensor, **settings: Any) -> Any:
    return attach(x, with_gradient(loss, lambda g: g * settings.get("scale", 1.0)), **settings)


DEFECTS: tuple[Defect, ...] = (
    Defect("AD16", "groups are chosen without the expert bias", CHOICE, _both(_groups_without_the_bias)),
    Defect("AD17", "the sum of the chosen scores is a constant", BACK, _both(_sum_is_constant)),
    Defect("AD18", "the root of softplus has no slope far below 0", BACK, _both(_flat_below)),
    Defect("AD19", "softmax weights are normalised again", CHOICE, _both(_renormalised)),
    Defect("AD20", "a router of one expert has no scaling factor", CHOICE, _both(_no_factor_for_one)),
    Defect("AD21", "an expert bias is taken for contiguous", LAYOUT, _both(_bias_taken_for_contiguous)),
    Defect(
        "AD22",
        "weights of given experts come in the experts' order",
        CHOICE,
        {"topk_indices": _given_experts_sorted},
    ),
    Defect("AD23", "padding counts for the auxiliary loss", COUNTED, {"aux_loss_scores": _padding_counts}),
    Defect("AD24", "the gradient has the coefficient twice", BACK, {"load_balancing_loss": _coefficient_twice}),
    Defect("AD25", "the logarithm is rounded to the logits' dtype", ROUNDED, {"z_loss": _logarithm_in_the_dtype}),
    Defect("AD26", "a capacity keeps the last tokens", COUNTED, {"drop_tokens": _last_tokens_kept}),
    Defect("AD27", "probs are compared without their sign", CHOICE, {"drop_tokens": _largest_without_sign}),
    Defect("AD28", "tokens that fill a capacity have gradients", BACK, {"drop_tokens": _filled_ones_have_gradients}),
    Defect("AD29", "the expert bias is centred", COUNTED, {"update_expert_bias": _centred}),
    Defect("AD30", "a product is rounded before the bias is added", ROUNDED, {"gate": _rounded_before_the_bias}),
    Defect("AD31", "a float32 product is taken in TF32", ROUNDED, {"gate": _in_tf32}),
    Defect("AD32", "a capacity is rounded down", COUNTED, {"route": _capacity_rounded_down}),
    Defect("AD33", "an evaluation does not route padding", COUNTED, {"route": _padding_is_not_routed}),
    Defect("AD34", "factors of the jitter are lopsided", CHOICE, {"jitter": _lopsided}),
    Defect("AD35", "a loss has its scale twice", BACK, {"attach_loss": _scale_twice}),
)
