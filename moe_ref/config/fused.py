"""Permutation and quantisation in one step: the result, and the rules that make a call illegal."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config.permutation import check_permute
from moe_ref.config.quantization import BLOCK, WHOLE_BLOCKS, QuantizerState, Recipe, check_quantize
from moe_ref.config.rules import require


class PermutedQuantization(NamedTuple):
    """What `permute_and_quantize` returns."""

    quantized: Any  # opaque: the permuted rows, for `codes`, `scales`, `amax` and `dequantize`
    state: QuantizerState | None  # the next state, a row per expert; None but for delayed scaling
    probs: Tensor | None  # [P], the probs' dtype; None when no probs were given
    row_map: Any  # opaque: hand it to this implementation's own `unpermute`
    tokens_per_expert: Tensor  # [E] integers: length of each expert's segment, its padding included; the splits
    pad_offsets: Tensor | None  # [E] integers: padding rows before each expert's segment; None without `align`
    overflow: Tensor  # [] bool: some routed row did not fit into `num_rows` or `capacity`


def check_permute_and_quantize(
    tokens: Tensor, routing_map: Tensor, recipe: Recipe, probs: Tensor | None, align: int | None,
    capacity: int | None, num_rows: int | None, role: str, rowwise: bool, columnwise: bool,
    state: QuantizerState | None,
) -> None:  # fmt: skip
    """The rules of `permute`, and of `quantize` for its rows; none reads the device."""
    check_permute(tokens, routing_map, probs, align, capacity, num_rows)
    require(isinstance(recipe, Recipe), "recipe", repr(recipe), "a Recipe")
    stochastic = bool(recipe.stochastic_rounding) and role == "grad_output"
    requirement = "without: there is no noise for rows whose number is not known yet"
    require(not stochastic, "recipe", "with stochastic_rounding, of gradients", requirement)
    segments = torch.empty(routing_map.shape[1], dtype=torch.int64, device="meta")
    check_quantize(tokens, recipe, role, segments, rowwise, columnwise, state, None)
    if recipe.scaling in WHOLE_BLOCKS:
        name, size = ("align", align) if capacity is None else ("capacity", capacity)
        block = BLOCK[recipe.scaling]
        requirement = f"a multiple of {block}: {recipe.scaling} wants segments of whole blocks"
        require(size is not None and size % block == 0, name, size, requirement)
