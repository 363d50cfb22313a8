"""Defects of the router's choice, weights and losses at the edges of inputs; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import rounded_to, with_gradient
from defects.router.parts import chosen_by, keys_of, reweighted
from moe_ref.router.scores import SCORES

BACK = "a mistake that a backward of one's own invites"
CHOICE = "a mistake that a choice of one's own invites"
RANGE = "a mistake that logits of moderate size do not show"
EDGE = "a mistake that loads at the edge invite"


# ---- gate and jitter


def _bias_with_the_weight(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    bias = settings.get("bias")
    if bias is not None and not weight.requires_grad:
        settings["bias"] = with_gradient(bias, torch.zeros_like)
    return gate(x, weight, **settings)


def _halves_added(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    """Autograd adds the gradients of two uses in the dtype of the weight."""
    out = gate(x, weight, **settings)
    half = len(x) // 2
    parts = [gate(part, weight, **settings) for part in (x[:half], x[half:])] if out.requires_grad and half else [out]
    return torch.cat(parts)


def _weight_in_the_dtype_of_x(gate: Wrapper, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    legal = weight.is_floating_point() and x.is_floating_point()
    return gate(x, with_values(weight, rounded_to(x.dtype)) if legal else weight, **settings)


def _one_factor_per_row(jitter: Wrapper, x: Tensor, **settings: Any) -> Any:
    out = jitter(x, **settings)
    return x * jitter(torch.ones_like(x[:, :1]), **settings) if x.numel() else out


def _only_smaller(jitter: Wrapper, x: Tensor, *, eps: float) -> Any:
    jitter(x, eps=eps)
    return x * (1 - eps * torch.rand_like(x))


# ---- the choice


def _free(logits: Tensor, settings: dict[str, Any]) -> bool:
    """Whether there is something to choose."""
    return settings.get("precomputed_indices") is None and bool(logits.numel())


def _limited(masked: float, least: float) -> Wrapper:
    """Experts of other groups have the key `masked`; a group's sum counts keys from `least` on."""

    def choose(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
        out, groups, kept = base(logits, **settings), settings.get("num_groups"), settings.get("group_topk")
        if not groups or not _free(logits, settings):
            return out
        by_group = keys_of(logits, settings).unflatten(1, (groups, -1))
        score = by_group.sort(dim=2, descending=True).values[..., : settings["topk"] // kept].clamp(min=least).sum(2)
        order = score.sort(dim=1, descending=True, stable=True).indices[:, :kept]
        mask = torch.zeros_like(score, dtype=torch.bool).scatter(1, order, True)
        keys = by_group.masked_fill(~mask[..., None], masked).flatten(1)
        order = keys.sort(dim=1, descending=True, stable=True).indices
        return chosen_by(order[:, : settings["topk"]], base, logits, settings)

    return choose


def _taken_is_minus_infinity(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    """Where only -∞ is left, the first expert is taken again."""
    out = base(logits, **settings)
    if not _free(logits, settings) or settings.get("num_groups"):
        return out
    keys, picks = keys_of(logits, settings), []
    for _ in range(settings["topk"]):
        picks.append(keys.argmax(1, keepdim=True))
        keys = keys.scatter(1, picks[-1], -torch.inf)
    return chosen_by(torch.cat(picks, 1), base, logits, settings)


def _nan_is_taken_again(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    out = base(logits, **settings)
    if not _free(logits, settings) or not bool(logits.isnan().any()):
        return out
    first = logits.detach().isnan().int().argmax(1, keepdim=True)
    index = (out.routing_map != 0).nonzero()[:, 1].reshape(len(logits), -1) if hasattr(out, "routing_map") else None
    index = out.indices.long() if index is None else index
    index = torch.where(logits.detach().isnan().any(1, keepdim=True), first, index)
    return chosen_by(index, base, logits, settings)


def _bias_in_the_dtype_of_logits(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    bias = settings.get("expert_bias")
    out = base(logits, **settings)
    if bias is None:
        return out
    return base(logits, **settings | {"expert_bias": rounded_to(logits.dtype)(bias)})


# ---- the weights


def _weighted(weigh: Callable[[Tensor], Tensor], function: str) -> Wrapper:
    """Weights weigh(chosen logits), in float32, of calls with a score function."""

    def wrapper(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
        out, late = base(logits, **settings), not settings.get("pre_softmax")
        if settings.get("score_function", "softmax") != function or not late or not logits.numel():
            return out
        return reweighted(base, logits, settings, lambda index: weigh(logits.gather(1, index).float()))

    return wrapper


def _no_largest_taken_off(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(1, keepdim=True)


def _no_epsilon(x: Tensor) -> Tensor:
    score = torch.sigmoid(x)
    return score / score.sum(1, keepdim=True) if x.shape[1] > 1 else score


def _exponential_overflows(x: Tensor) -> Tensor:
    score = x.exp().add(1).log().sqrt()
    return score / (score.sum(1, keepdim=True) + 1e-20) if x.shape[1] > 1 else score


def _one_is_normalised(x: Tensor) -> Tensor:
    score = SCORES["sigmoid"](x)
    return score / (score.sum(1, keepdim=True) + 1e-20)


def _factor_not_in_the_gradient(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    factor = settings.get("scaling_factor")
    return base(with_gradient(logits, lambda g: g / factor) if factor else logits, **settings)


def _replay_is_constant(base: Wrapper, logits: Tensor, /, **settings: Any) -> Any:
    replayed = settings.get("precomputed_indices") is not None
    return base(with_gradient(logits, torch.zeros_like) if replayed else logits, **settings)


# ---- capacity


def _product_with_the_map(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Ranks probs · map: an unrouted token is a 0, which is more than a negative prob."""
    out = drop(probs, routing_map, **settings)
    if settings.get("drop_policy", "probs") != "probs" or settings.get("pad_to_capacity") or not probs.numel():
        return out
    product = torch.where(routing_map != 0, probs.detach(), 0.0)
    best = product.sort(dim=0, descending=True, stable=True).indices[: settings["capacity"]]
    kept = torch.zeros_like(out.routing_map).scatter(0, best, True) & (routing_map != 0)
    return out._replace(probs=torch.where(kept, probs, 0), routing_map=kept)


def _dropped_have_gradients(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["all"] = g
        return g

    out = drop(with_gradient(probs, lambda g: torch.where(routing_map != 0, seen["all"], g)), routing_map, **settings)
    return out._replace(probs=with_gradient(out.probs, noted))


def _no_capacity_for_zero(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = drop(probs, routing_map, **settings)
    if settings["capacity"]:
        return out
    return out._replace(probs=torch.where(routing_map != 0, probs, 0), routing_map=routing_map != 0)


def _filled_with_their_probs(drop: Wrapper, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = drop(probs, routing_map, **settings)
    filled = out.routing_map & (routing_map == 0)
    return out._replace(probs=torch.where(filled, probs, out.probs))


# ---- losses


def _masked_by_a_product(scores: Wrapper, logits: Tensor, **settings: Any) -> Any:
    """The gradient of padding is its slope times 0: NaN where a padding token holds one."""
    out, mask = scores(logits, **settings), settings.get("padding_mask")
    if mask is None:
        return out
    strange = (mask != 0)[:, None] & ~logits.detach().isfinite().all(1, keepdim=True)
    return scores(with_gradient(logits, lambda g: torch.where(strange, torch.nan, g)), **settings)


def _mean_of_nothing(z_loss: Wrapper, logits: Tensor, **settings: Any) -> Any:
    out, mask = z_loss(logits, **settings), settings.get("padding_mask")
    return out * torch.nan if mask is not None and bool((mask != 0).all()) else out


def _absolute_logarithm(z_loss: Wrapper, logits: Tensor, **settings: Any) -> Any:
    out = z_loss(logits, **settings)
    negative = logits.detach().float().logsumexp(1, keepdim=True) < 0
    return z_loss(with_gradient(logits, lambda g: torch.where(negative, -g, g)), **settings) if len(logits) else out


def _mean_over_padding(z_loss: Wrapper, logits: Tensor, **settings: Any) -> Any:
    out, mask = z_loss(logits, **settings), settings.get("padding_mask")
    return out if mask is None or not len(mask) else out * (mask == 0).float().mean()


def _at_least_one_token(loss: Wrapper, scores: Tensor, counts: Tensor, **settings: Any) -> Any:
    out, total = loss(scores, counts, **settings), settings["total_num_tokens"]
    below = bool(total > 0) and bool(total < 1)
    return out * float(total) ** 2 if below else out


def _divided_by_no_tokens(loss: Wrapper, scores: Tensor, counts: Tensor, **settings: Any) -> Any:
    out = loss(scores, counts, **settings)
    return out * torch.nan if bool(settings["total_num_tokens"] == 0) else out


def _loss_in_the_dtype_of_x(attach: Wrapper, x: Tensor, loss: Tensor, **settings: Any) -> Any:
    change = rounded_to(x.dtype)
    return attach(x, with_gradient(loss, change) if x.is_floating_point() else loss, **settings)


def _nothing_on_zeros(attach: Wrapper, x: Tensor, loss: Tensor, **settings: Any) -> Any:
    """A block of zero gradients is skipped, and the loss with it."""
    seen: dict[str, bool] = {}

    def noted(g: Tensor) -> Tensor:
        seen["some"] = bool(g.any())
        return g

    out = attach(x, with_gradient(loss, lambda g: g if seen["some"] else torch.zeros_like(g)), **settings)
    return with_gradient(out, noted)


def _equal_counts_move(update: Wrapper, bias: Tensor, counts: Tensor, **settings: Any) -> Any:
    out, count = update(bias, counts, **settings), counts.double()
    equal = count * len(count) == count.sum()
    return torch.where(equal, bias + settings["update_rate"], out)


def _mean_of_the_busy(update: Wrapper, bias: Tensor, counts: Tensor, **settings: Any) -> Any:
    out, count = update(bias, counts, **settings), counts.double()
    direction = (count.sum() - (count > 0).sum() * count).sign()
    return (bias + settings["update_rate"] * direction.to(bias.dtype)).to(out.dtype)


def _plan_in_evaluation(sinkhorn: Wrapper, logits: Tensor, **settings: Any) -> Any:
    return sinkhorn(logits, **settings | {"training": True})


def _choice_without_a_plan(sinkhorn: Wrapper, logits: Tensor, **settings: Any) -> Any:
    return sinkhorn(logits, **settings | {"training": False})


def _both(wrapper: Wrapper) -> dict[str, Wrapper]:
    return {"topk_indices": wrapper, "topk_routing": wrapper}


DEFECTS: tuple[Defect, ...] = (
    Defect("U01", "a gate's bias has a gradient only if its weight has one", BACK, {"gate": _bias_with_the_weight}),
    Defect("U02", "the gradients of two halves are added in 16 bits", BACK, {"gate": _halves_added}),
    Defect("U03", "a gate's weight is rounded to the dtype of x", RANGE, {"gate": _weight_in_the_dtype_of_x}),
    Defect("U04", "one random factor for each row", CHOICE, {"jitter": _one_factor_per_row}),
    Defect("U05", "jitter makes x smaller only", CHOICE, {"jitter": _only_smaller}),
    Defect("U06", "experts of other groups have the key 0", CHOICE, _both(_limited(0.0, -torch.inf))),
    Defect(
        "U07", "the sum of a group starts from 0: negative keys do not count", CHOICE, _both(_limited(-torch.inf, 0.0))
    ),
    Defect("U08", "a taken expert is marked by -∞", CHOICE, _both(_taken_is_minus_infinity)),
    Defect("U09", "a NaN is taken in every slot", CHOICE, _both(_nan_is_taken_again)),
    Defect("U10", "the expert bias is added in the dtype of the logits", CHOICE, _both(_bias_in_the_dtype_of_logits)),
    Defect(
        "U12", "softmax without the largest logit taken off", RANGE, _both(_weighted(_no_largest_taken_off, "softmax"))
    ),
    Defect("U13", "sigmoids that are all 0 are divided by their sum", RANGE, _both(_weighted(_no_epsilon, "sigmoid"))),
    Defect(
        "U14",
        "softplus by the exponential of a large logit",
        RANGE,
        _both(_weighted(_exponential_overflows, "sqrtsoftplus")),
    ),
    Defect(
        "U15", "the weight of one expert is normalised to 1", CHOICE, _both(_weighted(_one_is_normalised, "sigmoid"))
    ),
    Defect("U16", "the scaling factor is missing in the gradient", BACK, _both(_factor_not_in_the_gradient)),
    Defect("U17", "replayed choices have no gradient", BACK, _both(_replay_is_constant)),
    Defect("U18", "an unrouted token is more than a negative prob", EDGE, {"drop_tokens": _product_with_the_map}),
    Defect("U19", "dropped tokens keep their gradient", BACK, {"drop_tokens": _dropped_have_gradients}),
    Defect("U20", "a capacity of 0 is taken for none", EDGE, {"drop_tokens": _no_capacity_for_zero}),
    Defect("U21", "tokens that fill a capacity keep their probs", EDGE, {"drop_tokens": _filled_with_their_probs}),
    Defect("U22", "padding is masked by a product with 0", BACK, {"aux_loss_scores": _masked_by_a_product}),
    Defect("U23", "a mean over no tokens", EDGE, {"z_loss": _mean_of_nothing}),
    Defect("U24", "the gradient of a negative logarithm has the wrong sign", BACK, {"z_loss": _absolute_logarithm}),
    Defect("U25", "a mean over padding too", EDGE, {"z_loss": _mean_over_padding}),
    Defect("U26", "fewer tokens than one are taken for one", EDGE, {"load_balancing_loss": _at_least_one_token}),
    Defect("U27", "no tokens are divided by", EDGE, {"load_balancing_loss": _divided_by_no_tokens}),
    Defect(
        "U28",
        "the gradient of a loss is rounded to the dtype of its carrier",
        BACK,
        {"attach_loss": _loss_in_the_dtype_of_x},
    ),
    Defect("U29", "a carrier with gradients of 0 does not carry", BACK, {"attach_loss": _nothing_on_zeros}),
    Defect("U30", "the sign of no difference is 1", EDGE, {"update_expert_bias": _equal_counts_move}),
    Defect("U31", "a mean over the experts that have tokens", EDGE, {"update_expert_bias": _mean_of_the_busy}),
    Defect("U32", "an evaluation chooses by the plan", CHOICE, {"sinkhorn_routing": _plan_in_evaluation}),
    Defect("U33", "a training step chooses without the plan", CHOICE, {"sinkhorn_routing": _choice_without_a_plan}),
)
