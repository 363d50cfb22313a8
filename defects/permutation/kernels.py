"""Defects of permutation that kernels of other libraries have had, or could have; see `planted`."""

from typing import Any

from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.addresses import int32_view
from conformance.mutants.kinds.gradients import with_backward

WIDE = "a mistake that 32-bit addresses of small inputs invite"


def _map_in_32_bits(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    permute(tokens, routing_map, **settings)
    return permute(tokens, int32_view(routing_map), **settings)


def _probs_in_32_bits(permute: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    out, probs = permute(tokens, *rest, **settings), settings.get("probs")
    if probs is None:
        return out
    seen = with_backward(probs, int32_view(probs.detach()), lambda g: g)
    return permute(tokens, *rest, **settings | {"probs": seen})


PERMUTE, UNPERMUTE, CHUNKS = "permute", "unpermute", "sort_chunks"
DEFECTS: tuple[Defect, ...] = (
    Defect("AD03", "32-bit row · stride of the map", WIDE, {PERMUTE: _map_in_32_bits}),
    Defect("AD04", "32-bit row · stride of the probs", WIDE, {PERMUTE: _probs_in_32_bits}),
)
