"""DeepEP's normal mode.

A dispatch sends one copy of a token to each rank, and a combine adds the sums of the ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem, accumulator_of
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import DTYPES
from conformance.families.dispatch.cases import (
    FLOATS,
    MOVED,
    PROBS,
    DispatchCase,
    indices_of,
    probs_of,
    values_of,
)
from conformance.families.dispatch.dispatcher import (
    Combine,
    Dispatching,
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
from conformance.families.dispatch.maps import after_dispatch
from conformance.families.dispatch.trees import flat
from conformance.families.dispatch.values_of_wire import SCALE_DTYPES, packed_codes
from conformance.judge import Exact, Expectation
from moe_ref.config import IndexPolicy


def policy_of(case: DispatchCase) -> IndexPolicy | None:
    """The policy of the case for repeated experts, zero probabilities and legal values; None if it
    is the default.
    """
    zeros, values = "drop" if case.drop_zeros else "keep", "trusted" if case.trusted else "checked"
    policy = IndexPolicy(duplicates=case.repeats or "reject", zero_prob=zeros, values=values)  # type: ignore[arg-type]
    return None if policy == IndexPolicy() else policy


def dispatches(case: DispatchCase) -> list[Problem]:
    """One dispatch per rank, without gradients."""
    counts = list(case.counts)
    indices, tokens = indices_of(case), values_of(case, "tokens", counts)
    settings: dict[str, Any] = {"num_experts": case.experts}
    if policy_of(case):
        settings["policy"] = policy_of(case)
    if case.align:
        settings["expert_alignment"] = case.align
    if case.slack is not None:
        home = [torch.cat(indices) // case.local_experts == rank for rank in range(case.ranks)]
        settings["num_worst_tokens"] = max(int(here.any(1).sum()) for here in home) + max(case.slack, 0)
    calls = [
        Problem("deepep_dispatch", {"tokens": x, "indices": rank_indices}, dict(settings))
        for x, rank_indices in zip(tokens, indices, strict=True)
    ]
    if case.probs:
        for call, probs in zip(calls, probs_of(case, "probs", counts, (case.topk,)), strict=True):
            call.settings["probs"] = given_probs(probs, call.required["indices"] >= 0)
    if case.scales:
        scales_of_ranks = values_of(case, "scales", counts, (case.scales,), "float32", "dyadic")
        if case.values == "reciprocals" or case.scale_dtype != "float32":
            scales_of_ranks = list(
                packed_codes(case.seed, (case.tokens, case.scales), DTYPES[case.scale_dtype]).split(counts)
            )
        for call, scales in zip(calls, scales_of_ranks, strict=True):
            call.settings["scales"] = scales.clone()
    return calls


def counts_of(calls: list[Problem], results: list[Any]) -> list[Tensor]:
    """The tokens per expert of each rank.

    The reference returns None for them if it is given a size, so it is called without one.
    """
    unsized_calls = [
        replace(call, settings={name: x for name, x in call.settings.items() if name != "num_worst_tokens"})
        for call in calls
    ]
    return [
        out.tokens_per_expert
        for out in (results if "num_worst_tokens" not in calls[0].settings else together(unsized_calls))
    ]


class DeepEPDispatch(Dispatching):
    """`deepep_dispatch`: rows without duplicates, slots, counts and both gradients."""

    function = "deepep_dispatch"
    signature = Signature(
        inputs=[
            Input("tokens", "TH", MOVED, gradient=True),
            Input("indices", "TK", field="index_dtype"),
            Input("probs", "TK", PROBS, field="probs", gradient=True, optional="probs"),
            Input("scales", "TS", ("float32", *SCALE_DTYPES), field="scale_dtype", optional="scales"),
        ],
        outputs=[
            Output("rows", "PH", of="tokens"),
            *(Output("scales", "PS"), Output("indices", "PK")),
            Output("probs", "PK", of="probs"),
            *(Output("tokens_per_expert", "E"), Output("handle")),
        ],
        settings=("policy", "expert_alignment", "num_worst_tokens"),
        required=("num_experts",),
        static=("num_worst_tokens",),
    )

    def calls(self, case: DispatchCase) -> list[Problem]:
        calls = dispatches(case)
        results = together(calls) if case.grads else []
        backward = self.backward(case, [len(out.rows) for out in results], (case.topk,))
        for gradients, out in zip(backward, results, strict=bool(results)):
            if "probs" in gradients["cotangents"]:  # functions that take the result read local slots only
                d_probs = gradients["cotangents"]["probs"]
                gradients["cotangents"]["probs"] = torch.where(out.indices >= 0, d_probs, 0.0)
        return [replace(call, **gradients) for call, gradients in zip(calls, backward, strict=True)]

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        results = together(calls)
        row_tokens = row_tokens_of([out.handle for out in results])
        expectations: list[dict[str, Expectation]] = []
        for out, counts in zip(results, counts_of(calls, results), strict=True):
            specified_rows = specified(case, out)
            rank_expectations: dict[str, Expectation] = {
                "rows": free_behind("rows", out.rows, specified_rows),
                "indices": Exact(out.indices, "integers"),
            }
            for name in ("scales", "probs"):
                if getattr(out, name) is not None:
                    rank_expectations[name] = free_behind(name, getattr(out, name), specified_rows)
            rank_expectations["tokens_per_expert"] = Exact(counts, "integers", or_none=out.tokens_per_expert is None)
            expectations.append(rank_expectations)
        accumulator = accumulator_of(declared, results[0].rows.dtype)
        for name in calls[0].wanted:
            output = "rows" if name == "tokens" else "probs"
            gradients = [
                call.cotangents.get(output, torch.zeros_like(getattr(out, output)))
                for call, out in zip(calls, results, strict=True)
            ]
            for rank_expectations, gradient in zip(
                expectations, sum_of_rows(case, gradients, row_tokens, "rows", flat(accumulator)), strict=True
            ):
                rank_expectations[f"d_{name}"] = (
                    gradient if name == "tokens" else masked_exact(gradient.value.to(gradients[0].dtype))
                )
        return expectations


class DeepEPCombine(Combine):
    """`deepep_combine`."""

    function, companions = "deepep_combine", ("deepep_dispatch",)
    signature = after_dispatch(
        "deepep_dispatch",
        DeepEPDispatch.signature,
        [
            Input("rows", "PH", FLOATS, gradient=True),
            Input("probs", "PK", PROBS, field="probs", gradient=True, optional="probs"),
            Input("biases", "", optional="biases"),  # a tuple of contiguous tensors
        ],
        [Output("tokens", "TH", of="rows"), Output("probs", "TK", of="probs")],
    )

    def dispatches(self, case: DispatchCase) -> list[Problem]:
        return dispatches(case)

    def right(
        self, case: DispatchCase, calls: list[Problem], declared: Mapping[str, Any]
    ) -> list[dict[str, Expectation]]:
        row_tokens = row_tokens_of(handles_of(calls))
        rows = [call.required["rows"] for call in calls]
        kind, tree = tree_of(case, rows[0].dtype, declared, rows[0].dtype)
        everywhere, sources = [*rows], [*row_tokens]
        for i in range(case.biases):  # a bias adds one row per token
            everywhere.append(torch.cat([call.settings["biases"][i] for call in calls]))
            sources.append(torch.arange(case.tokens))
        expectations: list[dict[str, Expectation]] = [
            {"tokens": rank_expectations} for rank_expectations in sum_of_rows(case, everywhere, sources, kind, tree)
        ]
        if "probs" in calls[0].settings:
            probs = [call.settings["probs"] for call in calls]
            for rank_expectations, total in zip(
                expectations,
                sum_of_rows(case, probs, row_tokens, "rows", flat(accumulator_of(declared, probs[0].dtype))),
                strict=True,
            ):
                rank_expectations["probs"] = total
        for name in calls[0].wanted:
            output = "tokens" if name == "rows" else "probs"
            like = calls[0].required["rows"] if name == "rows" else calls[0].settings["probs"]
            gradients = torch.cat(
                [
                    call.cotangents.get(output, like.new_zeros(n, like.shape[1]))
                    for call, n in zip(calls, case.counts, strict=True)
                ]
            )
            for rank_expectations, source in zip(expectations, row_tokens, strict=True):
                rank_expectations[f"d_{name}"] = masked_exact(moved(gradients, source))
        return expectations
