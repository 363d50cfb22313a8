"""Mistakes in checkpoints that two conditions together invite, as changes of the
reference's source.
"""

from conformance.core.rewritten import series

NAMES = "parameters/names.py"
SHARDS = "parameters/shards.py"
EXTRA = "parameters/extra_state.py"
UPCYCLE = "parameters/upcycling.py"

DEFECTS = series(
    214,
    (
        (
            "keys of eleven experts are sorted as text",
            "normalize_parameters normalize_master_parameters",
            NAMES,
            "torch.stack([state[part] for part in parts])}",
            "torch.stack([state[part] for part in sorted(parts)])}",
        ),
        (
            "a flat bias of one value per expert is a row",
            "normalize_parameters",
            NAMES,
            "return [whole[e] for e in range(num_experts)]",
            "return [whole[e] if whole.dim() != 1 else whole[e : e + 1] for e in range(num_experts)]",
        ),
        (
            "a layer whose bias alone is packed stays as it is",
            "normalize_parameters",
            NAMES,
            "    for name in NAMES if bias else NAMES[:1]:\n",
            '    for name in NAMES if bias and (packed or f"{prefix}weight" in state) else NAMES[:1]:\n',
        ),
        (
            "a master's name needs no dot before it",
            "normalize_master_parameters",
            NAMES,
            "whole = [key for key in state if matches(key, name)]",
            "whole = [key for key in state if key.endswith(name)]",
        ),
        (
            "a prefix that holds the name is cut at its first place",
            "normalize_master_parameters",
            NAMES,
            'key.removesuffix(f"{name}{e}")',
            'key.split(f"{name}{e}")[0]',
        ),
        (
            "experts from the tenth on have the first digit's key",
            "convert_experts",
            NAMES,
            'sequential = [f"{prefix}local_experts.{e}.{linear}.{name}" for e in range(num_experts)]',
            'sequential = sorted(f"{prefix}local_experts.{e}.{linear}.{name}" for e in range(num_experts))',
        ),
        (
            "a packed bias is not unpacked for experts one after another",
            "convert_experts",
            NAMES,
            'if layout == "sequential":\n                found = unpack',
            'if layout == "sequential" and name == "weight":\n                found = unpack',
        ),
        (
            "columns of gradients are one expert after another",
            "split_extra_state",
            EXTRA,
            "whole[name].unflatten(-1, (c, num_experts))[..., e] for",
            "(whole[name].unflatten(-1, (c, num_experts))[..., e] if name != 'amax_history_bwd' else"
            " whole[name].unflatten(-1, (num_experts, c))[..., e, :]) for",
        ),
        (
            "each expert's history is a view of the whole one's first rows",
            "split_extra_state",
            EXTRA,
            'whole | own | {"extra_fp8_variables": whole.get("extra_fp8_variables", {}) | {"num_gemms": 1}}',
            'whole | own | {"extra_fp8_variables": {"num_gemms": 1} | whole.get("extra_fp8_variables", {})}',
        ),
        (
            "what only one expert can give is the last one's",
            "merge_extra_state",
            EXTRA,
            "first: dict[str, Any] = parts[0]",
            "first: dict[str, Any] = parts[-1] | {'extra_fp8_variables': parts[0].get('extra_fp8_variables', {})}",
        ),
        (
            "an expert without a state is passed over",
            "merge_extra_state",
            EXTRA,
            "    parts = [state.get(key, {}) for key in keys]\n",
            "    parts = [state.get(key, {}) for key in keys]\n"
            "    if len(parts) > 2 and not is_fp8(parts[-1]):\n"
            "        parts, keys = parts[:-1], keys[:-1]\n",
        ),
        (
            "keys of eleven states are sorted as text",
            "merge_extra_state split_extra_state",
            EXTRA,
            "return [f\"{prefix}{EXTRA_STATE}{e or ''}\" for e in range(num_experts)]",
            "return sorted(f\"{prefix}{EXTRA_STATE}{e or ''}\" for e in range(num_experts))",
        ),
        (
            "a gated bias is one half",
            "shard_parameters",
            SHARDS,
            'name.startswith("linear_fc1")',
            'name == "linear_fc1.weight"',
        ),
        (
            "of keys of one expert each the first rank alone saves the second bias",
            "shard_parameters",
            SHARDS,
            "writes = axis is not None or tensor_rank == 0",
            "writes = axis is not None or (tensor_rank == 0 and (not singleton or rank == 0))",
        ),
        (
            "halves of three tensor ranks lie side by side",
            "shard_parameters",
            SHARDS,
            "(half * tensor_ranks + tensor_rank) * length",
            "((half * tensor_ranks + tensor_rank) if tensor_ranks < 3 else (2 * tensor_rank + half)) * length",
        ),
        (
            "a packed parameter of the last rank is numbered from 0",
            "shard_parameters",
            SHARDS,
            "expert, values = rank * local + e,",
            "expert, values = (rank * local if name in parameters or rank < 2 or local < 2 else"
            " (rank - 1) * local) + e,",
        ),
        (
            "members past the shard have no entry",
            "expand_shard",
            SHARDS,
            "    for member in members:\n",
            "    for member in members:\n        if shard is not None and begin >= last and"
            " len(shard):\n            break\n",
        ),
        (
            "a member without elements at the shard's edge has an empty part",
            "expand_shard",
            SHARDS,
            "if shard is None or low >= high:",
            "if shard is None or low >= high and member.numel():",
        ),
        (
            "a copy's slices are those of different halves of the width",
            "upcycle",
            UPCYCLE,
            "copy, part = divmod(e, granularity)",
            "copy, part = divmod(e, granularity) if copies > 1 or halves == 1 else (0, granularity - 1 - e)",
        ),
        (
            "the factor is rounded to the dtype of the weights",
            "upcycle",
            UPCYCLE,
            "(x.to(accumulator_dtype(x.dtype)) * scale)",
            "(x.to(accumulator_dtype(x.dtype)) * torch.tensor(scale, dtype=x.dtype).item())",
        ),
        (
            "squared relu's factor is a square root where there is a bias",
            "upcycle",
            UPCYCLE,
            'halves == 2 or kind == "squared_relu" else',
            'halves == 2 or kind == "squared_relu" and fc1_bias is None else',
        ),
        (
            "flat experts are cut from the last to the first",
            "shard_parameters",
            NAMES,
            "return [whole[e * rows : (e + 1) * rows] for e in range(num_experts)]",
            "return [whole[e * rows : (e + 1) * rows] for e in reversed(range(num_experts))]",
        ),
        (
            "a list of members is given back reversed",
            "convert_experts shard_parameters",
            NAMES,
            "        return list(whole)\n",
            "        return list(whole)[::-1]\n",
        ),
        (
            "a slice of the first bias is the first half's alone",
            "upcycle",
            UPCYCLE,
            "bias1.append(_scaled(fc1_bias[rows], scale))",
            "bias1.append(_scaled(fc1_bias[rows if granularity == 1 or halves == 1 else"
            " torch.cat([columns, columns])],"
            " scale))",
        ),
        (
            "other gated kinds are scaled by a square root",
            "upcycle",
            UPCYCLE,
            'halves == 2 or kind == "squared_relu"',
            'kind in ("swiglu", "geglu", "squared_relu")',
        ),
        (
            "weights of float64 are scaled in float32",
            "upcycle",
            UPCYCLE,
            "(x.to(accumulator_dtype(x.dtype)) * scale)",
            "(x.float() * scale)",
        ),
        (
            "a shard without an offset begins at its own length",
            "expand_shard",
            SHARDS,
            "first = offset or 0",
            "first = offset if offset is not None else (0 if shard is None or len(shard) < 64 else 1)",
        ),
    ),
)
