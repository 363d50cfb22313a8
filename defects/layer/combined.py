"""Defects of the layer that only some combinations of options show; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import only
from conformance.mutants.kinds.gradients import read_as_contiguous, rounded_to, with_gradient
from defects.layer.wrappers import Stage, in_stages, stages
from moe_ref.config import LayerConfig, LayerParameters

SEVERAL = "a mistake that one option alone does not show"
OWNER = "a mistake about whose memory it is"
STATE = "a mistake that a module's state invites"


def where(condition: Any) -> Any:
    return lambda x, p, config, **settings: bool(condition(p, config, settings))


def planted_stages(**wrong: Stage) -> Any:
    """The layer with wrong stages."""

    def run(layer: Wrapper, right: Any, *arguments: Any, **settings: Any) -> Any:
        with stages(layer, **wrong):
            return layer(*arguments, **settings)

    return run


def _configured(**changes: Any) -> Any:
    def run(layer: Wrapper, right: Any, x: Any, p: Any, config: LayerConfig, **settings: Any) -> Any:
        return layer(x, p, replace(config, **{name: change(config) for name, change in changes.items()}), **settings)

    return run


# ---- several options


def _bias_weighted_on_input(mlp: Stage, *rows: Any, **settings: Any) -> Any:
    return mlp(
        *rows, **settings | ({"fc2_bias": settings["fc2_bias"] * 0.5} if settings.get("fc2_bias") is not None else {})
    )


def _detached_if_the_router_is_frozen(gate: Stage, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    return gate(x if weight.requires_grad else x.detach(), weight, **settings)


def _shared_reads_flat(shared: Stage, x: Tensor, *rest: Any, **settings: Any) -> Any:
    return shared(with_values(x, lambda _: read_as_contiguous(x)), *rest, **settings)


def _gate_of_the_jittered(
    layer: Wrapper, right: Any, x: Tensor, p: LayerParameters, config: LayerConfig, **settings: Any
) -> Any:
    """The gate of shared experts reads the router's input."""
    noise, eps = settings.get("noise"), config.jitter_eps
    if noise is None or eps is None:
        return right

    def shared(stage: Stage, own: Tensor, *rest: Any, **options: Any) -> Any:
        return stage(own * (1 - eps + 2 * eps * noise), *rest, **options)

    return planted_stages(shared_experts=shared)(layer, right, x, p, config, **settings)


def _double_router_is_single(gate: Stage, x: Tensor, weight: Tensor, **settings: Any) -> Any:
    out = gate(x, weight, **settings)
    return with_values(out, rounded_to(torch.float32)) if out.dtype == torch.float64 else out


def _counters_of_an_evaluation(layer: Wrapper, right: Any, *arguments: Any, state: Any, **settings: Any) -> Any:
    zero = torch.zeros_like(state.tokens_per_expert)
    return right._replace(routed=right.routed._replace(state=right.routed.state._replace(tokens_per_expert=zero)))


def _bias_in_bfloat16(layer: Wrapper, right: Any, *arguments: Any, state: Any, **settings: Any) -> Any:
    """The module's cast to the tokens' dtype reaches the buffer."""
    narrow = state._replace(expert_bias=state.expert_bias.to(torch.bfloat16).float())
    return layer(*arguments, state=narrow, **settings)


def _no_probs_gradient_with_rows_again(mlp: Stage, *rows: Any, **settings: Any) -> Any:
    again = settings.get("rows_again") is not None
    probs = settings.get("probs")
    return mlp(*rows, **settings | ({"probs": probs.detach()} if again and probs is not None else {}))


def _expert_losses_once_per_rank(route: Stage, logits: Tensor, config: Any, **settings: Any) -> Any:
    """Under a mask the z-loss is of all tokens."""
    out = route(logits, config, **settings)
    if settings.get("padding_mask") is None or out.losses.z_loss is None:
        return out
    return out._replace(
        losses=out.losses._replace(z_loss=route(logits, config, **settings | {"padding_mask": None}).losses.z_loss)
    )


def _latent_gradient_halved(
    layer: Wrapper, right: Any, x: Tensor, p: LayerParameters, *rest: Any, **settings: Any
) -> Any:
    assert p.latent_down is not None
    changed = p._replace(latent_down=with_gradient(p.latent_down, lambda g: g * 0.5))
    return layer(x, changed, *rest, **settings)


def _mask_of_the_first_sequence(
    layer: Wrapper, right: Any, *arguments: Any, padding_mask: Tensor, batch_size: int = 1, **settings: Any
) -> Any:
    """All sequences are padded as the first: token t is s · B + b."""
    by_step = padding_mask.unflatten(0, (-1, batch_size))
    mask = by_step[:, :1].expand_as(by_step).flatten()
    return layer(*arguments, padding_mask=mask, batch_size=batch_size, **settings)


