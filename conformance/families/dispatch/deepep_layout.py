"""deepep_layout, which one rank calls alone before anything is sent."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from conformance.core.contract import Contract, Problem
from conformance.families.permutation.routing_map import IndicesCase, indices, simpler_indices
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.dispatch.deepep import deepep_layout


class DeepEPLayout(Contract[IndicesCase]):
    """`deepep_layout`: which ranks a token goes to, how many each gets, and the slots of each expert."""

    function = "deepep_layout"
    outputs = ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank")
    primary = "is_token_in_rank"

    def legal(self, case: IndicesCase) -> Problem:
        required = {"indices": indices(case).to(getattr(torch, case.index_dtype))}
        return Problem(
            self.function, required, {"num_experts": case.experts, "ranks": case.ranks}, {case.layout_of: case.layout}
        )

    def expected(self, case: IndicesCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        out = deepep_layout(problem.required["indices"], **problem.settings)
        return {name: Exact(getattr(out, name), "integers") for name in self.outputs}

    def neighbour(self, case: IndicesCase) -> IndicesCase:
        experts = case.experts + case.ranks
        return replace(
            case, golden="", law="", seed=case.seed + 1, slots=(), experts=experts, layout="contiguous", layout_of=""
        )

    def simpler(self, case: IndicesCase) -> Iterator[IndicesCase]:
        return simpler_indices(case)
