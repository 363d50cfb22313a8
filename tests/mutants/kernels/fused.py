"""Mistakes in the kernels that quantise in the launch of the stage before."""

from tests.mutants.kernels import series

FORWARD = "glu_and_quantize activation_and_quantize"
BACKWARD = "glu_backward_and_quantize activation_backward_and_quantize"

DEFECTS = series(
    "F",
    (
        (
            "delayed scaling: a token enters the amax of its first expert alone",
            "permute_and_quantize",
            "fused/_permute_and_quantize.py",
            "larger = raise_amax(group_amax_ptr, expert, bits, live)",
            "larger = raise_amax(group_amax_ptr, expert, bits, live & (j == 0))",
        ),
        (
            "NVFP4: the scales of padding are not written",
            "permute_and_quantize",
            "fused/_permute_and_quantize.py",
            'if RULE == "mxfp8" or RULE == "nvfp4":\n            b =',
            'if RULE == "mxfp8":\n            b =',
        ),
        (
            "block scaling: padding has a scale of 0",
            "permute_and_quantize",
            "fused/_permute_and_quantize.py",
            "tl.where((source >= 0)[:, None], stored, of_zero)",
            "stored",
        ),
        (
            "four over six of activations is forgotten in the fused launch",
            "permute_and_quantize",
            "fused/permute_and_quantize.py",
            "        or recipe.four_over_six in SCOPES[role]\n",
            '        or (recipe.four_over_six in SCOPES[role] and role == "weight")\n',
        ),
        (
            "halves that end within a tile count twice in the gradient of the probs",
            BACKWARD,
            "fused/_tiles.py",
            "counted = in_group & (of_value == 0)  # each term once",
            "counted = in_group",
        ),
        (
            "round_before_quantize: the values' gradient is not rounded where both halves are whole tiles",
            BACKWARD,
            "fused/_tiles.py",
            "as_float32(rounded(dv, h_ptr.dtype.element_ty) if ROUNDED else dv)",
            "as_float32(dv)",
        ),
        (
            "a value at its bound has no gradient",
            BACKWARD,
            "fused/_tiles.py",
            "free_u, free_v = u <= bound, tl.abs(v) <= bound",
            "free_u, free_v = u <= bound, tl.abs(v) < bound",
        ),
        (
            "the parts of the probs' gradient are float32, also where the probs are float64",
            BACKWARD,
            "fused/activation_source.py",
            "torch.float64 in (self.h.dtype, self.probs.dtype)",
            "self.h.dtype == torch.float64",
        ),
        (
            "a scale that overflows is the largest number of h's dtype, also of an activation that is not rounded",
            FORWARD + " " + BACKWARD,
            "fused/activate_and_quantize.py",
            "*scale_limits(recipe, x.dtype),",
            "*scale_limits(recipe, source.h.dtype),",
        ),
        (
            "what is quantised apart has a gradient of the probs past the last group",
            BACKWARD,
            "fused/activate_and_quantize.py",
            "        d_probs = _owned_rows(d_probs, forms.splits)\n",
            "",
        ),
        (
            "the probs have a gradient past the last group",
            FORWARD,
            "fused/activate_and_quantize.py",
            "_owned_rows(d_probs, ctx.splits), None, None",
            "d_probs, None, None",
        ),
        (
            "what is quantised apart comes back in float32",
            FORWARD + " " + BACKWARD,
            "fused/activate_and_quantize.py",
            "return replace(quantized.quantized, dtype=h.dtype), None, d_probs",
            "return quantized.quantized, None, d_probs",
        ),
        (
            "scales of groups forget amax_epsilon",
            FORWARD + " " + BACKWARD,
            "fused/activate_and_quantize.py",
            "number_bits(recipe.amax_epsilon or 0.0)",
            "number_bits(0.0)",
        ),
        (
            "current scaling: the values' gradient does not enter the amax where both halves are whole tiles",
            BACKWARD,
            "fused/_activate_and_quantize.py",
            "            largest = tl.maximum(largest, magnitude(other))\n",
            "            largest = tl.maximum(largest, magnitude(x))\n",
        ),
        (
            "current scaling: a program's second step has the columns before its first",
            FORWARD + " " + BACKWARD,
            "fused/_activate_and_quantize.py",
            "end, begin + i * BLOCK_N, CURVE",
            "end, begin - i * BLOCK_N, CURVE",
        ),
        (
            "codes of the second half of a second tile stand where those of the first do",
            BACKWARD,
            "fused/_activate_and_quantize.py",
            "                x = other\n                column += width\n            quantize_forms(",
            "                x = other\n                column = width\n            quantize_forms(",
        ),
        (
            "the result reads the splits in the caller's memory",
            FORWARD + " " + BACKWARD,
            "fused/activation_source.py",
            "non_blocking=True, copy=True",
            "non_blocking=True, copy=False",
        ),
    ),
)
