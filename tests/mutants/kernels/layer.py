"""Mistakes in the layer that joins the stages."""

from tests.mutants.kernels import series

DEFECTS = series(
    "L",
    (
        (
            "experts that are filled to their capacity have room for the routed copies alone",
            "moe_layer",
            "layer/token_rows.py",
            "return room if router.pad_to_capacity else min(copies, room)",
            "return min(copies, room)",
        ),
        (
            "the jitter is left out of evaluation",
            "moe_layer",
            "layer/layer.py",
            "logits = gate(jittered(x_TH, config, noise), p.router_weight,",
            'logits = gate(jittered(x_TH, config, noise) if options["training"] else x_TH, p.router_weight,',
        ),
        (
            "a router with a bias forgets the router's dtype",
            "moe_layer",
            "layer/layer.py",
            "router_dtype=config.router_dtype)",
            "router_dtype=config.router_dtype if p.router_bias is None else None)",
        ),
        (
            "losses are of each rank's own tokens where the capacity is bounded",
            "moe_layer",
            "layer/layer.py",
            "    if group is not None:\n        batch = RouterRanks",
            "    if group is not None and config.router.capacity_factor is None:\n        batch = RouterRanks",
        ),
        (
            "the shared experts' columns interleave like the routed ones'",
            "moe_layer",
            "layer/layer.py",
            "**config.shared_experts)",
            '**config.shared_experts | {"interleave": config.interleave})',
        ),
        (
            "with padding all tokens count as one sequence",
            "moe_layer",
            "layer/layer.py",
            'options = {"training": training, "batch_size": batch_size, "padding_mask": padding_mask}',
            'options = {"training": training, "batch_size": batch_size if padding_mask is None else 1, '
            '"padding_mask": padding_mask}',
        ),
        (
            "deepep's rows come again from this rank's tokens, not from those that arrived",
            "moe_layer",
            "layer/layer.py",
            "return Sent(permuted, combine, (sent.rows, permuted.row_map))",
            "again = torch.cat([tokens, tokens.new_zeros(sent.rows.shape)])[: len(sent.rows)]\n"
            "    return Sent(permuted, combine, (again, permuted.row_map))",
        ),
        (
            "deepep has topk slots also where padding to the capacity gives a token more experts",
            "moe_layer",
            "layer/layer.py",
            "slots = experts if config.router.pad_to_capacity else config.router.topk * config.expert_tensor_parallel",
            "slots = config.router.topk * config.expert_tensor_parallel",
        ),
        (
            "deepep has topk slots also where an expert is on several ranks",
            "moe_layer",
            "layer/layer.py",
            "config.router.topk * config.expert_tensor_parallel",
            "config.router.topk",
        ),
        (
            "deepep with a budget says that nothing was dropped",
            "moe_layer",
            "layer/layer.py",
            "permuted = permuted if kept is None else permuted._replace(overflow=kept.overflow)",
            "permuted = permuted._replace(overflow=permuted.overflow)",
        ),
        (
            "amaxes are not raised where something is computed again",
            "moe_layer",
            "layer/layer.py",
            'kept = {"wgrads": wgrads, "state": linear_states, "amaxes": amaxes}',
            'kept = {"wgrads": wgrads, "state": linear_states, "amaxes": amaxes if recompute is None else None}',
        ),
        (
            "the noise is no part of what tells a checked call from another",
            "moe_layer",
            "layer/layer.py",
            "return key_of(config, x_TH, *parameters, *state[:-1], padding_mask, noise, **more)",
            "return key_of(config, x_TH, *parameters, *state[:-1], padding_mask, **more)",
        ),
        (
            "the batch size is no part of what tells a checked call from another",
            "moe_layer",
            "layer/layer.py",
            'more = {"training": training, "batch_size": batch_size, "recompute": recompute}',
            'more = {"training": training, "recompute": recompute}',
        ),
        (
            "the second run with room for all forgets the sequences",
            "moe_layer",
            "layer/layer.py",
            "state=state, training=training, batch_size=batch_size, group=group)",
            "state=state, training=training, group=group)",
        ),
    ),
)
