"""The dispatchers that read routing maps: allgather, alltoall and hybridep."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem, accumulator_of, declare
from conformance.core.signature import Input, Output, Signature
from conformance.families.dispatch.cases import (
    FLOATS,
    MAPS,
    MOVED,
    PROBS,
    PROGRAMS,
    DispatchCase,
    maps_of,
    probs_of,
    values_of,
)
from conformance.families.dispatch.dispatcher import (
    HANDLE,
    Combine,
    Dispatching,
    after,
    dtype_of,
    free_behind,
    given_probs,
    handles_of,
    masked_exact,
    moved,
    row_tokens_of,
    specified,
    sum_of_rows,
    together,
    tree_of,
)
from conformance.families.dispatch.trees import flat, tree_bound
from conformance.judge import Exact, Expectation
from conformance.judge.bound import ROUNDOFF, sum_bound
from moe_ref.dispatch.plan import RoutePlan
from moe_ref.permutation.rows import PADDING

OUTPUTS = ("rows", "probs", "tokens_per_expert", "handle", "overflow")


def settings_of(case: DispatchCase, maps: list[Tensor]) -> dict[str, Any]:
    """The sizes the case sets."""
    settings: dict[str, Any] = {}
    if case.shards > 1:
        settings["expert_tensor_parallel"] = case.shards
    if case.capacity:
        settings["capacity"] = case.capacity
    if case.dispatcher == "hybridep" and case.align:
        settings["align"] = case.align
    if case.slack is not None:
        unit = max(case.align, 1) if case.dispatcher == "hybridep" else 1
        count_E = -(-torch.cat(maps).long().sum(0) // unit) * unit
        settings["num_rows"] = max(
            int(count_E.reshape(case.ranks // case.shards, -1).sum(1).max()) + case.slack * unit, 0
        )
    return settings


def programs_of(case: DispatchCase) -> dict[str, int]:
    """The numbers of programs the case sets."""
    return {name: getattr(case, name) for name in PROGRAMS if case.dispatcher == "hybridep" and getattr(case, name)}


def dispatches(case: DispatchCase) -> list[Problem]:
    """One dispatch per rank, without gradients."""
    maps, tokens = maps_of(case), values_of(case, "tokens", list(case.counts))
    settings = settings_of(case, maps) | programs_of(case)
    calls = [
        Problem(f"{case.dispatcher}_dispatch", {"tokens": x, "routing_map": rank_map}, dict(settings))
        for x, rank_map in zip(tokens, maps, strict=True)
    ]
    if case.probs:
        for call, probs in zip(calls, probs_of(case, "probs", list(case.counts), (case.experts,)), strict=True):
            # only a capacity may read unrouted entries, because unrouted tokens fill it
            call.settings["probs"] = probs if case.capacity else given_probs(probs, call.required["routing_map"] != 0)
    return calls


def of_maps(*settings: str) -> Signature:
    """The signature of a dispatch that reads a routing map."""
    return Signature(
        inputs=[
            Input("tokens", "TH", MOVED, gradient=True),
            Input("routing_map", "TE", MAPS, field="map_dtype"),
            Input("probs", "TE", PROBS, field="probs", gradient=True, optional="probs"),
        ],
        outputs=[
            Output("rows", "PH", of="tokens"),
            Output("probs", "P", of="probs"),
            *(Output("tokens_per_expert", "E"), Output("handle"), Output("overflow")),
        ],
        settings=settings,
        static=tuple(name for name in settings if name in ("capacity", "num_rows")),
    )


SIGNATURES = {
    "allgather_dispatch": of_maps("expert_tensor_parallel", "num_rows"),
    "alltoall_dispatch": of_maps("expert_tensor_parallel", "capacity", "num_rows"),
    "hybridep_dispatch": of_maps("align", "num_rows", "recipe", *PROGRAMS),
}


def after_dispatch(producer: str, made_from: Signature, inputs: list[Input], outputs: list[Output]) -> Signature:
    """The signature of a function that takes the handle of a dispatch with this signature."""
    # the dispatch's rows are not codes
    settings = tuple(name for name in made_from.settings if name != "recipe")
    return Signature(inputs, outputs, settings, producer=producer, made_from=tuple(made_from.inputs))


class MapDispatch(Dispatching):
    """Dispatch by a routing map: rows, probabilities, counts, padding and both gradients."""

    def __init__(self, function: str) -> None:
        self.function = function
        declare(self, SIGNATURES[function])

    def calls(self, case: DispatchCase) -> list[Problem]:
        calls = dispatches(case)
        lengths = [len(out.rows) for out in together(calls)] if case.grads else []
        return [replace(call, **backward) for call, backward in zip(calls, self.backward(case, lengths), strict=True)]

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        results = together(calls)
        expectations: list[dict[str, Expectation]] = []
        for out in results:
            specified_rows = specified(case, out)
            rank_expectations: dict[str, Expectation] = {"rows": free_behind("rows", out.rows, specified_rows)}
            if out.probs is not None:
                rank_expectations["probs"] = free_behind("probs", out.probs, specified_rows)
            rank_expectations["tokens_per_expert"] = Exact(out.tokens_per_expert, "integers")
            rank_expectations["overflow"] = Exact(out.overflow, "integers", flag=True)
            expectations.append(rank_expectations)
        for name in calls[0].wanted:
            gradients = (
                self._d_tokens(case, calls, results, declared)
                if name == "tokens"
                else self._d_probs(case, calls, results)
            )
            for rank_expectations, gradient in zip(expectations, gradients, strict=True):
                rank_expectations[f"d_{name}"] = gradient
        return expectations

    @staticmethod
    def _d_tokens(
        case: DispatchCase, calls: list[Problem], results: list[Any], declared: Mapping[str, Any]
    ) -> list[Expectation]:
        d_rows = [
            call.cotangents.get("rows", torch.zeros_like(out.rows)) for call, out in zip(calls, results, strict=True)
        ]
        dtype = d_rows[0].dtype
        return list(
            sum_of_rows(
                case, d_rows, row_tokens_of([out.handle for out in results]), *tree_of(case, dtype, declared, dtype)
            )
        )

    @staticmethod
    def _d_probs(case: DispatchCase, calls: list[Problem], results: list[Any]) -> list[Expectation]:
        """The gradient of the probabilities, moved back to the sources.

        With shards it is a sum, in the dtype of the probabilities.
        """
        d_probs = torch.cat(
            [
                call.cotangents.get("probs", torch.zeros_like(out.probs))
                for call, out in zip(calls, results, strict=True)
            ]
        )
        plan: RoutePlan = results[0].handle.plan
        cells = torch.cat([plan.row_cells(rank) for rank in range(plan.ranks)])
        real = cells != PADDING
        shaped = (case.tokens, case.ranks // case.shards, case.shards, case.local_experts)
        token, group, _, local = torch.unravel_index(cells[real], shaped)
        probs_index = (token * (case.ranks // case.shards) + group) * case.local_experts + local
        tree = flat(d_probs.dtype)
        bound_of_all = tree_bound(
            case,
            d_probs[real].double(),
            torch.arange(len(probs_index)),
            probs_index,
            case.tokens * case.experts,
            d_probs.dtype,
            tree,
        )
        if case.shards > 1:
            rank_bounds = zip(
                *(
                    x.reshape(case.tokens, case.experts).split(list(case.counts))
                    for x in (bound_of_all.value, bound_of_all.bound)
                ),
                strict=True,
            )
            return [
                type(bound_of_all)(value, bound, bound_of_all.dtype, bound_of_all.accumulator)
                for value, bound in rank_bounds
            ]
        return [
            masked_exact(rank_probs.to(d_probs.dtype))
            for rank_probs in bound_of_all.value.reshape(case.tokens, case.experts).split(list(case.counts))
        ]


class MapCombine(Combine):
    """`allgather_combine`, `alltoall_combine` or `hybridep_combine`."""

    def __init__(self, function: str) -> None:
        self.function, producer = function, function.replace("combine", "dispatch")
        self.companions = (producer,)
        inputs, outputs = [Input("rows", "PH", FLOATS, gradient=True)], [Output("tokens", "TH", of="rows")]
        if function == "hybridep_combine":
            inputs.append(Input("probs", "P", PROBS, field="probs", gradient=True, optional="probs"))
            outputs.append(Output("probs", "TE", of="probs"))
        declare(self, after_dispatch(producer, SIGNATURES[producer], inputs, outputs))

    def dispatches(self, case: DispatchCase) -> list[Problem]:
        return dispatches(case)

    def settings_of(self, case: DispatchCase) -> dict[str, Any]:
        return programs_of(case)

    def columns_of_probs(self, case: DispatchCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), (case.experts,)

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        handles = handles_of(calls)
        row_tokens = row_tokens_of(handles)
        rows = [call.required["rows"] for call in calls]
        accumulator = accumulator_of(declared, rows[0].dtype)
        reduce = dtype_of(case.probs) if case.probs else accumulator
        kind, tree = tree_of(case, rows[0].dtype, declared, reduce)
        expectations: list[dict[str, Expectation]] = [
            {"tokens": rank_expectations} for rank_expectations in sum_of_rows(case, rows, row_tokens, kind, tree)
        ]
        plan: RoutePlan = handles[0].plan
        if "probs" in calls[0].settings:
            for rank_expectations, out in zip(expectations, together(calls), strict=True):
                rank_expectations["probs"] = masked_exact(out.probs)
        if "rows" in calls[0].wanted:
            d_tokens = torch.cat(
                [
                    call.cotangents.get("tokens", x.new_zeros(n, x.shape[1]))
                    for call, x, n in zip(calls, rows, case.counts, strict=True)
                ]
            )
            for rank_expectations, source in zip(expectations, row_tokens, strict=True):
                rank_expectations["d_rows"] = self._d_rows(case, moved(d_tokens, source), reduce)
        if "probs" in calls[0].wanted:
            like = calls[0].settings["probs"]
            d_probs = torch.cat(
                [
                    call.cotangents.get("probs", like.new_zeros(n, case.experts))
                    for call, n in zip(calls, case.counts, strict=True)
                ]
            )
            for rank, rank_expectations in enumerate(expectations):
                rank_expectations["d_probs"] = masked_exact(moved(d_probs.flatten(), plan.row_cells(rank)))
        return expectations

    @staticmethod
    def _d_rows(case: DispatchCase, value: Tensor, reduce: torch.dtype) -> Expectation:
        """Copies, rounded in transit where ranks add in a narrower dtype than the rows'."""
        travels = case.ranks > 1 if case.dispatcher == "allgather" else case.shards > 1
        if case.dispatcher == "hybridep" or not travels or ROUNDOFF[reduce] <= ROUNDOFF[value.dtype]:
            return masked_exact(value)
        return sum_bound(value.double(), value.double().abs(), 1, value.dtype, reduce)


