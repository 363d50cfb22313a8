"""Defects of the router that only some calls show; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import called_with, given, in_place, only
from conformance.mutants.kinds.gradients import with_gradient, with_gradients_of

SEVERAL = "a mistake that one option alone does not show"
INTEGERS = "a mistake in a result that is seldom read"
VALUES = "a mistake that one class of values shows"
OWNER = "a mistake about whose memory it is"
STEPS = "a mistake that several steps show"
BOTH = ("topk_indices", "topk_routing")


# ---- selection


def _scaled_after_rounding(function: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    out = function(logits, **settings | {"scaling_factor": None})
    return out._replace(probs=(out.probs.float() * settings["scaling_factor"]).to(out.probs.dtype))


def _not_normalised(function: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    scores = torch.sigmoid(logits.double() if logits.dtype == torch.float64 else logits.float())
    scores = scores * (settings.get("scaling_factor") or 1)
    return right._replace(probs=scores.gather(1, right.indices.long()).to(logits.dtype))


def _all_by_sigmoid(logits: Tensor, **settings: Any) -> bool:
    return settings.get("score_function") == "sigmoid" and settings["topk"] == logits.shape[1] > 1


def _restricted_to_groups(function: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """Given experts outside the best groups have no weight."""
    free = settings | {"precomputed_indices": None, "topk": settings["topk"]}
    own = function(logits.detach(), **free).indices
    size = logits.shape[1] // settings["num_groups"]
    kept = (right.indices[:, :, None] // size == own[:, None, :] // size).any(2)
    return right._replace(probs=torch.where(kept, right.probs, 0))


def _masked_lanes_are_zero(function: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """Lanes past the experts hold 0, which is more than a row of negative logits."""
    lost = (logits.detach() < 0).all(1, keepdim=True)
    return right._replace(indices=torch.where(lost, right.indices.flip(1).roll(1, 0), right.indices))


def _odd_width(logits: Tensor, **settings: Any) -> bool:
    narrow = logits.shape[1] & (logits.shape[1] - 1)
    return bool(narrow) and settings.get("score_function", "softmax") == "softmax" and not settings.get("pre_softmax")


def _bias_in_the_gradient(function: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    """The backward has the sigmoid of the biased logits."""
    bias = settings["expert_bias"]
    if not right[0].requires_grad:
        return right
    chosen = right[1] if right[1].dtype != torch.bool else None
    if chosen is None:
        return right
    shifted = logits + (bias.to(logits.dtype) * 0.5)
    other = function(shifted, **settings | {"expert_bias": None, "precomputed_indices": chosen})
    return right._replace(probs=with_gradients_of(right.probs, other.probs))


def _grouped_bias(*inputs: Any, **settings: Any) -> bool:
    return settings.get("num_groups") is not None and settings.get("expert_bias") is not None


# ---- scores and losses


def _all_experts_of_padding(aux: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    return right._replace(routing_map=torch.ones_like(right.routing_map))


def _all_chosen(logits: Tensor, **settings: Any) -> bool:
    return settings["topk"] == logits.shape[1] and settings.get("padding_mask") is not None


def _shape_of_the_total(loss: Wrapper, right: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    return right.reshape(settings["total_num_tokens"].shape)


def _tensor_total(*inputs: Any, **settings: Any) -> bool:
    return isinstance(settings.get("total_num_tokens"), Tensor)


def _counts_in_float32(loss: Wrapper, right: Tensor, scores: Tensor, counts: Tensor, **settings: Any) -> Any:
    return loss(scores, counts.float().double(), **settings)


def _double_scores(scores: Tensor, *rest: Any, **settings: Any) -> bool:
    return scores.dtype == torch.float64


def _mean_over_padding_in_the_gradient(z_loss: Wrapper, right: Tensor, logits: Tensor, **settings: Any) -> Tensor:
    valid = (settings["padding_mask"] == 0).sum()
    share = float(valid) / max(len(logits), 1)
    return z_loss(with_gradient(logits, lambda g: g * share), **settings)


def _scale_of_zero_is_one(attach: Wrapper, x: Tensor, loss: Tensor, **settings: Any) -> Any:
    return attach(x, loss, **settings | ({"scale": 1.0} if settings.get("scale") == 0 else {}))


def _negative_scale(attach: Wrapper, x: Tensor, loss: Tensor, **settings: Any) -> Any:
    scale = settings.get("scale", 1.0)
    out = attach(x, loss, **settings)
    return attach(x, loss, scale=abs(scale)) if isinstance(scale, (int, float)) and scale < 0 else out


# ---- capacity


def _routed_by_prob(drop: Wrapper, right: Any, probs: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """A token of prob 0 is not routed."""
    return drop(probs, (routing_map != 0) & (probs.detach() != 0), **settings)


def _by_position(*inputs: Any, **settings: Any) -> bool:
    return settings.get("drop_policy") == "position" and bool(settings.get("pad_to_capacity"))


def _probs_masked_in_place(probs: Tensor, routing_map: Tensor, **settings: Any) -> None:
    if not probs.requires_grad:
        probs.masked_fill_(routing_map == 0, 0)


# ---- gate, jitter, Sinkhorn, bias


def _single_product(gate: Wrapper, right: Tensor, x: Tensor, weight: Tensor, **settings: Any) -> Tensor:
    return gate(x, weight, **settings | {"router_dtype": "fp32"}).double()


def _double_of_float32(x: Tensor, *rest: Any, **settings: Any) -> bool:
    return settings.get("router_dtype") == "fp64" and x.dtype == torch.float32


def _bias_twice_where_x_is_frozen(gate: Wrapper, right: Tensor, x: Tensor, weight: Tensor, **settings: Any) -> Tensor:
    bias = settings["bias"]
    return gate(x, weight, **settings | {"bias": with_gradient(bias, lambda g: 2 * g)})


def _frozen_input(x: Tensor, *rest: Any, **settings: Any) -> bool:
    return not x.requires_grad and settings.get("bias") is not None


def _softmax_of_one(sinkhorn: Wrapper, right: Any, logits: Tensor, **settings: Any) -> Any:
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    probs = torch.where(right.routing_map, wide.softmax(1), 0).to(logits.dtype)
    return right._replace(probs=probs)


def _one_in_evaluation(*inputs: Any, **settings: Any) -> bool:
    return settings["topk"] == 1 and settings.get("training") is False


def _same_bias_at_rate_zero(update: Wrapper, right: Tensor, bias: Tensor, *rest: Any, **settings: Any) -> Tensor:
    return bias


def _bias_in_place(bias: Tensor, counts: Tensor, *, update_rate: float) -> None:
    bias.add_(update_rate)


def _scores_zeroed_in_place(logits: Tensor, **settings: Any) -> None:
    mask = settings.get("padding_mask")
    if mask is not None:
        logits[mask != 0] = 0


# ---- route


def _sequences_first(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """The loss of a sequence reads the tokens sequence by sequence."""
    out, batch = route(logits, config, **settings), settings.get("batch_size", 1)
    if out.losses.seq_aux_loss is None or batch == 1 or settings.get("padding_mask") is not None:
        return out
    other = route(logits.unflatten(0, (batch, -1)).transpose(0, 1).flatten(0, 1), config, **settings)
    return out._replace(losses=out.losses._replace(seq_aux_loss=other.losses.seq_aux_loss))


def _last_loss_alone(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if len(config.balancing_coeffs) < 2:
        return out
    last = list(config.balancing_coeffs)[-1]
    zeros = {f"{name}_coeff": 0.0 for name in config.balancing_coeffs if name != last}
    return out._replace(probs=route(logits, replace(config, **zeros), **settings).probs)


def _own_choice_counted(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if settings.get("replay") not in ("forward", "backward") or not config.expert_bias:
        return out
    free = settings | {"replay": "none", "replay_target": None}
    plain = route(logits.detach() if not logits.requires_grad else logits, config, **free)
    return out._replace(state=out.state._replace(tokens_per_expert=plain.state.tokens_per_expert))


def _dropped_are_not_recorded(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if out.indices is None or config.capacity_factor is None:
        return out
    kept = out.routing_map.gather(1, out.indices.long())
    return out._replace(indices=torch.where(kept, out.indices, 0))


def _no_z_loss_in_replays(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if settings.get("replay") != "backward" or not config.z_loss_coeff:
        return out
    return out._replace(probs=route(logits, replace(config, z_loss_coeff=0.0), **settings).probs)


def _evaluation_queues_the_last(route: Wrapper, logits: Tensor, config: Any, *, state: Any, **settings: Any) -> Any:
    out = route(logits, config, state=state, **settings)
    if settings.get("training", True) or settings.get("replay") != "forward":
        return out
    older = state.replay_queue or out.state.replay_queue
    return out._replace(state=out.state._replace(replay_queue=(*state.replay_queue, older[-1])))


def _fillers_not_counted(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if not config.pad_to_capacity or not config.expert_bias:
        return out
    fewer = route(logits, replace(config, pad_to_capacity=False), **settings).state.tokens_per_expert
    return out._replace(state=out.state._replace(tokens_per_expert=fewer))


def _capacity_of_valid_tokens(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out, mask = route(logits, config, **settings), settings.get("padding_mask")
    if config.capacity_factor is None or mask is None or not len(logits):
        return out
    share = float((mask == 0).sum()) / len(logits)
    return route(logits, replace(config, capacity_factor=config.capacity_factor * share), **settings) if share else out


def _aux_loss_of_kept_scores(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """With both a capacity and a scaling factor, the losses' gradients are scaled."""
    out = route(logits, config, **settings)
    if config.capacity_factor is None or config.scaling_factor is None or not config.balancing_coeffs:
        return out
    scale = settings.get("loss_scale", 1.0) * config.scaling_factor
    return out._replace(probs=route(logits, config, **settings | {"loss_scale": scale}).probs)


