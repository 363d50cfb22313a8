"""shared_experts: output and every gradient, the gate's too, by running error analysis."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.mlp_stages import Call
from conformance.analysis.running import Running
from conformance.analysis.shared_stages import shared_backward, shared_forward
from conformance.core.contract import Contract, Problem, computed_in
from conformance.core.signature import Input, Output, Signature
from conformance.families.experts.activations import activation_settings
from conformance.families.experts.cases_mlp import (
    OVERFLOW,
    SharedCase,
    fc1_columns,
    rows_of,
    weight_of,
    with_large_cotangents,
)
from conformance.families.experts.judged_mlp import Judged, in_reference, or_not_finite
from conformance.families.experts.precision_mlp import beside_recipe, layers_of, with_pairs
from conformance.judge import Bounded, Expectation
from moe_ref.experts.shared import shared_experts


class SharedExperts(Contract[SharedCase]):
    """`shared_experts`: the output, and the gradients of x, both weights and the gate."""

    function = "shared_experts"
    case_type = SharedCase
    signature = Signature(
        inputs=[
            Input("x", "TH", gradient=True),
            Input("fc1_weight", "GH", gradient=True),
            Input("fc2_weight", "HF", gradient=True),
            Input("gate_weight", "OH", optional="gate", gradient=True),
        ],
        outputs=[Output("out", "TH", of="x")],
        settings=(
            *("kind", "offset", "clamp", "alpha", "interleave", "fp8_input_store", "recompute"),
            *("recipe", "state", "noise"),
        ),
    )

    def legal(self, case: SharedCase) -> Problem:
        one_expert = replace(case, experts=1)
        rows, hidden, width = (size * case.unit for size in (case.tokens, case.hidden, case.width))
        required = {
            "x": rows_of(case, "x"),
            "fc1_weight": weight_of(one_expert, "fc1_weight", fc1_columns(case), hidden)[0],
            "fc2_weight": weight_of(one_expert, "fc2_weight", hidden, width)[0],
        }
        settings = {"gate_weight": weight_of(one_expert, "gate_weight", 1, hidden)[0]} if case.gate else {}
        settings |= activation_settings(case) | ({"recompute": True} if case.again else {})
        tensors, recipe_settings = beside_recipe(one_expert, (rows,), (fc1_columns(case), hidden))
        problem = self.call(case, required, settings | recipe_settings, lengths={"T": rows, "H": hidden})
        problem = with_large_cotangents(case, problem)
        return with_pairs(problem, self.outputs, tensors)

    def expected(self, case: SharedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        x, fc1_weight, fc2_weight, *_ = problem.required.values()
        gate, dtype = problem.settings.get("gate_weight"), computed_in(declared, x)
        lost = ~x.isfinite().all(1)
        clean, count = torch.where(lost[:, None], 0, x), torch.tensor([len(x)])
        low = layers_of(problem, declared, x, count)
        call = Call(
            clean,
            count,
            fc1_weight[None],
            fc2_weight[None],
            None,
            None,
            None,
            problem.settings,
            dtype,
            dtype,
            dtype,
            low,
        )
        terms = len(x) + sum(fc1_weight.shape)
        overflows = case is not None and case.values == OVERFLOW
        judged = Judged(call, len(x), count, lost, in_reference(shared_experts, problem), terms, overflows)
        expectations = _expected(problem, judged, gate)
        if not overflows:
            return expectations
        return or_not_finite(expectations, _expected(problem, replace(judged, call=replace(call, marked=True)), gate))


def _expected(problem: Problem, judged: Judged, gate: Tensor | None) -> dict[str, Expectation]:
    """The expectation of the output, and of each wanted gradient."""
    stages, stored = shared_forward(judged.call, gate), problem.required["x"].dtype
    expectations = {"out": judged.by_row("out", stages.out, stored, stages.product, stages.inherited)}
    if not problem.wanted:
        return expectations
    stage_gradients = shared_backward(stages, Running.of(problem.cotangents["out"], judged.call.sums))
    gradients: dict[str, Callable[[], Expectation]] = {
        "x": lambda: judged.by_row(
            "d_x", stage_gradients.x, stored, stage_gradients.mlp.row_product, stage_gradients.inherited
        ),
        "fc1_weight": lambda: _of_one(judged.by_expert("d_fc1_weight", stage_gradients.mlp.fc1_weight()[0], stored)),
        "fc2_weight": lambda: _of_one(judged.by_expert("d_fc2_weight", stage_gradients.mlp.fc2_weight()[0], stored)),
        "gate_weight": lambda: judged.by_expert("d_gate_weight", _not_none(stage_gradients.gate_weight), stored),
    }
    return expectations | {f"d_{name}": gradients[name]() for name in problem.wanted}


def _of_one(expected: Expectation) -> Expectation:
    """The expectation of the only expert."""
    assert isinstance(expected, Bounded)
    return replace(expected, value=expected.value[0], bound=expected.bound[0])


def _not_none(x: Running | None) -> Running:
    assert x is not None
    return x
