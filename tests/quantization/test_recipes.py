"""Recipes: what is refused, what is quantised how, and the rules that scales come from, against
exact and hand-made values.
"""

import pytest

from moe_ref.config import (
    MoEConfig,
    Operand,
    Recipe,
    pads_expert_rows,
    quantization_alignment,
    recipe_of,
)
from moe_ref.config.quantization import DEFAULTS, SCALINGS
from moe_ref.quantization.formats import E2M1, E4M3, E5M2
from moe_ref.quantization.recipes import (
    operands,
    scheme,
)


def test_options_that_are_left_out_become_the_defaults_of_the_scaling():
    assert Recipe("delayed") == Recipe(
        "delayed", fp8_format="hybrid", margin=0, amax_history_len=1024, amax_compute_algo="max"
    )
    assert Recipe("current") == Recipe("current", fp8_format="hybrid", power_of_two_scales=False, amax_epsilon=0.0)
    assert Recipe("block") == Recipe("block", fp8_format="e4m3", power_of_two_scales=True, two_dimensional_weights=True)
    assert Recipe("mxfp8") == Recipe("mxfp8", fp8_format="e4m3", two_dimensional_weights=False)
    assert (Recipe("nvfp4").hadamard, Recipe("nvfp4").stochastic_rounding, Recipe("nvfp4").two_dimensional_weights) == (
        True,
        True,
        True,
    )


REFUSED = {
    "scaling is 'tensor'": {"scaling": "tensor"},
    "fp8_format is 'e5m2'": {"scaling": "current", "fp8_format": "e5m2"},
    "margin is -1": {"scaling": "delayed", "margin": -1},
    "margin is 0.5": {"scaling": "delayed", "margin": 0.5},
    "amax_history_len is 0": {"scaling": "delayed", "amax_history_len": 0},
    "amax_compute_algo is 'mean'": {"scaling": "delayed", "amax_compute_algo": "mean"},
    "amax_epsilon is -1.0": {"scaling": "current", "amax_epsilon": -1.0},
    "power_of_two_scales is 1": {"scaling": "current", "power_of_two_scales": 1},
    "four_over_six is 'inputs'": {"scaling": "nvfp4", "four_over_six": "inputs"},
    "four_over_six_error is 'MAE'": {"scaling": "nvfp4", "four_over_six_error": "MAE"},
    "four_over_six is 'all' with hadamard True": {"scaling": "nvfp4", "four_over_six": "all"},
    "four_over_six is 'activations' with hadamard True": {"scaling": "nvfp4", "four_over_six": "activations"},
    "row_scaled_activation is True with hadamard True": {"scaling": "nvfp4", "row_scaled_activation": True},
    "backward_override is 'float32'": {"scaling": "mxfp8", "backward_override": "float32"},
    "backward_override is 'dequantized' with scaling 'delayed'": {
        "scaling": "delayed",
        "backward_override": "dequantized",
    },
}


@pytest.mark.parametrize(("message", "options"), REFUSED.items(), ids=list(REFUSED))
def test_illegal_settings_are_refused_by_name_and_value(message, options):
    with pytest.raises(ValueError, match=f"^{message}"):
        Recipe(**options)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_option_of_another_scaling_is_refused(scaling):
    foreign = {
        name: value
        for table in DEFAULTS.values()
        for name, value in table.items()
        if name not in DEFAULTS[scaling] and value is not None
    }
    assert foreign
    for name, value in foreign.items():
        with pytest.raises(ValueError, match=f"^{name} is .* with scaling '{scaling}'; it must be left out"):
            Recipe(scaling, **{name: value})


def test_4over6_of_weights_goes_with_the_hadamard_transform_of_activations():
    assert Recipe("nvfp4", four_over_six="weights").hadamard
    assert Recipe("nvfp4", four_over_six="all", row_scaled_activation=True, hadamard=False).row_scaled_activation


def configured(**options) -> MoEConfig:
    base = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 8,
        "bf16": True,
        "params_dtype": "bf16",
    }
    base |= {"add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu"}
    return MoEConfig(**(base | options))


ALIGNMENT = [
    ({}, 0),
    ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, 32),
    ({"fp8": "e4m3", "fp8_recipe": "delayed"}, 16),
    ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, 16),
    ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16),
    ({"fp8": "e4m3", "fp8_recipe": "custom"}, 16),
    ({"fp4": "e2m1"}, 128),
    ({"use_transformer_engine_op_fuser": True}, 256),
    ({"use_transformer_engine_op_fuser": True, "moe_grouped_gemm": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}, 256),
]


@pytest.mark.parametrize(("options", "rows"), ALIGNMENT)
def test_alignment_is_that_of_megatrons_table(options, rows):
    assert quantization_alignment(configured(**options)) == rows


