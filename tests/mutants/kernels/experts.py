"""Mistakes in the kernels of the experts."""

from tests.mutants.kernels import series

ACTIVATIONS = "glu glu_backward activation activation_backward"
PRODUCTS = "grouped_linear grouped_dgrad grouped_wgrad"

DEFECTS = series(
    "E",
    (
        (
            "a gate at its bound has no gradient",
            "glu glu_backward",
            "experts/_activations.py",
            "free_u = u <= bound  # the bounds themselves are free",
            "free_u = u < bound",
        ),
        (
            "a value below the lower bound keeps its gradient",
            "glu glu_backward",
            "experts/_activations.py",
            "free_v = tl.abs(v) <= bound",
            "free_v = v <= bound",
        ),
        (
            "float64 probs do not make the arithmetic float64",
            ACTIVATIONS,
            "experts/activations.py",
            '"ACCUMULATOR": accumulator(result, probs),',
            '"ACCUMULATOR": accumulator(result),',
        ),
        (
            "round_before_probs: the gradient of the probs is of the activation before rounding",
            ACTIVATIONS,
            "experts/_activations.py",
            "            act = widened(rounded(act, d_out_ptr.dtype.element_ty), ACCUMULATOR)\n",
            "",
        ),
        (
            "fp8_input_store saves h itself if only the probs have a gradient",
            "glu",
            "experts/activations.py",
            "if fp8_input_store and any(ctx.needs_input_grad)",
            "if fp8_input_store and ctx.needs_input_grad[0]",
        ),
        (
            "the gradient of the probs is not written where rows are empty",
            ACTIVATIONS,
            "experts/activations.py",
            "parts = 1 if d_probs is not None else tiles if needs_h else 0",
            "parts = min(tiles, 1) if d_probs is not None else tiles if needs_h else 0",
        ),
        (
            "the backward takes neighbours in a row of the cotangent for neighbours in memory",
            ACTIVATIONS,
            "experts/_activations.py",
            "p[:, None] * stride_d_out_p + f * stride_d_out_f, mask",
            "p[:, None] * stride_d_out_p + f, mask",
        ),
        (
            "the gradient of the probs is not written past the experts' rows",
            "grouped_mlp",
            "experts/_activations.py",
            "rounded(tl.sum(total, axis=1), d_probs_ptr.dtype.element_ty), mask=in_probs)",
            "rounded(tl.sum(total, axis=1), d_probs_ptr.dtype.element_ty), mask=real)",
        ),
        (
            "the last step reads the weight past the depth, where the rows are 0",
            PRODUCTS,
            "experts/_linear.py",
            "mask=in_depth[:, None] & in_row,",
            "mask=(d >= 0)[:, None] & in_row,",
        ),
        (
            "a float64 bias is added as float32",
            "grouped_linear",
            "experts/linear.py",
            "BIAS_AS=tl.float64 if wide and bias_LC is not None and bias_LC.dtype == torch.float64 else tl.float32,",
            "BIAS_AS=tl.float32,",
        ),
        (
            "the gradient of the bias is rounded to the dtype of the rows first",
            "grouped_linear grouped_mlp",
            "experts/linear.py",
            "segment_sums(d_out, ctx.bias_dtype, plan) if ctx.needs_input_grad[2] else None",
            "segment_sums(d_out, d_out.dtype, plan) if ctx.needs_input_grad[2] else None",
        ),
        (
            "a bias has no gradient where the weight has none",
            "grouped_linear grouped_mlp",
            "experts/linear.py",
            "segment_sums(d_out, ctx.bias_dtype, plan) if ctx.needs_input_grad[2] else None",
            "segment_sums(d_out, ctx.bias_dtype, plan) if ctx.needs_input_grad[2] and rows is not None else None",
        ),
        (
            "rows of padding have a prob of 1: with a bias of fc1 they raise fc2's amax",
            "grouped_mlp",
            "experts/padding.py",
            "probs.new_zeros(self.spare)",
            "probs.new_ones(self.spare)",
        ),
        (
            "the shared experts' gate has no gradient where nothing else has one",
            "shared_experts",
            "experts/shared.py",
            "if y.shape[0] and (needs_y or needs_z):",
            "if y.shape[0] and needs_y:",
        ),
        (
            "the amaxes of a step are the last call's, not the largest",
            "grouped_mlp",
            "experts/factors.py",
            "seen_L.copy_(torch.maximum(seen_L, quantized.form(not rowwise).amax))",
            "seen_L.copy_(quantized.form(not rowwise).amax)",
        ),
        (
            "an expert's scales begin a block early where its outputs are no multiple of 128",
            PRODUCTS + " grouped_mlp",
            "experts/scaled_linear.py",
            "ceil_div(height, self.form.block[0]) * stride_m, *along",
            "height // self.form.block[0] * stride_m, *along",
        ),
        (
            "the product of two scales is rounded to 16 bits before it meets the sum",
            PRODUCTS,
            "experts/_factors.py",
            "    return acc * (left[:, None] * right[None, :]) * (left_back[:, None] * right_back[None, :])",
            "    scale = (left[:, None] * right[None, :]).to(tl.bfloat16).to(tl.float32)\n"
            "    return acc * scale * (left_back[:, None] * right_back[None, :])",
        ),
        (
            "block scaling: the scales of the weight's gradient are those of the rows' blocks in the whole tensor",
            PRODUCTS,
            "experts/_scaled_linear.py",
            "block = tile + first // SHARED_P",
            "block = (begin + first) // SHARED_P",
        ),
        (
            "a weight gradient that waits draws noise of its own",
            "grouped_mlp",
            "experts/linear.py",
            "Precision(recipe, state, noise, amaxes))",
            "Precision(recipe, state, None, amaxes))",
        ),
        (
            "rows that are made again are not multiplied by their probs",
            "grouped_mlp",
            "experts/mlp.py",
            "_then(rows_again, lambda rows: ScaledRows.apply(rows, given, ends_L))",
            "_then(rows_again, lambda rows: rows)",
        ),
        (
            "the tensor to add to is taken to be contiguous along its rows",
            "grouped_wgrad",
            "experts/_linear.py",
            "m[:, None] * stride_before_m + n[None, :] * stride_before_n",
            "m[:, None] * stride_before_m + n[None, :]",
        ),
        (
            "within the MLP no zeros are written to the rows' gradient past the experts' rows",
            "grouped_mlp",
            "experts/mlp.py",
            "WITHIN = ((False, True), (True, False))",
            "WITHIN = ((False, False), (True, False))",
        ),
    ),
)
