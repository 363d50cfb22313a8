"""`flatten_experts`, which a rank calls by itself between a router and a dispatcher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.core.axes import choice, dtypes, number, size
from conformance.core.case import Case
from conformance.core.contract import Contract, Problem, accumulator_of
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import hashed, payload
from conformance.judge import Expectation
from conformance.judge.bound import sum_bound
from conformance.judge.exact import Exact
from moe_ref.dispatch.indices import flatten_experts

FLOATS = ("float32", "bfloat16", "float16")
MAPS = ("bool", "int64", "uint8")


@dataclass(frozen=True, kw_only=True)
class FlatCase(Case):
    """A routing map or its probabilities, the groups that hold the experts, and their shards."""

    tokens: int = size("T")
    experts: int = size("E", at_least=1)
    groups: int = size(at_least=1, divides="experts", argument="expert_parallel")  # of ranks that share experts
    shards: int = number(1, *range(2, 9), pairs=(2, 3), argument="expert_tensor_parallel")  # ranks of a group
    dtype: str = dtypes(*FLOATS, also=(*MAPS, "float64"))
    values: str = choice("dyadic", also=("special",), data=True)


def entries(case: FlatCase) -> Tensor:
    """[T,E] numbers, or a map."""
    shape = (case.tokens, case.experts)
    if case.dtype in MAPS:
        bits = hashed(case.seed, "x", case.tokens * case.experts) % 2
        return torch.from_numpy(bits.astype("int64")).reshape(shape).to(getattr(torch, case.dtype))
    return payload(case.seed, "x", shape, case.dtype, case.values)


class FlattenExperts(Contract[FlatCase]):
    """`flatten_experts`: each group's columns once for each of its ranks, and their gradient."""

    function = "flatten_experts"
    case_type = FlatCase
    signature = Signature(
        inputs=[Input("x", "TE", (*FLOATS, *MAPS), gradient=True)],
        outputs=[Output("x", "TF", of="x")],
        required=("expert_parallel", "expert_tensor_parallel"),
    )

    def legal(self, case: FlatCase) -> Problem:
        settings = {"expert_parallel": case.groups, "expert_tensor_parallel": case.shards}
        return self.call(case, {"x": entries(case)}, settings, lengths={"F": case.experts * case.shards})

    def expected(self, case: FlatCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        x = problem.required["x"]
        expectations: dict[str, Expectation] = {"x": Exact(flatten_experts(x, **problem.settings))}
        if problem.wanted:
            shard_gradients = problem.cotangents["x"].double().unflatten(1, (case.groups, case.shards, -1))
            total, magnitude = (y.sum(2).flatten(1) for y in (shard_gradients, shard_gradients.abs()))
            accumulator = accumulator_of(declared, x.dtype)
            expectations["d_x"] = sum_bound(total, magnitude, case.shards, x.dtype, accumulator)
        return expectations