@pytest.mark.parametrize(
    ("options", "pads"),
    [
        ({}, False),
        ({"use_transformer_engine_op_fuser": True}, False),
        ({"fp8": "e4m3"}, True),
        ({"fp8": "e4m3", "moe_token_dispatcher_type": "alltoall", "moe_router_padding_for_quantization": True}, False),
        ({"fp8": "e4m3", "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}, False),
        ({"fp8": "e4m3", "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}, True),
        ({"fp8": "e4m3", "moe_flex_dispatcher_backend": "hybridep", "moe_token_dispatcher_type": "alltoall"}, True),
    ],
)
def test_experts_pad_unless_somebody_before_them_does(options, pads):
    assert pads_expert_rows(configured(**options)) is pads


def test_deepep_pads_grouped_tensors_if_its_fused_permutation_can():
    flex = {"moe_token_dispatcher_type": "flex", "moe_permute_fusion": True}
    config = configured(use_transformer_engine_op_fuser=True, moe_grouped_gemm=True, **flex)
    assert not pads_expert_rows(config)
    assert pads_expert_rows(config, pad_permute=False)


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, None),
        ({"fp8": "e4m3"}, Recipe("delayed", fp8_format="e4m3")),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, Recipe("current")),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, Recipe("block")),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, Recipe("mxfp8")),
        ({"fp4": "e2m1"}, Recipe("nvfp4")),
    ],
)
def test_a_configuration_names_a_recipe(options, recipe):
    assert recipe_of(configured(**options)) == recipe


def test_a_custom_recipe_is_refused():
    with pytest.raises(ValueError, match="fp8_recipe is 'custom'"):
        recipe_of(configured(fp8="e4m3", fp8_recipe="custom"))


# ---- what is quantised how


def test_hybrid_gives_gradients_e5m2_and_nothing_else():
    for scaling in ("delayed", "current", "block", "mxfp8"):
        hybrid, e4m3 = Recipe(scaling, fp8_format="hybrid"), Recipe(scaling, fp8_format="e4m3")
        assert [scheme(hybrid, role).format for role in ("input", "weight", "grad_output")] == [E4M3, E4M3, E5M2]
        assert [scheme(e4m3, role).format for role in ("input", "weight", "grad_output")] == [E4M3] * 3
    assert scheme(Recipe("nvfp4"), "grad_output").format == E2M1


def test_only_weights_have_square_blocks():
    blocks = {
        role: [scheme(Recipe(scaling), role).block for scaling in SCALINGS]
        for role in ("input", "weight", "grad_output")
    }
    tensor = (None, None)
    assert blocks["input"] == blocks["grad_output"] == [tensor, tensor, (1, 128), (1, 32), (1, 16)]
    assert blocks["weight"] == [tensor, tensor, (128, 128), (1, 32), (16, 16)]
    assert scheme(Recipe("mxfp8", two_dimensional_weights=True), "weight").block == (32, 32)


def test_nvfp4_transforms_columns_of_activations_and_gradients_and_rounds_gradients_at_random():
    forms = [(role, columnwise) for role in ("input", "weight", "grad_output") for columnwise in (False, True)]
    schemes = [scheme(Recipe("nvfp4"), role, columnwise=columnwise) for role, columnwise in forms]
    assert [form for form, form_scheme in zip(forms, schemes, strict=True) if form_scheme.hadamard] == [
        ("input", True),
        ("grad_output", True),
    ]
    assert [form for form, form_scheme in zip(forms, schemes, strict=True) if form_scheme.stochastic] == [
        ("grad_output", False),
        ("grad_output", True),
    ]


@pytest.mark.parametrize(
    ("bound", "expected"),
    [("all", [256, 256]), ("weights", [448, 256]), ("activations", [256, 448]), ("none", [448, 448])],
)
def test_4over6_never_reaches_gradients_and_is_bounded_in_its_own_scope(bound, expected):
    recipe = Recipe("nvfp4", hadamard=False, four_over_six="all", four_over_six_bound_256=bound)
    schemes = [scheme(recipe, role) for role in ("input", "weight", "grad_output")]
    assert [form_scheme.four_over_six for form_scheme in schemes] == [True, True, False]
    assert [form_scheme.scale_max for form_scheme in schemes] == [*expected, 448]


def test_every_product_reads_blocks_along_its_contraction():
    assert operands("fprop", Recipe("mxfp8")) == (Operand("weight", False), Operand("input", False))
    assert operands("dgrad", Recipe("mxfp8")) == (Operand("weight", True), Operand("grad_output", False))
    assert operands("wgrad", Recipe("mxfp8")) == (Operand("input", True), Operand("grad_output", True))


@pytest.mark.parametrize("scaling", SCALINGS[1:])
@pytest.mark.parametrize(("override", "reading"), [("high_precision", "stored"), ("dequantized", "dequantized")])
def test_an_overridden_backward_reads_no_columns_and_no_quantised_gradient(scaling, override, reading):
    recipe = Recipe(scaling, backward_override=override)
    assert operands("fprop", recipe) == operands("fprop", Recipe(scaling))
    assert operands("dgrad", recipe) == (Operand("weight", False, reading), Operand("grad_output", False, "stored"))
    assert operands("wgrad", recipe) == (Operand("input", False, reading), Operand("grad_output", False, "stored"))


def test_a_row_scaled_4over6_activation_has_a_wgrad_where_the_backward_is_overridden():
    recipe = Recipe(
        "nvfp4", hadamard=False, four_over_six="all", row_scaled_activation=True, backward_override="dequantized"
    )
    assert operands("wgrad", recipe)[0] == Operand("input", False, "dequantized")


def test_wgrad_of_a_row_scaled_4over6_activation_is_refused():
    recipe = Recipe("nvfp4", hadamard=False, four_over_six="all", row_scaled_activation=True)
    with pytest.raises(ValueError, match="gemm is 'wgrad' with a row-scaled activation"):
        operands("wgrad", recipe)
    with pytest.raises(ValueError, match="gemm is 'forward'"):
        operands("forward", recipe)
    with pytest.raises(ValueError, match="role is 'bias'"):
        scheme(recipe, "bias")


# ---- scales from amax
