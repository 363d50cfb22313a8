"""Defects of a router's state over several steps; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper

REPEATED = "a mistake that repeated layers invite"
STATE = "a mistake that state over several steps invites"


def _padding_counted(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out, mask = route(logits, config, **settings), settings.get("padding_mask")
    if mask is None or torch.equal(out.state.tokens_per_expert, settings["state"].tokens_per_expert):
        return out
    counts = settings["state"].tokens_per_expert + (out.routing_map != 0).sum(0)
    return out._replace(state=out.state._replace(tokens_per_expert=counts))


def _counted_in_evaluation(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    out = route(logits, config, **settings)
    if settings.get("training", True) or not config.expert_bias:
        return out
    counts = out.state.tokens_per_expert + (out.routing_map != 0).sum(0)
    return out._replace(state=out.state._replace(tokens_per_expert=counts))


def _newest_first(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    if settings.get("replay") != "backward":
        return route(logits, config, **settings)
    state = settings["state"]
    turned = state._replace(replay_queue=state.replay_queue[::-1])
    out = route(logits, config, **settings | {"state": turned})
    return out._replace(state=out.state._replace(replay_queue=out.state.replay_queue[::-1]))


def _last_step_for_all(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """The global loss counts the last micro-batch, not the mean of all."""
    state = settings["state"]
    fresh = state._replace(
        global_tokens_per_expert=torch.zeros_like(state.global_tokens_per_expert),
        global_steps=torch.zeros_like(state.global_steps),
    )
    out, right = route(logits, config, **settings | {"state": fresh}), route(logits.detach(), config, **settings)
    return out._replace(state=right.state)


def _counters_of_a_frozen_batch(finish_batch: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    out = finish_batch(state, config, **settings)
    return state if settings.get("frozen") else out


def _global_counters_left(finish_batch: Wrapper, state: Any, config: Any, **settings: Any) -> Any:
    out = finish_batch(state, config, **settings)
    return out._replace(global_tokens_per_expert=state.global_tokens_per_expert, global_steps=state.global_steps)


def _queue_not_saved(state_tensors: Wrapper, state: Any) -> Any:
    return {name: x for name, x in state_tensors(state).items() if not name.startswith("replay_queue")}


def _buffers_shared(new_state: Wrapper, config: Any, *rest: Any, **settings: Any) -> Any:
    """One buffer for the counters of all routers of a size."""
    out = new_state(config, *rest, **settings)
    kept = _counters.setdefault(config.num_experts, out.tokens_per_expert)
    return out._replace(tokens_per_expert=kept)


def _added_in_place(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """Counters are added to in place: the state before the step changes, too."""
    out, before = route(logits, config, **settings), settings["state"].tokens_per_expert
    if torch.equal(out.state.tokens_per_expert, before):
        return out
    before.copy_(out.state.tokens_per_expert)
    return out._replace(state=out.state._replace(tokens_per_expert=before))


def _two_slots(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """A third choice that waits is written over the first."""
    out = route(logits, config, **settings)
    queue = out.state.replay_queue
    if settings.get("replay") != "forward" or len(queue) < 3:
        return out
    return out._replace(state=out.state._replace(replay_queue=(queue[-1], *queue[1:])))


def _second_after_third(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """Of three and more choices that wait, the last two are swapped."""
    out = route(logits, config, **settings)
    queue = out.state.replay_queue
    if settings.get("replay") != "forward" or len(queue) < 3:
        return out
    return out._replace(state=out.state._replace(replay_queue=(*queue[:-2], queue[-1], queue[-2])))


def _undivided(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    """The losses of a repeated layer count in full at each of its calls."""
    return route(logits, replace(config, loss_divisor=1), **settings)


def _z_loss_undivided(route: Wrapper, logits: Tensor, config: Any, **settings: Any) -> Any:
    coeff = config.z_loss_coeff * config.loss_divisor
    return route(logits, replace(config, z_loss_coeff=coeff), **settings)


_counters: dict[int, Tensor] = {}


def _not_loaded(state_from: Wrapper, tensors: Any) -> Any:
    state = state_from(tensors)
    if tensors["expert_bias"].dtype == torch.float32:
        return state
    return state._replace(expert_bias=torch.zeros_like(state.expert_bias))


DEFECTS: tuple[Defect, ...] = (
    Defect("U34", "padding counts for the expert bias", STATE, {"route": _padding_counted}),
    Defect("U35", "an evaluation counts for the expert bias", STATE, {"route": _counted_in_evaluation}),
    Defect("U36", "replays take the newest choice first", STATE, {"route": _newest_first}),
    Defect("U37", "the global loss counts the last micro-batch alone", STATE, {"route": _last_step_for_all}),
    Defect("U38", "a frozen batch leaves its counters", STATE, {"finish_batch": _counters_of_a_frozen_batch}),
    Defect("U39", "counters of the global loss are never cleared", STATE, {"finish_batch": _global_counters_left}),
    Defect("U40", "queued replays are not saved", STATE, {"state_tensors": _queue_not_saved}),
    Defect(
        "U41",
        "routers of a size share their counters",
        STATE,
        {"new_state": _buffers_shared, "route": _added_in_place},
    ),
    Defect("U42", "a third replay that waits is written over the first", STATE, {"route": _two_slots}),
    Defect("U43", "a third replay that waits is taken before the second", STATE, {"route": _second_after_third}),
    Defect("U46", "losses of a repeated layer are not divided by its calls", REPEATED, {"route": _undivided}),
    Defect("U47", "the z-loss of a repeated layer is not divided", REPEATED, {"route": _z_loss_undivided}),
    Defect("U64", "an expert bias that was saved in another dtype is not loaded", STATE, {"state_from": _not_loaded}),
)
