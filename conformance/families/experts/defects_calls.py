"""Defects of how calls of the experts follow one another."""

from typing import Any

import torch
from torch import Tensor

from conformance.core import autocast_defects as autocast
from conformance.core import call_defects as calls
from conformance.core.defect import Defect, Wrapper, int32_view, with_values
from conformance.core.gradient_defects import NEGATED, reads_no_pending_minus


def _short_bias_by_recipe(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    bias = settings.get("bias")
    short = (
        settings | {"bias": with_values(bias, lambda _: int32_view(bias.detach()))} if bias is not None else settings
    )
    return function(*inputs, **(short if settings.get("recipe") else settings))


def _adds_twice_to_its_own_result() -> Wrapper:
    """What the last call has returned is its buffer, to which a product has already been added."""
    last: list[Tensor] = []

    def wgrad(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out, into = base(*inputs, **settings), settings.get("accumulate_into")
        if into is not None and last and last[0].shape == into.shape and torch.equal(last[0].to(into), into):
            out = base(*inputs, **settings | {"accumulate_into": out})
        last[:] = [out.detach().clone()] if into is not None else []
        return out

    return wgrad


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
    Defect("C44", "without a graph the options are ignored", calls.CALLS, {"glu": calls.another_path_under_no_grad}),
    Defect("C45", "a graph is kept under no_grad", calls.CALLS, {"grouped_linear": calls.a_graph_of_its_own}),
    Defect(
        "C08",
        "the backward scales the cotangent in place",
        calls.CALLS,
        {"grouped_linear": calls.changes_the_cotangent},
    ),
    Defect("C09", "a factor cached by address", calls.CALLS, {"glu": calls.cached_by_address()}),
    Defect("C27", "gradients lack their own derivatives", calls.SECOND, {"glu": calls.drops_the_second_derivative}),
    Defect(
        "C28",
        "a second derivative is refused only where a cotangent requires grad",
        calls.SECOND,
        {"grouped_linear": calls.refuses_only_where_a_cotangent_requires_grad},
    ),
    Defect(
        "Y42", "a pending minus is not read", NEGATED, dict.fromkeys(("glu", "grouped_linear"), reads_no_pending_minus)
    ),
    Defect(
        "Y43",
        "32-bit row · stride of a bias, in products by a recipe",
        "a mistake that 32-bit addresses invite",
        dict.fromkeys(("grouped_linear", "latent_projection"), _short_bias_by_recipe),
    ),
    Defect(
        "C35",
        "a sum over its own result is added twice",
        calls.CALLS,
        {"grouped_wgrad": _adds_twice_to_its_own_result()},
    ),
    Defect(
        "C36",
        "the backward is in bfloat16 where autocast is entered",
        autocast.INVITED,
        {"glu": autocast.backward_in_bfloat16},
    ),
    Defect(
        "C37",
        "a cast under autocast is kept for later calls of its shape",
        autocast.INVITED,
        {"activation": autocast.first_of_a_shape()},
    ),
    Defect(
        "C40",
        "float64 is cast to bfloat16 where autocast is entered",
        autocast.INVITED,
        {"grouped_dgrad": autocast.inputs_in_bfloat16},
    ),
    Defect(
        "C41",
        "the backward reads the memory of the result",
        calls.CALLS,
        dict.fromkeys(("glu", "grouped_linear"), calls.backward_reads_the_result),
    ),
    Defect("C43", "a result of equal rows is expanded", calls.CALLS, {"grouped_linear": calls.expands_equal_rows}),
    Defect("C10", "the default dtype is left changed", calls.CALLS, {"grouped_wgrad": calls.leaves_another_dtype}),
)
