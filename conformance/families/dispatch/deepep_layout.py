"""`deepep_layout`, which a rank calls by itself before any transfer."""

from collections.abc import Mapping
from typing import Any

import torch

from conformance.core.contract import Contract, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.families.permutation.cases import IndicesCase, indices
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.dispatch.deepep import deepep_layout


class DeepEPLayout(Contract[IndicesCase]):
    """`deepep_layout`: destination ranks per token, tokens per rank, slots per expert."""

    function = "deepep_layout"
    case_type = IndicesCase
    signature = Signature(
        inputs=[Input("indices", "TK", field="index_dtype")],
        outputs=[
            Output("num_tokens_per_rank", "R"),
            Output("num_tokens_per_expert", "E"),
            Output("is_token_in_rank", "TR"),
        ],
        required=("num_experts", "ranks"),
    )
    primary = "is_token_in_rank"

    def legal(self, case: IndicesCase) -> Problem:
        required = {"indices": indices(case).to(getattr(torch, case.index_dtype))}
        return self.call(case, required, {"num_experts": case.experts, "ranks": case.ranks})

    def expected(self, case: IndicesCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        out = deepep_layout(problem.required["indices"], **problem.settings)
        return {name: Exact(getattr(out, name), "integers") for name in self.outputs}
