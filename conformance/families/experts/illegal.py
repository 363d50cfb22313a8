"""Illegal calls of the experts."""

import torch

from conformance.core.illegal import Rule, flat, in_dtype, on_device, one_more, setting, together, with_values

# two rows, one per expert
COUNTS: dict[str, Rule] = {
    "count_negative": on_device(with_values("tokens_per_expert", torch.tensor([-1, 2]))),
    "counts_beyond_the_rows": on_device(with_values("tokens_per_expert", torch.tensor([2, 1]))),
    "counts_of_floats": in_dtype("tokens_per_expert", torch.float32),
    "accumulator_unknown": setting("accumulator", "bfloat16"),
}


def padded(counts: list[int]) -> Rule:
    """The counts of segments that are padded. A count of -1 becomes 0."""
    values = with_values("tokens_per_expert", torch.tensor(counts))
    return on_device(lambda problem: values(setting("align", 4)(problem)))


# two rows
HIDDEN: dict[str, Rule] = {
    "h_flat": flat("h"),
    "h_of_integers": in_dtype("h", torch.int32),
    "kind_unknown": setting("kind", "softmax"),
    "probs_too_long": setting("probs", torch.ones(3)),
    "probs_of_integers": setting("probs", torch.ones(2, dtype=torch.int64)),
}


OF_GATES: dict[str, Rule] = {
    "width_odd": one_more("h", 1),
    "kind_without_a_gate": setting("kind", "silu"),
    "clamp_zero": setting("clamp", 0.0),
    "alpha_of_a_tanh": together("alpha", kind="geglu", alpha=1.0),
    "interleave_no_divisor": setting("interleave", 3),
}


# two rows, one per expert, or two tokens; all widths are 1
MLP: dict[str, Rule] = {
    "fc1_weight_wider_than_rows": one_more("fc1_weight", -1),
    "fc1_width_odd": one_more("fc1_weight", -2),
    "fc2_weight_wider_than_activations": one_more("fc2_weight", -1),
    "fc2_weight_taller_than_rows": one_more("fc2_weight", -2),
    "weight_in_another_dtype": in_dtype("fc2_weight", torch.float16),
    "kind_unknown": setting("kind", "softmax"),
    "clamp_zero": setting("clamp", 0.0),
    "alpha_of_a_tanh": together("alpha", kind="geglu", alpha=1.0),
    "stored_input_of_another_gate": together("fp8_input_store", kind="geglu", fp8_input_store=True),
    "offset_without_a_gate": together("offset", kind="relu", offset=1.0),
    "interleave_no_divisor": setting("interleave", 3),
}


EXPERTS: dict[str, Rule] = (
    {name: rule for name, rule in COUNTS.items() if name.startswith("count")}
    | MLP
    | {
        "count_negative_padded": padded([-1, 2]),
        "counts_beyond_the_rows_padded": padded([2, 1]),
        "rows_flat": flat("rows"),
        "more_weights_than_counts": one_more("fc1_weight"),
        "fc2_of_more_experts": one_more("fc2_weight"),
        "fc1_bias_too_wide": setting("fc1_bias", torch.zeros(2, 3)),
        "fc2_bias_of_one_expert": setting("fc2_bias", torch.zeros(1, 1)),
        "fc2_bias_of_integers": setting("fc2_bias", torch.zeros(2, 1, dtype=torch.int64)),
        "probs_too_long": setting("probs", torch.ones(3)),
        "probs_of_integers": setting("probs", torch.ones(2, dtype=torch.int64)),
        "probs_on_input_without_probs": setting("probs_on_input", True),
        "align_zero": setting("align", 0),
        "recompute_unknown": setting("recompute", "fc1"),
    }
)


SHARED: dict[str, Rule] = MLP | {
    "x_flat": flat("x"),
    "gate_of_two_rows": setting("gate_weight", torch.zeros(2, 1)),
    "gate_wider_than_x": setting("gate_weight", torch.zeros(1, 2)),
    "gate_in_another_dtype": setting("gate_weight", torch.zeros(1, 1, dtype=torch.float16)),
}


GLU: dict[str, Rule] = HIDDEN | {
    "width_odd": one_more("h", 1),
    "kind_without_a_gate": setting("kind", "silu"),
    "offset_infinite": setting("offset", float("inf")),
    "clamp_zero": setting("clamp", 0.0),
    "clamp_negative": setting("clamp", -7.0),
    "alpha_zero": setting("alpha", 0.0),
    "alpha_of_a_tanh": together("alpha", kind="geglu", alpha=1.0),
    "interleave_zero": setting("interleave", 0),
    "interleave_no_divisor": setting("interleave", 3),
    "stored_input_of_another_gate": together("fp8_input_store", kind="geglu", fp8_input_store=True),
}
ACTIVATION: dict[str, Rule] = HIDDEN | {"kind_with_a_gate": setting("kind", "swiglu")}
GROUPED_LINEAR: dict[str, Rule] = COUNTS | {
    "weight_wider_than_rows": one_more("weight", 2),
    "more_weights_than_counts": one_more("weight"),
    "weight_in_another_dtype": in_dtype("weight", torch.float16),
    "rows_flat": flat("rows"),
    "bias_wider_than_weight": setting("bias", torch.zeros(2, 2)),
    "bias_of_integers": setting("bias", torch.zeros(2, 1, dtype=torch.int64)),
}
GROUPED_DGRAD: dict[str, Rule] = COUNTS | {
    "weight_taller_than_cotangent": one_more("weight", 1),
    "more_weights_than_counts": one_more("weight"),
    "weight_in_another_dtype": in_dtype("weight", torch.float16),
    "cotangent_flat": flat("d_out"),
}
GROUPED_WGRAD: dict[str, Rule] = COUNTS | {
    "rows_more_than_cotangents": one_more("rows"),
    "cotangent_in_another_dtype": in_dtype("d_out", torch.float16),
    "rows_flat": flat("rows"),
    "into_of_another_shape": setting("accumulate_into", torch.zeros(2, 1, 2)),
    "into_in_half": setting("accumulate_into", torch.zeros(2, 1, 1, dtype=torch.bfloat16)),
}
GROUPED_MLP: dict[str, Rule] = EXPERTS
SEQUENTIAL_MLP: dict[str, Rule] = EXPERTS
SHARED_EXPERTS: dict[str, Rule] = SHARED
LATENT_PROJECTION: dict[str, Rule] = {
    "x_flat": flat("x"),
    "x_of_integers": in_dtype("x", torch.int32),
    "weight_flat": flat("weight"),
    "weight_wider_than_x": one_more("weight", 1),
    "weight_in_another_dtype": in_dtype("weight", torch.float16),
    "bias_wider_than_weight": setting("bias", torch.zeros(2)),
    "bias_of_integers": setting("bias", torch.zeros(1, dtype=torch.int64)),
}
