"""Defects of the router that only some calls show; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import only
from conformance.mutants.kinds.gradients import with_gradients_of

SEVERAL = "a mistake that one option alone does not show"
STEPS = "a mistake that several steps show"


# ---- selection


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


# ---- capacity


# ---- gate, jitter, Sinkhorn, bias


# ---- route


def _sequences_first(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """The loss of a sequence reads the tokens sequence by sequence."""
    out, batch = route(logits, config, **settings), settings.get("batch_size", 1)
    if out.losses.seq_aux_loss is None or batch == 1 or settings.get("padding_mask") is not None:
        return out
    other = route(logits.unflatten(0, (batch, -1)).transpose(0, 1).flatten(0, 1), config, **settings)
    return out._replace(losses=out.losses._replace(seq_aux_loss=other.losses.seq_aux_loss))


def _own_choice_counted(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if settings.get("replay") not in ("forward", "backward") or not config.expert_bias:
        return out
    free = settings | {"replay": "none", "replay_target": None}
    plain = route(logits.detach() if not logits.requires_grad else logits, config, **free)
    return out._replace(state=out.state._replace(tokens_per_expert=plain.state.tokens_per_expert))


def _evaluation_queues_the_last(route: Wrapper, logits: Tensor, config: Any, *, state: Any, **settings: Any) -> Any:
    out = route(logits, config, state=state, **settings)
    if settings.get("training", True) or settings.get("replay") != "forward":
        return out
    older = state.replay_queue or out.state.replay_queue
    return out._replace(state=out.state._replace(replay_queue=(*state.replay_queue, older[-1])))


def _capacity_of_valid_tokens(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out, mask = route(logits, config, **settings), settings.get("padding_mask")
    if config.capacity_factor is None or mask is None or not len(logits):
        return out
    share = float((mask == 0).sum()) / len(logits)
    return route(logits, replace(config, capacity_factor=config.capacity_factor * share), **settings) if share else out


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


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    ("AE025", "lanes past the experts hold 0", SEVERAL, {"topk_indices": only(_odd_width, _masked_lanes_are_zero)}),
    (
        "AE026",
        "the bias is in the gradient of grouped choices",
        SEVERAL,
        {"topk_indices": only(_grouped_bias, _bias_in_the_gradient)},
    ),
    ("AE042", "sequences are read one after the other", SEVERAL, {"route": _sequences_first}),
    ("AE044", "a replay counts the choice that it replaces", STEPS, {"route": _own_choice_counted}),
    ("AE047", "an evaluation queues the replay before", STEPS, {"route": _evaluation_queues_the_last}),
    ("AE049", "a capacity is of the tokens without padding", SEVERAL, {"route": _capacity_of_valid_tokens}),
    ("AE052", "counters stay where there is no bias", STEPS, {"finish_batch": _counters_stay_without_a_bias}),
    ("AE053", "a frozen batch keeps its steps", STEPS, {"finish_batch": _frozen_keeps_its_global_steps}),
    ("AE054", "replays are loaded in the order of letters", STEPS, {"state_from": _replays_by_letters}),
    ("AE055", "a loaded state counts its micro-batches anew", STEPS, {"state_from": _steps_restart}),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
