"""drop_tokens, load_balancing_loss and update_expert_bias: what is done with a map, or with its counts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.core.contract import Contract, Problem, accumulator_of, leaf
from conformance.core.tensors import DTYPES, hashed, payload
from conformance.judge import Expectation, Given
from conformance.judge.bound import Bounded, sum_bound
from conformance.judge.choice import Chosen
from conformance.judge.exact import Exact
from moe_ref.rounding import accumulator_dtype
from moe_ref.router.balancing import load_balancing_loss, update_expert_bias
from moe_ref.router.capacity import drop_tokens


@dataclass(frozen=True, kw_only=True)
class LoadCase(Case):
    """A case around a routing map drawn from the seed, or its counts."""

    tokens: int = 1
    experts: int = 1
    topk: int = 1
    sequences: int = 1  # folded into columns
    dtype: str = "float32"
    map_dtype: str = "bool"
    values: str = "distinct"  # of the probs or scores: distinct, ties, zeros, negative
    capacity: int = 0
    policy: str = "probs"
    pad: bool = False
    coeff: int = 8  # in eighths
    total: str = "number"  # total_num_tokens as a number, on the device, or zero
    rate: int = 1  # update rate in thousandths
    bias: int = 0  # magnitude of the expert bias before, in halves
    even: bool = False  # all counts equal
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "values": ("distinct", "ties", "zeros", "negative"),
        "policy": ("probs", "position"),
        "total": ("number", "device", "zero"),
    }

    def __post_init__(self) -> None:
        if min(self.tokens, self.capacity) < 0 or min(self.experts, self.topk, self.sequences) < 1:
            sizes = f"{self.tokens}, {self.capacity}, {self.experts}, {self.topk}, {self.sequences}"
            raise ValueError(f"tokens, capacity ≥ 0 and experts, topk, sequences ≥ 1 are needed; they are {sizes}")


LoadCase.serves("drop_tokens", "load_balancing_loss", "update_expert_bias")


def map_of(case: LoadCase) -> Tensor:
    """[T,E] bool, up to K experts a token; some tokens have none."""
    rank = (
        hashed(case.seed, "map", case.tokens * case.experts)
        .reshape(case.tokens, case.experts)
        .argsort(axis=1)
        .argsort(axis=1)
    )
    some = hashed(case.seed, "count", case.tokens)[:, None] % (case.topk + 1) if case.seed % 3 == 0 else case.topk
    return torch.from_numpy(rank < some)


def numbers(case: LoadCase, name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of probs or scores."""
    noise = hashed(case.seed, name, int(np.prod(shape))).astype(np.int64)
    value = {
        "distinct": (noise % 2**16 + 1) / 2**16,
        "ties": (noise % 3 + 1) / 4,
        "zeros": np.where(noise % 2 == 0, np.where(noise % 4 == 0, 0.0, -0.0), (noise >> 8) % 64 / 64),
        "negative": (noise % 2**16) / 2**15 - 1,
    }[case.values]
    return torch.from_numpy(value).reshape(shape).to(DTYPES[case.dtype])


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


class LoadBalancingLoss(_OfLoads):
    """`load_balancing_loss` and its gradient."""

    function = "load_balancing_loss"
    outputs = ("loss",)
    primary = "loss"

    def legal(self, case: LoadCase) -> Problem:
        columns = case.experts * case.sequences
        scores = numbers(case, "scores", (case.tokens, columns))
        counts = torch.from_numpy(hashed(case.seed, "counts", columns).astype(np.int64) % (case.tokens * case.topk + 2))
        total: int | Tensor = case.tokens + case.seed % 3
        total = {"number": total, "device": torch.tensor(total), "zero": 0}[case.total]
        settings = {"total_num_tokens": total, "topk": case.topk, "num_experts": case.experts, "coeff": case.coeff / 8}
        wanted = ("scores",) if case.grads else ()
        wide = {torch.float64: "float64"}.get(scores.dtype, "float32")
        cotangents = {"loss": payload(case.seed, "d_loss", (), wide)} if wanted else {}
        required = {
            "scores": scores,
            "tokens_per_expert": counts.to(getattr(torch, case.map_dtype if case.map_dtype != "bool" else "int64")),
        }
        return Problem(self.function, required, settings, {case.layout_of: case.layout}, wanted, cotangents)

    def expected(self, case: LoadCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        scores, counts = problem.required.values()
        dtype, out = accumulator_of(declared, scores.dtype), accumulator_dtype(scores.dtype)
        terms = scores.shape[0] + scores.shape[1] + 12  # sums over rows and columns, counts, factors
        oracle = leaf(scores)
        value = load_balancing_loss(oracle, counts, **problem.settings)
        magnitude = load_balancing_loss(scores.double().abs(), counts, **problem.settings)
        right: dict[str, Expectation] = {"loss": sum_bound(value.detach(), magnitude, terms, out, dtype)}
        if problem.wanted:
            (gradient,) = torch.autograd.grad(value, oracle, problem.cotangents["loss"].double())
            right["d_scores"] = sum_bound(gradient, gradient.abs(), 12, scores.dtype, dtype)
        return right


class UpdateExpertBias(_OfLoads):
    """`update_expert_bias`."""

    function = "update_expert_bias"
    outputs = ("expert_bias",)
    primary = "expert_bias"

    def legal(self, case: LoadCase) -> Problem:
        noise = hashed(case.seed, "bias", case.experts).astype(np.int64)
        bias = torch.from_numpy((noise % 1025 - 512) / 512 * (case.bias / 2)).float()
        counts = hashed(case.seed, "counts", case.experts).astype(np.int64) % (case.tokens + 1)
        held = torch.from_numpy(counts if not case.even else np.full(case.experts, case.tokens))
        kind = {"bool": torch.int64, "uint8": torch.float32}.get(case.map_dtype, getattr(torch, case.map_dtype))
        required = {"expert_bias": bias, "tokens_per_expert": held.to(kind)}
        return Problem(self.function, required, {"update_rate": case.rate / 1000}, {case.layout_of: case.layout})

    def expected(self, case: LoadCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        bias, counts = problem.required.values()
        value = update_expert_bias(bias.double(), counts, **problem.settings)
        step = (value - bias.double()).abs()
        bound = 2.0**-23 * (value.abs() + step)  # the rate and the sum are each rounded once
        return {"expert_bias": Bounded(value, torch.where(step > 0, bound, 0.0), torch.float32, torch.float32)}