def _state_in_place(route: Wrapper, logits: Tensor, config: Any, *, state: Any, **settings: Any) -> Any:
    out = route(logits, config, state=state, **settings)
    if config.expert_bias:
        state.tokens_per_expert.copy_(out.state.tokens_per_expert)
        return out._replace(state=out.state._replace(tokens_per_expert=state.tokens_per_expert))
    return out


def _counters_stay_without_a_bias(finish: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    out = finish(state, config, **settings)
    return out if config.expert_bias else state


def _frozen_keeps_its_global_steps(finish: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    out = finish(state, config, **settings)
    return out._replace(global_steps=state.global_steps) if settings.get("frozen") else out


def _replays_by_letters(state_from: Wrapper, tensors: Any) -> Any:
    out = state_from(tensors)
    names = sorted(name for name in tensors if name.startswith("replay_queue."))
    return out._replace(replay_queue=tuple(tensors[name] for name in names))


def _steps_restart(state_from: Wrapper, tensors: Any) -> Any:
    """A loaded state counts its micro-batches anew."""
    out = state_from(tensors)
    return out._replace(global_steps=torch.zeros_like(out.global_steps))


def _losses_ride(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """Losses keep their graph: what is logged holds all activations."""
    out = route(logits, config, **settings)
    seen = out.losses.z_loss
    return out if seen is None else out._replace(losses=out.losses._replace(z_loss=seen + 0 * logits.float().sum()))


def _one_of(wrapper: Wrapper, *names: str) -> dict[str, Wrapper]:
    return dict.fromkeys(names, wrapper)


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE022",
        "weights in groups are rounded before they are scaled",
        SEVERAL,
        _one_of(only(given("num_groups", "scaling_factor"), _scaled_after_rounding), *BOTH),
    ),
    (
        "AE023",
        "sigmoids of all experts are not normalised",
        SEVERAL,
        {"topk_indices": only(_all_by_sigmoid, _not_normalised)},
    ),
    (
        "AE024",
        "given experts outside the best groups have no weight",
        SEVERAL,
        {"topk_indices": only(given("num_groups", "precomputed_indices"), _restricted_to_groups)},
    ),
    ("AE025", "lanes past the experts hold 0", SEVERAL, {"topk_indices": only(_odd_width, _masked_lanes_are_zero)}),
    (
        "AE026",
        "the bias is in the gradient of grouped choices",
        SEVERAL,
        {"topk_indices": only(_grouped_bias, _bias_in_the_gradient)},
    ),
    (
        "AE027",
        "padding is routed where all experts are chosen",
        SEVERAL,
        {"aux_loss_scores": only(_all_chosen, _all_experts_of_padding)},
    ),
    (
        "AE028",
        "a loss has the shape of its total",
        INTEGERS,
        {"load_balancing_loss": only(_tensor_total, _shape_of_the_total)},
    ),
    (
        "AE029",
        "counts of float64 scores are in float32",
        SEVERAL,
        {"load_balancing_loss": only(_double_scores, _counts_in_float32)},
    ),
    (
        "AE030",
        "the gradient's mean is over padding too",
        SEVERAL,
        {"z_loss": only(given("padding_mask"), _mean_over_padding_in_the_gradient)},
    ),
    ("AE031", "a scale of 0 is 1", VALUES, {"attach_loss": _scale_of_zero_is_one}),
    ("AE032", "a scale has no sign", VALUES, {"attach_loss": _negative_scale}),
    ("AE033", "fillers come before tokens of prob 0", SEVERAL, {"drop_tokens": only(_by_position, _routed_by_prob)}),
    ("AE034", "probs are masked in place", OWNER, {"drop_tokens": in_place(_probs_masked_in_place)}),
    (
        "AE035",
        "a float64 product of float32 is a float32 product",
        SEVERAL,
        {"gate": only(_double_of_float32, _single_product)},
    ),
    (
        "AE036",
        "a bias has its gradient twice where x is frozen",
        SEVERAL,
        {"gate": only(_frozen_input, _bias_twice_where_x_is_frozen)},
    ),
    (
        "AE037",
        "one expert has a softmax in evaluation",
        SEVERAL,
        {"sinkhorn_routing": only(_one_in_evaluation, _softmax_of_one)},
    ),
    (
        "AE038",
        "a bias at a rate of 0 is the same tensor",
        OWNER,
        {"update_expert_bias": only(lambda *x, **s: s.get("update_rate") == 0, _same_bias_at_rate_zero)},
    ),
    ("AE039", "a bias moves in place", OWNER, {"update_expert_bias": in_place(_bias_in_place)}),
    ("AE040", "logits of padding are zeroed in place", OWNER, {"aux_loss_scores": in_place(_scores_zeroed_in_place)}),
    ("AE042", "sequences are read one after the other", SEVERAL, {"route": _sequences_first}),
    ("AE043", "of several losses the last is attached", SEVERAL, {"route": _last_loss_alone}),
    ("AE044", "a replay counts the choice that it replaces", STEPS, {"route": _own_choice_counted}),
    ("AE045", "dropped experts are not recorded", SEVERAL, {"route": _dropped_are_not_recorded}),
    ("AE046", "a replayed step has no z-loss", STEPS, {"route": _no_z_loss_in_replays}),
    ("AE047", "an evaluation queues the replay before", STEPS, {"route": _evaluation_queues_the_last}),
    ("AE048", "tokens that fill a capacity are not counted", SEVERAL, {"route": _fillers_not_counted}),
    ("AE049", "a capacity is of the tokens without padding", SEVERAL, {"route": _capacity_of_valid_tokens}),
    ("AE050", "losses are scaled like probs that are dropped", SEVERAL, {"route": _aux_loss_of_kept_scores}),
    ("AE051", "the state is counted in place", OWNER, {"route": _state_in_place}),
    ("AE052", "counters stay where there is no bias", STEPS, {"finish_batch": _counters_stay_without_a_bias}),
    ("AE053", "a frozen batch keeps its steps", STEPS, {"finish_batch": _frozen_keeps_its_global_steps}),
    ("AE054", "replays are loaded in the order of letters", STEPS, {"state_from": _replays_by_letters}),
    ("AE055", "a loaded state counts its micro-batches anew", STEPS, {"state_from": _steps_restart}),
    ("AE056", "logged losses keep their graph", OWNER, {"route": _losses_ride}),
    (
        "AE057",
        "a scaling factor that is given is rounded with groups",
        SEVERAL,
        {
            "topk_routing": only(
                given("num_groups", "scaling_factor"),
                called_with(scaling_factor=lambda x: float(torch.tensor(x).to(torch.bfloat16))),
            )
        },
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
