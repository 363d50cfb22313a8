"""DeepEP's low-latency mode: slabs with each source's rows in arrival order, a weighted combine.

`layout_range` and `source_tokens` identify each row. Expected rows depend on them: each
implementation is judged in its order, and combine receives rows in that order.
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
    copies = case.topk if case.repeats == "count each" else 1  # of a token in one slab, at most
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
        Problem("deepep_low_latency_dispatch", {"tokens": x, "indices": own}, dict(settings))
        for x, own in zip(tokens, indices_of(case), strict=True)
    ]


def order_of(layout_range: Tensor, source_tokens: Tensor, right: Any) -> Tensor | None:
    """[L,W·M]: the reference's row for each row of a slab; None if segments or tokens differ.

    Repeats of a token from one source match in order. Rows past the counts map to themselves.
    """
    layout, own = layout_range.cpu().long(), source_tokens.cpu().long()
    if layout.shape != right.layout_range.shape or own.shape != right.source_tokens.shape:
        return None
    begin_LW, count_LW = layout // COUNT, layout % COUNT
    first_LW = right.layout_range // COUNT
    if not torch.equal(count_LW, right.layout_range % COUNT):
        return None
    order = torch.arange(own.shape[1]).repeat(len(own), 1)
    for slab in range(len(own)):
        filled = torch.zeros(int(count_LW[slab].sum()), dtype=torch.bool)
        for source in range(layout.shape[1]):
            begin, count, first = (int(x[slab, source]) for x in (begin_LW, count_LW, first_LW))
            if count == 0:
                continue
            if begin + count > len(filled) or bool(filled[begin : begin + count].any()):
                return None
            filled[begin : begin + count] = True
            mine, theirs = own[slab, begin : begin + count], right.source_tokens[slab, first : first + count]
            if not torch.equal(mine.sort().values, theirs.sort().values):
                return None
            order[slab, begin + mine.argsort(stable=True)] = first + theirs.argsort(stable=True)
    return order


@contextmanager
def allowed_to_wait() -> Iterator[None]:
    """Within it the suite may wait for the device, where it forbids an implementation to."""
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


def _arranged(name: str, right: Any, received: Tensor) -> Given:
    """The reference's rows in this result's order; free past the counts."""
    value: Tensor = getattr(right, name)

    def make(outputs: Mapping[str, Any]) -> Exact:
        got, layout, tokens = (outputs.get(key) for key in (name, "layout_range", "source_tokens"))
        if (
            not (isinstance(got, Tensor) and isinstance(layout, Tensor) and isinstance(tokens, Tensor))
            or got.shape != value.shape
            or got.dtype != value.dtype
        ):
            return Exact(value)
        order = order_of(layout, tokens, right)
        if order is None:
            return Exact(value)
        return Exact(where_rows(received, in_order(value, order), got))

    return Given(value, make)


def _ranges(right: Any) -> Given:
    """Segments of the expected lengths, in any order, packed from the slab's start."""

    def make(outputs: Mapping[str, Any]) -> Exact:
        got = outputs.get("layout_range")
        if isinstance(got, Tensor) and got.shape == right.layout_range.shape and not got.is_floating_point():
            begin, count = got.long() // COUNT, got.long() % COUNT
            # an empty segment's begin is free
            held = torch.where(count > 0, begin, count.sum(1, keepdim=True))
            first, where = held.sort(1)
            tiles = (first == count.gather(1, where).cumsum(1) - count.gather(1, where)).all()
            if tiles and torch.equal(count, right.layout_range % COUNT):
                return Exact(got.long(), "integers")
        return Exact(right.layout_range, "integers")

    return Given(right.layout_range, make)


def _tokens(right: Any, received: Tensor) -> Given:
    """Each segment's tokens in any order."""

    def make(outputs: Mapping[str, Any]) -> Exact:
        got, layout = outputs.get("source_tokens"), outputs.get("layout_range")
        if not isinstance(got, Tensor) or not isinstance(layout, Tensor) or got.shape != right.source_tokens.shape:
            return Exact(right.source_tokens, "integers")
        if order_of(layout, got, right) is not None:
            return Exact(got.long(), "integers")
        return Exact(torch.where(received, right.source_tokens, got.long()), "integers")

    return Given(right.source_tokens, make)


