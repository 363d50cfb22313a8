"""drop_tokens, load_balancing_loss and update_expert_bias: what is done with a map, or with its counts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Contract, Problem
from conformance.core.tensors import payload
from conformance.families.router.cases import LoadCase, map_of, numbers
from conformance.judge import Expectation, Given
from conformance.judge.choice import Chosen
from conformance.judge.exact import Exact
from moe_ref.router.capacity import drop_tokens


class _OfLoads(Contract[LoadCase]):
    def neighbour(self, case: LoadCase) -> LoadCase:
        plain: dict[str, Any] = {"golden": "", "law": "", "layout": "contiguous", "layout_of": ""}
        policy = "position" if case.policy == "probs" else "probs"
        return replace(
            case,
            **plain,
            seed=case.seed + 1,
            experts=case.experts + 1,
            capacity=case.capacity + 1,
            policy=policy,
            coeff=case.coeff + 8,
        )

    def simpler(self, case: LoadCase) -> Iterator[LoadCase]:
        plain = (
            "law",
            "layout",
            "grads",
            "values",
            "pad",
            "policy",
            "total",
            "map_dtype",
            "dtype",
            "coeff",
            "rate",
            "bias",
            "even",
            "poison",
            "seed",
        )
        for name in plain:
            default: Any = LoadCase.__dataclass_fields__[name].default
            if getattr(case, name) != default:
                yield replace(case, **{name: default} | ({"layout_of": ""} if name == "layout" else {}))
        for name, least in (("tokens", 0), ("experts", case.topk), ("topk", 1), ("sequences", 1), ("capacity", 0)):
            size = getattr(case, name)
            for smaller in sorted({s for s in (least, 1, 2, 3, size // 2, size - 1) if least <= s < size}):
                changed: dict[str, Any] = {name: smaller}
                yield replace(case, **changed)


class DropTokens(_OfLoads):
    """`drop_tokens`: who is kept, by the rule of margins with exact keys; probs and their gradient, given who is kept."""

    function = "drop_tokens"
    outputs = ("probs", "routing_map")
    primary = "probs"
    optional = ("drop_policy", "pad_to_capacity")

    def legal(self, case: LoadCase) -> Problem:
        chosen = map_of(case)
        probs = torch.where(chosen, numbers(case, "probs", (case.tokens, case.experts)), torch.nan)
        settings: dict[str, Any] = {"capacity": case.capacity}
        settings |= {"drop_policy": case.policy} if case.policy != "probs" else {}
        settings |= {"pad_to_capacity": True} if case.pad else {}
        wanted = ("probs",) if case.grads else ()
        cotangents = {"probs": payload(case.seed, "d_probs", tuple(probs.shape), case.dtype)} if wanted else {}
        required = {"probs": probs, "routing_map": chosen.to(getattr(torch, case.map_dtype))}
        return Problem(self.function, required, settings, {case.layout_of: case.layout}, wanted, cotangents)

    def expected(self, case: LoadCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        probs, routing_map = problem.required.values()
        capacity = problem.settings["capacity"]
        routed = routing_map != 0
        own = drop_tokens(probs, routing_map, **problem.settings)
        by_position = problem.settings.get("drop_policy") == "position"
        rank = -torch.arange(len(probs), dtype=torch.float64)[:, None].expand(probs.shape)
        value = rank if by_position else probs.double()
        keys = torch.where(routed, value, -torch.inf).T
        counts = torch.full((probs.shape[1],), min(capacity, len(probs)))
        if not problem.settings.get("pad_to_capacity"):
            counts = torch.minimum(counts, routed.sum(0))
        inputs = (torch.where(routed, value, -torch.inf).T, routed.double().T)
        lowest = declared.get("tie_rule") == "lowest_index"
        choice = Chosen(own.routing_map, keys, torch.zeros_like(keys), counts, inputs, lowest, dim=0)

        def kept(out: Mapping[str, Any]) -> Tensor:
            return (out["routing_map"] != 0) & routed

        right: dict[str, Expectation] = {
            "routing_map": choice,
            "probs": Given(own.probs, lambda out: Exact(torch.where(kept(out), probs, 0), "values")),
        }
        if problem.wanted:
            d_probs = problem.cotangents["probs"]
            right["d_probs"] = Given(d_probs, lambda out: Exact(torch.where(kept(out), d_probs, 0), "values"))
        return right
