"""pad_routing_map and the two converters; and cases of expert indices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.core.contract import Contract, Problem
from conformance.core.tensors import hashed, payload, probabilities
from conformance.families.permutation.cases import RoutingCase, routed, routing_map, simpler_routing
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.permutation.routing_map import EMPTY, indices_to_multihot, multihot_to_indices, pad_routing_map


class PadRoutingMap(Contract[RoutingCase]):
    """`pad_routing_map`: the padded map and which experts fell short; the caller's map must come back as it was."""

    function = "pad_routing_map"
    outputs = ("routing_map", "unreached")
    primary = "routing_map"

    def legal(self, case: RoutingCase) -> Problem:
        return Problem(
            self.function,
            {"routing_map": routing_map(case)},
            {"align": max(case.align, 1)},
            {case.layout_of: case.layout},
        )

    def expected(self, case: RoutingCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        out = pad_routing_map(problem.required["routing_map"], align=problem.settings["align"])
        return {
            "routing_map": Exact(out.routing_map, "integers"),
            "unreached": Exact(out.unreached, "integers", flag=True),
        }

    def neighbour(self, case: RoutingCase) -> RoutingCase:
        masks = None if case.routing is None else case.routing[::-1]
        return replace(
            case,
            golden="",
            law="",
            seed=case.seed + 1,
            routing=masks,
            align=3 if case.align != 3 else 5,
            layout="contiguous",
            layout_of="",
        )

    def simpler(self, case: RoutingCase) -> Iterator[RoutingCase]:
        return simpler_routing(case)


@dataclass(frozen=True, kw_only=True)
class IndicesCase(Case):
    """A case of expert indices: K slots a token, drawn from the seed."""

    tokens: int = 1
    topk: int = 1
    experts: int = 1
    ranks: int = 1  # that the experts are divided among, where a function has to do with ranks
    slots: tuple[int, ...] = ()  # the indices, row by row, if explicit
    empty: int = 0  # of 8 slots, how many are -1
    repeats: bool = False  # whether an expert may stand in several slots of a token
    dtype: str = "float32"
    index_dtype: str = "int64"
    zero_probs: bool = False
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.experts % self.ranks:
            raise ValueError(f"ranks are {self.ranks}; they must divide the {self.experts} experts")
        if self.slots and (
            len(self.slots) != self.tokens * self.topk or not all(EMPTY <= e < self.experts for e in self.slots)
        ):
            raise ValueError(f"slots must hold {self.tokens} × {self.topk} experts from -1 to {self.experts - 1}")


IndicesCase.serves("indices_to_multihot", "deepep_layout")


def indices(case: IndicesCase) -> Tensor:
    """[T,K] expert indices."""
    shape = (case.tokens, case.topk)
    if case.slots:
        return torch.tensor(case.slots).reshape(shape)
    if case.repeats:
        chosen = torch.from_numpy(
            (hashed(case.seed, "indices", case.tokens * case.topk) % case.experts).astype("int64")
        ).reshape(shape)
    else:
        rank = torch.from_numpy(hashed(case.seed, "indices", case.tokens * case.experts).astype("int64")).reshape(
            case.tokens, case.experts
        )
        chosen = torch.nn.functional.pad(
            rank.argsort(dim=1, stable=True), (0, max(case.topk - case.experts, 0)), value=EMPTY
        )[:, : case.topk]
    none = torch.from_numpy((hashed(case.seed, "empty", case.tokens * case.topk) % 8 < case.empty).reshape(shape))
    return torch.where(none, EMPTY, chosen)


class IndicesToMultihot(Contract[IndicesCase]):
    """`indices_to_multihot`: the map, the probabilities and their gradient."""

    function = "indices_to_multihot"
    outputs = ("routing_map", "probs")
    primary = "routing_map"

    def legal(self, case: IndicesCase) -> Problem:
        required = {
            "indices": indices(case).to(getattr(torch, case.index_dtype)),
            "probs": probabilities(case.seed, "probs", (case.tokens, case.topk), case.dtype, case.zero_probs),
        }
        wanted = ("probs",) if case.grads else ()
        cotangents = {"probs": payload(case.seed, "d_probs", (case.tokens, case.experts), case.dtype)} if wanted else {}
        return Problem(
            self.function, required, {"num_experts": case.experts}, {case.layout_of: case.layout}, wanted, cotangents
        )

    def expected(self, case: IndicesCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        index_TK, probs = problem.required.values()
        out = indices_to_multihot(index_TK, probs, **problem.settings)
        right: dict[str, Expectation] = {"routing_map": Exact(out.routing_map, "integers"), "probs": Exact(out.probs)}
        if problem.wanted:
            right["d_probs"] = Exact(_slot_gradient(index_TK, problem.cotangents["probs"]), "values")
        return right

    def neighbour(self, case: IndicesCase) -> IndicesCase:
        return replace(
            case,
            golden="",
            law="",
            seed=case.seed + 1,
            slots=(),
            experts=case.experts + 1,
            layout="contiguous",
            layout_of="",
        )

    def simpler(self, case: IndicesCase) -> Iterator[IndicesCase]:
        return simpler_indices(case)


def simpler_indices(case: IndicesCase) -> Iterator[IndicesCase]:
    """Smaller cases of expert indices."""
    if not case.slots and 0 < case.tokens * case.topk <= 256:
        yield replace(case, slots=tuple(indices(case).flatten().tolist()), empty=0, repeats=False)
    for name in ("law", "layout", "grads", "zero_probs", "index_dtype", "dtype", "seed", "poison", "empty", "repeats"):
        default: Any = IndicesCase.__dataclass_fields__[name].default
        if getattr(case, name) != default:
            yield replace(case, **{name: default} | ({"layout_of": ""} if name == "layout" else {}))
    yield from (replace(case, ranks=r) for r in range(1, case.ranks) if case.experts % r == 0)
    if case.slots:
        yield from _fewer_slots(case)
        return
    yield from (
        replace(case, tokens=t) for t in sorted({0, 1, 2, case.tokens // 2, case.tokens - 1}) if 0 <= t < case.tokens
    )
    yield from (replace(case, topk=k) for k in sorted({1, 2, case.topk // 2, case.topk - 1}) if 1 <= k < case.topk)
    local = case.experts // case.ranks
    yield from (replace(case, experts=e * case.ranks) for e in sorted({1, 2, local // 2, local - 1}) if 1 <= e < local)


def _fewer_slots(case: IndicesCase) -> Iterator[IndicesCase]:
    k = case.topk
    rows = [case.slots[i : i + k] for i in range(0, len(case.slots), k)]
    for t in range(len(rows) if len(rows) > 1 else 0):
        yield replace(case, tokens=case.tokens - 1, slots=tuple(e for row in rows[:t] + rows[t + 1 :] for e in row))
    for column in range(k if k > 1 else 0):
        yield replace(case, topk=k - 1, slots=tuple(e for row in rows for e in row[:column] + row[column + 1 :]))
    for i, e in enumerate(case.slots):
        for smaller in (EMPTY, 0) if e > 0 else (EMPTY,) if e == 0 else ():
            yield replace(case, slots=(*case.slots[:i], smaller, *case.slots[i + 1 :]))
    fewest = -(-max(max(case.slots) + 1, 1) // case.ranks) * case.ranks
    if fewest < case.experts:
        yield replace(case, experts=fewest)


def _slot_gradient(index_TK: Tensor, d_multihot: Tensor) -> Tensor:
    """Each slot gets its expert's gradient, unless the slot is empty or a later slot holds the same expert."""
    out = torch.zeros(index_TK.shape, dtype=d_multihot.dtype)
    for t, row in enumerate(index_TK.tolist()):
        for k, e in enumerate(row):
            if e != EMPTY and e not in row[k + 1 :]:
                out[t, k] = d_multihot[t, e]
    return out


class MultihotToIndices(Contract[RoutingCase]):
    """`multihot_to_indices`: the indices, the probabilities, the overflow flag and the gradient."""

    function = "multihot_to_indices"
    outputs = ("indices", "probs", "overflow")
    primary = "indices"

    def legal(self, case: RoutingCase) -> Problem:
        chosen = torch.from_numpy(routed(case))
        probs = probabilities(case.seed, "probs", tuple(chosen.shape), case.dtype, case.zero_probs)
        required = {"routing_map": routing_map(case), "probs": torch.where(chosen, probs, torch.nan)}
        wanted = ("probs",) if case.grads else ()
        cotangents = {"probs": payload(case.seed, "d_probs", (case.tokens, case.topk), case.dtype)} if wanted else {}
        return Problem(self.function, required, {"topk": case.topk}, {case.layout_of: case.layout}, wanted, cotangents)

    def expected(self, case: RoutingCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        map_TE, probs = problem.required.values()
        out = multihot_to_indices(map_TE, probs, **problem.settings)
        right: dict[str, Expectation] = {
            "indices": Exact(out.indices, "integers"),
            "probs": Exact(out.probs),
            "overflow": Exact(out.overflow, "integers", flag=True),
        }
        if problem.wanted:
            d_probs = torch.zeros_like(probs)
            t, k = (out.indices != EMPTY).nonzero(as_tuple=True)
            d_probs[t, out.indices[t, k]] = problem.cotangents["probs"][t, k]
            right["d_probs"] = Exact(d_probs, "values")
        return right

    def neighbour(self, case: RoutingCase) -> RoutingCase:
        masks = None if case.routing is None else case.routing[::-1]
        return replace(
            case,
            golden="",
            law="",
            seed=case.seed + 1,
            routing=masks,
            topk=case.topk + 1,
            layout="contiguous",
            layout_of="",
        )

    def simpler(self, case: RoutingCase) -> Iterator[RoutingCase]:
        return simpler_routing(case)
