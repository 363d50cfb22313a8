"""Defects that were reported of public layers, planted by their mechanism; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import only
from conformance.mutants.kinds.gradients import with_gradient
from defects.layer.combined import planted_stages, where
from defects.layer.wrappers import Stage, stages
from moe_ref.config import LayerConfig, LayerParameters


def _scale(config: LayerConfig) -> float:
    factor = config.router.scaling_factor
    return 1.0 if factor is None else float(factor)


def _scaled(config: LayerConfig) -> bool:
    return _scale(config) not in (0.0, 1.0)


def _no_rows(mlp: Stage, *rows: Any, **settings: Any) -> Any:
    """The sum over a token's only expert reads what nothing was written to."""
    return 0 * mlp(*rows, **settings)


def _with(change: Any, name: str) -> Any:
    """The layer with change(result of the stage, config)."""

    def run(
        layer: Wrapper, right: Any, x: Tensor, p: LayerParameters, config: LayerConfig, *rest: Any, **settings: Any
    ) -> Any:
        def stage(base: Stage, *arguments: Any, **options: Any) -> Any:
            return change(base(*arguments, **options), config)

        with stages(layer, **{name: stage}):
            return layer(x, p, config, *rest, **settings)

    return run


def _scaled_again(rows: Tensor, config: LayerConfig) -> Tensor:
    return rows * _scale(config)


def _divided(rows: Tensor, config: LayerConfig) -> Tensor:
    return rows / _scale(config)


def _one_less(routed: Any, config: LayerConfig) -> Any:
    """The slot of the shared experts is taken from the routed ones."""
    keys = torch.where(routed.routing_map, routed.probs.detach().float(), torch.inf)
    least = torch.arange(keys.shape[1], device=keys.device) == keys.argmin(1, keepdim=True)
    kept = ~least & routed.routing_map
    return routed._replace(routing_map=kept, probs=torch.where(kept, routed.probs, 0))


def _gradients_of_all_ranks(
    layer: Wrapper, right: Any, x: Tensor, p: LayerParameters, *rest: Any, **settings: Any
) -> Any:
    """Gradients of experts are not divided by the ranks that share them out."""
    ranks = p.router_weight.shape[0] // p.fc1_weight.shape[0]
    changed = {name: with_gradient(getattr(p, name), lambda g: g * ranks) for name in ("fc1_weight", "fc2_weight")}
    return layer(x, p._replace(**changed), *rest, **settings)


_PLANTED: tuple[tuple[str, str, str, Any, Any], ...] = (
    (
        "RB73",
        "with a factor the one expert's rows are lost",
        "SGLang #40187",
        lambda p, c, s: c.router.topk == 1 and _scaled(c),
        planted_stages(grouped_mlp=_no_rows),
    ),
    (
        "RB74",
        "beside shared experts the factor is applied twice",
        "vLLM #45037",
        lambda p, c, s: p.shared_fc1_weight is not None and _scaled(c),
        _with(_scaled_again, "grouped_mlp"),
    ),
    (
        "RB75",
        "behind deepep shared experts are divided by the factor",
        "SGLang #28237",
        lambda p, c, s: p.shared_fc1_weight is not None and c.dispatcher == "deepep" and _scaled(c),
        _with(_divided, "shared_experts"),
    ),
    (
        "RB76",
        "shared experts take the slot of a routed one",
        "SGLang #36515",
        lambda p, c, s: p.shared_fc1_weight is not None and c.router.topk > 1,
        _with(_one_less, "route"),
    ),
    (
        "RB77",
        "gradients of experts are times the ranks",
        "pytorch #160285",
        lambda p, c, s: p.fc1_weight.shape[0] < c.router.num_experts,
        _gradients_of_all_ranks,
    ),
)
DEFECTS = tuple(
    Defect(name, title, origin, {"moe_layer": only(where(shown), wrong)})
    for name, title, origin, shown, wrong in _PLANTED
)
