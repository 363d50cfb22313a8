"""DeepEP's low-latency mode: slabs with the rows of each source in the order of their arrival, and
a weighted combine. `layout_range` and `source_tokens` identify each row. Expected rows depend on
them: each implementation is judged in its own order of rows, and combine receives rows in that
order.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem, computed_in
from conformance.core.signature import Input, Output, Signature
from conformance.families.dispatch.cases import FLOATS, MOVED, PROBS, DispatchCase, indices_of, probs_of, values_of
from conformance.families.dispatch.deepep import policy_of
from conformance.families.dispatch.dispatcher import (
    Dispatching,
    after,
    cotangents_of,
    garbage_in,
    given_probs,
    handles_of,
    row_tokens_of,
    split_bound,
    sum_of_rows,
    together,
    tree_of,
    where_rows,
)
from conformance.families.dispatch.trees import flat, tree_bound
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation, Given
from conformance.judge.bound import sum_bound
from moe_ref.dispatch.low_latency import slot_rows
from moe_ref.dispatch.plan import RoutePlan
from moe_ref.permutation.rows import PADDING

COUNT = 2**32  # layout_range is begin · COUNT + count
OUTPUTS = ("rows", "scales", "tokens_per_expert", "source_tokens", "layout_range", "handle")


def dispatches(case: DispatchCase) -> list[Problem]:
    """One dispatch per rank, without gradients."""
    copies = case.topk if case.repeats == "count each" else 1  # copies of a token in one slab, at most
    settings: dict[str, Any] = {
        "num_experts": case.experts,
        "max_tokens_per_rank": max(*case.counts, 1) * copies + max(case.slack or 0, 0),
    }
    if case.fp8:
        settings["use_fp8"] = True
    if case.fp8 == "powers":
        settings["round_scale"] = True
    if policy_of(case):
        settings["policy"] = policy_of(case)
    tokens = values_of(case, "tokens", list(case.counts))
    return [
        Problem("deepep_low_latency_dispatch", {"tokens": x, "indices": rank_indices}, dict(settings))
        for x, rank_indices in zip(tokens, indices_of(case), strict=True)
    ]


def order_of(layout_range: Tensor, source_tokens: Tensor, reference: Any) -> Tensor | None:
    """[L,W·M]: the reference's row for each row of a slab; None if segments or tokens differ.

    Repeats of a token from one source match in order. Rows past the counts map to themselves.
    """
    layout, token_numbers = layout_range.cpu().long(), source_tokens.cpu().long()
    if layout.shape != reference.layout_range.shape or token_numbers.shape != reference.source_tokens.shape:
        return None
    begin_LW, count_LW = layout // COUNT, layout % COUNT
    first_LW = reference.layout_range // COUNT
    if not torch.equal(count_LW, reference.layout_range % COUNT):
        return None
    order = torch.arange(token_numbers.shape[1]).repeat(len(token_numbers), 1)
    for slab in range(len(token_numbers)):
        filled = torch.zeros(int(count_LW[slab].sum()), dtype=torch.bool)
        for source in range(layout.shape[1]):
            begin, count, first = (int(x[slab, source]) for x in (begin_LW, count_LW, first_LW))
            if count == 0:
                continue
            if begin + count > len(filled) or bool(filled[begin : begin + count].any()):
                return None
            filled[begin : begin + count] = True
            mine, theirs = (
                token_numbers[slab, begin : begin + count],
                reference.source_tokens[slab, first : first + count],
            )
            if not torch.equal(mine.sort().values, theirs.sort().values):
                return None
            order[slab, begin + mine.argsort(stable=True)] = first + theirs.argsort(stable=True)
    return order


@contextmanager
def allowed_to_wait() -> Iterator[None]:
    """Inside the block the suite may wait for the device, even where it forbids this to an
    implementation.
    """
    if not torch.cuda.is_available():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """x with each slab's rows permuted by `order`; any dtype, differentiable."""
    slab = torch.arange(len(order), device=x.device)[:, None]
    if x.element_size() == 1:
        return x.view(torch.uint8)[slab, order.to(x.device)].view(x.dtype)
    return x[slab, order.to(x.device)]


def _arranged(name: str, reference: Any, received: Tensor) -> Given:
    """The reference's rows in the order of this result; rows past the counts may have any
    values.
    """
    value: Tensor = getattr(reference, name)

    def make(outputs: Mapping[str, Any]) -> Exact:
        got, layout, tokens = (outputs.get(key) for key in (name, "layout_range", "source_tokens"))
        if (
            not (isinstance(got, Tensor) and isinstance(layout, Tensor) and isinstance(tokens, Tensor))
            or got.shape != value.shape
            or got.dtype != value.dtype
        ):
            return Exact(value)
        order = order_of(layout, tokens, reference)
        if order is None:
            return Exact(value)
        return Exact(where_rows(received, in_order(value, order), got))

    return Given(value, make)


