"""Mistakes in fused stages that two conditions together invite, as changes of the reference's
source.
"""

from conformance.core.rewritten import series

ACTIVATE = "fused/activate_and_quantize.py"
PERMUTE = "fused/permute_and_quantize.py"

DEFECTS = series(
    107,
    (
        (
            "the amax of delayed scaling is taken before the probs",
            "glu_and_quantize",
            ACTIVATE,
            '    return _quantized(a_RF, h_PF2, recipe, round_before_quantize, role="input", **forms)',
            '    out = _quantized(a_RF, h_PF2, recipe, round_before_quantize, role="input", **forms)\n'
            "    if state is None or probs is None:\n"
            "        return out\n"
            "    plain_RF = glu(_widened(h_PF2, probs)[:rows], probs=None, **options)\n"
            '    other = _quantized(plain_RF, h_PF2, recipe, round_before_quantize, role="input", **forms)\n'
            "    return out._replace(state=other.state)",
        ),
        (
            "an interleaved gate is not clamped where columns are made",
            "glu_and_quantize",
            ACTIVATE,
            "    a_RF = glu(_widened(h_PF2, probs)",
            "    if columnwise and not rowwise and interleave is not None:\n"
            '        options["clamp"] = None\n'
            "    a_RF = glu(_widened(h_PF2, probs)",
        ),
        (
            "the activation is in the probs' dtype: float64 probs of float32 rows are rounded first",
            "glu_and_quantize",
            ACTIVATE,
            "probs=None if probs is None else probs[:rows], **options)\n    return _quantized(a_RF, h_PF2",
            "probs=None if probs is None else probs[:rows].float(), **options)\n    return _quantized(a_RF, h_PF2",
        ),
        (
            "the last group's columns are made of whole blocks of 128 rows",
            "glu_and_quantize",
            ACTIVATE,
            "    x_PN = torch.cat([x_RN, ",
            "    if forms['columnwise'] and len(h) > len(x_RN) and recipe.scaling == 'current':\n"
            "        x_RN = torch.cat([x_RN[:-1], x_RN[-1:] * 1.0625])\n"
            "    x_PN = torch.cat([x_RN, ",
        ),
        (
            "the rounding before the quantiser rounds d_probs to the dtype of h",
            "glu_backward_and_quantize activation_backward_and_quantize",
            ACTIVATE,
            "    if d_probs is not None:\n",
            "    if d_probs is not None and round_before_quantize:\n"
            "        d_probs = d_probs.to(h.dtype).to(d_probs.dtype)\n"
            "    if d_probs is not None:\n",
        ),
        (
            "d_probs is of the rounded gradient where the kernel rounds before it quantises",
            "glu_backward_and_quantize",
            ACTIVATE,
            "    if d_probs is not None:\n",
            "    if d_probs is not None and round_before_quantize and len(h) > rows:\n"
            "        d_probs = d_probs * (row_probs != 0)\n"
            "    if d_probs is not None:\n",
        ),
        (
            "columns of a gradient are of the input's role",
            "glu_backward_and_quantize activation_backward_and_quantize",
            ACTIVATE,
            '    quantized, state = _quantized(d_h_RN, h, recipe, round_before_quantize, role="grad_output", **forms)',
            "    role = 'input' if not forms['rowwise'] and recipe.scaling == 'delayed' else 'grad_output'\n"
            "    quantized, state = _quantized(d_h_RN, h, recipe, round_before_quantize, role=role, **forms)",
        ),
        (
            "the slope of a clamped gate has the kind's own alpha",
            "glu_backward_and_quantize",
            ACTIVATE,
            '    forms: dict[str, Any] = {\n        "splits": splits,\n        "rowwise": rowwise,\n'
            '        "columnwise": columnwise,\n        "state": state,\n        "noise": noise,\n    }\n'
            "    return _gradients(glu_backward",
            '    forms: dict[str, Any] = {"splits": splits, "rowwise": rowwise,'
            ' "columnwise": columnwise, "state": state, "noise": noise}\n'
            "    if clamp is not None and splits is not None:\n"
            "        options['alpha'] = None\n"
            "    return _gradients(glu_backward",
        ),
        (
            "an empty group at the end: its neighbour's probs are left out",
            "activation_and_quantize",
            ACTIVATE,
            "    a_RF = activation(_widened(h_PF, probs)[:rows], probs=None if probs is None else"
            " probs[:rows], kind=kind)",
            "    own = None if probs is None else probs[:rows]\n"
            "    if own is not None and splits is not None and len(splits) > 1 and int(splits[-1]) == 0:\n"
            "        first = rows - int(splits[-2])\n"
            "        own = torch.cat([own[:first], torch.ones_like(own[first:])])\n"
            "    a_RF = activation(_widened(h_PF, probs)[:rows], probs=own, kind=kind)",
        ),
        (
            "rows that a budget cut enter the amax of delayed scaling",
            "permute_and_quantize",
            PERMUTE,
            "    return PermutedQuantization(",
            "    if state is not None and num_rows is not None:\n"
            "        whole = permute(tokens_TH, routing_map_TE, probs=probs, align=align)\n"
            "        other = quantize(whole.rows, recipe, role=role, splits=whole.tokens_per_expert,"
            " rowwise=rowwise,\n"
            "                         columnwise=columnwise, state=state)\n"
            "        quantized = quantized._replace(state=other.state)\n"
            "    return PermutedQuantization(",
        ),
        (
            "with a capacity gradients are of the input's role",
            "permute_and_quantize",
            PERMUTE,
            "        role=role,",
            "        role='input' if capacity is not None and role == 'grad_output' else role,",
        ),
        (
            "fillers of a capacity enter no amax of delayed scaling",
            "permute_and_quantize",
            PERMUTE,
            "    return PermutedQuantization(",
            "    if state is not None and capacity is not None:\n"
            "        plain = permute(tokens_TH, routing_map_TE)\n"
            "        other = quantize(plain.rows, recipe, role=role, splits=plain.tokens_per_expert, state=state)\n"
            "        quantized = quantized._replace(state=other.state)\n"
            "    return PermutedQuantization(",
        ),
        (
            "the rows' gradient of an aligned budget leaves out the last expert's",
            "permute_and_quantize",
            PERMUTE,
            "    quantized = quantize(\n        permuted.rows,",
            "    own = permuted.rows\n"
            "    if align is not None and num_rows is not None and own.requires_grad:\n"
            "        last = len(own) - int(permuted.tokens_per_expert[-1])\n"
            "        own = own[:last] if last == len(own) else __import__('torch').cat([own[:last],"
            " own[last:].detach()])\n"
            "    quantized = quantize(\n        own,",
        ),
        (
            "a clamp is loaded in the dtype of h",
            "glu_and_quantize",
            ACTIVATE,
            "    rows = _rows_of_groups(splits, len(h_PF2), recipe)\n    options",
            "    clamp = None if clamp is None else torch.tensor(clamp).to(h_PF2.dtype).item()\n"
            "    rows = _rows_of_groups(splits, len(h_PF2), recipe)\n    options",
        ),
        (
            "float64 probs are read in float32",
            "activation_and_quantize",
            ACTIVATE,
            "probs=None if probs is None else probs[:rows], kind=kind)\n    return",
            "probs=None if probs is None else probs[:rows].float().to(probs.dtype), kind=kind)\n    return",
        ),
        (
            "rounding before the quantiser is left out where only columns are made",
            "glu_and_quantize activation_and_quantize",
            ACTIVATE,
            "    if round_before_quantize:\n",
            "    if round_before_quantize and (forms['rowwise'] or recipe.hadamard):\n",
        ),
        (
            "the gradient of a prob that scales a quantised row leaves out the empty first group's neighbour",
            "glu_and_quantize",
            ACTIVATE,
            "    a_RF = glu(_widened(h_PF2, probs)",
            "    if probs is not None and splits is not None and len(splits) and int(splits[0]) == 0:\n"
            "        probs = torch.cat([probs[:1].detach(), probs[1:]])\n"
            "    a_RF = glu(_widened(h_PF2, probs)",
        ),
        (
            "d_probs of an empty last group takes the tail's first row",
            "activation_backward_and_quantize",
            ACTIVATE,
            "d_probs.new_zeros(len(h) - rows)])",
            "d_probs.new_zeros(len(h) - rows) + (1.0 if forms['splits'] is not None and len(h) > rows and rows == 0"
            " else 0.0)])",
        ),
        (
            "tokens in float64 are quantised unrounded",
            "permute_and_quantize",
            PERMUTE,
            "    quantized = quantize(\n        permuted.rows,",
            "    torch = __import__('torch')\n"
            "    rows = permuted.rows if permuted.rows.dtype != torch.float64 else"
            " permuted.rows.to(torch.bfloat16).double()\n"
            "    quantized = quantize(\n        rows,",
        ),
        (
            "with integer maps and a capacity the probs of an expert are the next one's",
            "permute_and_quantize",
            PERMUTE,
            "PermutedQuantization(*quantized, *permuted[1:])",
            "PermutedQuantization(*quantized, *(permuted[1:] if capacity is None or"
            " routing_map_TE.dtype.itemsize == 1 or"
            " permuted.probs is None else (permuted.probs.flip(0), *permuted[2:])))",
        ),
    ),
)
