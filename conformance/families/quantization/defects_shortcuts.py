"""Fast paths, caches and shortcuts gone wrong in quantisers, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    27,
    (
        (
            "stochastic rounding of the columnwise form alone reads the noise of the rowwise one",
            "quantize",
            "quantization/quantize.py",
            "None if noise is None else noise[int(columnwise)],",
            "None if noise is None else noise[int(columnwise and rowwise)],",
        ),
        (
            "delayed, columnwise alone: the running maximum of the history is overwritten, not raised",
            "quantize",
            "quantization/quantize.py",
            "latest_G1 = torch.maximum(state.amax_history[:, :1], amax_G1)",
            "latest_G1 = torch.maximum(state.amax_history[:, :1], amax_G1) if rowwise else amax_G1",
        ),
        (
            "the gradient through the Hadamard transform is left out for all groups but the first",
            "quantize",
            "quantization/quantize.py",
            "sources.append(turned(group_MN, columnwise))",
            "sources.append(turned(group_MN, columnwise) if g == 0 else x_MN[rows])",
        ),
    ),
    "RD",
    SHORTCUT,
)
