"""Mistakes in the steps of a router that two conditions together invite, as changes of the
reference's source.
"""

from conformance.core.rewritten import series

DEFECTS = series(
    39,
    (
        (
            "the capacity is of the tokens that are no padding",
            "route",
            "router/route.py",
            "probs_TE, map_TE = limit_tokens(chosen, config)",
            "valid = None if padding_mask is None else int((padding_mask == 0).sum())\n"
            "    probs_TE, map_TE = limit_tokens(chosen, config)\n"
            "    if valid and config.capacity_factor is not None:\n"
            "        sizes = {'num_experts': config.num_experts, 'topk': config.topk}\n"
            "        capacity = expert_capacity(valid, capacity_factor=config.capacity_factor, **sizes)\n"
            "        own = {'drop_policy': config.drop_policy, 'pad_to_capacity': config.pad_to_capacity}\n"
            "        probs_TE, map_TE = drop_tokens(*chosen, capacity=capacity, **own)",
        ),
        (
            "with a capacity padding is counted",
            "route",
            "router/route.py",
            "count_tokens(state, map_TE, padding_mask)",
            "count_tokens(state, map_TE, padding_mask if config.capacity_factor is None else None)",
        ),
        (
            "tokens are counted before the capacity",
            "route",
            "router/route.py",
            "count_tokens(state, map_TE, padding_mask)",
            "count_tokens(state, chosen.routing_map, padding_mask)",
        ),
        (
            "the mean length of masked sequences is the first one's",
            "route",
            "router/losses.py",
            "now.sum().double() / topk / sequences",
            "now[:num_experts].sum().double() / topk",
        ),
        (
            "a masked global loss divides by the tokens of all micro-batches",
            "route",
            "router/losses.py",
            "now.sum().double() / topk / sequences",
            "counted.sum().double() / topk / sequences",
        ),
        (
            "the z-loss per token counts padding",
            "route",
            "router/losses.py",
            "tokens = _valid_tokens(logits_TE, padding_mask) * group.size",
            "tokens = _valid_tokens(logits_TE, None) * group.size",
        ),
        (
            "a third balancing loss has no gradient",
            "route",
            "router/route.py",
            "for term in balancing.values():",
            "for term in list(balancing.values())[:2]:",
        ),
        (
            "a frozen bias leaves the counters as they are",
            "finish_batch",
            "router/state.py",
            "    zero = torch",
            "    if frozen:\n        return state\n    zero = torch",
        ),
        (
            "of three queued replays the newest is next",
            "route",
            "router/route.py",
            "target, *rest = queue",
            "*rest, target = queue if len(queue) > 2 else queue[::-1]",
        ),
        (
            "a sequence loss with one sequence is divided by the batch before",
            "route",
            "router/losses.py",
            "loss = loss / sequences / config.loss_divisor",
            "loss = loss / sequences / (config.loss_divisor if name != 'seq_aux_loss' or padding_mask is None else 1)",
        ),
        (
            "per token the global loss is times this step's masked tokens over K",
            "route",
            "router/losses.py",
            "loss * valid if config.loss_per_token else loss)",
            "loss * (tokens if name == 'global_aux_loss' and padding_mask is not None else valid)"
            " if config.loss_per_token else loss)",
        ),
        (
            "fillers up to the capacity are not counted",
            "route",
            "router/route.py",
            "count_tokens(state, map_TE, padding_mask)",
            "count_tokens(state, map_TE & chosen.routing_map, padding_mask)",
        ),
        (
            "a replay backward under a capacity keeps its place in the queue",
            "route",
            "router/route.py",
            "        queue = tuple(rest)",
            "        queue = tuple(rest) if config.capacity_factor is None else queue",
        ),
        (
            "recorded indices with a bias are those without it",
            "route",
            "router/route.py",
            'indices if replay == "record" else None',
            "(topk_indices(logits_TE, **config.selection).indices if config.expert_bias and"
            " config.num_groups else indices)"
            ' if replay == "record" else None',
        ),
        (
            "attached twice, the second scale is the first's",
            "route",
            "router/route.py",
            'attached_TE = attach_loss(logits_TE, terms["z_loss"].attached, scale=loss_scale)',
            'attached_TE = attach_loss(logits_TE, terms["z_loss"].attached,'
            " scale=loss_scale if not config.balancing_coeffs or config.loss_divisor == 1 else 1.0)",
        ),
        (
            "in evaluation a capacity does not fill up",
            "route",
            "router/route.py",
            "    probs_TE, map_TE = limit_tokens(chosen, config)\n",
            "    probs_TE, map_TE = limit_tokens(chosen, config)\n"
            "    if not training and config.pad_to_capacity:\n"
            "        map_TE = map_TE & chosen.routing_map\n",
        ),
        (
            "global steps count forwards of a recomputed layer",
            "route",
            "router/route.py",
            "    if records:\n",
            "    if training and not records and config.global_aux_loss_coeff:\n"
            "        state = state._replace(global_steps=state.global_steps + 1)\n"
            "    if records:\n",
        ),
    ),
)
