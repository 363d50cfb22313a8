"""The weights of a layer by the names of transformers, read and written.

The names are those of the module in transformers 5.24, without the prefix of the layer:

    gate.weight  experts.gate_up_proj  experts.down_proj  shared_experts.gate_proj.weight …

Published checkpoints of many families have each expert's matrices apart, which are read as well:

    experts.0.gate_proj.weight  experts.0.up_proj.weight  experts.0.down_proj.weight …
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_fast.layer.huggingface.families import Family
from moe_ref.config import GATED, LayerConfig, LayerParameters, require

Weights = dict[str, Tensor]
MERGED = "gate_up_proj"  # gate and value in one matrix
OF_ONE_EXPERT = "experts.{}.{}.weight"


def state_of(
    family: Family,
    config: LayerConfig,
    parameters: LayerParameters,
    score_bias: Tensor | None,
    *,
    per_expert: bool = False,
) -> Weights:
    """The weights by their names in transformers, as views where nothing is transposed.

    Args:
        parameters: of all experts; None for what has no value, such as a gradient that is not
            wanted.
        per_expert: the matrices of each expert apart, as many published checkpoints have them.

    Raises:
        ValueError: per_expert, of a family whose checkpoints have biases or transposed weights.
    """
    gated = config.kind in GATED
    named: dict[str, Tensor | None] = {
        f"{family.router}.weight": parameters.router_weight,
        f"{family.router}.bias": parameters.router_bias,
        "fc1_latent_proj.weight": parameters.latent_down,
        "fc2_latent_proj.weight": parameters.latent_up,
        f"{family.shared_gate}.weight": parameters.shared_gate_weight,
        f"{family.shared}.down_proj.weight": parameters.shared_fc2_weight,
    }
    if family.score_bias is not None:
        named[family.score_bias] = score_bias
    named |= _shared_fc1(family, gated, parameters.shared_fc1_weight)
    named |= (
        _experts_one_by_one(family, gated, parameters) if per_expert else _experts_stacked(family, gated, parameters)
    )
    return {name: x for name, x in named.items() if x is not None}


def parameters_of(
    family: Family, config: LayerConfig, state: Mapping[str, Tensor]
) -> tuple[LayerParameters, Tensor | None]:
    """The parameters of a layer with all experts, and the bias of the choice.

    Raises:
        ValueError: a weight is missing, or one has a name that the family does not have.
    """
    gated, weights = config.kind in GATED, dict(state)
    fc1, fc2 = _experts(family, config, weights)
    shared = None
    if family.shared_width and f"{family.shared}.down_proj.weight" in weights:
        shared = torch.cat([_pop(weights, name) for name in _shared_fc1(family, gated, torch.empty(2, 0))])
    latent = family.latent and "fc1_latent_proj.weight" in weights
    parameters = LayerParameters(
        router_weight=_pop(weights, f"{family.router}.weight"),
        fc1_weight=fc1,
        fc2_weight=fc2,
        router_bias=_pop(weights, f"{family.router}.bias") if family.biases else None,
        latent_down=_pop(weights, "fc1_latent_proj.weight") if latent else None,
        latent_up=_pop(weights, "fc2_latent_proj.weight") if latent else None,
        shared_fc1_weight=shared,
        shared_fc2_weight=None if shared is None else _pop(weights, f"{family.shared}.down_proj.weight"),
        shared_gate_weight=_pop(weights, f"{family.shared_gate}.weight") if family.shared_gate else None,
        fc1_bias=_pop(weights, f"experts.{_fc1_name(gated)}_bias") if family.biases else None,
        fc2_bias=_pop(weights, "experts.down_proj_bias") if family.biases else None,
    )
    score_bias = None if family.score_bias is None else _pop(weights, family.score_bias)
    surplus = ", ".join(sorted(weights)[:4])
    require(not weights, "state_dict", f"with {surplus}", "of the layer's own weights alone, in high precision")
    return parameters, score_bias


def _fc1_name(gated: bool) -> str:
    return MERGED if gated else "up_proj"


def _pop(weights: Weights, name: str) -> Tensor:
    """The weight of that name, which is removed from the dict."""
    require(name in weights, "state_dict", f"without {name}", "the state of the whole layer")
    return weights.pop(name)


def _shared_fc1(family: Family, gated: bool, weight: Tensor | None) -> dict[str, Tensor | None]:
    if weight is None or not gated or family.shared_packed:
        return {f"{family.shared}.{_fc1_name(gated)}.weight": weight}
    gate, value = weight.chunk(2)
    return {f"{family.shared}.gate_proj.weight": gate, f"{family.shared}.up_proj.weight": value}


def _experts_stacked(family: Family, gated: bool, parameters: LayerParameters) -> dict[str, Tensor | None]:
    weights = (parameters.fc1_weight, parameters.fc2_weight)
    fc1, fc2 = (x if x is None or not family.transposed else x.mT.contiguous() for x in weights)
    named = {f"experts.{_fc1_name(gated)}": fc1, "experts.down_proj": fc2}
    biases = {f"experts.{_fc1_name(gated)}_bias": parameters.fc1_bias, "experts.down_proj_bias": parameters.fc2_bias}
    return named | biases


def _experts_one_by_one(family: Family, gated: bool, parameters: LayerParameters) -> dict[str, Tensor | None]:
    stacked = family.transposed or family.biases
    require(not stacked, "per_expert", True, "False: checkpoints of the family have stacked experts")
    gate, value, out = family.expert_names
    named: dict[str, Tensor | None] = {}
    for expert, (fc1, fc2) in enumerate(zip(parameters.fc1_weight, parameters.fc2_weight, strict=True)):
        matrices = dict(zip((gate, value), fc1.chunk(2), strict=True)) if gated else {value: fc1}
        named |= {OF_ONE_EXPERT.format(expert, name): x for name, x in (matrices | {out: fc2}).items()}
    return named


def _experts(family: Family, config: LayerConfig, weights: Weights) -> tuple[Tensor, Tensor]:
    """[E,2F,N] or [E,F,N], and [E,N,F]."""
    gated, experts = config.kind in GATED, config.router.num_experts
    gate, value, out = family.expert_names
    if OF_ONE_EXPERT.format(0, out) not in weights:
        pair = _pop(weights, f"experts.{_fc1_name(gated)}"), _pop(weights, "experts.down_proj")
        return (pair[0].mT, pair[1].mT) if family.transposed else pair
    fc1 = [
        torch.cat([_pop(weights, OF_ONE_EXPERT.format(e, name)) for name in ((gate, value) if gated else (value,))])
        for e in range(experts)
    ]
    return torch.stack(fc1), torch.stack([_pop(weights, OF_ONE_EXPERT.format(e, out)) for e in range(experts)])
