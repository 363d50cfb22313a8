"""Whether a layer's experts gather their rows from tokens, and how many rows there may be."""

from typing import Any

from torch import Tensor

from moe_fast.experts.activated_linear import can_gather_activated
from moe_fast.experts.delayed import waiting_for
from moe_fast.fused.token_mlp import activation_of
from moe_fast.launch.operators import tracing
from moe_fast.quantization.gathered import can_gather
from moe_ref.config import LayerConfig, LayerParameters, check_recompute
from moe_ref.config.router import expert_capacity


def stay_tokens(tokens: Tensor, probs_TE: Tensor, p: LayerParameters, config: LayerConfig, recompute: Any) -> bool:
    """Whether the experts gather their rows, so that `permute` writes none. This is so on one
    Hopper if nothing else needs the rows, in FP8 by blocks, or in 16 bits if no gradient is wanted.
    """
    recipe, (_, of_experts) = config.recipe, check_recompute(recompute)
    if tracing() or config.align is not None or config.probs_on_input or p.fc2_bias is not None:
        return False
    if recipe is None:
        num_rows = most_rows(tokens.shape[0], config)
        operands = (p.fc1_weight, p.fc1_bias, probs_TE, activation_of(config))
        return can_gather_activated(tokens, num_rows, *operands)
    if recipe.scaling != "block" or recipe.backward_override is not None or of_experts == "moe":
        return False
    waits = any(waiting_for(weight) is not None for weight in (p.fc1_weight, p.fc2_weight))
    return not waits and can_gather(tokens, recipe)


def most_rows(tokens: int, config: LayerConfig) -> int:
    """The budget of rows. Without one, a bound on the number of routed copies that needs no counts:
    without a capacity it is their exact number.
    """
    if config.num_rows is not None:
        return config.num_rows
    router = config.router
    copies = tokens * router.topk
    if router.capacity_factor is None:
        return copies
    sizes = {"num_experts": router.num_experts, "topk": router.topk}
    room = min(expert_capacity(tokens, capacity_factor=router.capacity_factor, **sizes), tokens) * router.num_experts
    return room if router.pad_to_capacity else min(copies, room)
