"""The layer a second time: dense, every token through every expert.

    y[t] = up(Σ_e kept[t, e] · p[t, e] · mlp_e(down(x[t]))) + shared(x[t])

`kept` leaves out the copies for which a rank has no room. Where values are quantised, a row's
result depends on the others of its segment: there the rows travel, through the other formulations.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evidence.formulations import dispatch
from evidence.formulations.experts import grouped_mlp, linear, shared_experts
from evidence.formulations.router import gate, route
from moe_ref.config import SHARDING, LayerConfig, LayerOutput, LayerParameters, RankGroup, RouterRanks
from moe_ref.dispatch.ranks import play


def moe_layer(
    x: Sequence[Tensor], parameters: Sequence[LayerParameters], config: LayerConfig, *, states: Sequence[Any],
    training: bool = True, batch_size: int = 1, padding_mask: Any = None, noise: Any = None,
    linear_states: Any = None, rerun: bool = False,
) -> LayerOutput:  # fmt: skip
    """All ranks at once."""
    ranks, records = range(len(x)), torch.is_grad_enabled()
    masks = [None] * len(x) if padding_mask is None else padding_mask
    logits = []
    for rank, p in enumerate(parameters):
        eps = config.jitter_eps
        router_input = x[rank] if eps is None else x[rank] * (1 + eps * (2 * noise[rank] - 1))
        logits.append(gate(router_input, p.router_weight, bias=p.router_bias))

    def at(rank: int, sum_over: Any) -> Any:
        group = RouterRanks(tp_dp_cp=RankGroup(len(x), sum_over(ranks)))
        options: dict[str, Any] = {"training": training, "batch_size": batch_size, "padding_mask": masks[rank]}
        with torch.set_grad_enabled(records):
            return route(logits[rank], config.router, state=states[rank], ranks=group, **options)

    routed = []
    for out, mask in zip(play(len(x), at), masks, strict=True):
        real = torch.ones(len(out.probs), 1, dtype=torch.bool) if mask is None else (mask == 0)[:, None]
        probs_TE = torch.where(real, out.probs, 0.0)
        routed.append(out._replace(probs=probs_TE, routing_map=out.routing_map & real))

    tokens = [
        x_TH if p.latent_down is None else linear(x_TH, p.latent_down) for x_TH, p in zip(x, parameters, strict=True)
    ]
    dispatched, shards = _dispatched(tokens, routed, config)
    if rerun and any(bool(rank_rows.overflow) for rank_rows in dispatched):
        dispatched, shards = _dispatched(tokens, routed, replace(config, num_rows=None))
    if config.recipe is None:
        combined = _dense(tokens, routed, parameters, config, dispatched, shards)
    else:
        combined = _by_rows(parameters, config, dispatched, linear_states)
    output = []
    for rank, y in enumerate(combined):
        p = parameters[rank]
        y = y if p.latent_up is None else linear(y, p.latent_up)
        if p.shared_fc1_weight is not None and p.shared_fc2_weight is not None:
            weights = (p.shared_fc1_weight, p.shared_fc2_weight)
            y = y + shared_experts(x[rank], *weights, gate_weight=p.shared_gate_weight, **config.shared_experts)
        output.append(y)
    return LayerOutput(logits, routed, dispatched, None, combined, None, output)


def _dispatched(tokens: Sequence[Tensor], routed: Sequence[Any], config: LayerConfig) -> tuple[list[Any], int]:
    """Each rank's rows, and the shards of each expert. Dispatchers differ in their order."""
    shards = config.expert_tensor_parallel
    maps, probs = [out.routing_map for out in routed], [out.probs for out in routed]
    if shards > 1 and config.dispatcher not in SHARDING:
        sizes = {"expert_parallel": len(tokens) // shards, "expert_tensor_parallel": shards}
        maps, probs = ([dispatch.flatten_experts(x_TE, **sizes) for x_TE in ranks] for ranks in (maps, probs))
    options: dict[str, Any] = {"num_rows": config.num_rows}
    if config.dispatcher in SHARDING:
        options |= {"expert_tensor_parallel": shards}
    by_turns = config.dispatcher == "alltoall"
    send = dispatch.alltoall_dispatch if by_turns else dispatch.allgather_dispatch
    return send(tokens, maps, probs=probs, **options), shards


def _dense(
    tokens: Sequence[Tensor], routed: Sequence[Any], parameters: Sequence[LayerParameters], config: LayerConfig,
    dispatched: Sequence[Any], shards: int,
) -> list[Tensor]:  # fmt: skip
    """Every token through every expert of every rank, times the probability of a kept copy."""
    options = {name: x for name, x in config.experts.items() if name not in ("align", "recipe")}
    out = []
    for source, x in enumerate(tokens):
        total = torch.zeros_like(x)
        for rank, rank_rows in enumerate(dispatched):
            kept_copies = [(c[1], c[2]) for c in rank_rows.handle.rows[rank] if c is not None and c[0] == source]
            p, local = parameters[rank], len(parameters[rank].fc1_weight)
            for e in range(local):
                expert = rank // shards * local + e
                cell = expert if rank_rows.handle.shards == shards else rank * local + e
                mine = torch.zeros(len(x), dtype=torch.bool)
                mine[[t for t, named in kept_copies if named == cell]] = True
                prob = torch.where(mine, routed[source].probs[:, expert], 0.0)
                own_biases = {n: b if b is None else b[e : e + 1] for n, b in _biases(p).items()}
                mlp_options: dict[str, Any] = options | own_biases | {"probs": prob}
                y = grouped_mlp(x, torch.tensor([len(x)]), p.fc1_weight[[e]], p.fc2_weight[[e]], **mlp_options)
                total = total + torch.where(mine[:, None], y, 0.0)
        out.append(total)
    return out


def _biases(p: LayerParameters) -> dict[str, Any]:
    return {"fc1_bias": p.fc1_bias, "fc2_bias": p.fc2_bias}


def _by_rows(
    parameters: Sequence[LayerParameters], config: LayerConfig, dispatched: Sequence[Any], linear_states: Any
) -> list[Tensor]:
    """The rows through their experts, and back."""
    rows = []
    for rank, (rank_rows, p) in enumerate(zip(dispatched, parameters, strict=True)):
        options: dict[str, Any] = config.experts | _biases(p) | {"probs": rank_rows.probs}
        options |= {} if linear_states is None else {"state": linear_states[rank]}
        rows.append(grouped_mlp(rank_rows.rows, rank_rows.tokens_per_expert, p.fc1_weight, p.fc2_weight, **options))
    return dispatch.combine(rows, [rank_rows.handle for rank_rows in dispatched])
