"""Products take descriptors only of tensors that can have them, whatever their widths."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_fast.experts import hopper, linear, scaled_linear
from moe_fast.experts.scaled_linear import Precision, quantized_rows, quantized_weight, scaled_plan
from moe_fast.experts.segments import make_plan
from moe_fast.launch import backend
from moe_fast.launch.tuning import GroupedTile
from moe_ref.config import Recipe
from tests.common.fast import interpreted, normal

pytestmark = interpreted
TILE = GroupedTile(hopper.MATMUL_ROWS, 128, 64, num_warps=8, num_stages=3)
ROWS, WIDTHS = 128, (1, 2, 4, 6, 8, 12, 16, 24)
PRECISION = Precision(Recipe("block"), None, None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products that a Hopper would launch, by the module of their kernel; none runs."""
    modules: list[str] = []

    def launch(kernel: Any, grid: Any, like: Any = None) -> Any:
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        return lambda *arguments, **settings: modules.append(kernel.__module__.rpartition(".")[2])

    for module in (linear, scaled_linear, hopper):
        monkeypatch.setattr(module, "launch", launch)
    for module in (linear, scaled_linear):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(backend, "has_descriptors", lambda device: True)
    monkeypatch.setattr(scaled_linear, "INTERPRETED", False)
    monkeypatch.setattr(scaled_linear, "casts_in_hardware", lambda device: True)
    return modules


def rows(width: int, seed: int) -> Tensor:
    return normal(ROWS, width, seed=seed, dtype=torch.bfloat16)


def test_a_gradient_of_codes_has_scales_in_whole_lines_or_another_kernel(launched):
    """A line of scales has 4 bytes for each output: 16 only for multiples of 4."""
    counts = torch.tensor([ROWS])
    plan = scaled_plan(counts, ROWS, PRECISION.recipe)
    d_outs, xs = (
        {width: quantized_rows(rows(width, seed), role, counts, PRECISION, False, True) for width in WIDTHS}
        for seed, role in ((1, "grad_output"), (2, "input"))
    )
    for outs in WIDTHS:
        for ins in WIDTHS:
            launched.clear()
            scaled_linear.scaled_wgrad(d_outs[outs], xs[ins], plan)
            in_lines = outs % 4 == 0 and ins % 8 == 0
            assert launched[-1] == ("_hopper_codes" if in_lines else "_scaled_linear"), (outs, ins)


def test_products_of_codes_and_of_rows_have_descriptors_or_another_kernel(launched):
    counts = torch.tensor([ROWS])
    cut, plan = scaled_plan(counts, ROWS, PRECISION.recipe), make_plan(counts, ROWS, TILE)
    for ins in WIDTHS:
        x = quantized_rows(rows(ins, 1), "input", counts, PRECISION, True, False)
        for outs in WIDTHS:
            weight = rows(ins, 2)[:outs]
            launched.clear()
            scaled_linear.scaled_fprop(x, quantized_weight(weight[None], PRECISION, True, False), cut)
            assert launched[-1] == ("_hopper_codes" if outs % 8 == ins % 16 == 0 else "_scaled_linear"), (outs, ins)
            launched.clear()
            linear._multiply(rows(ins, 1), weight.T[None], None, plan)
            assert launched == ["_hopper_rows" if outs % 8 == ins % 8 == 0 else "_linear"], (outs, ins)
            launched.clear()
            linear._outer_products(rows(outs, 1), rows(ins, 2), None, plan)
            assert launched == ["_hopper" if outs % 8 == ins % 8 == 0 else "_linear"], (outs, ins)
