"""The products for Hopper compile without one; on a Hopper the gate judges their results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_fast.experts.hopper import BAND, OUTER, STAGES

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 * 1024  # of a program
MATMUL = {
    "x_desc": ("fp8e4nv", [64, 128]),
    "weight_desc": ("fp8e4nv", [1, 128, 128]),
    "out_desc": ("bf16", [1, 1, 64, 128]),
}
TURNED = {
    "d_out_desc": ("fp8e5", [64, 128]),
    "d_out_scale_desc": ("fp32", [1, 64]),
    "x_desc": ("fp8e4nv", [128, 128]),
    "x_scale_desc": ("fp32", [1, 128]),
    "out_desc": ("bf16", [1, 64, 128]),
}
WGRAD = {
    "d_out_desc": ("bf16", [1, 1, 64, 128]),
    "x_desc": ("bf16", [1, 1, 64, 256]),
    "out_desc": ("bf16", [1, 128, 256]),
}


def compiled(
    module: str, kernel: str, tiles: dict, bias: str | None = None, *, more: dict | None = None, **constants: Any
) -> tuple[int, ...]:
    """Bytes of shared memory, products of the matrix unit, registers spilled."""
    request = {"module": module, "kernel": kernel, "tiles": tiles, "constants": constants, "bias": bias} | (more or {})
    command = [sys.executable, "-m", "tests.experts.compile_gluon", json.dumps(request)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return tuple(map(int, run.stdout.split()))


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("bias", [None, "*bf16"])
def test_products_of_codes_compile(groups, bias):
    constants = {"GROUPS": groups, "STAGES": STAGES[groups], "num_warps": 4}
    shared, products, spilled = compiled("experts._hopper_codes", "scaled_matmul_kernel", MATMUL, bias, **constants)
    assert shared <= SHARED_BYTES and products == 4 * groups and spilled == 0


def test_one_stage_more_is_too_many_for_three_groups():
    constants = {"GROUPS": 3, "STAGES": STAGES[3] + 1, "num_warps": 4}
    assert compiled("experts._hopper_codes", "scaled_matmul_kernel", MATMUL, None, **constants)[0] > SHARED_BYTES


def test_the_weights_gradient_compiles():
    shared, products, spilled = compiled("experts._hopper", "outer_products_kernel", WGRAD, BAND=BAND, **OUTER)
    assert shared <= SHARED_BYTES and products == 4 and spilled == 0
    constants = {"STAGES": STAGES[3], "BAND": BAND, "num_warps": 4}
    shared, products, spilled = compiled("experts._hopper_codes", "scaled_wgrad_kernel", TURNED, **constants)
    assert shared <= SHARED_BYTES and products == 12 and spilled == 0
