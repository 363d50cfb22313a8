"""Values that several claims use."""

import math

BALANCED_BY_BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
inf, nan = math.inf, math.nan


def rows_of(column):
    return set(column.flatten().nonzero().flatten().tolist())
