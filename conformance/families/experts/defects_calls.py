"""Defects of how calls of the experts follow one another."""

from conformance.core import call_defects as calls
from conformance.core.defect import Defect

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "C01",
        "backward reads what the last forward kept",
        calls.CALLS,
        {"grouped_linear": calls.backward_of_the_last_forward()},
    ),
    Defect(
        "C02", "backward reads what the last forward kept", calls.CALLS, {"glu": calls.backward_of_the_last_forward()}
    ),
    Defect(
        "C03",
        "a second backward reads memory that the first has reused",
        calls.CALLS,
        {"activation": calls.empties_what_backward_keeps},
    ),
    Defect(
        "C04",
        "one output buffer for all calls of a shape",
        calls.CALLS,
        {"grouped_dgrad": calls.one_buffer_of_each_shape()},
    ),
    Defect("C05", "each third call of a shape is wrong", calls.CALLS, {"glu": calls.wrong_at_the_third_call()}),
    Defect(
        "C06", "the first thread alone has its tables", calls.CALLS, {"activation": calls.set_up_by_the_first_thread()}
    ),
    Defect(
        "C07", "without gradients the options are ignored", calls.CALLS, {"glu": calls.another_path_without_gradients}
    ),
    Defect(
        "C08",
        "the backward scales the cotangent in place",
        calls.CALLS,
        {"grouped_linear": calls.changes_the_cotangent},
    ),
    Defect("C09", "a factor cached by address", calls.CALLS, {"glu": calls.cached_by_address()}),
    Defect("C10", "the default dtype is left changed", calls.CALLS, {"grouped_wgrad": calls.leaves_another_dtype}),
)
