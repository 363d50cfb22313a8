"""moe_fast with the smallest blocks that make sense, so that everything spans several."""

from dataclasses import replace

from moe_fast import declares, indices_to_multihot, multihot_to_indices, pad_routing_map, permute, sort_chunks, supports, tuning, unpermute

__all__ = ["declares", "indices_to_multihot", "multihot_to_indices", "pad_routing_map", "permute", "sort_chunks", "supports", "unpermute"]

SMALL = replace(
    tuning.INTERPRETER,
    metadata=tuning.Metadata(tokens=16, elements=2048, num_warps=2, max_programs=7),
    permute=tuning.Tile(tokens=16, columns=64, num_warps=2),
    unpermute=tuning.Tile(tokens=8, columns=64, num_warps=2),
    prob_columns=8,
    unpermute_backward=tuning.Tile(tokens=16, columns=64, num_warps=2),
    unpermute_backward_probs=tuning.WholeRows(tokens=16, elements=4096, num_warps=2),
    fill=tuning.Fill(lanes=4, rows=4, tail_lanes=3),
    sort_chunks=tuning.Tile(tokens=16, columns=64, num_warps=2),
    chunk_columns=8,
    multihot=tuning.Tile(tokens=16, columns=8, num_warps=2),
    multihot_rows=tuning.WholeRows(tokens=16, elements=4096, num_warps=2),
)
tuning.INTERPRETER = tuning.GPU = SMALL
