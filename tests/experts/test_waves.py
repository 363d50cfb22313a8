"""More tiles than a GPU has multiprocessors: a kernel whose programs stay takes one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.families.experts.space_waves import waves_of_layers, waves_of_products
from tests.common.suite import outcome_of, wrapped

GPU, CPU = Space(device="cuda"), Space()
PROGRAMS = 148
ROWS = 128  # of a tile
OF_WEIGHT = (128, 256)  # of a tile of a weight's gradient
PRODUCTS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad")


def cases_of(function: str, space: Space = GPU) -> list[Any]:
    waves = waves_of_layers if function == "grouped_mlp" else waves_of_products
    return waves(scope_of(function, space))


def row_tiles(counts: Tensor) -> list[tuple[int, int]]:
    """The rows of each tile, from first to end."""
    tiles_of_rows, begin = [], 0
    for count in counts.tolist():
        tiles_of_rows += [(first, min(first + ROWS, begin + count)) for first in range(begin, begin + count, ROWS)]
        begin += count
    return tiles_of_rows


def first_tiles(function: Any, rows: Tensor, *arguments: Any, **settings: Any) -> Any:
    """What no program's first tile has is left as it is: zeros."""
    out = function(rows, *arguments, **settings)
    if out.dim() == 3:  # of weights
        pieces = torch.arange(len(out)) * (-(-out.shape[1] // OF_WEIGHT[0]) * -(-out.shape[2] // OF_WEIGHT[1]))
        return torch.where((pieces < PROGRAMS)[:, None, None], out, 0)
    counts = next(x for x in arguments if x.dim() == 1)
    for first, end in row_tiles(counts)[PROGRAMS:]:
        out[first:end] = 0
    return out


def tiles(case: Any) -> int:
    if case.function == "grouped_wgrad":
        return case.experts * -(-case.width // OF_WEIGHT[0]) * -(-case.hidden // OF_WEIGHT[1])
    return len(row_tiles(torch.tensor(case.counts)))


@pytest.mark.parametrize("function", [*PRODUCTS, "grouped_mlp"])
def test_what_a_program_does_after_its_first_tile_shows_on_a_gpus_cases(function):
    cases = [case for case in cases_of(function) if tiles(case) > PROGRAMS]
    assert set(cases) <= set(scope_of(function, GPU).always())
    assert {case.scaling for case in cases} == ({""} if function == "grouped_mlp" else {"", "block"})
    assert outcome_of(cases[0], moe_ref).status == "PASS"
    assert {outcome_of(case, wrapped(function, first_tiles)).status for case in cases} == {"FAIL"}


@pytest.mark.parametrize("function", PRODUCTS[:2])
def test_experts_of_few_rows_have_several_waves_of_small_tiles(function):
    small_cases = [case for case in cases_of(function) if tiles(case) <= PROGRAMS]
    assert [case.scaling for case in small_cases] == ["", "current"]
    columns = {"grouped_linear": "width", "grouped_dgrad": "hidden"}[function]
    small = [sum(-(-count // 64) for count in case.counts) * -(-getattr(case, columns) // 128) for case in small_cases]
    assert min(small) > PROGRAMS


@pytest.mark.parametrize("function", [*PRODUCTS, "grouped_mlp"])
def test_an_interpreter_has_no_case_of_several_waves(function):
    assert cases_of(function, CPU) == []
