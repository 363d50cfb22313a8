"""Fast paths, caches and shortcuts gone wrong in fused stages, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    30,
    (
        (
            "permute and quantise, delayed, one expert: amax of all tokens, also of those without a row",
            "permute_and_quantize",
            "fused/permute_and_quantize.py",
            "return PermutedQuantization(*quantized, *permuted[1:])",
            "if quantized.state is not None and routing_map_TE.shape[1] == 1 and"
            " tokens_TH.numel() > 0:\n"
            "        history = quantized.state.amax_history.clone()\n"
            "        history[:, 0] = history[:,"
            " 0].maximum(tokens_TH.detach().abs().nan_to_num(0).amax().float())\n"
            "        quantized ="
            " quantized._replace(state=quantized.state._replace(amax_history=history))\n"
            "    return PermutedQuantization(*quantized, *permuted[1:])",
        ),
    ),
    "RD",
    SHORTCUT,
)
