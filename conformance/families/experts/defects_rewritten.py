"""Mistakes in experts that two conditions together invite, as changes of the reference's source."""

from conformance.core.rewritten import series

GLU = "experts/activations.py"
LINEAR = "experts/linear.py"
MLP = "experts/mlp.py"
SHARED = "experts/shared.py"

DEFECTS = series(
    127,
    (
        (
            "with a clamp the slope has the kind's own alpha",
            "glu",
            GLU,
            "g_PF * gate.slope(u_PF) * shifted_PF",
            "g_PF * _gate(kind, alpha if clamp is None else None).slope(u_PF) * shifted_PF",
        ),
        (
            "an interleaved value is clamped after its offset",
            "glu",
            GLU,
            "act_PF = _gate(kind, alpha).value(u_PF) * (v_PF + offset)",
            "act_PF = _gate(kind, alpha).value(u_PF) * ((v_PF + offset) if clamp is None or interleave is None"
            " else (v_PF + offset).clamp(-clamp, clamp))",
        ),
        (
            "d_probs of a stored input is of the exact one",
            "glu",
            GLU,
            "        ctx.backward_of, ctx.dtype = backward, h.dtype\n",
            "        exact = h.detach()\n\n"
            "        def both(d_out, kept, p):\n"
            "            d_h, d_probs = backward(d_out, kept, p)\n"
            "            return d_h, d_probs if d_probs is None else backward(d_out, exact, p)[1]\n\n"
            "        ctx.backward_of, ctx.dtype = both if fp8_input_store else backward, h.dtype\n",
        ),
        (
            "a float64 prob of 16-bit rows is read in float32",
            "glu activation",
            GLU,
            "accumulator_dtype(h.dtype if probs is None else torch.promote_types(h.dtype, probs.dtype))",
            "accumulator_dtype(h.dtype)",
        ),
        (
            "d_probs is summed in blocks of 64 columns, each rounded to the dtype of the gradient",
            "glu activation",
            GLU,
            "round_to((wide_PF * act_PF).sum(1), probs.dtype)",
            "round_to(sum((part.sum(1) if act_PF.shape[1] <= 64 else part.sum(1).to(d_out_PF.dtype).to(act_PF.dtype)"
            " for part in (wide_PF * act_PF).split(64, 1)), torch.zeros_like(act_PF[:, :0].sum(1))), probs.dtype)",
        ),
        (
            "a row of prob 0 is padding: its prob has no gradient",
            "glu activation",
            GLU,
            "round_to((wide_PF * act_PF).sum(1), probs.dtype)",
            "round_to((wide_PF * act_PF).sum(1) * (probs != 0), probs.dtype)",
        ),
        (
            "where probs are rounded for, their gradient is of the unrounded activation",
            "glu activation",
            GLU,
            "            round_to(act_PF, d_out_PF.dtype).to(act_PF.dtype),\n",
            "            act_PF,\n",
        ),
        (
            "a clamp is compared in the dtype of h",
            "glu",
            GLU,
            "torch.where(free_v_PF.abs() <= clamp, dv_PF, 0)",
            "torch.where(free_v_PF.abs() <= round_to(torch.tensor(clamp), h_PF2.dtype).item(), dv_PF, 0)",
        ),
        (
            "the bound of a value has no gradient below",
            "glu",
            GLU,
            "torch.where(free_v_PF.abs() <= clamp, dv_PF, 0)",
            "torch.where((free_v_PF > -clamp) & (free_v_PF <= clamp), dv_PF, 0)",
        ),
        (
            "squared relu of float16 is squared before it is widened",
            "activation",
            GLU,
            "_times_probs(CURVES[kind].value(_widened(h_PF, probs)), probs",
            "_times_probs(CURVES[kind].value(_widened(h_PF, probs)) if kind != 'squared_relu' or probs is None"
            " else CURVES[kind].value(h_PF).to(_widened(h_PF, probs).dtype), probs",
        ),
        (
            "the tail of a row past 128 columns has no offset",
            "glu",
            GLU,
            "act_PF = _gate(kind, alpha).value(u_PF) * (v_PF + offset)",
            "act_PF = _gate(kind, alpha).value(u_PF) * (v_PF + offset * (torch.arange(v_PF.shape[1],"
            " device=v_PF.device) < max(v_PF.shape[1] // 128 * 128, 128)))",
        ),
        (
            "with a recipe the product is rounded before it is accumulated",
            "grouped_wgrad",
            LINEAR,
            "round_to(accumulate_into[e] + product_MN",
            "round_to(accumulate_into[e] + (product_MN if precision.recipe is None else"
            " round_to(product_MN, rows_PN.dtype))",
        ),
        (
            "a float64 gradient is accumulated in float32",
            "grouped_wgrad",
            LINEAR,
            "round_to(accumulate_into[e] + product_MN",
            "round_to(accumulate_into[e].to(product_MN.dtype) + product_MN",
        ),
        (
            "an expert of one row is added twice: the tail is a tile of its own",
            "grouped_wgrad",
            LINEAR,
            "product_MN = product(d_mM.T, x_mN)",
            "product_MN = product(d_mM.T, x_mN) * (1 + int(len(x_mN) == 1 and accumulate_into is not None and e > 0))",
        ),
        (
            "with a recipe a bias is rounded to the dtype of the rows",
            "grouped_linear",
            LINEAR,
            "y_mM + round_to(b_M, y_mM.dtype)",
            "y_mM + round_to(b_M if precision.recipe is None else round_to(b_M, rows_PN.dtype), y_mM.dtype)",
        ),
        (
            "the last expert's bias gradient is of all rows that follow, where it has some",
            "grouped_linear",
            LINEAR,
            "    sums = [d_out_PM[rows]",
            "    slices = expert_slices(tokens_per_expert_L, len(d_out_PM))\n"
            "    if precision.recipe is not None and slices[-1].stop > slices[-1].start:\n"
            "        parts = [d_out_PM[r] for r in slices[:-1]] + [d_out_PM[slices[-1].start :]]\n"
            "        return round_to(torch.stack([part.to(accumulator).sum(0) for part in parts]), bias_LM.dtype)\n"
            "    sums = [d_out_PM[rows]",
        ),
        (
            "the accumulator of a gradient is float32 with a recipe",
            "grouped_dgrad",
            LINEAR,
            '"grad_output", "dgrad", precision)\n    weight = _weight_factors(weight_LMN, "dgrad", precision)',
            '"grad_output", "dgrad", precision._replace(accumulator="float32"))\n'
            '    weight = _weight_factors(weight_LMN, "dgrad", precision._replace(accumulator="float32"))',
        ),
        (
            "dequantized weights are not rounded: the backward decodes in its loop",
            "grouped_dgrad grouped_linear",
            LINEAR,
            'if operand.kept == "dequantized" else',
            'if operand.kept == "dequantized" and role != "weight" else',
        ),
        (
            "the scale of a weight past the second is the second's",
            "grouped_linear",
            LINEAR,
            "getattr(precision.state, role)\n    noise",
            "getattr(precision.state, role)\n"
            "    if state is not None and role == 'weight' and len(state.scale) > 2:\n"
            "        state = state._replace(scale=state.scale[:2].repeat(len(state.scale))[: len(state.scale)])\n"
            "    noise",
        ),
        (
            "an expert whose rows fill 64 exactly has a second tile, of the next one's rows",
            "grouped_linear",
            LINEAR,
            "    products = [product(x_mN, w_MN.T)",
            "    rows = [torch.cat([x[:-1], x[-1:] * 2]) if len(x) % 64 == 0 and len(x) else x for x in rows]\n"
            "    products = [product(x_mN, w_MN.T)",
        ),
        (
            "a bias is not added to an expert of one row",
            "grouped_linear",
            LINEAR,
            "y_mM + round_to(b_M, y_mM.dtype) for y_mM",
            "y_mM + round_to(b_M, y_mM.dtype) * (1 if len(y_mM) != 1 or precision.recipe is None else 0) for y_mM",
        ),
        (
            "probs on the input weigh the second bias too",
            "grouped_mlp sequential_mlp",
            MLP,
            "(bias_PH if p_P is None else bias_PH * p_P[:, None])",
            "(bias_PH if p_P is None and on_input_P is None else bias_PH * (on_input_P if p_P is"
            " None else p_P)[:, None])",
        ),
        (
            "aligned rows are made again without probs",
            "grouped_mlp",
            MLP,
            "made_again(second, a_PF, lambda: act(h_PF, probs=p_P))",
            "made_again(second, a_PF, lambda: act(h_PF, probs=p_P if align is None else None))",
        ),
        (
            "the second product has the first one's scales",
            "grouped_mlp",
            MLP,
            "pairs = zip(state or (None, None), amaxes",
            "pairs = zip((state[0], state[1]._replace(weight=state[0].weight)) if state and"
            " isinstance(state[1], LinearState)"
            " else state or (None, None), amaxes",
        ),
        (
            "one expert after another forgets to round before the probs",
            "sequential_mlp",
            MLP,
            "    outputs = []\n    slices",
            "    settings = {name: x for name, x in settings.items() if name != 'round_before_probs'}\n"
            "    outputs = []\n    slices",
        ),
        (
            "with a bias the gradient's noise is drawn",
            "latent_projection",
            MLP,
            "return linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state, noise=noise)",
            "return linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state,"
            " noise=noise if bias is None or noise is None else noise * 0)",
        ),
        (
            "a bias of wider dtype widens the output",
            "latent_projection",
            MLP,
            "return linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state, noise=noise)",
            "out = linear(x_TN, weight_MN, bias=bias, recipe=recipe, state=state, noise=noise)\n"
            "    return out if bias is None else out.to(torch.promote_types(out.dtype, bias.dtype))",
        ),
        (
            "the gate is made by the recipe of the products",
            "shared_experts",
            SHARED,
            "torch.sigmoid(linear(x_TH, gate_weight)",
            "torch.sigmoid(linear(x_TH, gate_weight, recipe=r if (r := fc1.keywords['recipe']) is not None"
            " and r.scaling == 'current' else None)",
        ),
        (
            "the gate of a made-again layer does not reach x",
            "shared_experts",
            SHARED,
            "torch.sigmoid(linear(x_TH, gate_weight)",
            "torch.sigmoid(linear(x_TH.detach() if fc1.keywords['recipe'] is not None else x_TH, gate_weight)",
        ),
        (
            "the two layers of the same shape take each other's scales",
            "shared_experts",
            SHARED,
            "pairs = zip(state or (None, None), noise or (None, None), strict=True)",
            "pairs = zip((state or (None, None))[::-1] if state and all(isinstance(x, LinearState)"
            " for x in state) else"
            " state or (None, None), noise or (None, None), strict=True)",
        ),
        (
            "with a bias, aligned rows that are made again leave probs without a gradient",
            "grouped_mlp",
            MLP,
            "        counts = -(-tokens_per_expert_L // align) * align\n",
            "        counts = -(-tokens_per_expert_L // align) * align\n"
            "        p_P = p_P if p_P is None or fc2_bias is None or recompute is False else p_P.detach()\n",
        ),
        (
            "with float64 probs a row times its prob is rounded twice",
            "grouped_mlp",
            MLP,
            "round_to(x_PH.to(accumulator) * on_input_P[:, None], x_PH.dtype)",
            "round_to(x_PH * on_input_P[:, None].to(x_PH.dtype), x_PH.dtype)",
        ),
        (
            "an alpha is loaded in the dtype of x",
            "shared_experts",
            SHARED,
            "clamp=clamp, alpha=alpha, interleave",
            "clamp=clamp, alpha=None if alpha is None else torch.tensor(alpha, dtype=x_TH.dtype).item(), interleave",
        ),
        (
            "a first bias beside probs on the input is weighted",
            "grouped_mlp",
            MLP,
            "return linears[0](x_PH, fc1_weight_LFH, counts, bias=fc1_bias, noise=noise1)",
            "out = linears[0](x_PH, fc1_weight_LFH, counts, bias=fc1_bias, noise=noise1)\n"
            "        return out if on_input_P is None or fc1_bias is None or align is None else"
            " round_to(out.to(accumulator) * (on_input_P[:, None] != 0), out.dtype)",
        ),
        (
            "a gate is clamped from below where columns alternate by one",
            "glu",
            GLU,
            "    return (u_PF, v_PF) if clamp is None else (u_PF.clamp(max=clamp), v_PF.clamp(-clamp, clamp))",
            "    return (u_PF, v_PF) if clamp is None else (u_PF.clamp(-1000 * clamp, clamp),"
            " v_PF.clamp(-clamp, clamp))",
        ),
        (
            "d_h of stored codes is rounded to E4M3 where probs are given",
            "glu",
            GLU,
            "return ActivationGradients(round_to(_interleave_halves(du_PF, dv_PF, interleave), h_PF2.dtype), d_probs)",
            "d_h = _interleave_halves(du_PF, dv_PF, interleave)\n"
            "    d_h = round_to(d_h, torch.bfloat16) if h_PF2.dtype == torch.float16 and probs is not None else d_h\n"
            "    return ActivationGradients(round_to(d_h, h_PF2.dtype), d_probs)",
        ),
        (
            "an expert's bias gradient is summed in its own dtype",
            "grouped_linear",
            LINEAR,
            "sums = [d_out_PM[rows].to(accumulator).sum(0)",
            "sums = [d_out_PM[rows].to(bias_LM.dtype if bias_LM.dtype == torch.bfloat16 else"
            " accumulator).to(accumulator)"
            ".sum(0)",
        ),
        (
            "a weight's gradient passes through bfloat16 where it is accumulated in float64",
            "grouped_wgrad",
            LINEAR,
            "round_to(accumulate_into[e] + product_MN, accumulate_into.dtype)",
            "round_to(accumulate_into[e] + (product_MN.float() if product_MN.dtype == torch.float64 else product_MN),"
            " accumulate_into.dtype)",
        ),
        (
            "an accumulator in float64 is float32 for the dequantized operand",
            "grouped_wgrad grouped_dgrad",
            LINEAR,
            'return torch.float64 if precision.accumulator == "float64" else accumulator_dtype(dtype)',
            "override = precision.recipe is not None and precision.recipe.backward_override is not None\n"
            '    return torch.float64 if precision.accumulator == "float64" and not override else'
            " accumulator_dtype(dtype)",
        ),
        (
            "one expert after another forgets stored codes with a recipe",
            "sequential_mlp",
            MLP,
            "    outputs = []\n    slices",
            "    if getattr(settings.get('recipe'), 'scaling', '') == 'current':\n"
            "        settings = settings | {'fp8_input_store': False}\n"
            "    outputs = []\n    slices",
        ),
    ),
)
