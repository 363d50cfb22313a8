"""moe_fast's symmetric-memory dispatcher; between two ranks tokens travel before their routing."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_fast.dispatch import symmetric
from moe_fast.dispatch.symmetric import (
    codes,
    declares,
    dequantize,
    hybridep_cached_dispatch,
    hybridep_combine,
    scales,
    start_early,
    supports,
)

__all__ = [
    "codes",
    "declares",
    "dequantize",
    "hybridep_cached_dispatch",
    "hybridep_combine",
    "hybridep_dispatch",
    "scales",
    "supports",
]


def hybridep_dispatch(
    tokens_TH: Tensor, routing_map_TE: Tensor, *, num_rows: int | None = None, group: Any = None, **settings: Any
) -> Any:
    if num_rows is not None and settings.get("recipe") is None and dist.get_world_size(group) == 2:
        sizes = {"num_experts": routing_map_TE.shape[1], "num_rows": num_rows}
        settings["early"] = start_early(tokens_TH, group=group, **sizes)
    return symmetric.hybridep_dispatch(tokens_TH, routing_map_TE, num_rows=num_rows, group=group, **settings)
