"""Cases with rows of whole 16-byte lines, for which a GPU has special kernels."""

from typing import Any

import torch

import moe_ref
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.families.quantization.space import tiles_of_lines
from tests.common.suite import outcome_of, wrapped

SCOPE = scope_of("quantize", Space(device="cuda"))


def rows_past_the_last(quantize: Any, x: Any, recipe: Any, *, splits: Any = None, **settings: Any) -> Any:
    """The last group has the rows that no group has."""
    if splits is not None and int(splits.sum()) < len(x):
        past = torch.zeros_like(splits)
        past[-1] = len(x) - splits.sum()
        splits = splits + past
    return quantize(x, recipe, splits=splits, **settings)


def test_each_of_them_shows_rows_that_are_taken_for_a_groups():
    cases = tiles_of_lines(SCOPE)
    assert {(case.dtype, case.direction) for case in cases if case.experts} == {
        ("bfloat16", "both"),
        ("float16", "columnwise"),
        ("float32", "columnwise"),
    }
    assert all(case.hidden > 2 * 128 and case.hidden % 16 == 0 < case.hidden % 128 for case in cases)
    assert set(cases) <= set(SCOPE.always())
    implementation = wrapped("quantize", rows_past_the_last)
    for case in cases:
        assert outcome_of(case, moe_ref).status == "PASS"
        assert outcome_of(case, implementation).status == ("FAIL" if case.experts else "PASS")
