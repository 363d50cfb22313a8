"""The products for Hopper compile without one; on a Hopper the gate judges their results."""

import pytest

from moe_fast.experts import hopper
from moe_fast.experts.hopper import BAND, OUTER, STAGES
from tests.common.compiler import compiled
from tests.experts.compile_gluon import compile_gluon

SHARED_BYTES = 227 * 1024  # of a program
MATMUL = {
    "x_desc": ("fp8e4nv", [64, 128]),
    "weight_desc": ("fp8e4nv", [1, 128, 128]),
    "out_desc": ("bf16", [1, 1, 64, 128]),
}
ROWS = {"x_desc": ("bf16", [64, 64]), "out_desc": ("bf16", [1, 1, 64, 256])}
TURNED = {
    "d_out_desc": ("fp8e5", [64, 128]),
    "d_out_scale_desc": ("fp32", [1, 64]),
    "x_desc": ("fp8e4nv", [128, 128]),
    "x_scale_desc": ("fp32", [1, 128]),
    "out_desc": ("bf16", [1, 64, 128]),
}
WGRAD = {
    "d_out_desc": ("bf16", [1, 1, 32, 128]),
    "x_desc": ("bf16", [1, 1, 32, 256]),
    "out_desc": ("bf16", [1, 128, 256]),
}


@pytest.mark.parametrize(("turned", "bias"), [(True, "*bf16"), (False, None)])
def test_products_of_rows_compile(turned, bias):
    tiles = ROWS | {"weight_desc": ("bf16", [1, 256, 64] if turned else [1, 64, 256])}
    constants = {"TURNED": turned, **hopper.MATMUL}
    shared, products, spilled = compiled(compile_gluon, "experts._hopper_rows", "matmul_kernel", tiles, constants, bias)
    assert shared <= SHARED_BYTES and products == 4 * 2 and spilled == 0


@pytest.mark.parametrize("gathered", [False, True])
def test_activated_products_compile(gathered):
    tiles = {"weight_desc": ("bf16", [1, 2, 128, 64]), "out_desc": ("bf16", [1, 1, 64, 32])}
    constants = {"CURVE": "sigmoid", "CLAMPED": True, "ROUND_FIRST": True, **hopper.MATMUL}
    divisible, absent = ("tokens_ptr", "stride_tokens_t", "depth"), ("tokens_ptr", "source_ptr")
    shared, products, spilled = compiled(
        compile_gluon, "experts._hopper_gated", "activated_matmul_kernel", ROWS | tiles, constants, "*bf16",
        absent=() if gathered else absent, divisible=divisible if gathered else (),
        int64_names=("offset", "clamp", "alpha"),
    )  # fmt: skip
    assert shared <= SHARED_BYTES and spilled == 0
    assert products == 4 * 2 * 2  # of each group: the steps that activate, and the others


@pytest.mark.parametrize(("groups", "bias"), [(2, None), (3, "*bf16")])
def test_products_of_codes_compile(groups, bias):
    constants = {"GROUPS": groups, "STAGES": STAGES[groups], "num_warps": 4}
    shared, products, spilled = compiled(
        compile_gluon, "experts._hopper_codes", "scaled_matmul_kernel", MATMUL, constants, bias
    )
    assert shared <= SHARED_BYTES and products == 4 * groups and spilled == 0


def test_one_stage_more_is_too_many_for_three_groups():
    constants = {"GROUPS": 3, "STAGES": STAGES[3] + 1, "num_warps": 4}
    shared, *_ = compiled(compile_gluon, "experts._hopper_codes", "scaled_matmul_kernel", MATMUL, constants)
    assert shared > SHARED_BYTES


def test_the_weights_gradient_compiles():
    shared, products, spilled = compiled(
        compile_gluon, "experts._hopper", "outer_products_kernel", WGRAD, {"BAND": BAND, **OUTER}
    )
    assert shared <= SHARED_BYTES and products == 4 and spilled == 0
    constants = {"STAGES": STAGES[3], "BAND": BAND, "num_warps": 4}
    shared, products, spilled = compiled(
        compile_gluon, "experts._hopper_codes", "scaled_wgrad_kernel", TURNED, constants
    )
    assert shared <= SHARED_BYTES and products == 12 and spilled == 0
