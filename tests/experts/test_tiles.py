"""The cases of a GPU's gate reach the products that move tiles by descriptors."""

from collections import Counter
from typing import Any

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from moe_fast.experts import hopper
from moe_fast.launch.tuning import GPU

SPACE = Space("cuda", few_kernels=True)
LINE = 16  # bytes that a descriptor's strides are multiples of


def reached(function: str) -> Counter[Any]:
    """(dtype, groups of a tile of codes or 0, whether gradients are wanted) of those of its cases
    that always run, and have tiles of many rows.
    """
    scope, tiles = scope_of(function, SPACE), Counter()
    for case in scope.always():
        problem = CONTRACTS[function].problem(case)
        tensors = [x for x in problem.required.values() if x.is_floating_point()]
        counts = problem.required.get("tokens_per_expert")
        experts = 1 if counts is None else len(counts)
        rows, dtype = len(tensors[0]), tensors[0].dtype
        lines = all(x.shape[-1] * x.itemsize % LINE == 0 for x in tensors)
        if dtype.itemsize > 2 or not lines:
            continue
        if case.scaling == "block":
            tiles[dtype, hopper.rows_of_tile(rows, experts) // hopper.HEIGHT, bool(problem.wanted)] += 1
        elif not case.scaling and GPU.grouped.tile(rows, experts, dtype.itemsize).rows == hopper.MATMUL_ROWS:
            tiles[dtype, 0, bool(problem.wanted)] += 1
    return tiles


@pytest.mark.parametrize("function", ["grouped_linear", "grouped_dgrad", "grouped_wgrad"])
def test_products_of_rows_and_of_codes_have_cases_with_tall_tiles(function):
    counts, wanted = reached(function), function == "grouped_linear"
    for dtype in (torch.bfloat16, torch.float16):
        assert counts[dtype, 0, wanted]
    assert counts[torch.bfloat16, 3, wanted]


@pytest.mark.parametrize("function", ["grouped_mlp", "shared_experts"])
def test_layers_have_cases_with_tall_tiles_with_and_without_gradients(function):
    counts = reached(function)
    assert counts[torch.bfloat16, 0, True] and counts[torch.bfloat16, 0, False] and counts[torch.float16, 0, False]


def test_few_rows_reach_no_tile_of_a_descriptor():
    scope = scope_of("grouped_linear", SPACE)
    assert GPU.grouped.tile(scope.case({"tokens": 9, "experts": 4}).tokens, 4, 2).rows != hopper.MATMUL_ROWS
