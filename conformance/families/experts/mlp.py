"""`grouped_mlp` and `sequential_mlp`: the output and all gradients."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from conformance.analysis.mlp_inherited import Inherited
from conformance.analysis.mlp_stages import Call, backward, forward
from conformance.analysis.running import Running
from conformance.core.contract import Contract, Problem, computed_in
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import DTYPES, payload
from conformance.families.experts.activations import activation_settings
from conformance.families.experts.cases import counts_of, probs_of
from conformance.families.experts.cases_mlp import (
    OVERFLOW,
    MlpCase,
    fc1_columns,
    rows_of,
    weight_of,
    with_large_cotangents,
)
from conformance.families.experts.judged_mlp import Judged, Padding, in_reference, or_not_finite
from conformance.families.experts.precision_mlp import beside_recipe, layers_of, rows_unit, with_pairs
from conformance.judge import Expectation
from moe_ref.experts.mlp import grouped_mlp

SETTINGS = (
    *("kind", "offset", "clamp", "alpha", "interleave", "round_before_probs", "fp8_input_store"),
    *("probs_on_input", "align", "recompute"),
)
SIGNATURE = Signature(
    inputs=[
        Input("rows", "PH", gradient=True),
        Input("probs", "P", field="probs", optional="probs", gradient=True),
        Input("fc1_weight", "LGH", gradient=True),
        Input("fc2_weight", "LHF", gradient=True),
        Input("fc1_bias", "LG", field="bias1", optional="bias1", gradient=True),
        Input("fc2_bias", "LH", field="bias2", optional="bias2", gradient=True),
        Input("tokens_per_expert", "L", ("int64", "int32"), field="index_dtype"),
    ],
    outputs=[Output("out", "PH", of="rows")],
    settings=(*SETTINGS, "recipe", "state", "noise"),
)


class GroupedMlp(Contract[MlpCase]):
    """`grouped_mlp`: the output, and the gradients of rows, probs, both weights and both biases."""

    function = "grouped_mlp"
    case_type = MlpCase
    signature = SIGNATURE

    def legal(self, case: MlpCase) -> Problem:
        hidden, width = (size * case.unit for size in (case.hidden, case.width))
        counts = tuple(count * rows_unit(case) for count in counts_of(case))
        total = sum(counts)
        required = {
            "rows": rows_of(case, "rows", case.tail),
            "tokens_per_expert": torch.tensor(counts, dtype=DTYPES[case.index_dtype]),
            "fc1_weight": weight_of(case, "fc1_weight", fc1_columns(case), hidden),
            "fc2_weight": weight_of(case, "fc2_weight", hidden, width),
        }
        settings: dict[str, Any] = {}
        if case.probs:
            settings["probs"] = probs_of(case.seed, total + case.tail, case.probs, case.weights)
            settings["probs"][total:] = torch.nan
        for name, dtype, columns in (("fc1_bias", case.bias1, fc1_columns(case)), ("fc2_bias", case.bias2, hidden)):
            settings |= {name: payload(case.seed, name, (case.experts, columns), dtype)} if dtype else {}
        options = {"probs_on_input": case.on_input, "align": case.align, "recompute": case.recompute}
        settings |= activation_settings(case) | {name: value for name, value in options.items() if value}
        tensors, recipe_settings = beside_recipe(case, counts, (fc1_columns(case), hidden))
        lengths = {"P": total + case.tail, "H": hidden}
        problem = with_large_cotangents(case, self.call(case, required, settings | recipe_settings, lengths=lengths))
        for x in problem.cotangents.values():
            x[total:] = torch.nan
        return with_pairs(problem, self.outputs, tensors)

    def expected(self, case: MlpCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        rows, counts, fc1_weight, fc2_weight, *_ = problem.required.values()
        settings, total = problem.settings, int(counts.sum())
        probs, bias1, bias2 = (settings.get(name) for name in ("probs", "fc1_bias", "fc2_bias"))
        real_rows, p = rows[:total], None if probs is None else probs[:total]
        lost = ~real_rows.isfinite().all(1)
        lost = lost if p is None else lost | ~p.isfinite()
        padding = Padding.of(counts, settings["align"] if settings.get("recipe") and "align" in settings else 1)
        call = Call(
            padding.pad(torch.where(lost[:, None], 0, real_rows)),
            padding.counts_L,
            fc1_weight,
            fc2_weight,
            p if p is None else padding.pad(torch.where(lost, 0, p)),
            bias1,
            bias2,
            settings,
            computed_in(declared, rows),
            computed_in(declared, rows, probs),
            computed_in(declared, rows, probs, bias2),
            layers_of(problem, declared, rows, padding.counts_L),
        )
        judged = Judged(
            call,
            len(rows),
            counts,
            lost,
            in_reference(grouped_mlp, problem),
            int(counts.max()) + sum(fc1_weight.shape[1:]),
            case is not None and case.values == OVERFLOW,
        )
        expectations = _expected(problem, judged, padding)
        if not judged.overflows:
            return expectations
        marked = replace(judged, call=replace(call, marked=True))
        return or_not_finite(expectations, _expected(problem, marked, padding))


class SequentialMlp(GroupedMlp):
    """`sequential_mlp`: the same function, without states and noise."""

    function = "sequential_mlp"
    signature = replace(SIGNATURE, settings=(*SETTINGS, "recipe"))


def _flat(x: Running | None) -> Running:
    assert x is not None
    return Running(x.value[:, 0], x.error[:, 0], x.dtype)


def _expected(problem: Problem, judged: Judged, padding: Padding) -> dict[str, Expectation]:
    """The expectation of the output, and of each wanted gradient."""
    call, dtype = judged.call, problem.required["rows"].dtype
    stages = forward(call)
    inherited = Inherited(stages)
    expectations = {"out": judged.by_row("out", padding.trim(stages.out), dtype, stages.y, inherited.out)}
    if not problem.wanted:
        return expectations
    d_out = Running.of(padding.pad(problem.cotangents["out"][: len(judged.lost)]), call.sums)
    gradients = _gradients(problem, judged, padding, inherited, d_out)
    return expectations | {f"d_{name}": gradients[name]() for name in problem.wanted}


def _gradients(
    problem: Problem, judged: Judged, padding: Padding, inherited: Inherited, d_out: Running
) -> dict[str, Callable[[], Expectation]]:
    """The expectation of each gradient."""
    stage_gradients, settings = backward(inherited.stages, d_out), problem.settings
    dtype, probs = problem.required["rows"].dtype, settings.get("probs")
    no_expert = torch.zeros(len(judged.counts_L), dtype=torch.bool)
    unspoilt = no_expert if probs is None or settings.get("probs_on_input") else judged.lost_experts
    return {
        "rows": lambda: judged.by_row(
            "d_rows",
            padding.trim(stage_gradients.rows),
            dtype,
            stage_gradients.row_product,
            lambda: inherited.rows(stage_gradients),
        ),
        "probs": lambda: judged.by_row("d_probs", padding.trim(_flat(stage_gradients.probs)), settings["probs"].dtype),
        # no ratio: errors within a row of d_h are correlated
        "fc1_weight": lambda: judged.by_expert("d_fc1_weight", stage_gradients.fc1_weight()[0], dtype),
        "fc2_weight": lambda: judged.by_expert(
            "d_fc2_weight",
            (second := stage_gradients.fc2_weight())[0],
            dtype,
            second[1],
            lambda: inherited.fc2_weight(d_out),
        ),
        "fc1_bias": lambda: judged.by_expert("d_fc1_bias", stage_gradients.fc1_bias, settings["fc1_bias"].dtype),
        "fc2_bias": lambda: judged.by_expert(
            "d_fc2_bias", stage_gradients.fc2_bias, settings["fc2_bias"].dtype, unspecified=unspoilt
        ),
    }
