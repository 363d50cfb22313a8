"""Defects of how calls of the permutation follow one another."""

from typing import Any

from torch import Tensor

from conformance.core import call_defects as calls
from conformance.core.defect import Defect, Wrapper


def _itself_where_nothing_moves(sort_chunks: Wrapper, rows: Tensor, *rest: Any, **settings: Any) -> Any:
    out = sort_chunks(rows, *rest, **settings)
    order = rest[-1]
    in_order = order.tolist() == list(range(len(order))) and out.rows.shape == rows.shape
    return out._replace(rows=rows) if in_order and not rows.requires_grad else out


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "C11", "the output is the input where nothing moves", calls.CALLS, {"sort_chunks": _itself_where_nothing_moves}
    ),
    Defect(
        "C12",
        "backward reads what the last forward kept",
        calls.CALLS,
        {"unpermute": calls.backward_of_the_last_forward()},
    ),
    Defect(
        "C13",
        "one output buffer for all calls of a shape",
        calls.CALLS,
        {"unpermute": calls.one_buffer_of_each_shape()},
    ),
    Defect("C14", "each third call of a shape is wrong", calls.CALLS, {"unpermute": calls.wrong_at_the_third_call()}),
    Defect(
        "C15",
        "a second backward reads memory that the first has reused",
        calls.CALLS,
        {"permute": calls.empties_what_backward_keeps},
    ),
    Defect(
        "C16", "the first thread alone has its tables", calls.CALLS, {"unpermute": calls.set_up_by_the_first_thread()}
    ),
    Defect("C17", "the global generator is advanced", calls.CALLS, {"permute": calls.draws_from_the_generator}),
)
