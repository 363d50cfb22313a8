"""The dispatchers that read routing maps: allgather, alltoall and hybridep."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem, accumulator_of
from conformance.families.dispatch.cases import DispatchCase, maps_of, probs_of, values_of
from conformance.families.dispatch.dispatcher import (
    HANDLE,
    Dispatching,
    after,
    cotangents_of,
    dtype_of,
    free_behind,
    garbage_in,
    given_probs,
    handles_of,
    masked_exact,
    moved,
    p_style,
    row_tokens_of,
    sum_of_rows,
    together,
    tree_of,
    wanted_of,
)
from conformance.families.dispatch.trees import flat, tree_bound
from conformance.judge import Exact, Expectation
from conformance.judge.bound import ROUNDOFF, sum_bound
from moe_ref.dispatch.plan import RoutePlan
from moe_ref.permutation.rows import PADDING

OUTPUTS = ("rows", "probs", "tokens_per_expert", "handle", "overflow")


def settings_of(case: DispatchCase, maps: list[Tensor]) -> dict[str, Any]:
    """The sizes that the case asks for."""
    settings: dict[str, Any] = {}
    if case.shards > 1:
        settings["expert_tensor_parallel"] = case.shards
    if case.capacity:
        settings["capacity"] = case.capacity
    if case.dispatcher == "hybridep" and case.align:
        settings["align"] = case.align
    if case.dispatcher == "hybridep" and case.slack is not None:
        unit = max(case.align, 1)
        count_E = -(-torch.cat(maps).long().sum(0) // unit) * unit
        settings["num_rows"] = max(int(count_E.reshape(case.ranks, -1).sum(1).max()) + case.slack * unit, 0)
    return settings


def dispatches(case: DispatchCase) -> list[Problem]:
    """The dispatch of each rank, without gradients."""
    maps, tokens = maps_of(case), values_of(case, "tokens", list(case.counts))
    settings = settings_of(case, maps)
    calls = [
        Problem(f"{case.dispatcher}_dispatch", {"tokens": x, "routing_map": own}, dict(settings))
        for x, own in zip(tokens, maps, strict=True)
    ]
    if case.probs:
        for call, probs in zip(calls, probs_of(case, "probs", list(case.counts), (case.experts,)), strict=True):
            # what is not routed must not be read, except where a capacity fills up with unrouted tokens
            call.settings["probs"] = probs if case.capacity else given_probs(probs, call.required["routing_map"] != 0)
    return calls


def specified(case: DispatchCase, out: Any) -> Tensor:
    """[P]: the rows that are said to hold something: all but those behind the last segment."""
    return torch.arange(len(out.rows)) < out.tokens_per_expert.sum()


class MapDispatch(Dispatching):
    """`allgather_dispatch`, `alltoall_dispatch` or `hybridep_dispatch`: rows, probabilities, counts, padding and both gradients."""

    outputs, primary = OUTPUTS, "rows"

    def __init__(self, function: str, *optional: str) -> None:
        self.function, self.optional = function, ("probs", *optional)
        self.static = tuple(name for name in optional if name in ("capacity", "num_rows"))

    def calls(self, case: DispatchCase) -> list[Problem]:
        calls = dispatches(case)
        wanted = wanted_of(case)
        lengths = [len(out.rows) for out in together(calls)] if wanted else []
        cotangents: list[dict[str, Tensor]] = [{} for _ in calls]
        if wanted and case.unused != "rows":
            for own, d_rows in zip(cotangents, cotangents_of(case, "rows", lengths), strict=True):
                own["rows"] = d_rows
        if wanted and case.unused != "probs" and case.probs:
            for own, d_probs in zip(
                cotangents, values_of(case, "d_probs", lengths, (), case.probs, p_style(case)), strict=True
            ):
                own["probs"] = d_probs
        layouts = {case.layout_of: case.layout}
        return [
            Problem(call.function, call.required, call.settings, layouts, wanted, own)
            for call, own in zip(calls, cotangents, strict=True)
        ]

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        every = together(calls)
        right: list[dict[str, Expectation]] = []
        for out in every:
            said = specified(case, out)
            own: dict[str, Expectation] = {"rows": free_behind("rows", out.rows, said)}
            if out.probs is not None:
                own["probs"] = free_behind("probs", out.probs, said)
            own["tokens_per_expert"] = Exact(out.tokens_per_expert, "integers")
            own["overflow"] = Exact(out.overflow, "integers", flag=True)
            right.append(own)
        for name in calls[0].wanted:
            gradients = (
                self._d_tokens(case, calls, every, declared) if name == "tokens" else self._d_probs(case, calls, every)
            )
            for own, gradient in zip(right, gradients, strict=True):
                own[f"d_{name}"] = gradient
        return right

    @staticmethod
    def _d_tokens(
        case: DispatchCase, calls: list[Problem], every: list[Any], declared: Mapping[str, Any]
    ) -> list[Expectation]:
        d_rows = [
            call.cotangents.get("rows", torch.zeros_like(out.rows)) for call, out in zip(calls, every, strict=True)
        ]
        dtype = d_rows[0].dtype
        return list(
            sum_of_rows(
                case, d_rows, row_tokens_of([out.handle for out in every]), *tree_of(case, dtype, declared, dtype)
            )
        )

    @staticmethod
    def _d_probs(case: DispatchCase, calls: list[Problem], every: list[Any]) -> list[Expectation]:
        """Moved back to where they came from; with shards, the sum over those in the probs' dtype, as ranks add."""
        d_probs = torch.cat(
            [call.cotangents.get("probs", torch.zeros_like(out.probs)) for call, out in zip(calls, every, strict=True)]
        )
        plan: RoutePlan = every[0].handle.plan
        cells = torch.cat([plan.row_cells(rank) for rank in range(plan.ranks)])
        real = cells != PADDING
        shaped = (case.tokens, case.ranks // case.shards, case.shards, case.local_experts)
        token, group, _, local = torch.unravel_index(cells[real], shaped)
        place = (token * (case.ranks // case.shards) + group) * case.local_experts + local
        tree = flat(d_probs.dtype)
        whole = tree_bound(
            case,
            d_probs[real].double(),
            torch.arange(len(place)),
            place,
            case.tokens * case.experts,
            d_probs.dtype,
            tree,
        )
        if case.shards > 1:
            parts = zip(
                *(x.reshape(case.tokens, case.experts).split(list(case.counts)) for x in (whole.value, whole.bound)),
                strict=True,
            )
            return [type(whole)(value, bound, whole.dtype, whole.accumulator) for value, bound in parts]
        return [
            masked_exact(own.to(d_probs.dtype))
            for own in whole.value.reshape(case.tokens, case.experts).split(list(case.counts))
        ]


class MapCombine(Dispatching):
    """`allgather_combine`, `alltoall_combine` or `hybridep_combine` of rows that dispatch never saw, through the handle that it made."""

    primary = "tokens"

    def __init__(self, function: str) -> None:
        self.function, self.companions = function, (function.replace("combine", "dispatch"),)
        self.with_probs = function == "hybridep_combine"
        self.outputs, self.optional = (("tokens", "probs"), ("probs",)) if self.with_probs else (("tokens",), ())

    def calls(self, case: DispatchCase) -> list[Problem]:
        before = dispatches(case)
        made = together(before)
        row_tokens = row_tokens_of([out.handle for out in made])
        lengths = [len(own) for own in row_tokens]
        wanted = wanted_of(case)
        calls: list[dict[str, Any]] = []
        for rows, own in zip(values_of(case, "rows", lengths), row_tokens, strict=True):
            calls.append(
                {
                    "required": {"rows": garbage_in(rows, own != PADDING, case.poison), "handle": HANDLE},
                    "settings": {},
                    "cotangents": {},
                }
            )
        if self.with_probs and case.probs:
            for call, probs, own in zip(calls, probs_of(case, "row probs", lengths, ()), row_tokens, strict=True):
                call["settings"]["probs"] = given_probs(probs, own != PADDING)
        if wanted and case.unused != "tokens":
            for call, d_tokens in zip(calls, cotangents_of(case, "tokens", list(case.counts)), strict=True):
                call["cotangents"]["tokens"] = d_tokens
        if wanted and case.unused != "probs" and "probs" in calls[0]["settings"]:
            for call, d_probs in zip(
                calls,
                values_of(case, "d_probs", list(case.counts), (case.experts,), case.probs, p_style(case)),
                strict=True,
            ):
                call["cotangents"]["probs"] = d_probs
        common = {"layouts": {case.layout_of: case.layout}, "wanted": wanted}
        expected = [free_behind("rows", out.rows, specified(case, out)) for out in made]
        return after(self.function, before, made, expected, [call | common for call in calls])

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        handles = handles_of(calls)
        row_tokens = row_tokens_of(handles)
        rows = [call.required["rows"] for call in calls]
        accumulator = accumulator_of(declared, rows[0].dtype)
        reduce = dtype_of(case.probs) if case.probs else accumulator
        kind, tree = tree_of(case, rows[0].dtype, declared, reduce)
        right: list[dict[str, Expectation]] = [
            {"tokens": own} for own in sum_of_rows(case, rows, row_tokens, kind, tree)
        ]
        plan: RoutePlan = handles[0].plan
        if "probs" in calls[0].settings:
            for own, out in zip(right, together(calls), strict=True):
                own["probs"] = masked_exact(out.probs)
        if "rows" in calls[0].wanted:
            d_tokens = torch.cat(
                [
                    call.cotangents.get("tokens", x.new_zeros(n, x.shape[1]))
                    for call, x, n in zip(calls, rows, case.counts, strict=True)
                ]
            )
            for own, source in zip(right, row_tokens, strict=True):
                own["d_rows"] = self._d_rows(case, moved(d_tokens, source), reduce)
        if "probs" in calls[0].wanted:
            like = calls[0].settings["probs"]
            d_probs = torch.cat(
                [
                    call.cotangents.get("probs", like.new_zeros(n, case.experts))
                    for call, n in zip(calls, case.counts, strict=True)
                ]
            )
            for rank, own in enumerate(right):
                own["d_probs"] = masked_exact(moved(d_probs.flatten(), plan.row_cells(rank)))
        return right

    @staticmethod
    def _d_rows(case: DispatchCase, value: Tensor, reduce: torch.dtype) -> Expectation:
        """Copies; rounded on their way where ranks add in a dtype that is narrower than the rows'."""
        sent = case.ranks > 1 if case.dispatcher == "allgather" else case.shards > 1
        if case.dispatcher == "hybridep" or not sent or ROUNDOFF[reduce] <= ROUNDOFF[value.dtype]:
            return masked_exact(value)
        return sum_bound(value.double(), value.double().abs(), 1, value.dtype, reduce)


class CachedDispatch(Dispatching):
    """Other tokens through the handle of a dispatch: the same rows as dispatched afresh."""

    outputs, primary = ("rows",), "rows"

    def __init__(self, function: str, before: Any) -> None:
        self.function, self.companions, self._before = function, (function.replace("cached_", ""),), before

    def calls(self, case: DispatchCase) -> list[Problem]:
        before = self._before(case)
        made = together(before)
        lengths = [len(out.rows) for out in made]
        wanted = wanted_of(case)
        cotangents = cotangents_of(case, "rows", lengths) if wanted else []
        calls = [
            {
                "required": {"tokens": tokens, "handle": HANDLE},
                "layouts": {case.layout_of: case.layout},
                "wanted": wanted,
                "cotangents": {"rows": cotangents[rank]} if wanted else {},
            }
            for rank, tokens in enumerate(values_of(case, "other tokens", list(case.counts)))
        ]
        return after(
            self.function, before, made, [free_behind("rows", out.rows, self._said(case, out)) for out in made], calls
        )

    @staticmethod
    def _said(case: DispatchCase, out: Any) -> Tensor:
        """[P]: rows that are specified: of DeepEP, those that were received."""
        return (
            specified(case, out) if case.dispatcher == "hybridep" else out.handle.row_tokens[out.handle.rank] != PADDING
        )

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        made, fresh = [call.produced.made for call in calls], together(calls)
        pairs = zip(made, fresh, strict=True)
        right: list[dict[str, Expectation]] = [
            {"rows": free_behind("rows", rows, self._said(case, out))} for out, rows in pairs
        ]
        if "tokens" in calls[0].wanted:
            d_rows = [call.cotangents["rows"] for call in calls]
            tree = tree_of(case, d_rows[0].dtype, declared, d_rows[0].dtype)
            for own, gradient in zip(
                right, sum_of_rows(case, d_rows, row_tokens_of([out.handle for out in made]), *tree), strict=True
            ):
                own["d_tokens"] = gradient
        return right
