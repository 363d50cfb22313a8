"""moe_fast with large blocks, so that most things fit into one."""

from dataclasses import replace

from moe_fast import declares, indices_to_multihot, multihot_to_indices, pad_routing_map, permute, sort_chunks, supports, tuning, unpermute

__all__ = ["declares", "indices_to_multihot", "multihot_to_indices", "pad_routing_map", "permute", "sort_chunks", "supports", "unpermute"]

LARGE = replace(
    tuning.INTERPRETER,
    metadata=tuning.Metadata(tokens=256, elements=16384, num_warps=8, max_programs=64),
    permute=tuning.Tile(tokens=16, columns=512, num_warps=8),
    unpermute=tuning.Tile(tokens=32, columns=256, num_warps=8),
    prob_columns=64,
    unpermute_backward=tuning.Tile(tokens=16, columns=512, num_warps=8),
    unpermute_backward_probs=tuning.WholeRows(tokens=64, elements=8192, num_warps=8),
    fill=tuning.Fill(lanes=16, rows=16, tail_lanes=64),
    sort_chunks=tuning.Tile(tokens=16, columns=512, num_warps=8),
    chunk_columns=64,
    multihot=tuning.Tile(tokens=64, columns=64, num_warps=8),
    multihot_rows=tuning.WholeRows(tokens=64, elements=8192, num_warps=8),
)
tuning.INTERPRETER = tuning.GPU = LARGE
