"""Defects of the layer: stages that are right, joined wrongly.

Each replaces stages in the module that joins them, during one call. All are likely mistakes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from moe_ref.config import LayerParameters

ORIGIN = "a likely mistake of a layer"
Stage = Callable[..., Any]  # (original stage, *arguments, **settings) -> result


@contextmanager
def stages(layer: Wrapper, **wrong: Stage) -> Iterator[None]:
    """The module that joins the stages, with these in the place of its own."""
    module = sys.modules[layer.__module__]
    right = {name: getattr(module, name) for name in wrong}

    def planted(name: str) -> Stage:
        return lambda *arguments, **settings: wrong[name](right[name], *arguments, **settings)

    try:
        for name in wrong:
            setattr(module, name, planted(name))
        yield
    finally:
        for name, stage in right.items():
            setattr(module, name, stage)


def in_stages(**wrong: Stage) -> Wrapper:
    """The layer with wrong stages."""

    def planted(layer: Wrapper, *arguments: Any, **settings: Any) -> Any:
        with stages(layer, **wrong):
            return layer(*arguments, **settings)

    return planted


# ---- probabilities


def _biased_probs(route: Stage, logits: Tensor, config: Any, *, state: Any, **settings: Any) -> Any:
    out = route(logits, config, state=state, **settings)
    bias = torch.where(out.routing_map, state.expert_bias, 0).to(out.probs.dtype)
    return out._replace(probs=out.probs + bias) if config.expert_bias else out


# ---- experts and shared experts


def _bias_unweighted(mlp: Stage, *rows: Any, fc2_bias: Tensor | None, **settings: Any) -> Any:
    """The second bias is added to each row as a plain linear layer adds it."""
    out = mlp(*rows, fc2_bias=None, **settings)
    if fc2_bias is None:
        return out
    counts_L = torch.cat([rows[1], (len(out) - rows[1].sum())[None]])
    return out + torch.cat([fc2_bias, 0 * fc2_bias[:1]]).repeat_interleave(counts_L, 0)


def _padded_counts(mlp: Stage, rows: Tensor, counts: Tensor, *weights: Any, **settings: Any) -> Any:
    """Counts are rounded up a second time, for rows that are not padded."""
    align = settings.get("align")
    if not align or settings.get("recipe") is None:
        return mlp(rows, counts, *weights, **settings)
    ends = (-(-counts // align) * align).cumsum(0).clamp(max=len(rows))
    return mlp(rows, ends.diff(prepend=ends.new_zeros(1)), *weights, **settings | {"align": None})


def _through_latent_space(layer: Wrapper, x: Tensor, p: LayerParameters, *rest: Any, **settings: Any) -> Any:
    """The shared output is added before the way up, so it must come down first."""
    if p.latent_down is None or p.latent_up is None:
        return layer(x, p, *rest, **settings)
    way = p.latent_down.mT @ p.latent_up.mT

    def projected(shared: Stage, *arguments: Any, **options: Any) -> Any:
        return shared(*arguments, **options) @ way

    with stages(layer, shared_experts=projected):
        return layer(x, p, *rest, **settings)


# ---- routing and its gradients


def _routed_otherwise(layer: Wrapper, x: Tensor, p: LayerParameters, *rest: Any, **settings: Any) -> Any:
    """The backward recomputes the forward, and routes by other logits."""
    out = layer(x, p, *rest, **settings)
    again = layer(x, p._replace(router_weight=p.router_weight.roll(1, 0)), *rest, **settings).output
    return out._replace(output=again + (out.output - again).detach())


def _loss_twice(route: Stage, *arguments: Any, **settings: Any) -> Any:
    return route(*arguments, **settings | {"loss_scale": 2.0})


def _state_forgotten(layer: Wrapper, *arguments: Any, state: Any, **settings: Any) -> Any:
    out = layer(*arguments, state=state, **settings)
    return out._replace(routed=out.routed._replace(state=state))


def _dropped_tokens_pass(layer: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    out = layer(x, *rest, **settings)
    return out._replace(output=torch.where(out.routed.routing_map.any(1)[:, None], out.output, out.output + x))


# ---- jitter


def _factors_not_in_backward(jittered: Stage, x: Tensor, *rest: Any) -> Any:
    return x + (jittered(x, *rest) - x).detach()


# ---- padding


# ---- dispatch


def _columns_of_another_rank(layer: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    """Each rank takes the columns of the rank before it."""
    if settings.get("group") is None:
        return layer(x, *rest, **settings)
    ranks = torch.distributed.get_world_size(settings["group"])

    def rolled(out: Any) -> Any:
        local = out.probs.shape[1] // ranks
        return out._replace(probs=out.probs.roll(local, 1), routing_map=out.routing_map.roll(local, 1))

    def route(right: Stage, *arguments: Any, **options: Any) -> Any:
        out = right(*arguments, **options)
        return [rolled(one) for one in out] if isinstance(out, list) else rolled(out)

    with stages(layer, route_together=route):
        out = layer(x, *rest, **settings)
    local = out.routed.probs.shape[1] // ranks
    back = {name: getattr(out.routed, name).roll(-local, 1) for name in ("probs", "routing_map")}
    return out._replace(routed=out.routed._replace(**back))


_combines: dict[tuple[int, ...], Any] = {}


def _handle_of_another_call(layer: Wrapper, *arguments: Any, **settings: Any) -> Any:
    """Combine has the handle of the call before, if that had as many rows."""
    module = sys.modules[layer.__module__]

    def stale(dispatch: Stage) -> Stage:
        def run(*inputs: Any) -> Any:
            sent, combine = dispatch(*inputs)
            key = tuple(len(part.rows) for part in sent)
            before, _combines[key] = _combines.get(key, combine), combine
            return sent, before

        return run

    right = module.DISPATCH
    try:
        module.DISPATCH = {name: stale(dispatch) for name, dispatch in right.items()}  # type: ignore[attr-defined]
        return layer(*arguments, **settings)
    finally:
        module.DISPATCH = right  # type: ignore[attr-defined]


_PLANTED: tuple[tuple[str, str, Wrapper], ...] = (
    ("ML04", "the expert bias is part of the weights", in_stages(route=_biased_probs)),
    ("ML06", "rows are padded twice", in_stages(grouped_mlp=_padded_counts)),
    ("ML07", "the shared output is added before the way out of the latent space", _through_latent_space),
    ("ML11", "the recomputed forward routes otherwise", _routed_otherwise),
    ("ML12", "losses are attached twice", in_stages(route=_loss_twice)),
    ("ML16", "the router's state is forgotten", _state_forgotten),
    ("ML18", "dropped tokens pass by", _dropped_tokens_pass),
    ("ML19", "a rank has the columns of another rank", _columns_of_another_rank),
    ("ML20", "combine has the handle of the call before", _handle_of_another_call),
    ("ML25", "the second bias is not weighted", in_stages(grouped_mlp=_bias_unweighted)),
    ("ML29", "the gradient of x has no factor of the jitter", in_stages(jittered=_factors_not_in_backward)),
)
DEFECTS = tuple(Defect(name, title, ORIGIN, {"moe_layer": wrapper}) for name, title, wrapper in _PLANTED)
