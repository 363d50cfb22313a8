"""`hybridep_dispatch` with a recipe.

Its rows are opaque, and are judged by their codes and scales, as those of `quantize` are. `amax` is
not judged, because it is not sent.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.analysis.forms import QuantizedForm, one_nan
from conformance.core.contract import Problem
from conformance.families.dispatch.cases import PROGRAMS, DispatchCase
from conformance.families.dispatch.dispatcher import together
from conformance.families.dispatch.maps import OUTPUTS, MapDispatch
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation, Given
from moe_ref.config import Recipe
from moe_ref.quantization.quantize import Form

RECIPES = {
    "fp8": Recipe("block", power_of_two_scales=False),
    "powers": Recipe("block"),
    "least": Recipe("block", power_of_two_scales=False, amax_epsilon=1.5),
}
KEYWORDS = ("probs", "align", "num_rows", "recipe", *PROGRAMS, "group")
READERS = ("codes", "scales", "dequantize", "hybridep_combine")  # that `_script` and `_read` call
NAMES = {name: name for name in ("amax", "scales", "codes", "values", "scales.gemm")}


class HybridEPDispatch(MapDispatch):
    """`hybridep_dispatch`: plain rows, or rows read by `codes`, `scales` and `dequantize`."""

    def __init__(self) -> None:
        super().__init__("hybridep_dispatch")

    def calls(self, case: DispatchCase) -> list[Problem]:
        calls = super().calls(case)
        return [with_recipe(call, RECIPES[case.fp8]) for call in calls] if case.fp8 else calls

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        if not case.fp8:
            return super().right(case, calls, declared)
        expectations = super().right(case, [_without_recipe(call) for call in calls], declared)
        results = together(calls)
        numbers = [_numbers(moe_ref.codes(out.rows)) for out in results]
        sums = moe_ref.hybridep_combine(numbers, [out.handle for out in results])
        reciprocal = declared.get("scale_arithmetic") == "reciprocal"
        return [
            {name: x for name, x in rank_expectations.items() if name != "rows"}
            | _form_right(out, reciprocal)
            | {"sums": Exact(total.tokens, "values")}
            for rank_expectations, out, total in zip(expectations, results, sums, strict=True)
        ]


def with_recipe(call: Problem, recipe: Recipe) -> Problem:
    """The call with a recipe. The cotangent is that of the dequantised rows."""
    layouts = {"d_dequantized" if of == "d_rows" else of: layout for of, layout in call.layouts.items()}
    cotangents = {"dequantized" if name == "rows" else name: x for name, x in call.cotangents.items()}
    settings = call.settings | {"recipe": recipe}
    call_with_recipe = replace(call, settings=settings, layouts=layouts, cotangents=cotangents)
    return replace(call_with_recipe, script=_script, first=call.required, read=_read, others=READERS)


def _without_recipe(call: Problem) -> Problem:
    cotangents = {"rows" if name == "dequantized" else name: x for name, x in call.cotangents.items()}
    return replace(
        call, settings={name: x for name, x in call.settings.items() if name != "recipe"}, cotangents=cotangents
    )


def _script(implementation: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Dispatch, dequantise, and find the order of the rows by a combine through the handle."""
    settings = {name: arguments[name] for name in KEYWORDS if name in arguments}
    outputs = named_outputs(
        implementation.call("hybridep_dispatch", arguments["tokens"], arguments["routing_map"], **settings), OUTPUTS
    )
    outputs["dequantized"] = implementation.call("dequantize", outputs["rows"])
    combined = implementation.call(
        "hybridep_combine", _numbers(outputs["dequantized"]), outputs["handle"], group=arguments["group"]
    )
    return outputs | {"sums": named_outputs(combined, ("tokens", "probs"))["tokens"]}


def _numbers(like: Tensor) -> Tensor:
    """A column with a unique number per row."""
    return torch.arange(1, len(like) + 1, dtype=torch.float32, device=like.device)[:, None]


def _read(implementation: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    """The codes, scales and values of the segments, in place of the rows. The number of rows is
    read on the host.
    """
    quantized, num_rows = outputs["rows"], max(int(outputs["tokens_per_expert"].sum()), 0)
    readings = {name: x for name, x in outputs.items() if name != "rows"}
    readings["codes"] = implementation.call("codes", quantized)[:num_rows]
    readings["scales"] = implementation.call("scales", quantized)
    return readings | {"values": one_nan(outputs["dequantized"].detach()[:num_rows])}


def _form_right(out: Any, reciprocal: bool) -> dict[str, Expectation]:
    """Expected codes, scales and values of one rank."""
    outputs = {
        "tokens_per_expert": out.tokens_per_expert,
        "rows": out.rows,
        "dequantized": moe_ref.dequantize(out.rows),
    }
    known_outputs = {"amax": moe_ref.amax(out.rows)}
    form: Form = out.rows.form(False)
    segment_form = replace(form, source_MN=form.source_MN[: int(out.tokens_per_expert.sum())])
    expectations = QuantizedForm(
        segment_form, NAMES, _read(Implementation(moe_ref), outputs) | known_outputs, reciprocal
    ).expectations()
    return {name: _knowing(x, known_outputs) for name, x in expectations.items() if name not in known_outputs}


def _knowing(expected: Expectation, known_outputs: dict[str, Tensor]) -> Expectation:
    """The expectation, with `known_outputs` added to the outputs that it reads."""
    return (
        Given(expected.value, lambda outputs: expected.make({**outputs, **known_outputs}))
        if isinstance(expected, Given)
        else expected
    )
