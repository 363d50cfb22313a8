"""Mistakes in names, shards and experts of checkpoints."""

from tests.mutants.kernels import series

DEFECTS = series(
    "S",
    (
        (
            "a packed parameter that is there already is written over by the experts'",
            "normalize_parameters",
            "parameters/names.py",
            "if packed and key not in state and all(present):",
            "if packed and all(present):",
        ),
        (
            "a packed vector of each expert is cut into rows of one",
            "normalize_parameters convert_experts",
            "parameters/names.py",
            "(whole if whole.shape[0] == num_experts else",
            "(whole if whole.shape[0] == num_experts and whole.dim() > 2 else",
        ),
        (
            "a state that lacks the first expert's parameter is left as it is, not refused",
            "convert_experts",
            "parameters/names.py",
            "if found.keys() & set(source):",
            "if source[0] in found:",
        ),
        (
            "a gated fc1's bias is one half",
            "shard_parameters",
            "parameters/shards.py",
            'gated and name.startswith("linear_fc1")',
            'gated and name == "linear_fc1.weight"',
        ),
        (
            "a member past the end of the shard has a part of no elements",
            "expand_shard",
            "parameters/shards.py",
            "if shard is None or low == high:",
            "if shard is None or high == 0 or begin == end:",
        ),
        (
            "a layer's extra state without extra_fp8_variables is split without num_gemms",
            "split_extra_state",
            "parameters/shards.py",
            'variables = {"extra_fp8_variables": {**whole.get("extra_fp8_variables", {}), "num_gemms": 1}}',
            'variables = {"extra_fp8_variables": {**of, "num_gemms": 1}} '
            'if (of := whole.get("extra_fp8_variables")) else {}',
        ),
        (
            "the bias of a gated layer is cut as that of a plain one",
            "upcycle",
            "parameters/upcycling.py",
            "of_experts(fc1_bias, 0, halves)",
            "of_experts(fc1_bias, 0, 1)",
        ),
        (
            "weights of two bytes are scaled by a factor of two bytes",
            "upcycle",
            "parameters/upcycling.py",
            "return x.to(wide).mul(scale).to(x.dtype)",
            "return x.to(wide).mul(torch.tensor(scale, dtype=x.dtype)).to(x.dtype)",
        ),
    ),
)