class CachedDispatch(Dispatching):
    """Other tokens through the handle of a dispatch give the rows of a fresh dispatch."""

    def __init__(
        self, function: str, signature: Signature, dispatches: Callable[[DispatchCase], list[Problem]]
    ) -> None:
        self.function, producer, self._before = function, function.replace("cached_", ""), dispatches
        self.companions = (producer,)
        inputs, outputs = [Input("tokens", "TH", MOVED, gradient=True)], [Output("rows", "PH", of="tokens")]
        declare(self, after_dispatch(producer, signature, inputs, outputs))

    def calls(self, case: DispatchCase) -> list[Problem]:
        narrower = case.hidden > 1 and case.seed % 2  # a handle holds a routing, and no width of rows
        dispatch_calls = self._before(replace(case, hidden=case.hidden - 1) if narrower else case)
        dispatched = together(dispatch_calls)
        backward = self.backward(case, [len(out.rows) for out in dispatched])
        calls = [
            {"required": {"tokens": tokens, "handle": HANDLE}, **gradients}
            for tokens, gradients in zip(values_of(case, "other tokens", list(case.counts)), backward, strict=True)
        ]
        expected_rows = [free_behind("rows", out.rows, specified(case, out)) for out in dispatched]
        return after(self.function, dispatch_calls, dispatched, expected_rows, calls)

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        dispatched, fresh = [call.produced.made for call in calls], together(calls)
        pairs = zip(dispatched, fresh, strict=True)
        expectations: list[dict[str, Expectation]] = [
            {"rows": free_behind("rows", rows, specified(case, out))} for out, rows in pairs
        ]
        if "tokens" in calls[0].wanted:
            d_rows = [call.cotangents["rows"] for call in calls]
            tree = tree_of(case, d_rows[0].dtype, declared, d_rows[0].dtype)
            for rank_expectations, gradient in zip(
                expectations,
                sum_of_rows(case, d_rows, row_tokens_of([out.handle for out in dispatched]), *tree),
                strict=True,
            ):
                rank_expectations["d_tokens"] = gradient
        return expectations
