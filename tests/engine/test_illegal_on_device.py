"""Illegal values that only the device sees: raise, show it, or mean what a legal call means."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_ref
from conformance.core.case import Case
from conformance.engine.child.evaluate import evaluate
from conformance.interface import Implementation
from moe_ref.config import SortedChunks


def judged(function: str, illegal: str, implementation: Callable[..., Any], **fields: Any) -> Any:
    """The outcome of the illegal call in an implementation of one function."""
    case = Case.family[function](function=function, illegal=illegal, **fields)
    return evaluate(case, Implementation(SimpleNamespace(**{function: implementation}), "made"))


def product(out: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """grouped_wgrad, with this in the place of a result for illegal counts."""

    def grouped_wgrad(
        d_out: torch.Tensor, rows: torch.Tensor, tokens_per_expert: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        return out(torch.ones(len(tokens_per_expert), d_out.shape[1], rows.shape[1], dtype=rows.dtype))

    return grouped_wgrad


@pytest.mark.parametrize("illegal", ["count_negative", "counts_beyond_the_rows"])
def test_a_result_that_is_nan_shows_illegal_counts_and_a_plausible_one_does_not(illegal):
    assert judged("grouped_wgrad", illegal, product(lambda out: out * torch.nan)).status == "PASS"
    plausible = judged("grouped_wgrad", illegal, product(lambda out: out))
    assert plausible.status == "FAIL"
    assert "or return NaN in each output of numbers" in plausible.finding["message"]


def test_an_implementation_that_raises_is_right():
    assert judged("grouped_wgrad", "count_negative", moe_ref.grouped_wgrad).status == "PASS"


def test_a_violation_that_the_host_sees_must_raise():
    outcome = judged("grouped_wgrad", "rows_flat", lambda *_, **__: torch.full((1, 1, 1), torch.nan))
    assert outcome.status == "FAIL"
    assert "NaN" not in outcome.finding["message"]


def chunks(rows: bool, probs: bool) -> Callable[..., Any]:
    """sort_chunks, which shows illegal sizes in these outputs."""

    def sort_chunks(x: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor, *, probs: Any = None) -> Any:
        shown = [None if y is None else y * torch.nan if marked else y for y, marked in ((x, rows), (probs, in_probs))]
        return SortedChunks(*shown)

    in_probs = probs
    return sort_chunks


@pytest.mark.parametrize(
    ("rows", "probs", "status"), [(True, True, "PASS"), (True, False, "FAIL"), (False, True, "FAIL")]
)
def test_each_output_of_numbers_shows_it(rows, probs, status):
    fields = {"sizes": (1, 2), "order": (1, 0), "hidden": 2, "probs": "float32"}
    assert judged("sort_chunks", "sizes_beyond_rows", chunks(rows, probs), **fields).status == status


@pytest.mark.parametrize(("read_as", "status"), [(-1, "PASS"), (0, "FAIL")])
def test_an_index_of_no_expert_is_an_empty_slot_but_not_another_expert(read_as, status):
    def indices_to_multihot(indices: torch.Tensor, *probs: Any, num_experts: int, **settings: Any) -> Any:
        legal = torch.where(indices < num_experts, indices, read_as)
        return moe_ref.indices_to_multihot(legal, *probs, num_experts=num_experts, **settings)

    assert judged("indices_to_multihot", "index_too_large", indices_to_multihot).status == status