def _valued(x: Tensor, value: Tensor) -> Tensor:
    return with_values(x, lambda _: value)


def _weights_kept(*names: str) -> Wrapper:
    """Weights in low precision are kept by their address, as for a first micro-batch."""
    kept: dict[Any, Tensor] = {}

    def planted(layer: Wrapper, x: Tensor, p: LayerParameters, config: LayerConfig, **settings: Any) -> Any:
        out = layer(x, p, config, **settings)
        changed = {}
        for name in names:
            own = getattr(p, name)
            first = kept.setdefault((name, own.data_ptr(), tuple(own.shape), own.dtype), own.detach().clone())
            if not torch.equal(first, own.detach()):
                changed[name] = _valued(own, first)
        return layer(x, p._replace(**changed), config, **settings) if changed else out

    return planted


def _input_normalised_in_place(layer: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    out = layer(x, *rest, **settings)
    with torch.no_grad():
        if not x.requires_grad:
            x.mul_(2)
    return out


def _amaxes_written_over(mlp: Stage, *rows: Any, **settings: Any) -> Any:
    """A second micro-batch replaces the amaxes of the first."""
    for own in settings.get("amaxes") or ():
        own.input.zero_()
        own.weight.zero_()
    return mlp(*rows, **settings)


_MORE: tuple[tuple[str, str, str, Any, Any], ...] = (
    (
        "AE176",
        "probs on the input weight the second bias",
        SEVERAL,
        lambda p, c, s: c.probs_on_input and p.fc2_bias is not None,
        planted_stages(grouped_mlp=_bias_weighted_on_input),
    ),
    (
        "AE177",
        "a frozen router gives x no gradient",
        SEVERAL,
        lambda p, c, s: not p.router_weight.requires_grad,
        planted_stages(gate=_detached_if_the_router_is_frozen),
    ),
    (
        "AE178",
        "shared experts take x for contiguous",
        SEVERAL,
        lambda p, c, s: p.shared_fc1_weight is not None,
        planted_stages(shared_experts=_shared_reads_flat),
    ),
    (
        "AE179",
        "shared experts see the jittered input",
        SEVERAL,
        lambda p, c, s: p.shared_fc1_weight is not None,
        _gate_of_the_jittered,
    ),
    (
        "AE180",
        "a float64 router gives float32",
        SEVERAL,
        lambda p, c, s: c.router_dtype == "fp64",
        planted_stages(gate=_double_router_is_single),
    ),
    (
        "AE181",
        "an evaluation clears the counters",
        STATE,
        lambda p, c, s: s.get("training") is False,
        _counters_of_an_evaluation,
    ),
    (
        "AE182",
        "the expert bias is cast with the module",
        STATE,
        lambda p, c, s: c.router.expert_bias,
        _bias_in_bfloat16,
    ),
    (
        "AE183",
        "probs have no gradient where rows are made again",
        SEVERAL,
        lambda p, c, s: s.get("recompute"),
        planted_stages(grouped_mlp=_no_probs_gradient_with_rows_again),
    ),
    (
        "AE184",
        "under a mask the z-loss is of all tokens",
        SEVERAL,
        lambda p, c, s: s.get("padding_mask") is not None,
        planted_stages(route=_expert_losses_once_per_rank),
    ),
    (
        "AE185",
        "the way down has half its gradient",
        SEVERAL,
        lambda p, c, s: p.latent_down is not None,
        _latent_gradient_halved,
    ),
    (
        "AE186",
        "all sequences are padded as the first",
        SEVERAL,
        lambda p, c, s: s.get("padding_mask") is not None and s.get("batch_size", 1) > 1,
        _mask_of_the_first_sequence,
    ),
    (
        "AE188",
        "with a recipe experts do not pad",
        SEVERAL,
        lambda p, c, s: c.recipe is not None and c.align is not None,
        _configured(align=lambda c: None),
    ),
)
_ALWAYS: tuple[tuple[str, str, str, Wrapper], ...] = (
    ("AE194", "a second call replaces amaxes", STATE, in_stages(grouped_mlp=_amaxes_written_over)),
    ("AE195", "weights are kept by their address", OWNER, _weights_kept("fc1_weight", "fc2_weight")),
    ("AE196", "x is changed in place", OWNER, _input_normalised_in_place),
)
_PLANTED = (
    *((name, title, origin, only(where(shown), wrong)) for name, title, origin, shown, wrong in _MORE),
    *_ALWAYS,
)
DEFECTS = tuple(Defect(name, title, origin, {"moe_layer": wrapper}) for name, title, origin, wrapper in _PLANTED)
