"""permute and quantize in one step: each token's codes and scales in the places of its rows.

Mirrors what transformer_engine does before a grouped linear layer in two or three steps: `moe_permute_and_pad_with_probs` of
transformer_engine.pytorch, then `split_quantize`.
"""

from torch import Tensor

from moe_ref.config import PermutedQuantization, QuantizerState, Recipe, check_permute_and_quantize
from moe_ref.permutation.permute import permute
from moe_ref.quantization.quantize import quantize


def permute_and_quantize(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    recipe: Recipe,
    *,
    probs: Tensor | None = None,
    align: int | None = None,
    capacity: int | None = None,
    num_rows: int | None = None,
    role: str = "input",
    rowwise: bool = True,
    columnwise: bool = False,
    state: QuantizerState | None = None,
) -> PermutedQuantization:
    """Copy each token once for every expert it is routed to, and quantise each expert's segment by itself.

        permuted  = permute(tokens, routing_map, probs, align, capacity, num_rows)
        quantized = quantize(permuted.rows, recipe, role, splits=permuted.tokens_per_expert, rowwise, columnwise, state)

    So blocks start at each segment's first row, its padding belongs to it, and rows behind the last segment belong to nobody. Padding is
    zeros: in a block of its own it has the scale of zeros, in a block beside others it changes nothing. Tokens without a row reach no amax.

    Args:
        tokens_TH: float64, float32, bfloat16 or float16.
        routing_map_TE, probs, align, capacity, num_rows: as in `permute`. Nothing is padded that was not asked for: MXFP8 wants an `align`
            or a `capacity` of a multiple of 32, NVFP4 of 16; what is best is `recipe.alignment`.
        role, rowwise, columnwise, state: as in `quantize`; a state has a row for each expert.

    Returns:
        `PermutedQuantization`. The gradient of `dequantize(quantized)` to the tokens is straight through, then the sum of each token's rows;
        that of probs is `permute`'s.

    Rounding: that of `quantize`; dtokens[t] = Σ over t's rows of drows, accumulated in fp32 (fp64 for fp64), rounded once.

    Raises:
        ValueError: see `moe_ref.config.check_permute_and_quantize`. Gradients rounded stochastically have no way here: permute, then
            quantize with as much noise as there are rows.

    Source: TE moe_permute_and_pad_with_probs, `tex.split_quantize`.
    """
    check_permute_and_quantize(
        tokens_TH, routing_map_TE, recipe, probs, align, capacity, num_rows, role, rowwise, columnwise, state
    )
    permuted = permute(tokens_TH, routing_map_TE, probs=probs, align=align, capacity=capacity, num_rows=num_rows)
    quantized = quantize(
        permuted.rows,
        recipe,
        role=role,
        splits=permuted.tokens_per_expert,
        rowwise=rowwise,
        columnwise=columnwise,
        state=state,
    )
    return PermutedQuantization(*quantized, *permuted[1:])
