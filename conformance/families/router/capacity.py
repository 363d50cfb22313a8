"""drop_tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Contract, Problem
from conformance.core.signature import Input, Output, Signature
from conformance.families.router.cases import FLOATS, LoadCase, map_of, numbers
from conformance.judge import Expectation, Given
from conformance.judge.choice import Chosen
from conformance.judge.exact import Exact
from moe_ref.router.capacity import drop_tokens


class DropTokens(Contract[LoadCase]):
    """`drop_tokens`: kept tokens by the rule of margins, exact keys; their probs and gradient."""

    function = "drop_tokens"
    case_type = LoadCase
    signature = Signature(
        inputs=[
            Input("probs", "TE", FLOATS, gradient=True, masked=True),
            Input("routing_map", "TE", ("bool", "uint8", "int32", "int64"), field="map_dtype"),
        ],
        outputs=[Output("probs", "TE", of="probs"), Output("routing_map", "TE")],
        settings=("drop_policy", "pad_to_capacity"),
        required=("capacity",),
        linear=("probs", "probs"),  # with twice the probabilities the same tokens are kept
    )

    def legal(self, case: LoadCase) -> Problem:
        chosen = map_of(case)
        probs = torch.where(chosen, numbers(case, "probs", (case.tokens, case.experts)), torch.nan)
        settings: dict[str, Any] = {"capacity": case.capacity}
        settings |= {"drop_policy": case.policy} if case.policy != "probs" else {}
        settings |= {"pad_to_capacity": True} if case.pad else {}
        required = {"probs": probs, "routing_map": chosen.to(getattr(torch, case.map_dtype))}
        return self.call(case, required, settings)

    def expected(self, case: LoadCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        probs, routing_map = problem.required.values()
        capacity = problem.settings["capacity"]
        routed = routing_map != 0
        reference = drop_tokens(probs, routing_map, **problem.settings)
        by_position = problem.settings.get("drop_policy") == "position"
        rank = -torch.arange(len(probs), dtype=torch.float64)[:, None].expand(probs.shape)
        value = rank if by_position else probs.double()
        keys = torch.where(routed, value, -torch.inf).T
        counts = torch.full((probs.shape[1],), min(capacity, len(probs)))
        if not problem.settings.get("pad_to_capacity"):
            counts = torch.minimum(counts, routed.sum(0))
        inputs = (torch.where(routed, value, -torch.inf).T, routed.double().T)
        lowest = declared.get("tie_rule") == "lowest_index"
        choice = Chosen(reference.routing_map, keys, torch.zeros_like(keys), counts, inputs, lowest, dim=0)

        def kept(out: Mapping[str, Any]) -> Tensor:
            return (out["routing_map"] != 0) & routed

        expectations: dict[str, Expectation] = {
            "routing_map": choice,
            "probs": Given(reference.probs, lambda out: Exact(torch.where(kept(out), probs, 0), "values")),
        }
        if problem.wanted:
            d_probs = problem.cotangents["probs"]
            expectations["d_probs"] = Given(d_probs, lambda out: Exact(torch.where(kept(out), d_probs, 0), "values"))
        return expectations
