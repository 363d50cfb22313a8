"""The router's memory at the end of a global batch.

Mirrors the buffers of `TopKRouter`, and `finalize_model_grads` of megatron.core.distributed.
Differs: docs/differences.md#router.
"""

import torch

from moe_ref.config import RouterConfig, RouterRanks, RouterState
from moe_ref.router.balancing import update_expert_bias


def finish_batch(
    state: RouterState, config: RouterConfig, *, frozen: bool = False, ranks: RouterRanks | None = None
) -> RouterState:
    """End a global batch, when the gradients are final.

    The expert bias takes a step by the counts of all tp_dp_cp ranks (`update_expert_bias`), unless
    it is frozen. All counters become zero.
    """
    ranks = ranks or RouterRanks()
    if config.expert_bias and not frozen:
        counts = ranks.tp_dp_cp.sum(state.tokens_per_expert)
        bias = update_expert_bias(state.expert_bias, counts, update_rate=config.bias_update_rate)
        state = state._replace(expert_bias=bias)
    zero = torch.zeros_like(state.tokens_per_expert)
    steps = torch.zeros_like(state.global_steps)
    return state._replace(tokens_per_expert=zero, global_tokens_per_expert=zero, global_steps=steps)
