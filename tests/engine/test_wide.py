"""On a GPU each structure has a case of several tiles in each dimension, with the same options."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.axes import Size
from conformance.core.case import axes_of
from conformance.core.scope import Scope
from conformance.core.signature import FAR
from conformance.core.space import Space
from conformance.core.wide import LINE, MANY, widened
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, structures_of
from conformance.engine.choose.profiles import PROFILES
from tests.common.suite import outcome_of, wrapped

GPU = Space(device="cuda", ranks=1, shared_ranks=4)
WIDE = [name for name, contract in CONTRACTS.items() if contract.shapes.wide]
ROWS, COLUMNS = 128, 256  # where another tile begins


@cache
def structures(function: str) -> list[list[Any]]:
    return list(structures_of(Section("covering", function), PROFILES["gate"], GPU, 0))


def reaches(case: Any) -> bool:
    """Whether the case has its family's wide sizes."""
    wide = CONTRACTS[case.function].shapes.wide.items()
    lengths = [(name, length, case.row_unit if name == "tokens" else case.unit) for name, length in wide]
    return all(getattr(case, name) * unit >= length for name, length, unit in lengths if not callable(length))


def wide_structures(function: str) -> list[list[Any]]:
    return [structure for structure in structures(function) if len(structure) > 1 and reaches(structure[-1])]


def wide_cases(function: str) -> list[Any]:
    return [structure[-1] for structure in wide_structures(function)]


def scope(function: str) -> Scope:
    return scope_of(function, replace(GPU, few_kernels=True))


@pytest.mark.parametrize("function", WIDE)
def test_structures_have_a_wide_case_with_their_options(function):
    chosen = wide_structures(function)
    assert len(chosen) >= 4
    for first, *_, last in chosen:
        assert last in [widened(scope(function), first, whole_lines) for whole_lines in (False, True)]
        options = [name for name, axis in axes_of(type(first)).items() if not (axis.data or isinstance(axis, Size))]
        assert {name: getattr(last, name) for name in options} == {name: getattr(first, name) for name in options}


@pytest.mark.parametrize("function", ["grouped_linear", "glu", "grouped_mlp"])
def test_some_wide_cases_are_of_whole_lines_and_some_are_not(function):
    assert {case.width % LINE == 0 for case in wide_cases(function)} == {True, False}


@pytest.mark.parametrize("function", WIDE)
def test_rows_and_columns_have_different_numbers_of_tiles(function):
    lengths = CONTRACTS[function].shapes.wide
    columns = [lengths[name] for name in ("hidden", "width") if name in lengths and "tokens" in lengths]
    assert all(-(-lengths["tokens"] // COLUMNS) != -(-length // COLUMNS) for length in columns), "a swap shows nothing"


def test_a_cpu_has_none():
    on_a_cpu = structures_of(Section("covering", "grouped_mlp"), PROFILES["gate"], Space(), 0)
    assert not any(reaches(case) for structure in on_a_cpu for case in structure)


@pytest.mark.parametrize("changes", [{"experts": MANY + 1, "tokens": MANY + 1}, {"hidden": 300, "width": 300}])
def test_large_cases_and_those_of_many_experts_stay_as_they_are(changes):
    case = structures("grouped_linear")[0][0]
    assert widened(scope("grouped_linear"), case) is not None
    assert widened(scope("grouped_linear"), scope("grouped_linear").mended(case.changed(counts=(), **changes))) is None


@pytest.mark.parametrize("layout", FAR)
def test_far_cases_stay_as_they_are(layout):
    far = [case for case in scope("glu").far() if case.layout == layout]
    assert [widened(scope("glu"), case) for case in far] == [None] * len(far)


# ---- mistakes past the first tile, with one option


def lost(x: torch.Tensor) -> torch.Tensor:
    """x with 0 where other tiles than the first would be, in both dimensions."""
    x = x.clone()
    x[ROWS:, COLUMNS:] = 0
    return x


MISTAKES = {
    "probs on the input": ("grouped_mlp", lambda settings: settings.get("probs_on_input")),
    "a second bias": ("sequential_mlp", lambda settings: settings.get("fc2_bias") is not None),
    "a clamp of a layer": ("shared_experts", lambda settings: settings.get("clamp")),
    "delayed scaling": ("latent_projection", lambda settings: settings.get("state") is not None),
    "an interleaved gate": ("glu", lambda settings: settings.get("interleave")),
    "a clamp": ("glu_and_quantize", lambda settings: settings.get("clamp")),
    "probs": ("glu_backward_and_quantize", lambda settings: settings.get("probs") is not None),
    "no probs": ("permute", lambda settings: settings.get("probs") is None),
}


@pytest.mark.parametrize("option", MISTAKES)
def test_a_second_tile_that_an_option_loses_is_found(option):
    function, has = MISTAKES[option]

    def mistaken(original: Any, x: torch.Tensor, *others: Any, **settings: Any) -> Any:
        return original(lost(x) if has(settings) else x, *others, **settings)

    implementation = wrapped(function, mistaken)
    first = [structure[0] for structure in structures(function)]
    small = [case.changed(law="") for case in first if not case.is_large and case.tokens <= ROWS]
    assert "FAIL" not in {outcome_of(case, implementation).status for case in small}
    assert "FAIL" in {outcome_of(case, implementation).status for case in wide_cases(function)}
