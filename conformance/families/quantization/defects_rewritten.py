"""Mistakes in quantisers that two conditions together invite, as changes of the
reference's source.
"""

from conformance.core.rewritten import series

QUANTIZE = "quantization/quantize.py"
RECIPES = "quantization/recipes.py"
READ = "quantize codes scales amax dequantize"

DEFECTS = series(
    82,
    (
        (
            "the least amax stands for an amax of 0 alone",
            READ,
            RECIPES,
            "a = amax.clamp(min=nearest32(epsilon))",
            "a = torch.where(amax == 0, nearest32(epsilon), amax) if power_of_two else"
            " amax.clamp(min=nearest32(epsilon))",
        ),
        (
            "a column's last partial block reads rows of the next group",
            READ,
            QUANTIZE,
            "        groups.append(RULES[scheme.recipe.scaling](group_MN.detach(), scheme, scale, noise))\n",
            "        whole = x_MN[start : start + -(-size // 128) * 128]\n"
            "        if columnwise and scheme.recipe.scaling == 'block' and size and len(whole) > size:\n"
            "            scaled = RULES['block'](turned(whole, True).detach(), scheme, scale, noise)\n"
            "            groups.append(scaled._replace(codes=scaled.codes[:, :size]))\n"
            "        else:\n"
            "            groups.append(RULES[scheme.recipe.scaling](group_MN.detach(), scheme, scale, noise))\n",
        ),
        (
            "a subnormal exponent is 0",
            READ,
            RECIPES,
            "exponent = encode(amax * nearest32(1 / scheme.format.max), E8M0)",
            "ratio = amax * nearest32(1 / scheme.format.max)\n"
            "    exponent = encode(torch.where(ratio < 2.0**-126, 0, ratio), E8M0)",
        ),
        (
            "both directions take the rows' noise",
            READ,
            QUANTIZE,
            "None if noise is None else noise[int(columnwise)],",
            "None if noise is None else noise[int(columnwise and not rowwise)],",
        ),
        (
            "columns alone leave the history as it was",
            READ,
            QUANTIZE,
            "    if state is not None:\n",
            "    if state is not None and rowwise:\n",
        ),
        (
            "a group without rows raises its amax by the group's before",
            READ,
            QUANTIZE,
            "        latest_G1 = torch.maximum",
            "        for g in range(1, len(sizes)):\n"
            "            if sizes[g] == 0:\n"
            "                amax_G1[g] = amax_G1[g - 1]\n"
            "        latest_G1 = torch.maximum",
        ),
        (
            "the most recent amax is this rank's, whatever was reduced",
            "quantize update_scales",
            RECIPES,
            "    amax_G = last_G\n",
            "    amax_G = last_G if reduced_amax is None else torch.where(history_GL[:, 0] != 0,"
            " history_GL[:, 0], last_G)\n",
        ),
        (
            "a margin is twice that of gradients in E5M2",
            "quantize update_scales",
            RECIPES,
            "2.0**-recipe.margin",
            "2.0**-(recipe.margin * (2 if role == 'grad_output' and recipe.fp8_format == 'hybrid' else 1))",
        ),
        (
            "a history of two keeps the older amax",
            "quantize update_scales",
            RECIPES,
            "older_GL = history_GL[:, 1:]",
            "older_GL = history_GL[:, 1:] if history_GL.shape[1] != 2 else torch.zeros_like(history_GL[:, 1:])",
        ),
        (
            "tiles of scales are laid out by columns first",
            READ,
            QUANTIZE,
            "permute(0, 3, 2, 1, 4)",
            "permute(3, 0, 2, 1, 4)",
        ),
        (
            "values past float16's largest number saturate where they are decoded",
            READ,
            QUANTIZE,
            "round_to(value, form.source_MN.dtype))",
            "round_to(value if form.source_MN.dtype != torch.float16 else value.clamp(-65504, 65504),"
            " form.source_MN.dtype))",
        ),
        (
            "squares are not squared in the error of square blocks",
            READ,
            RECIPES,
            'if scheme.recipe.four_over_six_error == "mse"',
            'if scheme.recipe.four_over_six_error == "mse" and scheme.block[0] == 1',
        ),
        (
            "a value that needs no rounding goes up where the noise is 0",
            READ,
            "quantization/formats.py",
            "(noise < steps - whole)",
            "(noise <= steps - whole)",
        ),
        (
            "the ninth group takes the first one's scale",
            READ,
            QUANTIZE,
            "None if state is None else state.scale[g]",
            "None if state is None else state.scale[g % 8]",
        ),
        (
            "an infinite amax of a row-scaled tensor makes a scale of 0",
            READ,
            RECIPES,
            "encoding = torch.where((amax == 0) | (encoding == 0), 1.0, encoding)",
            "encoding = torch.where((amax == 0) | (encoding == 0) & (not scheme.row_scaled), 1.0, encoding)",
        ),
        (
            "a bound of 256 is decoded by that of 448 where weights are square",
            READ,
            RECIPES,
            "nearest32(1 / (6 * scheme.scale_max))",
            "nearest32(1 / (6 * (scheme.scale_max if scheme.block[0] == 1 else E4M3.max)))",
        ),
        (
            "the gradient of columns is that of rows: no transform back",
            READ,
            QUANTIZE,
            "        sources.append(turned(group_MN, columnwise))",
            "        plain = turned(group_MN, columnwise)\n"
            "        sources.append(plain if not scheme.hadamard or not len(sizes) > 1 else"
            " plain.detach() + x_MN[rows] - x_MN[rows].detach())",
        ),
        (
            "a code of a subnormal E5M2 is rounded half up",
            READ,
            "quantization/formats.py",
            "whole = steps.round()  # ties to even",
            "whole = torch.where((steps < 4) & (format.mantissa_bits == 2), (steps + 0.5).floor(), steps.round())",
        ),
        (
            "one row of a group: its columns' amax is of the row before too",
            READ,
            QUANTIZE,
            "        group_MN = turned(x_MN[rows], columnwise)\n",
            "        group_MN = turned(x_MN[rows], columnwise)\n"
            "        if size == 1 and start and columnwise and scheme.recipe.scaling == 'block':\n"
            "            group_MN = turned(torch.where(x_MN[rows] == 0, x_MN[start - 1 : start] * 0,"
            " x_MN[rows]), True)\n",
        ),
        (
            "where both directions are made the gradient is the rows' alone",
            READ,
            QUANTIZE,
            "form(True) if columnwise else None)\n",
            "form(True) if columnwise else None)\n"
            "    if quantized.rowwise is not None and quantized.columnwise is not None:\n"
            "        other = quantized.columnwise\n"
            "        other = Form(other.scheme, other.columnwise, other.source_MN.detach(), other.groups)\n"
            "        quantized = Quantized(quantized.rowwise, other)\n",
        ),
        (
            "float64 is encoded without a stop at float32",
            READ,
            RECIPES,
            "    x32 = round_to(x, torch.float32)\n    amax = block_amax(x32, scheme.block)\n",
            "    x32 = x if x.dtype == torch.float64 else round_to(x, torch.float32)\n"
            "    amax = block_amax(x32, scheme.block).float()\n",
        ),
        (
            "the columns' amaxes of row-scaled groups are one for all",
            READ,
            QUANTIZE,
            "    per_row = form.scheme.row_scaled and columnwise\n",
            "    per_row = form.scheme.row_scaled and columnwise\n"
            "    if per_row and len(form.groups) > 1:\n"
            "        whole = whole.amax(0, keepdim=True).expand_as(whole).clone()\n",
        ),
        (
            "scales of columns for a product are not transposed back where there are groups",
            READ,
            QUANTIZE,
            "_padded(scale.T if scheme.block[0] == 1 else scale, 1, 4)",
            "_padded(scale.T if scheme.block[0] == 1 or scale.shape[0] == scale.shape[1] > 1 else scale, 1, 4)",
        ),
        (
            "an amax that is subnormal makes the largest scale, as 0 does none",
            READ,
            RECIPES,
            "    s = torch.where((a == 0) | torch.isinf(a), 1.0, s)",
            "    s = torch.where((a < 2.0**-126) | torch.isinf(a), 1.0, s)",
        ),
        (
            "a reduced amax of NaN stops the step",
            "quantize update_scales",
            RECIPES,
            "torch.where(reduced_amax != 0, reduced_amax, last_G)",
            "torch.where(reduced_amax > 0, torch.maximum(reduced_amax, last_G), last_G)",
        ),
    ),
)
