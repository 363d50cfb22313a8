"""permute and quantize in one step: each token's codes and scales in the places of its rows.

Mirrors what transformer_engine does before a grouped linear layer in two or three steps:
`moe_permute_and_pad_with_probs` of transformer_engine.pytorch, then `split_quantize`.
"""

from torch import Tensor

from moe_ref.config import PermutedQuantization, QuantizerState, Recipe, check_permute_and_quantize
from moe_ref.permutation.permute import permute
from moe_ref.quantization.quantize import quantize


def permute_and_quantize(
    tokens_TH: Tensor, routing_map_TE: Tensor, recipe: Recipe,
    *, probs: Tensor | None = None, align: int | None = None, capacity: int | None = None,
    num_rows: int | None = None, role: str = "input", rowwise: bool = True,
    columnwise: bool = False, state: QuantizerState | None = None,
) -> PermutedQuantization:  # fmt: skip
    """Copy each token once per expert it is routed to, and quantise each expert's segment.

        permuted  = permute(tokens, routing_map, probs, align, capacity, num_rows)
        quantized = quantize(permuted.rows, recipe, role, splits=permuted.tokens_per_expert, …)

    Blocks start at each segment's first row, and padding is part of a segment: a block of padding
    has the scale of zeros. Rows past the last segment have no scale. Tokens without a row enter no
    amax.

    Args:
        tokens_TH: float64, float32, bfloat16 or float16.
        routing_map_TE, probs, align, capacity, num_rows: as in `permute`. MXFP8 needs an `align` or
            a `capacity` of a multiple of 32, NVFP4 of 16; `recipe.alignment` is the best.
        role, rowwise, columnwise, state: as in `quantize`; a state has a row per expert.

    Returns:
        `PermutedQuantization`. The gradient of `dequantize(quantized)` is straight through, then
        `permute`'s.

    Rounding: `quantize`'s; gradients as in `permute`.

    Raises:
        ValueError: see `moe_ref.config.check_permute_and_quantize`. Stochastic rounding of
            gradients is refused: the noise needs as many rows as are permuted.
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
