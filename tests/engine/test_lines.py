"""Each matrix has rows of whole lines in layouts that look like contiguous lines and are none."""

from functools import cache
from typing import Any

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.each_value import LINED
from conformance.core.space import Space
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from tests.common.suite import outcome_of, wrapped

SPACES = {"CPU": Space(), "GPU": Space(device="cuda", ranks=1, shared_ranks=4)}
LINE = 16
# functions, their matrices, and the sizes that are the lengths of rows
MATRICES = [
    ("grouped_linear", "rows", ("hidden", "width")),
    ("grouped_linear", "weight", ("hidden", "width")),
    ("grouped_mlp", "rows", ("hidden", "width")),
    ("glu", "h", ("width",)),
    ("quantize", "x", ("hidden",)),
    ("permute", "tokens", ("hidden",)),
    ("moe_layer", "x", ("hidden", "width")),
    ("topk_routing", "logits", ("experts",)),
]


@cache
def cases(function: str, device: str) -> list[Any]:
    return cases_of(Section("covering", function), PROFILES["gate"], SPACES[device], 0)


def is_lined(case: Any, lengths: tuple[str, ...]) -> bool:
    return case.layout in LINED and all(getattr(case, name) * case.unit % LINE == 0 for name in lengths)


@pytest.mark.parametrize("device", SPACES)
@pytest.mark.parametrize(("function", "name", "lengths"), MATRICES)
def test_each_layout_of_a_matrix_has_whole_lines(function, name, lengths, device):
    lined = [case for case in cases(function, device) if case.layout_of == name and is_lined(case, lengths)]
    assert {case.layout for case in lined} == {*LINED}


@pytest.mark.parametrize("device", SPACES)
@pytest.mark.parametrize(("function", "name"), [("grouped_linear", "rows"), ("glu", "h"), ("permute", "tokens")])
def test_an_input_of_whole_lines_has_a_call_without_gradients(function, name, device):
    lengths = tuple(
        length for tensor, of, of_tensor in MATRICES if (tensor, of) == (function, name) for length in of_tensor
    )
    of = [case for case in cases(function, device) if (case.layout, case.layout_of) == ("uneven", name)]
    assert {bool(case.grads) for case in of if is_lined(case, lengths)} == {True, False}


@pytest.mark.parametrize("layout", LINED)
def test_a_lined_case_has_several_rows_of_whole_lines(layout):
    (first, *_) = (
        case
        for case in cases("grouped_linear", "GPU")
        if (case.layout, case.layout_of) == (layout, "rows") and is_lined(case, ("hidden", "width"))
    )
    rows = CONTRACTS["grouped_linear"].problem(first).tensors["rows"]
    assert len(rows) > 1 and rows.shape[1] % LINE == 0 and rows.dtype == torch.bfloat16


# ---- kernels that take whole lines for contiguous, aligned ones


def adjacent(x: torch.Tensor) -> torch.Tensor:
    """What is read where the rows' strides are not looked at."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def begun_evenly(x: torch.Tensor) -> torch.Tensor:
    """What is read where each row begins at a multiple of eight elements, or before one."""
    starts = [x.stride(0) * i + x.storage_offset() for i in range(len(x))]
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return torch.stack([memory[start // 8 * 8 :][: x.shape[1]] for start in starts]) if starts else x


MISTAKES = {"rows that lie apart": adjacent, "rows that begin anywhere": begun_evenly}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_kernel_that_takes_lines_for_what_they_are_not_is_found(mistake):
    def mistaken(original: Any, rows: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        lines = rows.shape[1] % LINE == 0 and rows.stride(1) == 1 and rows.numel() and not rows.is_neg()
        read = rows.detach() if lines else rows
        read = MISTAKES[mistake](read) if lines else rows
        return original(rows + (read - rows).detach() if lines else rows, *arguments, **settings)

    implementation, lengths = wrapped("grouped_linear", mistaken), ("hidden", "width")
    of_rows = [case.changed(law="") for case in cases("grouped_linear", "GPU") if case.layout_of == "rows"]
    failing = {case.layout for case in of_rows if outcome_of(case, implementation).status == "FAIL"}
    assert failing <= {*LINED} and failing & {"uneven"}
    arguments = [case for case in of_rows if not is_lined(case, lengths)]
    assert "FAIL" not in {outcome_of(case, implementation).status for case in arguments}
