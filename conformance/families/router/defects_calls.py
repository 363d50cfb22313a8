"""Defects of how calls of the router follow one another."""

from conformance.core import autocast_defects as autocast
from conformance.core import call_defects as calls
from conformance.core.defect import Defect
from conformance.core.gradient_defects import (
    NEGATED,
    reads_no_pending_minus,
    reads_no_pending_minus_of_a_cotangent,
)

LOSSES = ("z_loss", "load_balancing_loss")
DEFECTS: tuple[Defect, ...] = (
    Defect("C30", "gradients lack their own derivatives", calls.SECOND, {"z_loss": calls.drops_the_second_derivative}),
    Defect(
        "U44", "a pending minus is not read", NEGATED, dict.fromkeys(("topk_routing", "gate"), reads_no_pending_minus)
    ),
    Defect(
        "U45",
        "a cotangent's pending minus is not read",
        NEGATED,
        dict.fromkeys(LOSSES, reads_no_pending_minus_of_a_cotangent),
    ),
    Defect("C18", "the global generator is advanced", calls.CALLS, {"topk_routing": calls.draws_from_the_generator}),
    Defect(
        "C19",
        "without gradients the options are ignored",
        calls.CALLS,
        {"topk_routing": calls.another_path_without_gradients},
    ),
    Defect(
        "C38", "the result is float32 where autocast is entered", autocast.INVITED, {"topk_routing": autocast.widened}
    ),
    Defect("C20", "each third call of a shape is wrong", calls.CALLS, {"gate": calls.wrong_at_the_third_call()}),
    Defect(
        "C21",
        "backward reads what the last forward kept",
        calls.CALLS,
        {"z_loss": calls.backward_of_the_last_forward()},
    ),
    Defect(
        "C22",
        "a second backward reads memory that the first has reused",
        calls.CALLS,
        {"aux_loss_scores": calls.empties_what_backward_keeps},
    ),
    Defect(
        "C23", "the default dtype is left changed", calls.CALLS, {"load_balancing_loss": calls.leaves_another_dtype}
    ),
)