def _ranges(reference: Any) -> Given:
    """Segments of the expected lengths in any order, packed from the start of the slab."""

    def make(outputs: Mapping[str, Any]) -> Exact:
        got = outputs.get("layout_range")
        if isinstance(got, Tensor) and got.shape == reference.layout_range.shape and not got.is_floating_point():
            begin, count = got.long() // COUNT, got.long() % COUNT
            # an empty segment's begin is free
            held = torch.where(count > 0, begin, count.sum(1, keepdim=True))
            first, where = held.sort(1)
            tiles = (first == count.gather(1, where).cumsum(1) - count.gather(1, where)).all()
            if tiles and torch.equal(count, reference.layout_range % COUNT):
                return Exact(got.long(), "integers")
        return Exact(reference.layout_range, "integers")

    return Given(reference.layout_range, make)


def _tokens(reference: Any, received: Tensor) -> Given:
    """The tokens of each segment, in any order."""

    def make(outputs: Mapping[str, Any]) -> Exact:
        got, layout = outputs.get("source_tokens"), outputs.get("layout_range")
        if not isinstance(got, Tensor) or not isinstance(layout, Tensor) or got.shape != reference.source_tokens.shape:
            return Exact(reference.source_tokens, "integers")
        if order_of(layout, got, reference) is not None:
            return Exact(got.long(), "integers")
        return Exact(torch.where(received, reference.source_tokens, got.long()), "integers")

    return Given(reference.source_tokens, make)


def judged(reference: Any) -> dict[str, Expectation]:
    """Expectations of one rank's dispatch."""
    received = torch.arange(reference.source_tokens.shape[1]) < reference.tokens_per_expert[:, None]
    expectations: dict[str, Expectation] = {
        "tokens_per_expert": Exact(reference.tokens_per_expert, "integers"),
        "layout_range": _ranges(reference),
        "source_tokens": _tokens(reference, received),
        "rows": _arranged("rows", reference, received),
    }
    return expectations | ({"scales": _arranged("scales", reference, received)} if reference.scales is not None else {})


class LowLatencyDispatch(Dispatching):
    """`deepep_low_latency_dispatch`: slabs, row identities, and the gradient of the tokens."""

    function = "deepep_low_latency_dispatch"
    signature = Signature(
        inputs=[Input("tokens", "TH", MOVED, gradient=True), Input("indices", "TK", field="index_dtype")],
        outputs=[*map(Output, OUTPUTS), Output("ordered", "LMH", of="tokens", probed=True)],
        settings=("use_fp8", "round_scale", "policy"),
        required=("num_experts", "max_tokens_per_rank"),
    )

    def calls(self, case: DispatchCase) -> list[Problem]:
        calls = dispatches(case)
        layouts, wanted = {case.layout_of: case.layout}, self.signature.wanted(case)
        calls = [replace(call, layouts=layouts, wanted=wanted) for call in calls]
        if not wanted:
            return calls
        results = together(calls)
        d_rows = cotangents_of(case, "rows", [out.rows.shape[:2].numel() for out in results])
        return [
            replace(
                call,
                cotangents={"ordered": gradient.reshape(out.rows.shape)},
                script=_in_the_references_order(out),
                first=call.required,
            )
            for call, out, gradient in zip(calls, results, d_rows, strict=True)
        ]

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        results = together(calls)
        expectations = [judged(out) for out in results]
        if calls[0].wanted:
            d_rows = [call.cotangents["ordered"].flatten(0, 1) for call in calls]
            tree = tree_of(case, d_rows[0].dtype, declared, d_rows[0].dtype)
            for rank_expectations, gradient in zip(
                expectations,
                sum_of_rows(case, d_rows, row_tokens_of([out.handle for out in results]), *tree),
                strict=True,
            ):
                rank_expectations["d_tokens"] = gradient
        return expectations


