"""latent_projection: grouped_linear of one expert with all tokens, in high and low precision.

Cases of grouped_linear; experts, counts, tail, accumulator and index_dtype are ignored.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from conformance.core.contract import Problem
from conformance.core.signature import Input, Output
from conformance.core.tensors import payload
from conformance.families.experts.cases import GroupedCase, grouped_rows, weights_of
from conformance.families.experts.linear import GroupedLinear, product_signature
from conformance.judge import Bounded, Expectation
from conformance.judge.ratios import RowWise

OF_GROUPED = {"x": "rows", "weight": "weight", "bias": "bias"}  # the names here, and the names in grouped_linear


class LatentProjection(GroupedLinear):
    """`latent_projection`: the output, and the gradients of x, the weight and the bias."""

    function = "latent_projection"
    signature = product_signature(
        [
            Input("x", "TN", gradient=True),
            Input("weight", "MN", gradient=True),
            Input("bias", "M", field="bias", optional="bias", gradient=True),
        ],
        Output("out", "TM", of="x"),
        linear="x",
    )

    def legal(self, case: GroupedCase) -> Problem:
        grouped_case, unit = of_one_expert(case), case.unit
        required = {
            "x": grouped_rows(grouped_case, "rows", unit * case.hidden),
            "weight": weights_of(grouped_case, "weight", unit * case.width, unit * case.hidden)[0],
        }
        settings = {"bias": payload(case.seed, "bias", (1, unit * case.width), case.bias)[0]} if case.bias else {}
        return self.called(grouped_case, required, settings)

    def expected(self, case: GroupedCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        x, weight, *_ = problem.required.values()
        state = {name: value for name, value in problem.required.items() if name not in OF_GROUPED}
        required = {"rows": x, "weight": weight[None], "tokens_per_expert": torch.tensor([len(x)])} | state
        settings = problem.settings | ({"bias": problem.settings["bias"][None]} if "bias" in problem.settings else {})
        wanted = tuple(OF_GROUPED[name] for name in problem.wanted)
        grouped = super().expected(
            case, Problem("grouped_linear", required, settings, {}, wanted, problem.cotangents), declared
        )
        expectations = {"out": grouped["out"]} | ({"d_x": grouped["d_rows"]} if "d_rows" in grouped else {})
        return expectations | {name: of_one(grouped[name]) for name in ("d_weight", "d_bias") if name in grouped}


def of_one_expert(case: GroupedCase) -> GroupedCase:
    """The case of grouped_linear with one expert."""
    return replace(case, experts=1, counts=(), tail=0, accumulator="")


def of_one(expected: Expectation) -> Expectation:
    """The expectation of the only expert."""
    assert isinstance(expected, Bounded)
    if not isinstance(expected, RowWise):
        return replace(expected, value=expected.value[0], bound=expected.bound[0])
    groups = None if expected.groups is None else expected.groups[0]
    return replace(
        expected,
        value=expected.value[0],
        bound=expected.bound[0],
        reference=expected.reference[0],
        magnitude=expected.magnitude[0],
        groups=groups,
    )
