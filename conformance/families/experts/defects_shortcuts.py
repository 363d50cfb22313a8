"""Fast paths, caches and shortcuts gone wrong in experts, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    17,
    (
        (
            "an offset of more than 16 bits is loaded in the dtype of h",
            "glu",
            "experts/activations.py",
            "act_PF = _gate(kind, alpha).value(u_PF) * (v_PF + offset)",
            "act_PF = _gate(kind, alpha).value(u_PF) * (v_PF + torch.tensor(offset, dtype=h_PF2.dtype).to(v_PF.dtype))",
        ),
        (
            "interleaved blocks wider than 64 columns are read as two of half the width",
            "glu",
            "experts/activations.py",
            "size = interleave or max(width // 2, 1)",
            "size = interleave or max(width // 2, 1)\n"
            "    size = size // 2 if interleave and size > 64 and size % 2 == 0 else size",
        ),
        (
            "d_probs leave out the columns past 1024",
            "glu activation",
            "experts/activations.py",
            "(wide_PF * act_PF).sum(1)",
            "(wide_PF * act_PF)[:, :1024].sum(1)",
        ),
        (
            "block scaling: the bias' gradient sums the quantised grad_output",
            "grouped_linear",
            "experts/linear.py",
            "    sums = [d_out_PM[rows].to(accumulator).sum(0) for rows in"
            " expert_slices(tokens_per_expert_L, len(d_out_PM))]",
            '    if precision.recipe is not None and precision.recipe.scaling == "block":\n'
            "        d_out_PM = torch.cat([*_row_factors(d_out_PM, tokens_per_expert_L,"
            ' "grad_output", "dgrad", precision)])\n'
            "    sums = [d_out_PM[rows].to(accumulator).sum(0) for rows in"
            " expert_slices(tokens_per_expert_L, len(d_out_PM))]",
        ),
        (
            "wgrad stops one step of 128 rows early when an expert has a whole number, > 1, of steps",
            "grouped_wgrad grouped_linear",
            "experts/linear.py",
            "product_MN = product(d_mM.T, x_mN)",
            "count = len(x_mN) - 128 if len(x_mN) > 128 and len(x_mN) % 128 == 0 else len(x_mN)\n"
            "        product_MN = product(d_mM[:count].T, x_mN[:count])",
        ),
        (
            "dgrad tests the wrong side for a whole number of steps: out features past a"
            " multiple of 64 are dropped if in features are whole",
            "grouped_dgrad grouped_linear",
            "experts/linear.py",
            "product(d_mM, w_MN) for d_mM, w_MN in zip(d_out, weight, strict=True)",
            "product(d_mM[:, :k], w_MN[:k])\n"
            "                       for d_mM, w_MN in zip(d_out, weight, strict=True)\n"
            "                       for k in [len(w_MN) // 64 * 64 if len(w_MN) > 64 and"
            " w_MN.shape[1] % 64 == 0 else len(w_MN)]",
        ),
        (
            "a weight's factors are kept on the tensor: stale after an update in place",
            "grouped_linear grouped_mlp",
            "experts/linear.py",
            "    return _from_codes(weight_LMN.reshape(experts * width_out, width_in), splits_L,"
            ' "weight", gemm, precision)',
            '    kept = weight_LMN.__dict__.setdefault("_factors", {})\n'
            "    key = (gemm, precision.recipe, precision.accumulator, id(precision.state))\n"
            "    if key not in kept or precision.amaxes is not None:\n"
            "        kept[key] = _from_codes(weight_LMN.reshape(experts * width_out, width_in),"
            ' splits_L, "weight", gemm, precision)\n'
            "    return kept[key]",
        ),
        (
            "NVFP4: experts share the weight's global amax if each has a multiple of 64 rows",
            "grouped_linear grouped_dgrad",
            "experts/linear.py",
            "    return _from_codes(weight_LMN.reshape(experts * width_out, width_in), splits_L,"
            ' "weight", gemm, precision)',
            '    if precision.recipe is not None and precision.recipe.scaling == "nvfp4" and'
            " width_out % 64 == 0:\n"
            "        whole = splits_L.sum()[None]\n"
            "        both = _from_codes(weight_LMN.reshape(experts * width_out, width_in),"
            ' whole, "weight", gemm, precision)\n'
            "        return list(both[0].split(width_out))\n"
            "    return _from_codes(weight_LMN.reshape(experts * width_out, width_in), splits_L,"
            ' "weight", gemm, precision)',
        ),
        (
            "few rows (at most 8) are multiplied by every expert and masked: a NaN in another expert's weight",
            "grouped_linear",
            "experts/linear.py",
            "    products = [product(x_mN, w_MN.T) for x_mN, w_MN in zip(rows, weight, strict=True)]",
            "    products = [product(x_mN, w_MN.T) for x_mN, w_MN in zip(rows, weight, strict=True)]\n"
            "    if len(rows_PN) <= 8:\n"
            "        products = [y + 0 * sum(product(x, w.T) for w in weight) for x, y in"
            " zip(rows, products, strict=True)]",
        ),
        (
            "the probs' gradient lacks the part of a frozen second bias",
            "grouped_mlp",
            "experts/mlp.py",
            "bias_PH * p_P[:, None]), y_PH.dtype)",
            "bias_PH * (p_P if fc2_bias.requires_grad else p_P.detach())[:, None]), y_PH.dtype)",
        ),
    ),
    "RD",
    SHORTCUT,
)