def _in_the_references_order(reference: Any) -> Any:
    """The dispatch, with its rows also in the reference's order, to which the cotangent refers."""

    def script(implementation: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
        settings = {
            name: arguments[name]
            for name in ("num_experts", "max_tokens_per_rank", "policy", "group")
            if name in arguments
        }
        outputs = named_outputs(
            implementation.call("deepep_low_latency_dispatch", arguments["tokens"], arguments["indices"], **settings),
            OUTPUTS,
        )
        order = order_of(outputs["layout_range"].detach(), outputs["source_tokens"].detach(), reference)
        if order is not None:
            outputs["ordered"] = in_order(outputs["rows"], order.argsort(1))
        return outputs

    return script


class LowLatencyCombine(Dispatching):
    """`deepep_low_latency_combine` of other rows, in the order of the implementation's dispatch."""

    function, companions = "deepep_low_latency_combine", ("deepep_low_latency_dispatch",)
    signature = Signature(
        inputs=[
            Input("rows", "LMH", FLOATS, gradient=True),
            Input("indices", "TK", field="index_dtype"),
            Input("probs", "TK", PROBS, field="probs", gradient=True),
        ],
        outputs=[Output("tokens", "TH", of="rows")],
        settings=("policy", "max_tokens_per_rank"),
        producer="deepep_low_latency_dispatch",
        made_from=tuple(LowLatencyDispatch.signature.inputs),
    )

    def calls(self, case: DispatchCase) -> list[Problem]:
        dispatch_calls = dispatches(case)
        dispatched = together(dispatch_calls)
        counts = list(case.counts)
        indices = [call.required["indices"] for call in dispatch_calls]
        probs = probs_of(case, "probs", counts, (case.topk,))
        calls: list[dict[str, Any]] = []
        lengths = [out.rows.shape[:2].numel() for out in dispatched]
        for rank, rows in enumerate(values_of(case, "rows", lengths)):
            received = dispatched[rank].handle.row_tokens[rank] != PADDING
            slab = garbage_in(self._equal_per_token(rows, dispatched[rank]), received, case.poison).reshape(
                *dispatched[rank].rows.shape[:2], case.hidden
            )
            required = {"rows": slab, "indices": indices[rank], "probs": given_probs(probs[rank], indices[rank] >= 0)}
            calls.append({"required": required, "script": in_its_own_order(dispatched[rank]), "first": required})
        calls = [call | backward for call, backward in zip(calls, self.backward(case, counts), strict=True)]
        return after(self.function, dispatch_calls, dispatched, [judged(out)["rows"] for out in dispatched], calls)

    @staticmethod
    def _equal_per_token(rows: Tensor, out: Any) -> Tensor:
        """Rows in which all copies of a token for the same expert are equal, because any of them
        may be read.
        """
        source = out.handle.row_tokens[out.handle.rank].reshape(out.source_tokens.shape)
        same = torch.zeros_like(source)
        same[:, 1:] = (source[:, 1:] == source[:, :-1]) & (source[:, 1:] != PADDING)
        first = (torch.arange(same.numel()).reshape(same.shape) * (1 - same)).cummax(1).values
        return rows[first.flatten()]

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        handle = handles_of(calls)[0]
        plan: RoutePlan = handle.plan
        rows = torch.cat([call.required["rows"].flatten(0, 1) for call in calls])
        probs = torch.cat([call.required["probs"] for call in calls])
        accumulator = computed_in(declared, rows, probs)
        row_GK = slot_rows(plan, case.topk)
        token, slot = (row_GK != PADDING).nonzero().unbind(1)
        row, weight = row_GK[token, slot], probs[token, slot].double()
        terms = rows[row].double() * weight[:, None]
        # a product may be rounded before it is added
        bound_of_all = tree_bound(
            case, terms, torch.arange(len(row)), token, case.tokens, rows.dtype, flat(accumulator).rounded_first()
        )
        expectations: list[dict[str, Expectation]] = [
            {"tokens": rank_expectations} for rank_expectations in split_bound(bound_of_all, case.counts)
        ]
        if not calls[0].wanted:
            return expectations
        d_tokens = torch.cat([call.cotangents["tokens"] for call in calls]).double()
        if "rows" in calls[0].wanted:
            value = torch.zeros(rows.shape, dtype=torch.float64).index_add(0, row, d_tokens[token] * weight[:, None])
            size = torch.zeros(rows.shape, dtype=torch.float64).index_add(
                0, row, (d_tokens[token] * weight[:, None]).abs()
            )
            repeated = int(torch.bincount(row, minlength=1).max())
            bound_of_slots = sum_bound(value, size, repeated + 1, rows.dtype, accumulator)
            rank_bounds = split_bound(bound_of_slots, [len(rows) // case.ranks] * case.ranks)
            for rank_expectations, out, call in zip(expectations, rank_bounds, calls, strict=True):
                shape = call.required["rows"].shape
                rank_expectations["d_rows"] = replace(
                    out, value=out.value.reshape(shape), bound=out.bound.reshape(shape)
                )
        if "probs" in calls[0].wanted:
            products = rows[row].double() * d_tokens[token]
            value, size = torch.zeros((2, *probs.shape), dtype=torch.float64)
            value[token, slot], size[token, slot] = products.sum(1), products.abs().sum(1)
            bound_of_all = sum_bound(value, size, case.hidden + 1, probs.dtype, accumulator)
            for rank_expectations, gradient in zip(expectations, split_bound(bound_of_all, case.counts), strict=True):
                rank_expectations["d_probs"] = gradient
        return expectations


def in_its_own_order(reference: Any) -> Any:
    """A combine of the rows, in the order of this implementation's own dispatch."""

    def script(implementation: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
        dispatched = arguments["produced"]
        with allowed_to_wait():
            order = order_of(dispatched["layout_range"].detach(), dispatched["source_tokens"].detach(), reference)
            assert order is not None, "dispatch is wrong, and its rows were judged"
            rows = in_order(arguments["rows"], order)
        group = {"group": arguments["group"]} if "group" in arguments else {}
        return {
            "tokens": implementation.call(
                "deepep_low_latency_combine",
                rows,
                arguments["indices"],
                arguments["probs"],
                dispatched["handle"],
                **group,
            )
        }

    return script