def judged(right: Any) -> dict[str, Expectation]:
    """Expectations of one rank's dispatch."""
    received = torch.arange(right.source_tokens.shape[1]) < right.tokens_per_expert[:, None]
    own: dict[str, Expectation] = {
        "tokens_per_expert": Exact(right.tokens_per_expert, "integers"),
        "layout_range": _ranges(right),
        "source_tokens": _tokens(right, received),
        "rows": _arranged("rows", right, received),
    }
    return own | ({"scales": _arranged("scales", right, received)} if right.scales is not None else {})


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
        every = together(calls)
        d_rows = cotangents_of(case, "rows", [out.rows.shape[:2].numel() for out in every])
        return [
            replace(
                call,
                cotangents={"ordered": own.reshape(out.rows.shape)},
                script=_in_the_references_order(out),
                first=call.required,
            )
            for call, out, own in zip(calls, every, d_rows, strict=True)
        ]

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        every = together(calls)
        right = [judged(out) for out in every]
        if calls[0].wanted:
            d_rows = [call.cotangents["ordered"].flatten(0, 1) for call in calls]
            tree = tree_of(case, d_rows[0].dtype, declared, d_rows[0].dtype)
            for own, gradient in zip(
                right, sum_of_rows(case, d_rows, row_tokens_of([out.handle for out in every]), *tree), strict=True
            ):
                own["d_tokens"] = gradient
        return right


def _in_the_references_order(right: Any) -> Any:
    """Dispatch, plus its rows in the reference's order, which the cotangent refers to."""

    def script(implementation: Implementation, given: dict[str, Any]) -> dict[str, Any]:
        settings = {
            name: given[name] for name in ("num_experts", "max_tokens_per_rank", "policy", "group") if name in given
        }
        outputs = named_outputs(
            implementation.call("deepep_low_latency_dispatch", given["tokens"], given["indices"], **settings), OUTPUTS
        )
        order = order_of(outputs["layout_range"].detach(), outputs["source_tokens"].detach(), right)
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
        before = dispatches(case)
        made = together(before)
        counts = list(case.counts)
        indices = [call.required["indices"] for call in before]
        probs = probs_of(case, "probs", counts, (case.topk,))
        calls: list[dict[str, Any]] = []
        lengths = [out.rows.shape[:2].numel() for out in made]
        for rank, rows in enumerate(values_of(case, "rows", lengths)):
            received = made[rank].handle.row_tokens[rank] != PADDING
            slab = garbage_in(self._alike(rows, made[rank]), received, case.poison).reshape(
                *made[rank].rows.shape[:2], case.hidden
            )
            required = {"rows": slab, "indices": indices[rank], "probs": given_probs(probs[rank], indices[rank] >= 0)}
            calls.append({"required": required, "script": in_its_own_order(made[rank]), "first": required})
        calls = [call | backward for call, backward in zip(calls, self.backward(case, counts), strict=True)]
        return after(self.function, before, made, [judged(out)["rows"] for out in made], calls)

    @staticmethod
    def _alike(rows: Tensor, out: Any) -> Tensor:
        """Equal rows for a token's repeats of an expert: either may be read."""
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
        whole = tree_bound(
            case, terms, torch.arange(len(row)), token, case.tokens, rows.dtype, flat(accumulator).rounded_first()
        )
        right: list[dict[str, Expectation]] = [{"tokens": own} for own in split_bound(whole, case.counts)]
        if not calls[0].wanted:
            return right
        d_tokens = torch.cat([call.cotangents["tokens"] for call in calls]).double()
        if "rows" in calls[0].wanted:
            value = torch.zeros(rows.shape, dtype=torch.float64).index_add(0, row, d_tokens[token] * weight[:, None])
            size = torch.zeros(rows.shape, dtype=torch.float64).index_add(
                0, row, (d_tokens[token] * weight[:, None]).abs()
            )
            repeated = int(torch.bincount(row, minlength=1).max())
            every = sum_bound(value, size, repeated + 1, rows.dtype, accumulator)
            parts = split_bound(every, [len(rows) // case.ranks] * case.ranks)
            for own, out, call in zip(right, parts, calls, strict=True):
                shape = call.required["rows"].shape
                own["d_rows"] = replace(out, value=out.value.reshape(shape), bound=out.bound.reshape(shape))
        if "probs" in calls[0].wanted:
            products = rows[row].double() * d_tokens[token]
            value, size = torch.zeros((2, *probs.shape), dtype=torch.float64)
            value[token, slot], size[token, slot] = products.sum(1), products.abs().sum(1)
            whole = sum_bound(value, size, case.hidden + 1, probs.dtype, accumulator)
            for own, gradient in zip(right, split_bound(whole, case.counts), strict=True):
                own["d_probs"] = gradient
        return right


def in_its_own_order(right: Any) -> Any:
    """Combine of the rows in the order of this implementation's dispatch."""

    def script(implementation: Implementation, given: dict[str, Any]) -> dict[str, Any]:
        made = given["produced"]
        with allowed_to_wait():
            order = order_of(made["layout_range"].detach(), made["source_tokens"].detach(), right)
            assert order is not None, "dispatch is wrong, and its rows were judged"
            rows = in_order(given["rows"], order)
        group = {"group": given["group"]} if "group" in given else {}
        return {
            "tokens": implementation.call(
                "deepep_low_latency_combine", rows, given["indices"], given["probs"], made["handle"], **group
            )
        }

    return script
